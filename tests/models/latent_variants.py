"""Further checkpoints with latent attention, so that each family has three.

They have no yarn, other sizes of each part of a head, and dense layers where the others have none.
"""

from __future__ import annotations

import torch

from tests.models.variants import LATENT, Variant

LATENT_VARIANTS = [
    Variant(
        "deepseek_v2_greedy",
        "deepseek_v2",
        LATENT
        | {
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 2,
            "n_routed_experts": 7,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
            "tie_word_embeddings": True,
        },
        saved_as=torch.float16,
        shard_size="60KB",
    ),
    Variant(
        "deepseek_v3_two_groups",
        "deepseek_v3",
        LATENT
        | {
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 20,
            "qk_rope_head_dim": 8,
            "first_k_dense_replace": 2,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
        },
        saved_as=torch.bfloat16,
    ),
]
