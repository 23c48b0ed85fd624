"""Checkpoints with sparse latent attention, which together use every option of both families.

Each has at least 16 index heads, so that hardly a key scores exactly 0, and reads fewer tokens than the
prompts have, but for one of each family, which reads them all.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.models.variants import LATENT, Variant, yarn

EXPERTS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}


def sparse(name: str, family: str, top: int, rope: dict[str, Any] | None = None, **more: Any) -> Variant:
    """A checkpoint whose queries read `top` tokens."""
    options = LATENT | EXPERTS | {"index_topk": top, "index_n_heads": 16, "index_head_dim": 24} | more
    kwargs: dict[str, Any] = {} if rope is None else {"rope": rope}
    saved_as = options.pop("saved_as", torch.float32)
    return Variant(name, family, options, saved_as=saved_as, **kwargs)


SPARSE_VARIANTS = [
    sparse("v32", "deepseek_v32", 16, yarn(mscale=1.0, mscale_all_dim=1.0)),
    sparse("v32_half", "deepseek_v32", 33, saved_as=torch.bfloat16, index_n_heads=32, index_head_dim=16),
    sparse("v32_types", "deepseek_v32", 8, mlp_layer_types=["sparse", "dense", "sparse"], index_head_dim=40),
    sparse("v32_reads_all", "deepseek_v32", 1024, norm_topk_prob=False, routed_scaling_factor=1.3),
    sparse("glm_5", "glm_moe_dsa", 16, qk_nope_head_dim=24, v_head_dim=32, n_group=1),
    sparse("glm_5_shared", "glm_moe_dsa", 12, indexer_types=["full", "shared", "full"], rms_norm_eps=1e-4),
    sparse("glm_5_freq", "glm_moe_dsa", 24, index_topk_freq=2, index_n_heads=24, saved_as=torch.float16),
    sparse("glm_5_pattern", "glm_moe_dsa", 9, index_topk_pattern="FSS", kv_lora_rank=24),
    sparse("glm_5_reads_all", "glm_moe_dsa", 1024, qk_rope_head_dim=8),
]
