"""Which faults are seeded in latent attention, its experts' choice, and weights with scales by block?"""

from __future__ import annotations

from tests.mutation.fault import Fault
from tests.mutation.mixture_faults import MIXTURE_TESTS_OF
from tests.mutation.packing_faults import PARTS, PLACE
from tests.mutation.tensor_faults import TENSOR_TESTS, TENSOR_TESTS_OF

ATTENTION, MODEL, CONFIG = "attention/latent.py", "models/latent.py", "models/latent_config.py"
ON_NPU, OPERATORS = "attention/npu/latent_attention.py", "virtual_npu/operators/latent.py"
PROLOG, LIMITS = "virtual_npu/operators/latent_prolog.py", "devices/ascend_latents.py"
GATING, SCALES, DEEPSEEK = (
    "virtual_npu/operators/gating.py",
    "models/block_scales.py",
    "recipes/deepseek/model.py",
)
OPS, NPU_OPS, MIXTURE = "models/ops/reference.py", "models/ops/npu.py", "models/mixture.py"
LATENT_UP = "models/npu/latent_up.py"
WHOLE, SHARE, WEIGHTS = "models/config.py", "models/share.py", "models/weights.py"
LAYER_PARTS = "models/layer_parts.py"
FILE, INT8_FILE = "models/huggingface_parts.py", "recipes/build/int8_checkpoint.py"
JOINED = ("tests/models/test_latent_prolog.py",)
TESTS = ("tests/models/test_deepseek.py", "tests/attention/test_latent.py")
ROPE, DECODER = "models/rope.py", "models/decoder.py"
STORED = ("tests/models/test_stored_otherwise.py",)
SCALED = ("tests/models/test_block_scales.py",)
LATENT_TESTS_OF = {
    **dict.fromkeys((ATTENTION, CONFIG, OPERATORS, GATING, DEEPSEEK), TESTS),
    **dict.fromkeys((MODEL, ON_NPU), (*TESTS, *JOINED)),
    **dict.fromkeys((PROLOG, LIMITS), JOINED),
    **dict.fromkeys((SCALES, INT8_FILE), SCALED),
    **dict.fromkeys((WEIGHTS, LAYER_PARTS), (*SCALED, *STORED, *TESTS, *TENSOR_TESTS)),
    ROPE: (*STORED, "tests/models/test_rope.py"),
    DECODER: (*STORED, *TENSOR_TESTS_OF[DECODER]),
    SHARE: (*TESTS, *TENSOR_TESTS),
    **{each: (*MIXTURE_TESTS_OF[each], *TESTS) for each in (OPS, MIXTURE, WHOLE, FILE)},
    **dict.fromkeys((NPU_OPS, LATENT_UP), (*JOINED, *MIXTURE_TESTS_OF[NPU_OPS], *TESTS)),
}

LATENT_FAULTS = {
    "long_factors_turn_short_requests": Fault(
        ROPE + "::needs_long_factors",
        "longest_tokens - 1 > config.original_max_positions",
        "longest_tokens > 0",
        "a model for 128k is worse at requests that all are short",
    ),
    "long_factors_never": Fault(
        ROPE + "::Rope.tabulate",
        "self.config.long_factors",
        "self.config.short_factors",
        "beyond the length that it was first trained on, a model talks nonsense",
    ),
    "pairs_side_by_side_as_halves": Fault(
        ROPE + "::head_order",
        "(turned[::2], turned[1::2]) if config.interleaved else turned.chunk(2)",
        "turned.chunk(2)",
        "GLM-4's heads are turned in other pairs than they were trained in",
    ),
    "what_is_not_turned_vanishes": Fault(
        ROPE + "::Rope.__init__", "value=1.0", "", "the part of a head that is not turned becomes zero"
    ),
    "joined_rows_of_the_first_linear": Fault(
        WEIGHTS + "::_joined_places",
        "slice(first + rows.start, first + rows.stop)",
        "slice(rows.start, rows.stop)",
        "keys and values are read from the rows of queries",
    ),
    "norms_of_heads_in_the_order_of_the_checkpoint": Fault(
        LAYER_PARTS + "::LayerParts.of",
        'orders[f"{prefix}self_attn.{name}"] = attention.order(name)',
        "",
        "norms of queries and keys weigh other dimensions",
    ),
    "attention_not_normed_after": Fault(
        DECODER + "::DecoderLayer.forward",
        "self.attention_post_norm is not None",
        "False",
        "GLM-4 adds what it should norm first",
    ),
    "queries_without_positions": Fault(
        ATTENTION + "::LatentAttention.attend_heads",
        "rope[rows]",
        "0 * rope[rows]",
        "a decode does not know where its tokens stand",
    ),
    "short_spans_expanded": Fault(
        ATTENTION + "::LatentAttention.expands",
        "num_tokens * saved > width * (latent.nope_dim + latent.value_dim)",
        "num_tokens * saved < width * (latent.nope_dim + latent.value_dim)",
        "every decode expands the latents of its whole request",
    ),
    "rows_of_short_spans_as_in_the_step": Fault(
        ATTENTION + "::LatentAttention.plan",
        "np.cumsum(lens[~is_long]) - lens[~is_long]",
        "(np.cumsum(lens) - lens)[~is_long]",
        "decodes beside a prompt read other rows",
    ),
    "queries_of_a_chunk_at_its_start": Fault(
        ATTENTION + "::LatentAttention.attend_heads",
        "self._attend_span(torch.cat((nope, rope), -1), keys, values, span, None, output)",
        (
            "self._attend_span(torch.cat((nope, rope), -1), keys, values, replace(span, first_row=0),"
            " None, output)"
        ),
        "a prompt's rows are written over the first ones",
    ),
    "pairs_of_queries_not_moved": Fault(
        MODEL + "::LatentSelfAttention.order",
        "torch.cat((rope[:, ::2], rope[:, 1::2]), 1)",
        "rope",
        "queries are turned by the angles of other pairs than keys",
    ),
    "pairs_of_keys_not_moved": Fault(
        MODEL + "::LatentSelfAttention._write",
        "torch.cat((pairs[:, ::2], pairs[:, 1::2]), -1)",
        "pairs",
        "keys are turned by the angles of other pairs than queries",
    ),
    "values_before_keys": Fault(
        MODEL + "::LatentSelfAttention.order",
        "[part.flatten() for part in rows.split(widths, 1)]",
        "[part.flatten() for part in rows.split(widths, 1)][::-1]",
        "keys are made of the weights of values",
    ),
    "compressed_queries_not_normed": Fault(
        MODEL + "::LatentSelfAttention.write",
        "self.ops.rms_norm(queries[0], self.query_norm, NORM_EPS)",
        "queries[0]",
        "the checkpoint's q_a_layernorm is read and not used",
    ),
    "eps_of_latents_of_the_model": Fault(
        CONFIG, "NORM_EPS = 1e-6", "NORM_EPS = 1e-1", "norms of latents take the model's own eps"
    ),
    "yarn_scales_scores_once": Fault(
        FILE + "::latent_config",
        "(0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2",
        "0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0",
        "scores of long contexts are too small",
    ),
    "latents_planned_as_keys_and_values": Fault(
        WHOLE + "::DecoderConfig.kv_layer_bytes",
        "self.latent.token_width",
        "2 * self.latent.rank",
        "a third of the cache stays unused",
    ),
    "heads_of_queries_cut_by_latents": Fault(
        SHARE + "::Share.slices", "config.query_dim", "config.head_dim", "a rank reads rows of other heads"
    ),
    "predicting_layers_surplus": Fault(
        SHARE + "::Share.is_elsewhere",
        "config.num_layers + config.num_unread_layers",
        "config.num_layers",
        "a published DeepSeek-V3 cannot be loaded",
    ),
    "rows_in_the_order_of_the_checkpoint": Fault(
        PLACE + "::Place.fill", "tensor = tensor[self.order]", "pass", "heads get the weights of others"
    ),
    "scales_of_the_first_rows": Fault(
        PARTS + "::_parts_of",
        'scaled(found["weight"], found[f"weight{SUFFIX}"], form, (rows.start, columns.start))',
        'scaled(found["weight"], found[f"weight{SUFFIX}"], form)',
        "the second rank's weights have the first one's scales",
    ),
    "columns_of_a_block_as_rows": Fault(
        SCALES + "::scaled", "blocks.columns", "blocks.rows", "weights have the scales of other blocks"
    ),
    "up_projection_stored_in_int8": Fault(
        INT8_FILE + "::quantize",
        "ignore.append(UP_PROJECTIONS)",
        "pass",
        "latents are expanded by rounded weights, for nothing",
    ),
    "correction_in_the_weights": Fault(
        OPS + "::Ops.route",
        "scores.gather(-1, chosen)",
        "ranked.gather(-1, chosen)",
        "what balances the experts also weighs them",
    ),
    "hidden_groups_at_zero": Fault(
        OPS + "::Ops.route",
        "-torch.inf",
        "0.0",
        "experts of hidden groups are chosen where corrections are negative",
    ),
    "groups_by_their_best_alone": Fault(
        OPS + "::Ops.route", "config.group_best", "1", "V3 chooses other groups than it was trained with"
    ),
    "scores_by_softmax": Fault(
        OPS + "::Ops.route",
        'scores.softmax(-1) if config.scores == "softmax" else scores.sigmoid()',
        "scores.softmax(-1)",
        "V3's experts compete where they should not",
    ),
    "routed_scale_forgotten": Fault(
        OPS + "::Ops._shares",
        "weights if config.scale == 1 else weights * config.scale",
        "weights",
        "experts count less than half of what they should",
    ),
    "shared_expert_forgotten": Fault(
        MIXTURE + "::Mixture.forward",
        "part + shared",
        "part + 0 * shared",
        "what every token needs is not added",
    ),
    "shared_gate_forgotten": Fault(
        MIXTURE + "::Mixture.forward",
        "F.linear(x, self.shared_gate).sigmoid() * shared",
        "shared",
        "the shared expert counts whole",
    ),
    "every_group_on_the_npu": Fault(
        NPU_OPS + "::NpuOps.route",
        "config.num_chosen_groups",
        "config.num_groups",
        "an NPU chooses among all groups",
    ),
    "uncorrected_on_the_npu": Fault(
        NPU_OPS + "::NpuOps.route", "bias=correction", "bias=None", "an NPU chooses other experts than a CPU"
    ),
    "weights_divided_on_the_npu": Fault(
        NPU_OPS + "::NpuOps.route",
        "divides == config.normalizes",
        "True",
        "an NPU weighs by sums where the model does not",
    ),
    "long_spans_in_the_space_of_latents": Fault(
        ON_NPU + "::FusedLatentAttention.plan",
        "lens > MOST_LATENT_QUERIES",
        "lens > 2 * MOST_LATENT_QUERIES",
        "an operator is asked for spans that it does not take",
    ),
    "latents_of_other_requests": Fault(
        ON_NPU + "::FusedLatentAttention.plan",
        "batch.slots[is_long]",
        "batch.slots[is_long][::-1]",
        "two prompts of one step read each other",
    ),
    "default_eps_of_the_cache_write": Fault(
        ON_NPU + "::FusedLatentAttention.write_raw",
        "epsilon=eps",
        "",
        "latents are normed with the operator's default",
    ),
    "wide_rows_in_one_launch": Fault(
        LATENT_UP + "::NpuLatentUp._by_heads",
        "x.shape[1] * x.shape[2] > MOST_PRODUCT_ROW",
        "False",
        "128 heads of latents are more than the product takes",
    ),
    "long_spans_joined": Fault(
        ON_NPU + "::FusedLatentAttention.is_joined",
        "metadata.long is None",
        "True",
        "queries of long spans come absorbed, where keys and values of each head are made",
    ),
    "sines_where_cosines_belong": Fault(
        ON_NPU + "::FusedLatentAttention.write_joined",
        (
            "torch_npu.npu_mla_prolog_v3(x.contiguous(), down, up, prolog.up.keys, latent_down,"
            " prolog.query_norm, prolog.latent_norm, sin, cos, layer_latents, layer_rope_keys,"
            " cache_index=metadata.write_index, rmsnorm_epsilon_cq=prolog.eps,"
            ' rmsnorm_epsilon_ckv=prolog.eps, cache_mode="PA_BSND", **more)'
        ),
        (
            "torch_npu.npu_mla_prolog_v3(x.contiguous(), down, up, prolog.up.keys, latent_down,"
            " prolog.query_norm, prolog.latent_norm, cos, sin, layer_latents, layer_rope_keys,"
            " cache_index=metadata.write_index, rmsnorm_epsilon_cq=prolog.eps,"
            ' rmsnorm_epsilon_ckv=prolog.eps, cache_mode="PA_BSND", **more)'
        ),
        "npu_mla_prolog_v3 takes sines first, all other operators cosines",
    ),
    "default_eps_of_joined_latents": Fault(
        ON_NPU + "::FusedLatentAttention.write_joined",
        "rmsnorm_epsilon_ckv=prolog.eps",
        "",
        "latents of decodes are normed with the operator's default, those of prompts are not",
    ),
    "scales_of_the_other_weights": Fault(
        NPU_OPS + "::NpuOps.join_latents",
        "zip(qkv[0], query_up[0], qkv[1])",
        "zip(qkv[0], qkv[1], query_up[0])",
        "an operator gets queries' weights where those of latents belong",
    ),
    "joined_weights_in_rows": Fault(
        NPU_OPS + "::NpuOps.join_latents",
        "in_tiles(each)",
        "each.clone()",
        "npu_mla_prolog_v3 reads tiles where there are rows",
    ),
    "heads_of_joined_queries_moved": Fault(
        MODEL + "::LatentSelfAttention.order",
        'name in ("q_proj", "q_b_proj") and not self.joins',
        'name in ("q_proj", "q_b_proj")',
        "the operator takes the two parts of a head side by side",
    ),
    "prompts_of_joined_layers_unturned": Fault(
        MODEL + "::LatentSelfAttention.write",
        "torch.cat((pairs[..., ::2], pairs[..., 1::2]), -1)",
        "pairs",
        "a prompt's queries are turned by the angles of other pairs than decodes'",
    ),
    "joins_before_it_was_found_right": Fault(
        ON_NPU + "::FusedLatentAttention.joins",
        (
            "self.product.joins_latents and takes_prolog(self.shape.dtype, hidden_size, query_rank,"
            " takes_float32=wide)"
        ),
        "takes_prolog(self.shape.dtype, hidden_size, query_rank, takes_float32=wide)",
        "an operator that nobody has run is used",
    ),
    "any_hidden_size_is_joined": Fault(
        LIMITS + "::takes_prolog",
        "is_type and hidden_size in PROLOG_HIDDEN and query_rank in PROLOG_QUERIES",
        "is_type and query_rank is not None",
        "the operator is asked for sizes that its page does not list",
    ),
    "stand_in_joins_without_norms": Fault(
        PROLOG + "::_prolog",
        'rms_norm(latent, call["rmsnorm_gamma_ckv"], call["rmsnorm_epsilon_ckv"])[0]',
        "latent",
        "the stand-in writes latents that the device norms",
    ),
    "stand_in_turns_joined_halves": Fault(
        PROLOG + "::turned",
        "torch.cat((pairs[..., ::2], pairs[..., 1::2]), -1)",
        "pairs",
        "the stand-in takes pairs from other places than the device",
    ),
    "stand_in_turns_halves": Fault(
        OPERATORS + "::_write",
        "torch.cat((pairs[:, ::2], pairs[:, 1::2]), -1)",
        "pairs",
        "the stand-in takes pairs from other places than the device",
    ),
    "stand_in_weighs_by_corrections": Fault(
        GATING + "::_gated",
        "scores.gather(1, experts)",
        "ranked.gather(1, experts)",
        "the stand-in weighs as no device does",
    ),
}
