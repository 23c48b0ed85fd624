"""Faults of latent attention, of positions, and of how a checkpoint is read into them."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "long_factors_never": Fault(
        "models/layers/rope.py::Rope.tabulate",
        "self.config.long_factors",
        "self.config.short_factors",
        "beyond the length that it was first trained on, a model talks nonsense",
        "tests/models/test_rope.py::test_frequencies",
    ),
    "pairs_side_by_side_as_halves": Fault(
        "models/layers/rope.py::head_order",
        "(turned[::2], turned[1::2]) if config.interleaved else turned.chunk(2)",
        "turned.chunk(2)",
        "GLM-4's heads are turned in other pairs than they were trained in",
        "tests/models/test_stored_otherwise.py::test_a_prompt_scores_as_in_transformers",
    ),
    "joined_rows_of_the_first_linear": Fault(
        "models/checkpoint/weights.py::_joined_places",
        "slice(first + rows.start, first + rows.stop)",
        "slice(rows.start, rows.stop)",
        "keys and values are read from the rows of queries",
        "tests/models/test_stored_otherwise.py::test_a_prompt_scores_as_in_transformers",
    ),
    "rows_of_short_spans_as_in_the_step": Fault(
        "attention/latent.py::LatentAttention._split",
        "np.cumsum(lens[is_short]) - lens[is_short]",
        "(np.cumsum(lens) - lens)[is_short]",
        "decodes beside a prompt read other rows",
        "tests/attention/test_latent.py::test_prompts_chunks_and_decodes_of_one_step",
    ),
    "equal_scores_from_any_position": Fault(
        "attention/sparse.py::top_positions",
        "equal.cumsum(-1) <= lacking",
        "equal.flip(-1).cumsum(-1).flip(-1) <= lacking",
        "of equal scores the last positions are chosen, and chunks choose otherwise than whole prompts",
        "tests/attention/test_sparse.py::test_equal_scores_are_chosen_from_the_lowest_position_on",
    ),
    "a_token_chooses_later_ones": Fault(
        "attention/sparse.py::SparseAttention._chosen",
        "seen > own",
        "seen > stop",
        "a prompt's token reads tokens that come after it",
        "tests/attention/test_sparse.py::test_chosen_tokens_alone_are_read",
    ),
    "rows_in_the_order_of_the_checkpoint": Fault(
        "models/checkpoint/destination.py::Destination.fill",
        "tensor = tensor[self.order]",
        "pass",
        "heads get the weights of others",
        "tests/models/test_deepseek.py::test_a_prompt_scores_as_in_transformers",
    ),
    "columns_of_a_block_as_rows": Fault(
        "models/checkpoint/unpacking.py::scaled",
        "blocks.columns",
        "blocks.rows",
        "weights have the scales of other blocks",
        "tests/models/test_block_scales.py::test_a_scale_belongs_to_its_block",
    ),
    "correction_in_the_weights": Fault(
        "models/ops/reference.py::Ops.route",
        "scores.gather(-1, chosen)",
        "ranked.gather(-1, chosen)",
        "what balances the experts also weighs them",
        "tests/models/test_deepseek.py::test_experts_are_chosen_and_weighed_as_in_transformers",
    ),
    "default_eps_of_the_cache_write": Fault(
        "attention/npu/latent_attention.py::FusedLatentAttention.write_raw",
        "epsilon=eps",
        "",
        "latents are normed with the operator's default",
        "tests/attention/test_latent.py::test_one_launch_writes_what_the_parts_of_it_write",
    ),
    "long_spans_joined": Fault(
        "attention/npu/latent_attention.py::FusedLatentAttention.is_joined",
        "not metadata.long",
        "True",
        "queries of long spans come absorbed, where keys and values of each head are made",
        "tests/models/test_latent_prolog.py::test_tokens_are_those_of_transformers",
    ),
    "an_output_for_each_captured_layer": Fault(
        "attention/npu/latent_attention.py::FusedLatentAttention._called",
        "metadata.results.get(kind)",
        "None",
        "a graph holds the results of all latent layers: 1 MB a row of 61 layers with 16 heads",
        "tests/attention/test_latent.py::test_layers_of_a_captured_step_write_one_output",
    ),
    "heads_of_any_width_joined": Fault(
        "devices/ascend_limits.py::takes_prolog",
        "nope_dim in PROLOG_NOPE",
        "True",
        "npu_mla_prolog_v3 refuses heads that are not 128 or 192 wide without rope",
        "tests/models/test_latent_prolog.py::test_heads_of_another_width_are_not_joined",
    ),
    "sines_where_cosines_belong": Fault(
        "attention/npu/latent_attention.py::FusedLatentAttention.write_joined",
        (
            "torch_npu.npu_mla_prolog_v3(x.contiguous(), down, up, prolog.up.keys, latent_down,"
            " prolog.query_norm, prolog.latent_norm, sin, cos, layer_latents, layer_rope_keys,"
            " cache_index=metadata.write_index, rmsnorm_epsilon_cq=prolog.eps,"
            ' rmsnorm_epsilon_ckv=prolog.eps, cache_mode="PA_BSND", query_norm_flag=reads,'
            " **more)"
        ),
        (
            "torch_npu.npu_mla_prolog_v3(x.contiguous(), down, up, prolog.up.keys, latent_down,"
            " prolog.query_norm, prolog.latent_norm, cos, sin, layer_latents, layer_rope_keys,"
            " cache_index=metadata.write_index, rmsnorm_epsilon_cq=prolog.eps,"
            ' rmsnorm_epsilon_ckv=prolog.eps, cache_mode="PA_BSND", query_norm_flag=reads,'
            " **more)"
        ),
        "npu_mla_prolog_v3 takes sines first, all other operators cosines",
        "tests/models/test_latent_prolog.py::test_tokens_are_those_of_transformers",
    ),
    "rows_of_a_rank_see_the_whole_span": Fault(
        "attention/npu/sparse_attention.py::FusedSparseAttention.plan",
        "(batch.stops - (ends - cut))[has]",
        "batch.stops[has]",
        "a rank that has the first rows of a prompt's chunk reads tokens that come after them",
        "tests/attention/test_sparse_npu.py::test_ranks_read_together_what_one_reads",
    ),
    "index_keys_not_turned": Fault(
        "attention/int8_sparse.py::Int8SparseAttention.write_index",
        "keys[: len(metadata.write_index)] @ self.rotation",
        "keys[: len(metadata.write_index)]",
        "index queries are turned and keys are not, so that others are chosen",
        "tests/attention/test_sparse.py::test_chosen_tokens_alone_are_read",
    ),
}
