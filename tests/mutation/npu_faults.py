"""Faults of the calls of Ascend's operators, and of the rules that they are called by."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "bias_added_with_tiles": Fault(
        "models/ops/npu.py::NpuOps.linear",
        "self.product.adds_to_tiles",
        "not self.product.adds_to_tiles",
        "addmm with a weight in tiles on a 310P",
        "tests/models/test_npu.py::test_every_line_of_every_npu_file_runs",
    ),
    "captured_prompts": Fault(
        "virtual_npu/operators/attention.py::_many_queries",
        "MOST_CAPTURED_QUERIES",
        "2 * MOST_CAPTURED_QUERIES",
        "vllm-ascend asserts it: a captured step of decodes has 16 query tokens a sequence",
        "tests/virtual_npu/test_wrong_calls.py::test_a_wrong_call_is_refused",
    ),
    "gaps_wider_than_a_page": Fault(
        "devices/ascend_limits.py::AscendProduct.graph_sizes",
        "size <= page_size",
        "size <= 2 * page_size",
        "padding rows beyond the null page write to somebody's page",
        "tests/attention/test_products.py::test_of_more_sizes_than_a_product_holds_a_sample_is_captured",
    ),
    "answers_without_effect": Fault(
        "devices/ascend_answers.py::answered",
        "replace(product, **found)",
        "product",
        "the first day on hardware changes nothing",
        "tests/devices/test_ascend_answers.py::test_answers_are_followed_and_said",
    ),
    "nan_that_the_maximum_lost": Fault(
        "models/ops/npu.py::PlainNpuOps.greedy",
        "is_finite & ~logits.isnan().any(-1)",
        "is_finite",
        "a row of NaN gives a token, where the device's maximum does not keep it",
        "tests/doctor/test_probes.py::test_a_maximum_that_loses_nan_is_found_and_followed",
    ),
    "tiles_of_every_weight": Fault(
        "models/ops/npu.py::NpuOps.pack",
        "in_tiles(weight) if self.product.tiles_weights else weight",
        "in_tiles(weight)",
        "vllm-ascend #4960: bfloat16 in FRACTAL_NZ failed in captured steps",
        "tests/doctor/test_probes.py::test_weights_lie_in_tiles_where_the_answer_is_yes",
    ),
}
