"""Small checkpoints of families that differ little from others.

GLM-4.7-Flash, Seed-OSS, Hy3 and ERNIE-4.5; MiniMax-M2 and OLMo 3, whose queries are normed over all heads;
Hunyuan, whose queries are normed after they are rotated; and Ministral 3, whose queries grow.
"""

from __future__ import annotations

import torch

from tests.models.variants import HALF, LATENT, LLAMA3, Variant, yarn

GROWTH = {"llama_4_scaling_beta": 0.1}
ROPES = {
    "full_attention": yarn(),
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}

RELATIVES = [
    Variant(
        "glm4_moe_lite",
        "glm4_moe_lite",
        {each: LATENT[each] for each in LATENT if each != "first_k_dense_replace"}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 1.8},
    ),
    Variant(
        "glm4_moe_lite_types",
        "glm4_moe_lite",
        LATENT
        | {
            "v_head_dim": 28,
            "qk_nope_head_dim": 24,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "tie_word_embeddings": True,
        },
        yarn(mscale=1.0, mscale_all_dim=1.0),
        saved_as=torch.bfloat16,
    ),
    Variant(
        "glm4_moe_lite_groups",
        "glm4_moe_lite",
        LATENT
        | {
            "q_lora_rank": None,
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 4,
        },
        shard_size="60KB",
    ),
    Variant("seed_oss", "seed_oss", {"head_dim": 24, "attention_bias": False}),
    Variant(
        "seed_oss_biased",
        "seed_oss",
        {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        LLAMA3,
        saved_as=torch.bfloat16,
    ),
    Variant(
        "hy_v3",
        "hy_v3",
        {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    Variant(
        "hy_v3_types",
        "hy_v3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "moe_intermediate_size": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "router_scaling_factor": 0.7,
            "enable_moe_fp32_combine": False,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "tie_word_embeddings": True,
        },
        yarn(),
        saved_as=torch.bfloat16,
    ),
    Variant("ernie4_5", "ernie4_5", {"head_dim": 16}),
    Variant(
        "ernie4_5_biased",
        "ernie4_5",
        {"head_dim": 24, "use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
        yarn(),
        saved_as=torch.bfloat16,
    ),
    Variant(
        "ernie4_5_moe",
        "ernie4_5_moe",
        {"moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 3},
    ),
    Variant(
        "ernie4_5_moe_interval",
        "ernie4_5_moe",
        {
            "moe_intermediate_size": 16,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
        saved_as=torch.bfloat16,
    ),
    Variant(
        "ernie4_5_moe_alone",
        "ernie4_5_moe",
        {
            "moe_intermediate_size": 40,
            "moe_num_experts": 4,
            "moe_k": 1,
            "moe_num_shared_experts": 0,
            "num_key_value_heads": 1,
        },
        LLAMA3,
        shard_size="60KB",
    ),
    Variant(
        "minimax_m2",
        "minimax_m2",
        {
            "head_dim": 16,
            "intermediate_size": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    Variant(
        "minimax_m2_tied",
        "minimax_m2",
        {
            "head_dim": 24,
            "intermediate_size": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
        },
        yarn(partial_rotary_factor=0.25),
        saved_as=torch.bfloat16,
    ),
    Variant("hunyuan", "hunyuan_v1_dense", {"head_dim": 16, "tie_word_embeddings": True}),
    Variant(
        "hunyuan_alpha",
        "hunyuan_v1_dense",
        {"head_dim": 24, "attention_bias": True, "num_key_value_heads": 1},
        {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
        saved_as=torch.bfloat16,
    ),
    Variant("hunyuan_moe", "hunyuan_v1_moe", {"head_dim": 16, "num_experts": 6, "moe_topk": 3}),
    Variant(
        "hunyuan_moe_alpha",
        "hunyuan_v1_moe",
        {
            "head_dim": 32,
            "attention_bias": True,
            "num_experts": 4,
            "moe_topk": [2, 2, 2],
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        saved_as=torch.bfloat16,
    ),
    Variant(
        "hunyuan_moe_one",
        "hunyuan_v1_moe",
        {"head_dim": 24, "num_experts": 5, "moe_topk": 1},
        LLAMA3,
        shard_size="60KB",
    ),
    Variant("ministral3", "ministral3", {"head_dim": 16}, yarn(original_max_position_embeddings=16) | GROWTH),
    Variant(
        "ministral3_window",
        "ministral3",
        {"head_dim": 24, "sliding_window": 21, "tie_word_embeddings": True, "num_key_value_heads": 1},
        yarn(original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=1.0) | GROWTH,
        saved_as=torch.bfloat16,
    ),
    Variant("olmo3", "olmo3", {"sliding_window": 21}, ROPES),
    Variant(
        "olmo3_types",
        "olmo3",
        {"layer_types": HALF, "sliding_window": 5, "attention_bias": True, "tie_word_embeddings": True},
        ROPES,
        saved_as=torch.bfloat16,
    ),
    Variant(
        "olmo3_full",
        "olmo3",
        {"layer_types": ["full_attention"] * 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        ROPES,
        shard_size="60KB",
    ),
]
