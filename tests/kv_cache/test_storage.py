"""Do the cache's tensors hold what they should, and nothing else?"""

from __future__ import annotations

import numpy as np
import torch

from kv_cache.storage import KVCache


def test_page_bytes_are_what_is_allocated() -> None:
    cache = KVCache(3, 7, 16, 2, 8, torch.bfloat16)
    allocated = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert allocated == 7 * KVCache.page_bytes(3, 16, 2, 8, torch.bfloat16)
    assert not any(tensor.any() for tensor in (*cache.keys, *cache.values))


def test_copy_reads_all_sources_before_it_writes() -> None:
    cache = KVCache(2, 5, 4, 1, 2, torch.float32)
    for tensor in (*cache.keys, *cache.values):
        tensor[:] = torch.arange(5.0)[:, None, None, None]
    cache.copy(np.array([1, 2, 1]), np.array([2, 3, 4]))
    for tensor in (*cache.keys, *cache.values):
        assert tensor[:, 0, 0, 0].tolist() == [0, 1, 1, 2, 1]
