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

LATENT_FAULTS = (
    Fault(
        "long_factors_turn_short_requests",
        ROPE,
        "longest_tokens - 1 > config.original_max_positions",
        "longest_tokens > 0",
        "a model for 128k is worse at requests that all are short",
    ),
    Fault(
        "long_factors_never",
        ROPE,
        "long = _divided(self.config, self.config.long_factors)",
        "long = _divided(self.config, self.config.short_factors)",
        "beyond the length that it was first trained on, a model talks nonsense",
    ),
    Fault(
        "pairs_side_by_side_as_halves",
        ROPE,
        "(turned[::2], turned[1::2]) if config.interleaved else turned.chunk(2)",
        "turned.chunk(2)",
        "GLM-4's heads are turned in other pairs than they were trained in",
    ),
    Fault(
        "what_is_not_turned_vanishes",
        ROPE,
        "fixed, value=1.0)",
        "fixed)",
        "the part of a head that is not turned becomes zero",
    ),
    Fault(
        "joined_rows_of_the_first_linear",
        WEIGHTS,
        "slice(first + rows.start, first + rows.stop)",
        "slice(rows.start, rows.stop)",
        "keys and values are read from the rows of queries",
    ),
    Fault(
        "norms_of_heads_in_the_order_of_the_checkpoint",
        LAYER_PARTS,
        '            orders[f"{prefix}self_attn.{name}"] = attention.order(name)\n',
        "",
        "norms of queries and keys weigh other dimensions",
    ),
    Fault(
        "attention_not_normed_after",
        DECODER,
        "if self.attention_post_norm is not None:",
        "if False:",
        "GLM-4 adds what it should norm first",
    ),
    Fault(
        "queries_without_positions",
        ATTENTION,
        "torch.cat((up.absorbed(nope[rows]), rope[rows]), -1)",
        "torch.cat((up.absorbed(nope[rows]), 0 * rope[rows]), -1)",
        "a decode does not know where its tokens stand",
    ),
    Fault(
        "short_spans_expanded",
        ATTENTION,
        "return num_tokens * saved > width",
        "return num_tokens * saved < width",
        "every decode expands the latents of its whole request",
    ),
    Fault(
        "rows_of_short_spans_as_in_the_step",
        ATTENTION,
        "taken_rows = np.cumsum(lens[~is_long]) - lens[~is_long]",
        "taken_rows = first_rows[~is_long]",
        "decodes beside a prompt read other rows",
    ),
    Fault(
        "queries_of_a_chunk_at_its_start",
        ATTENTION,
        "keys, values, span, None, output)\n        return output",
        "keys, values, replace(span, first_row=0), None, output)\n        return output",
        "a prompt's rows are written over the first ones",
    ),
    Fault(
        "pairs_of_queries_not_moved",
        MODEL,
        "torch.cat((rope[:, ::2], rope[:, 1::2]), 1).flatten()",
        "rope.flatten()",
        "queries are turned by the angles of other pairs than keys",
    ),
    Fault(
        "pairs_of_keys_not_moved",
        MODEL,
        "torch.cat((pairs[:, ::2], pairs[:, 1::2]), -1)",
        "pairs",
        "keys are turned by the angles of other pairs than queries",
    ),
    Fault(
        "values_before_keys",
        MODEL,
        "[part.flatten() for part in rows.split(widths, 1)]",
        "[part.flatten() for part in rows.split(widths, 1)][::-1]",
        "keys are made of the weights of values",
    ),
    Fault(
        "compressed_queries_not_normed",
        MODEL,
        "self.query_up(self.ops.rms_norm(queries[0], self.query_norm, NORM_EPS))",
        "self.query_up(queries[0])",
        "the checkpoint's q_a_layernorm is read and not used",
    ),
    Fault(
        "eps_of_latents_of_the_model",
        CONFIG,
        "NORM_EPS = 1e-6",
        "NORM_EPS = 1e-1",
        "norms of latents take the model's own eps",
    ),
    Fault(
        "yarn_scales_scores_once",
        FILE,
        "math.log(rope.factor) + 1.0) ** 2",
        "math.log(rope.factor) + 1.0)",
        "scores of long contexts are too small",
    ),
    Fault(
        "latents_planned_as_keys_and_values",
        WHOLE,
        "else self.latent.token_width",
        "else 2 * self.latent.rank",
        "a third of the cache stays unused",
    ),
    Fault(
        "heads_of_queries_cut_by_latents",
        SHARE,
        "(_equal(config.num_heads * config.query_dim, rank, ranks),)",
        "(_equal(config.num_heads * config.head_dim, rank, ranks),)",
        "a rank reads rows of other heads",
    ),
    Fault(
        "predicting_layers_surplus",
        SHARE,
        "range(config.num_layers + config.num_unread_layers)",
        "range(config.num_layers)",
        "a published DeepSeek-V3 cannot be loaded",
    ),
    Fault(
        "rows_in_the_order_of_the_checkpoint",
        PLACE,
        "            tensor = tensor[self.order]\n",
        "            pass\n",
        "heads get the weights of others",
    ),
    Fault(
        "scales_of_the_first_rows",
        PARTS,
        "form, (rows.start, columns.start)",
        "form",
        "the second rank's weights have the first one's scales",
    ),
    Fault(
        "columns_of_a_block_as_rows",
        SCALES,
        "// blocks.columns",
        "// blocks.rows",
        "weights have the scales of other blocks",
    ),
    Fault(
        "up_projection_stored_in_int8",
        INT8_FILE,
        "        ignore.append(UP_PROJECTIONS)\n",
        "        pass\n",
        "latents are expanded by rounded weights, for nothing",
    ),
    Fault(
        "correction_in_the_weights",
        OPS,
        "self._shares(scores.gather(-1, chosen), config)",
        "self._shares(ranked.gather(-1, chosen), config)",
        "what balances the experts also weighs them",
    ),
    Fault(
        "hidden_groups_at_zero",
        OPS,
        "== 0, -torch.inf).flatten(-2)",
        "== 0, 0.0).flatten(-2)",
        "experts of hidden groups are chosen where corrections are negative",
    ),
    Fault(
        "groups_by_their_best_alone",
        OPS,
        "groups.topk(config.group_best, dim=-1)",
        "groups.topk(1, dim=-1)",
        "V3 chooses other groups than it was trained with",
    ),
    Fault(
        "scores_by_softmax",
        OPS,
        'scores.softmax(-1) if config.scores == "softmax" else scores.sigmoid()',
        "scores.softmax(-1)",
        "V3's experts compete where they should not",
    ),
    Fault(
        "routed_scale_forgotten",
        OPS,
        "return weights if config.scale == 1 else weights * config.scale",
        "return weights",
        "experts count less than half of what they should",
    ),
    Fault(
        "shared_expert_forgotten",
        MIXTURE,
        "part = part + shared",
        "part = part + 0 * shared",
        "what every token needs is not added",
    ),
    Fault(
        "shared_gate_forgotten",
        MIXTURE,
        "F.linear(x, self.shared_gate).sigmoid() * shared",
        "shared",
        "the shared expert counts whole",
    ),
    Fault(
        "every_group_on_the_npu",
        NPU_OPS,
        "k_group=config.num_chosen_groups",
        "k_group=config.num_groups",
        "an NPU chooses among all groups",
    ),
    Fault(
        "uncorrected_on_the_npu",
        NPU_OPS,
        "bias=correction",
        "bias=None",
        "an NPU chooses other experts than a CPU",
    ),
    Fault(
        "weights_divided_on_the_npu",
        NPU_OPS,
        "if divides == config.normalizes:",
        "if True:",
        "an NPU weighs by sums where the model does not",
    ),
    Fault(
        "long_spans_in_the_space_of_latents",
        ON_NPU,
        "is_long = lens > MOST_LATENT_QUERIES",
        "is_long = lens > 2 * MOST_LATENT_QUERIES",
        "an operator is asked for spans that it does not take",
    ),
    Fault(
        "latents_of_other_requests",
        ON_NPU,
        "np.repeat(batch.slots[is_long], stops)",
        "np.repeat(batch.slots[is_long][::-1], stops)",
        "two prompts of one step read each other",
    ),
    Fault(
        "default_eps_of_the_cache_write",
        ON_NPU,
        "            epsilon=eps,\n",
        "",
        "latents are normed with the operator's default",
    ),
    Fault(
        "wide_rows_in_one_launch",
        LATENT_UP,
        "if x.shape[1] * x.shape[2] > MOST_PRODUCT_ROW:",
        "if False:",
        "128 heads of latents are more than the product takes",
    ),
    Fault(
        "long_spans_joined",
        ON_NPU,
        "return metadata.long is None",
        "return True",
        "queries of long spans come absorbed, where keys and values of each head are made",
    ),
    Fault(
        "sines_where_cosines_belong",
        ON_NPU,
        "            sin,\n            cos,\n            layer_latents,",
        "            cos,\n            sin,\n            layer_latents,",
        "npu_mla_prolog_v3 takes sines first, all other operators cosines",
    ),
    Fault(
        "default_eps_of_joined_latents",
        ON_NPU,
        "            rmsnorm_epsilon_ckv=prolog.eps,\n",
        "",
        "latents of decodes are normed with the operator's default, those of prompts are not",
    ),
    Fault(
        "scales_of_the_other_weights",
        NPU_OPS,
        "weights, scales, _ = zip(qkv[0], query_up[0], qkv[1])",
        "weights, scales, _ = zip(qkv[0], qkv[1], query_up[0])",
        "an operator gets queries' weights where those of latents belong",
    ),
    Fault(
        "joined_weights_in_rows",
        NPU_OPS,
        "            parts[:] = [in_tiles(each) for each in parts]\n",
        "            parts[:] = [each.clone() for each in parts]\n",
        "npu_mla_prolog_v3 reads tiles where there are rows",
    ),
    Fault(
        "heads_of_joined_queries_moved",
        MODEL,
        'if name in ("q_proj", "q_b_proj") and not self.joins:',
        'if name in ("q_proj", "q_b_proj"):',
        "the operator takes the two parts of a head side by side",
    ),
    Fault(
        "prompts_of_joined_layers_unturned",
        MODEL,
        "nope.contiguous(), torch.cat((pairs[..., ::2], pairs[..., 1::2]), -1)",
        "nope.contiguous(), pairs",
        "a prompt's queries are turned by the angles of other pairs than decodes'",
    ),
    Fault(
        "joins_before_it_was_found_right",
        ON_NPU,
        "return self.product.joins_latents and takes_prolog(",
        "return takes_prolog(",
        "an operator that nobody has run is used",
    ),
    Fault(
        "any_hidden_size_is_joined",
        LIMITS,
        "return is_type and hidden_size in PROLOG_HIDDEN and query_rank in PROLOG_QUERIES",
        "return is_type and query_rank is not None",
        "the operator is asked for sizes that its page does not list",
    ),
    Fault(
        "stand_in_joins_without_norms",
        PROLOG,
        'rms_norm(latent, call["rmsnorm_gamma_ckv"], call["rmsnorm_epsilon_ckv"])[0],',
        "latent,",
        "the stand-in writes latents that the device norms",
    ),
    Fault(
        "stand_in_turns_joined_halves",
        PROLOG,
        "halves = torch.cat((pairs[..., ::2], pairs[..., 1::2]), -1).float()",
        "halves = pairs.float()",
        "the stand-in takes pairs from other places than the device",
    ),
    Fault(
        "stand_in_turns_halves",
        OPERATORS,
        "halves = torch.cat((pairs[:, ::2], pairs[:, 1::2]), -1).float()",
        "halves = pairs.float()",
        "the stand-in takes pairs from other places than the device",
    ),
    Fault(
        "stand_in_weighs_by_corrections",
        GATING,
        "weights = scores.gather(1, experts)",
        "weights = ranked.gather(1, experts)",
        "the stand-in weighs as no device does",
    ),
)
