"""Caches of plain keys and values, [P, B, K, D], for tests that need no attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_cache.device.storage import KVCache, LayerPages


def plain_pages(page: Sequence[int], dtype: torch.dtype, num_planes: int = 2, group: int = 0) -> LayerPages:
    """A layer whose planes are [P, *page] of one type on the CPU."""

    def zeros(count: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(count, *page, dtype=dtype) for _ in range(num_planes))

    return LayerPages(zeros, group)


def plain_cache(
    num_layers: int,
    num_pages: int,
    page: Sequence[int],
    dtype: torch.dtype,
    num_host_pages: int = 0,
    *,
    indexed: bool = True,
) -> KVCache:
    """Layers of keys and values, each [P, *page] with `page` = [B, K, D]."""
    layers = [plain_pages(page, dtype)] * num_layers
    return KVCache(layers, page[0], [num_pages], [num_host_pages], indexed=indexed)
