"""List what this project calls of torch_npu, with the arguments that it passes, and who needs each call.

A release that lacks one of them is too old for this project. The engine refuses it at start, by what the
installed release registers (attention/npu/registered.py); the doctor knows releases by their number
(devices/torch_npu_releases.py). tests/devices/test_torch_npu_calls.py holds this list to the code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devices.ascend_limits import AscendProduct

MODELS = "every model"
INT8 = "W8A8"
INT4 = "weights in 4 bits and W8A16"
MIXTURES = "mixtures of experts"
LATENTS = "latent attention"
STATES = "states in bfloat16"
SPARSE = "sparse attention"
SINKS = "models with attention sinks"
ANSWERS = "answers of scripts/verify_npu.sh"


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call of an operator by its name in torch_npu: the arguments that are ever passed, and for what."""

    operator: str
    arguments: tuple[str, ...]
    needed_by: str


def _call(operator: str, arguments: str, needed_by: str = MODELS) -> OperatorCall:
    return OperatorCall(operator, tuple(arguments.split()), needed_by)


_FIRST = (
    "query key value query_rope key_rope atten_mask actual_seq_lengths actual_seq_lengths_kv block_table"
    " num_heads num_key_value_heads scale input_layout block_size softmax_lse_flag sparse_mode pre_tokens"
    " next_tokens key_antiquant_scale value_antiquant_scale"
)
_SECOND = (
    "query key value atten_mask actual_seq_qlen actual_seq_kvlen block_table num_query_heads"
    " num_key_value_heads softmax_scale input_layout block_size sparse_mode pre_tokens"
    " next_tokens learnable_sink"
)
_GROUP = "group_ep ep_world_size ep_rank_id moe_expert_num group_tp tp_world_size comm_alg"
_SPANS = "query key_cache value_cache num_kv_heads num_heads scale_value block_table context_lens out"

ON_ALL: tuple[OperatorCall, ...] = (  # but the first 910, which has plain torch alone
    _call("npu_rms_norm", "input gamma epsilon"),
    _call("npu_add_rms_norm", "x1 x2 gamma epsilon"),
    _call("npu_rotary_mul", "input r1 r2"),
    _call("npu_swiglu", "input dim"),
    _call("npu_format_cast", "input acl_format"),
    _call("npu_quant_matmul", "x1 x2 scale pertoken_scale bias output_dtype", INT8),
    _call("npu_quantize", "input scales zero_points dtype axis div_mode", f"static {INT8}, int8 caches"),
)
ON_FUSED: tuple[OperatorCall, ...] = (
    _call("npu_fused_infer_attention_score", _FIRST),
    _call("npu_fused_infer_attention_score.out", f"{_FIRST} workspace out"),
    _call("_npu_fused_infer_attention_score_get_max_workspace", _FIRST),
    _call("npu_scatter_pa_kv_cache", "key value key_cache value_cache slot_mapping cache_mode"),
    _call("npu_apply_rotary_pos_emb", "query key cos sin layout rotary_mode"),
    _call("npu_grouped_matmul", "x weight bias split_item group_type group_list group_list_type scale"
          " per_token_scale output_dtype antiquant_scale antiquant_offset"),
    _call("npu_fused_infer_attention_score_v2", _SECOND, SINKS),
    _call("npu_fused_infer_attention_score_v2.out", f"{_SECOND} workspace out", SINKS),
    _call("_npu_fused_infer_attention_score_v2_get_max_workspace", _SECOND, SINKS),
    _call("npu_dynamic_quant", "input", INT8),
    _call("npu_add_rms_norm_dynamic_quant", "x1 x2 gamma epsilon output_mask", INT8),
    _call("npu_dequant_swiglu_quant", "x weight_scale activation_scale activate_left quant_mode", INT8),
    _call("npu_grouped_matmul_swiglu_quant_v2", "x weight weight_scale x_scale group_list group_list_type",
          "mixtures of experts in W8A8"),
    _call("npu_weight_quant_batchmatmul", "x weight antiquant_scale antiquant_offset antiquant_group_size"
          " bias", INT4),
    _call("npu_convert_weight_to_int4pack", "weight", INT4),
    _call("npu_add_rms_norm_cast", "x1 x2 gamma epsilon", MIXTURES),
    _call("npu_moe_gating_top_k_softmax", "x k", MIXTURES),
    _call("npu_moe_gating_top_k_softmax_v2", "x k renorm", ANSWERS),
    _call("npu_clipped_swiglu", "x interleaved alpha limit bias", "experts with a clamped gate"),
    _call("npu_moe_gating_top_k", "x k bias k_group group_count group_select_mode norm_type"
          " routed_scaling_factor", MIXTURES),
    _call("npu_moe_init_routing_v2", "x expert_idx active_num expert_num expert_tokens_num_type"
          " expert_tokens_num_flag active_expert_range quant_mode", MIXTURES),
    _call("npu_moe_token_unpermute", "permuted_tokens sorted_indices probs", MIXTURES),
    _call("npu_kv_rmsnorm_rope_cache", "kv gamma cos sin index k_cache ckv_cache epsilon cache_mode",
          LATENTS),
    _call("npu_transpose_batchmatmul", "input weight perm_x1 perm_y", LATENTS),
    _call("npu_mla_prolog_v3", "token_x weight_dq weight_uq_qr weight_uk weight_dkv_kr rmsnorm_gamma_cq"
          " rmsnorm_gamma_ckv rope_sin rope_cos kv_cache kr_cache cache_index rmsnorm_epsilon_cq"
          " rmsnorm_epsilon_ckv cache_mode weight_quant_mode dequant_scale_x dequant_scale_w_dq"
          " dequant_scale_w_uq_qr dequant_scale_w_dkv_kr query_norm_flag", ANSWERS),
    _call("npu_qkv_rms_norm_rope_cache", "qkv q_gamma k_gamma cos sin index q_out k_cache v_cache qkv_size"
          " head_nums epsilon cache_mode is_output_qkv", ANSWERS),
    _call("npu_mm_all_reduce_base", "x1 x2 hcom", ANSWERS),
    _call("npu_prefetch", "input dependency max_size", ANSWERS),
    _call("npu_moe_distribute_dispatch_v2", f"x expert_ids {_GROUP} quant_mode", ANSWERS),
    _call("npu_moe_distribute_combine_v2", "expand_x expert_ids assist_info_for_combine ep_send_counts"
          f" expert_scales {_GROUP} expand_scales tp_send_counts", ANSWERS),
)  # fmt: skip
# Only an engine whose states are in bfloat16 needs these: older releases lack them
ON_STATES: tuple[OperatorCall, ...] = (
    _call("npu_recurrent_gated_delta_rule", "query key value state beta scale actual_seq_lengths"
          " ssm_state_indices g", STATES),
    _call("npu_chunk_gated_delta_rule", "query key value beta initial_state actual_seq_lengths scale g",
          STATES),
)  # fmt: skip
# Only an engine of a model with sparse attention needs these
ON_SPARSE: tuple[OperatorCall, ...] = (
    _call("npu_lightning_indexer", "query key weights actual_seq_lengths_query actual_seq_lengths_key"
          " block_table layout_query layout_key sparse_count sparse_mode", SPARSE),
    _call("npu_sparse_flash_attention", "query key value sparse_indices scale_value block_table"
          " actual_seq_lengths_query actual_seq_lengths_kv query_rope key_rope layout_query layout_kv"
          " sparse_mode attention_mode", SPARSE),
)  # fmt: skip
# These instead, with a cache in int8
ON_INT8_SPARSE: tuple[OperatorCall, ...] = (
    _call("npu_quant_lightning_indexer", "query key weights query_dequant_scale key_dequant_scale"
          " query_quant_mode key_quant_mode actual_seq_lengths_query actual_seq_lengths_key block_table"
          " layout_query layout_key sparse_count sparse_mode", SPARSE),
    _call("npu_kv_quant_sparse_flash_attention", "query key value sparse_indices scale_value key_quant_mode"
          " value_quant_mode block_table actual_seq_lengths_query actual_seq_lengths_kv layout_query"
          " layout_kv sparse_mode attention_mode quant_scale_repo_mode tile_size rope_head_dim", SPARSE),
)  # fmt: skip
ON_ATB: tuple[OperatorCall, ...] = (
    _call("empty_with_format", "size dtype device acl_format"),
    _call("_npu_reshape_and_cache", "key value key_cache value_cache slot_indices"),
    _call("_npu_paged_attention", _SPANS),
    _call("_npu_paged_attention_splitfuse_v2", f"{_SPANS} seq_len mask"),
)
ALL: tuple[OperatorCall, ...] = (*ON_ALL, *ON_FUSED, *ON_STATES, *ON_SPARSE, *ON_INT8_SPARSE, *ON_ATB)

# What is called in torch_npu.npu beside what torch.cuda has too
PYTHON_NAMES = (
    "ExternalEvent", "NPUGraph", "current_stream", "device_count", "get_device_name",
    "graph_task_group_begin", "graph_task_group_end", "graph_task_update_begin", "graph_task_update_end",
    "is_available", "is_current_stream_capturing", "set_compile_mode", "Stream", "stream", "synchronize",
    "get_cann_version",
)  # fmt: skip


def calls_of(product: AscendProduct) -> Sequence[OperatorCall]:
    """Return the calls without which this product's operators cannot be used."""
    if product.is_atb:
        return (*ON_ALL, *ON_ATB)
    return (*ON_ALL, *ON_FUSED) if product.is_fused else ()


def lacking(
    calls: Sequence[OperatorCall], arguments_of: Callable[[str], Sequence[Collection[str]]]
) -> Iterator[str]:
    """Yield what a release lacks for these calls, in words.

    `arguments_of` gives the names of an operator's arguments for each schema that the release has of it.
    """
    for call in calls:
        schemas = arguments_of(call.operator)
        if not schemas:
            yield f"{call.operator} ({call.needed_by})"
            continue
        absent = min(([each for each in call.arguments if each not in known] for known in schemas), key=len)
        if absent:
            some = "arguments" if len(absent) > 1 else "argument"
            yield f"the {some} {', '.join(absent)} of {call.operator} ({call.needed_by})"
