"""Faults of experts: how they are chosen, joined, placed on ranks, and sent to."""

from __future__ import annotations

from tests.mutation.fault import Fault, TextFault

FAULTS = {
    "router_in_the_type_of_the_model": Fault(
        "models/ops/reference.py::Ops.route",
        "self.scores(x.float(), router, bias)",
        "self.scores(x, router.to(x.dtype), bias).float()",
        "experts that score nearly alike change places by rounding",
        "tests/models/test_mixture.py::test_the_router_weighs_the_best_by_their_chances",
    ),
    "infinity_of_another_token": Fault(
        "models/ops/reference.py::Ops.mixture",
        "part.where(is_chosen.any(-1, keepdim=True), 0)",
        "part",
        "an expert's overflow on tokens that did not choose it spoils them",
        "tests/models/test_mixture.py::test_what_an_expert_makes_of_other_tokens_does_not_count",
    ),
    "tokens_of_one_choice": Fault(
        "models/ops/cpu/ops.py::CpuOps.mixture",
        "order // chosen.shape[1]",
        "order % len(chosen)",
        "rows go back to other tokens",
        "tests/models/test_mixture.py::test_a_token_gets_the_weighted_sum_of_its_experts",
    ),
    "scales_of_gated_experts_in_bfloat16": Fault(
        "models/ops/npu/grouped.py::JoinedLinear.gated_product",
        "[self.scale]",
        "[self.scale.bfloat16()]",
        "on a 910B and a 910C the operator takes scales of int8 weights in float32 alone",
        "tests/models/test_wide_experts.py::test_experts_of_every_width_compute_what_a_cpu_defines",
    ),
    "width_of_a_half_bounded": Fault(
        "devices/ascend_limits.py::fuses_gate",
        "2 * inner_size",
        "inner_size",
        "the tiling counts gate and up together, and refuses Mixtral's experts over two ranks",
        "tests/models/test_wide_experts.py::test_a_width_is_gated_in_one_launch_or_not",
    ),
    "ids_of_experts_not_mapped": Fault(
        "models/layers/mixture.py::Mixture._part",
        "self._numbers is not None",
        "False",
        "every rank computes the rows of the first rank's experts",
        "tests/models/test_spread_experts.py::test_any_experts_anywhere_compute_what_one_rank_does",
    ),
    "largest_of_other_experts": Fault(
        "models/parallel/group.py::sharing_experts",
        "return group.few",
        "return group",
        "an expert's int8 weights hang on those of others",
        "tests/models/test_spread_experts.py::test_spread_experts_in_int8_have_the_weights_of_one_rank",
    ),
    "padding_counted": Fault(
        "models/step/graphs.py::DecodeGraphs._step",
        "write_index >= self.slots.page_size",
        "write_index >= 0",
        "the experts of the null token seem to be chosen most",
        "tests/models/test_expert_counts.py::test_a_captured_step_counts_its_tokens_and_no_padding",
    ),
    "tokens_and_sums_together": TextFault(
        "virtual_npu/cann/collectives.c",
        "    if (c->carries_tokens && c->carries_sums)\n",
        "    if (false)\n",
        "the stand-in takes what hangs on hardware",
        "tests/virtual_npu/test_hccl.py::test_ranks_that_disagree_or_are_killed_are_named_at_once",
    ),
    "gate_and_up_as_halves": Fault(
        "models/checkpoint/stacked_experts.py::Stack.take_expert",
        "rows[turn :: len(places)]",
        "rows.chunk(len(places))[turn]",
        "as all other checkpoints have them that join the two",
        "tests/models/test_gpt_oss.py::test_experts_in_mxfp4_score_as_in_transformers",
    ),
}
