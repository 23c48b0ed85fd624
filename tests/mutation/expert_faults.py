"""Faults of experts: how they are chosen, joined, placed on ranks, and sent to."""

from __future__ import annotations

from tests.mutation.fault import Fault, TextFault

FAULTS = {
    "router_in_the_type_of_the_model": Fault(
        "models/ops/reference.py::Ops.route",
        "F.linear(x.float(), router, bias)",
        "F.linear(x, router.to(x.dtype), bias).float()",
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
        "models/ops/cpu.py::CpuOps.mixture",
        "order // chosen.shape[1]",
        "order % len(chosen)",
        "rows go back to other tokens",
        "tests/models/test_mixture.py::test_a_token_gets_the_weighted_sum_of_its_experts",
    ),
    "width_of_a_half_bounded": Fault(
        "devices/ascend_experts.py::fuses_gate",
        "2 * inner_size",
        "inner_size",
        "the tiling counts gate and up together, and refuses Mixtral's experts over two ranks",
        "tests/models/test_wide_experts.py::test_a_width_is_gated_in_one_launch_or_not",
    ),
    "idle_experts_counted": Fault(
        "models/config.py::DecoderConfig.num_active_parameters",
        "self.num_parameters - self.num_mixtures * self._num_idle * self._expert_parameters",
        "self.num_parameters",
        "a token is said to be multiplied with all experts",
        "tests/models/test_mixture.py::test_published_models_have_the_parameters_that_their_names_say",
    ),
    "an_expert_on_two_ranks": Fault(
        "models/placement.py::read",
        "sorted(layer) != list(range(count if has_experts else 0))",
        "len(layer) != (count if has_experts else 0)",
        "a placement leaves out an expert, whose tokens get nothing of it",
        "tests/scripts/test_place.py::test_a_placement_of_another_model_is_refused_by_its_key",
    ),
    "placements_compared_by_their_path": Fault(
        "recipes/build/rank_process.py::common",
        'sections["parallel"]["placement"] = digest',
        "assert digest",
        "two machines take two placements, and some experts are nowhere",
        "tests/scripts/test_place.py::test_ranks_compare_what_the_file_says_and_not_where_it_lies",
    ),
    "counts_that_begin_again": Fault(
        "models/expert_counts.py::ExpertCounts.read",
        "now - self._last",
        "now.astype(np.int64) - self._last",
        "after 4e9 tokens of an expert, it seems to be chosen less than never",
        "tests/models/test_expert_counts.py::test_thirty_two_bits_may_begin_again",
    ),
    "first_ranks_tokens_are_sent_by_all": Fault(
        "models/npu/dispatch.py::Dispatch._own",
        "each[rank * count : (rank + 1) * count]",
        "each[:count]",
        "every rank sends the same tokens, and all others get what became of these",
        "tests/models/test_tensor_parallel_npu.py::test_ranks_on_npus_compute_what_one_processor_computes",
    ),
    "int8_sent_in_16_bits": Fault(
        "models/npu/dispatch.py::Dispatch.mixture",
        "2 if is_int8 else 0",
        "0",
        "products in int8 get rows that are none",
        "tests/models/test_tensor_parallel_npu.py::test_tokens_are_sent_to_experts_where_there_is_one_for_each_rank",
    ),
    "tokens_and_sums_together": TextFault(
        "virtual_npu/cann/collectives.c",
        "    if (c->carries_tokens && c->carries_sums)\n",
        "    if (false)\n",
        "the stand-in takes what hangs on hardware",
        "tests/virtual_npu/test_hccl.py::test_tokens_in_a_communicator_of_sums_are_refused",
    ),
    "an_expert_twice": Fault(
        "virtual_npu/operators/dispatch.py::_known",
        "(ids.sort(1).values.diff(dim=1) == 0).any()",
        "False",
        "more rows arrive than there is room for",
        "tests/virtual_npu/test_wrong_calls.py::test_a_wrong_call_is_refused",
    ),
    "gate_and_up_as_halves": Fault(
        "models/stacked_experts.py::Stack.take_expert",
        "rows[turn :: len(places)]",
        "rows.chunk(len(places))[turn]",
        "as all other checkpoints have them that join the two",
        "tests/models/test_gpt_oss.py::test_experts_in_mxfp4_score_as_in_transformers",
    ),
    "high_half_of_a_byte_first": Fault(
        "models/stacked_experts.py::unpacked",
        "(blocks & 15, blocks >> 4)",
        "(blocks >> 4, blocks & 15)",
        "the low half is the first number",
        "tests/models/test_gpt_oss.py::test_every_byte_and_scale_stands_for_what_transformers_makes_of_it",
    ),
    "gate_without_its_limit": Fault(
        "models/ops/reference.py::Ops.clamped_swiglu",
        "gate.clamp(max=limit)",
        "gate",
        "no published weight shows it in a short answer",
        "tests/models/test_gpt_oss.py::test_the_gate_is_clamped_as_in_transformers",
    ),
}
