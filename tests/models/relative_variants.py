"""Small checkpoints of families that differ little from others: GLM-4.7-Flash, Seed-OSS, Hy3, ERNIE-4.5."""

from __future__ import annotations

import torch

from tests.models.variants import LATENT, LLAMA3, Variant, yarn

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
    Variant("seed_oss", "seed_oss", {"head_dim": 24}),
    Variant(
        "seed_oss_biased",
        "seed_oss",
        {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        LLAMA3,
        saved_as=torch.bfloat16,
    ),
    Variant(
        "seed_oss_unbiased",
        "seed_oss",
        {"head_dim": 32, "attention_bias": False, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        yarn(),
        shard_size="60KB",
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
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "tie_word_embeddings": True,
        },
        yarn(),
        saved_as=torch.bfloat16,
    ),
    Variant(
        "hy_v3_one",
        "hy_v3",
        {
            "head_dim": 24,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 40,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "enable_moe_fp32_combine": False,
        },
        LLAMA3,
        shard_size="60KB",
    ),
    Variant("ernie4_5", "ernie4_5", {"head_dim": 16}),
    Variant(
        "ernie4_5_biased",
        "ernie4_5",
        {"head_dim": 24, "use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
        yarn(),
        saved_as=torch.bfloat16,
    ),
    Variant("ernie4_5_wide", "ernie4_5", {"head_dim": 32, "rms_norm_eps": 1e-3}, LLAMA3, shard_size="60KB"),
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
]
