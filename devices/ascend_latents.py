"""State which latent attention Ascend's operators take.

Sources: op-plugin, npu_kv_rmsnorm_rope_cache and npu_mla_prolog_v3; vllm-ascend, mla_v1.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from devices.shapes import AttentionShape, dtype_name

if TYPE_CHECKING:
    import torch

LATENT, LATENT_ROPE, LATENT_HEAD = 512, 64, 128
MOST_LATENT_HEADS = 128
MOST_LATENT_QUERIES = 16  # most tokens of a span in the space of latents
# npu_mla_prolog_v3: the hidden sizes and the widths of compressed queries
PROLOG_HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
PROLOG_QUERIES = (1536, 2048)


def check_latent(shape: AttentionShape, plain: str) -> None:
    """Raise ValueError for latents or heads that the operators do not take; `plain` is the fix."""
    latent, heads = shape.latent, shape.num_heads
    assert latent is not None, "other attention has other limits"
    sizes = shape.head_dim, latent.rope_dim, latent.nope_dim, latent.value_dim
    if sizes != (LATENT, LATENT_ROPE, LATENT_HEAD, LATENT_HEAD):
        raise ValueError(
            f"the model's kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim and v_head_dim are"
            f" {', '.join(map(str, sizes))}; fused attention takes {LATENT}, {LATENT_ROPE}, {LATENT_HEAD}"
            f" and {LATENT_HEAD}: choose another model, {plain}"
        )
    if heads > MOST_LATENT_HEADS or heads & (heads - 1):
        raise ValueError(
            f"each device has {heads} heads of the model; fused attention by latents takes a power of two"
            f" up to {MOST_LATENT_HEADS}: choose another parallel.tensor, {plain}"
        )


def takes_prolog(
    dtype: torch.dtype, hidden_size: int, query_rank: int | None, *, takes_float32: bool = False
) -> bool:
    """Whether one operator computes what precedes attention, for a shape that passes `check_latent`."""
    is_type = dtype_name(dtype) in ("bfloat16", *(["float32"] if takes_float32 else []))
    return is_type and hidden_size in PROLOG_HIDDEN and query_rank in PROLOG_QUERIES
