"""Which shapes does a model ask of a device's operators?"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model and a recipe fix of attention; `windows` has one entry a layer, None for full."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    dtype: torch.dtype
    windows: tuple[int | None, ...]
