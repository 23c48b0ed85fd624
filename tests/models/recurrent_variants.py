"""Small checkpoints of the families whose layers keep a recurrent state.

Their states decay slowly: with the decays that transformers draws, a state forgets within two tokens, and one
that was lost would hardly be missed.
"""

from __future__ import annotations

import torch

from tests.models.variants import Variant

HEADS = {
    "head_dim": 24,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_hidden_layers": 4,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
QUARTER = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
HALF = QUARTER | {"partial_rotary_factor": 0.5}
KIMI = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "moe_intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 5,
}
RECURRENT_VARIANTS = [
    Variant(
        "qwen3_next", "qwen3_next", HEADS | EXPERTS | {"decoder_sparse_step": 2}, HALF, shard_size="40KB"
    ),
    Variant(
        "qwen3_next_layer_types",
        "qwen3_next",
        HEADS
        | EXPERTS
        | {
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "mlp_only_layers": [1],
        },
        HALF,
        saved_as=torch.bfloat16,
    ),
    Variant("qwen3_5", "qwen3_5_text", HEADS, HALF),
    Variant(
        "qwen3_5_tied",
        "qwen3_5_text",
        HEADS | {"tie_word_embeddings": True, "linear_num_key_heads": 1, "head_dim": 32},
        QUARTER,
    ),
    Variant("qwen3_5_moe", "qwen3_5_moe_text", HEADS | EXPERTS, HALF),
    Variant("kimi_linear", "kimi_linear", KIMI, {}),
    Variant(
        "kimi_linear_groups", "kimi_linear", KIMI | {"n_group": 4, "topk_group": 2, "q_lora_rank": 20}, {}
    ),
]
