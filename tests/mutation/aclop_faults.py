"""Which faults are seeded in what a product refuses of torch's operators, and in how that is met?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ACLOP, LIMITS, FUSED = "virtual_npu/aclop.py", "devices/ascend_limits.py", "models/ops/npu.py"
MACHINE, ACTIVATION = "recipes/build/machine.py", "virtual_npu/operators/activation.py"
MATMUL, CAPTURED = "virtual_npu/operators/matmul.py", "virtual_npu/operators/attention.py"
STORAGE, HOST_CALL = "kv_cache/storage.py", "virtual_npu/host_call.py"
ANSWERS = "devices/ascend_answers.py"

ACLOP_TESTS = ("tests/virtual_npu/test_aclop.py",)
RULE_TESTS = tuple(f"tests/virtual_npu/test_{name}.py" for name in ("wrong_calls", "right_calls", "products"))
ACLOP_TESTS_OF = {
    ACLOP: ACLOP_TESTS,
    HOST_CALL: ACLOP_TESTS,
    **dict.fromkeys((ACTIVATION, MATMUL, CAPTURED), RULE_TESTS),
    MACHINE: ACLOP_TESTS,
    ANSWERS: ("tests/devices/test_ascend_answers.py",),
}

ACLOP_FAULTS = {
    "online_capture_passes": Fault(
        ACLOP + "::_online",
        "not npu.is_jit_compile_false()",
        "npu.is_jit_compile_false()",
        "a 310P captures what it compiles when it is called",
    ),
    "sum_of_tiles_passes": Fault(
        ACLOP + "::_sum",
        "is_before_910b()",
        "not is_before_910b()",
        "a product with a bias goes to aclop on a 310P, and no one says so",
    ),
    "copy_by_index_passes": Fault(
        ACLOP,
        '{"index_fill_", "index_fill", "index_copy_", "index_copy", "index_select", "index_put_"}',
        '{"index_fill_", "index_fill", "index_select", "index_put_"}',
        "every page that is copied is read back by the host",
    ),
    "tiles_captured_by_anything": Fault(
        ACLOP + "::_captured",
        "call.name not in PRODUCTS_OF_TILES",
        "call.name in PRODUCTS_OF_TILES",
        "operators that do not know the format are captured",
    ),
    "cast_that_forgets_the_format": Fault(
        HOST_CALL + "::HostCall.__call__",
        "self.name == FORMAT_CAST",
        "not self.name",
        "no tensor lies in tiles, so that no rule about them is ever asked",
    ),
    "compile_mode_as_it_was": Fault(
        MACHINE + "::Npu.__init__",
        "use_compiled_kernels()",
        "",
        "the recipe with graphs for a 310P cannot start its capture",
    ),
    "bias_added_with_tiles": Fault(
        FUSED + "::NpuOps.linear",
        "self.product.adds_to_tiles",
        "not self.product.adds_to_tiles",
        "addmm with a weight in tiles on a 310P",
    ),
    "swiglu_of_odd_halves": Fault(
        ACTIVATION + "::_aligned",
        "half_bytes % HALF_BYTES",
        "x.shape[0] % HALF_BYTES",
        "halves that do not end at 64 bytes pass",
    ),
    "int8_on_the_950": Fault(
        MATMUL,
        "(P310, A2, A3)",
        "(P310, A2, A3, A5)",
        "npu_quant_matmul is called where its page does not list the product",
    ),
    "captured_prompts": Fault(
        CAPTURED + "::_many_queries",
        "MOST_CAPTURED_QUERIES",
        "2 * MOST_CAPTURED_QUERIES",
        "vllm-ascend asserts it: a captured step of decodes has 16 query tokens a sequence",
    ),
    "gaps_wider_than_a_page": Fault(
        LIMITS + "::AscendProduct.graph_sizes",
        "size <= page_size",
        "size <= 2 * page_size",
        "padding rows beyond the null page write to somebody's page",
    ),
    "null_page_by_index": Fault(
        STORAGE + "::KVCache.clear_null_page",
        "tensor[:1].zero_()",
        "tensor.index_fill_(0, _index(np.zeros(1, np.int64), tensor), 0)",
        "op-plugin uploads two layer-sized tensors of the host for it",
    ),
    "answers_without_effect": Fault(
        ANSWERS + "::answered",
        "replace(product, **found)",
        "product",
        "the first day on hardware changes nothing",
    ),
    "float16_in_spite_of_the_answer": Fault(
        LIMITS + "::AscendProduct.check",
        "not self.packs_float16",
        "self.packs_float16 is None",
        "attention that was found wrong in float16 is used in it",
    ),
    "nan_that_the_maximum_lost": Fault(
        FUSED + "::PlainNpuOps.greedy",
        "is_finite & ~logits.isnan().any(-1)",
        "is_finite",
        "a row of NaN gives a token, where the device's maximum does not keep it",
    ),
    "tiles_of_every_weight": Fault(
        FUSED + "::NpuOps.pack",
        "in_tiles(weight) if self.product.tiles_weights else weight",
        "in_tiles(weight)",
        "vllm-ascend #4960: bfloat16 in FRACTAL_NZ failed in captured steps",
    ),
}
