"""Small checkpoints that use, together, every option that a decoder has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Variant:
    """One checkpoint. `old` has config.json in the older spelling; `saved_as` is the tensors' dtype."""

    name: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    old: bool = False
    saved_as: torch.dtype = torch.float32
    shard_size: str = "5GB"


def yarn(**more: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 5e3,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    } | more


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
PUBLISHED_LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _ropes(full: dict[str, Any], theta: float = 1e4, **local: Any) -> dict[str, Any]:
    own = {"rope_type": "default", "rope_theta": theta} | local
    return {"full_attention": full, "sliding_attention": own}


HALF_TURNED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONGROPE = {  # two thirds of heads of 12
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "partial_rotary_factor": 0.67,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0, 1.1, 1.4, 2.0],
    "long_factor": [1.1, 2.9, 4.5, 7.5],
}
HALF = ["full_attention", "sliding_attention", "full_attention"]

VARIANTS = [
    Variant("llama", "llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    Variant(
        "llama_dynamic",
        "llama",
        {"max_position_embeddings": 100},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.5},
        old=True,
    ),
    Variant(
        "llama_dynamic_new",
        "llama",
        {"max_position_embeddings": 64, "head_dim": 32},
        {"rope_type": "dynamic", "rope_theta": 3e3, "factor": 5.5},
    ),
    Variant(
        "llama_biased",
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
        LLAMA3,
        shard_size="60KB",
    ),
    Variant(
        "internlm3",
        "internlm3",
        {"head_dim": 16, "max_position_embeddings": 100},
        {"rope_type": "dynamic", "rope_theta": 5e7, "factor": 6.0},
        old=True,
    ),
    Variant(
        "internlm3_biased",
        "internlm3",
        {"head_dim": 20, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        saved_as=torch.bfloat16,
    ),
    Variant(
        "internlm3_yarn",
        "internlm3",
        {"head_dim": None, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        yarn(),
        shard_size="60KB",
    ),
    Variant("mistral_window", "mistral", {"sliding_window": 37}),
    Variant(
        "mistral_yarn",
        "mistral",
        {"sliding_window": None, "num_key_value_heads": 1, "head_dim": 20},
        yarn(),
        old=True,
        saved_as=torch.float16,
    ),
    Variant(
        "qwen2_window_from",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
        old=True,
    ),
    Variant(
        "qwen2_yarn",
        "qwen2",
        {"tie_word_embeddings": True, "sliding_window": 20},
        yarn(mscale=0.7, mscale_all_dim=0.4, truncate=False, beta_fast=16.0, beta_slow=2.0),
        saved_as=torch.bfloat16,
    ),
    Variant(
        "qwen2_layer_types",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": HALF},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ),
    Variant("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-4}, old=True),
    Variant(
        "qwen3_layer_types",
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": HALF,
        },
        yarn(attention_factor=1.3),
        shard_size="100KB",
    ),
    Variant(
        "qwen3_moe",
        "qwen3_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    Variant(
        "qwen3_moe_window",
        "qwen3_moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "moe_intermediate_size": 40,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 21,
        },
        yarn(),
        old=True,
        shard_size="60KB",
    ),
    Variant(
        "qwen3_moe_tied",
        "qwen3_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "num_experts": 16,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
        saved_as=torch.bfloat16,
    ),
    Variant("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Variant(
        "mixtral_window",
        "mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 19, "rms_norm_eps": 1e-3},
        old=True,
        saved_as=torch.float16,
    ),
    Variant("glm4", "glm4", {"head_dim": 16}, {**HALF_TURNED}),
    Variant(
        "glm4_unbiased",
        "glm4",
        {"head_dim": 32, "attention_bias": False, "num_key_value_heads": 1, "tie_word_embeddings": True},
        yarn(partial_rotary_factor=0.25),
        saved_as=torch.bfloat16,
    ),
    Variant("glm4_old", "glm4", {"head_dim": 24, "rms_norm_eps": 1e-3}, {**HALF_TURNED}, old=True),
    Variant(
        "gemma3",
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 37, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
        _ropes({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, 500.0),
        old=True,
    ),
    Variant(
        "gemma3_layer_types",
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 21,
            "layer_types": HALF,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 7,
        },
        _ropes(yarn(), 3e2, rope_type="linear", factor=1.5),
        saved_as=torch.bfloat16,
        shard_size="60KB",
    ),
    Variant(
        "gemma3_pattern",
        "gemma3_text",
        {
            "head_dim": 20,
            "num_key_value_heads": 1,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
            "rms_norm_eps": 1e-4,
        },
        _ropes(LLAMA3),
        saved_as=torch.float16,
    ),
    Variant("phi3", "phi3", {"num_key_value_heads": 4}),
    Variant(
        "phi3_window",
        "phi3",
        {"sliding_window": 37, "tie_word_embeddings": True},
        old=True,
    ),
    Variant(
        "phi3_part",
        "phi3",
        {"head_dim": 16, "num_key_value_heads": 1},
        {**HALF_TURNED},
        saved_as=torch.float16,
        shard_size="60KB",
    ),
    Variant("phi3_long", "phi3", {"tie_word_embeddings": True}, LONGROPE, old=True),
    Variant(
        "qwen2_moe",
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        old=True,
    ),
    Variant(
        "qwen2_moe_sparse",
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "decoder_sparse_step": 2,
            "num_key_value_heads": 4,
        },
        yarn(),
        saved_as=torch.bfloat16,
    ),
    Variant(
        "glm4_moe",
        "glm4_moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "num_mtp_layers": 0,
        },
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    Variant(
        "glm4_moe_groups",
        "glm4_moe",
        {
            "head_dim": 32,
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "num_key_value_heads": 1,
            "num_mtp_layers": 0,
        },
        yarn(partial_rotary_factor=0.25, attention_factor=1.3),
        saved_as=torch.bfloat16,
    ),
    Variant(
        "deepseek_v2_lite",
        "deepseek_v2",
        LATENT
        | {"q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2},
        yarn(mscale=0.707, mscale_all_dim=0.707),
        old=True,
    ),
    Variant(
        "deepseek_v2",
        "deepseek_v2",
        LATENT
        | {
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.7,
            "n_shared_experts": 1,
        },
        yarn(mscale=0.7, mscale_all_dim=1.0),
        saved_as=torch.bfloat16,
    ),
    Variant(
        "deepseek_v3",
        "deepseek_v3",
        LATENT
        | {
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "num_mtp_layers": 0,
        },
        yarn(mscale=1.0, mscale_all_dim=1.0),
        shard_size="60KB",
    ),
    Variant(
        "deepseek_v3_one_group",
        "deepseek_v3",
        LATENT
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "n_routed_experts": 5,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.6,
            "n_shared_experts": 2,
            "tie_word_embeddings": True,
        },
        old=True,
    ),
]
