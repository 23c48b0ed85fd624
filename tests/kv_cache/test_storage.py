"""Do the cache's tensors hold what they should, and nothing else?"""

from __future__ import annotations

import numpy as np
import torch

from kv_cache.pages import PageCopy
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


def numbered(num_pages: int, num_host_pages: int = 0) -> KVCache:
    """A cache each of whose pages holds its number."""
    cache = KVCache(2, num_pages, 4, 1, 2, torch.float32, num_host_pages=num_host_pages)
    for tensor in (*cache.keys, *cache.values):
        tensor[:] = torch.arange(float(num_pages))[:, None, None, None]
    return cache


def held(cache: KVCache) -> list[float]:
    """The number that each page holds, the same in all tensors and places."""
    for tensor in (*cache.keys, *cache.values):
        assert torch.equal(tensor, cache.keys[0][:, :1, :1, :1].expand_as(tensor))
    return cache.keys[0][:, 0, 0, 0].tolist()


def test_copies_are_made_in_their_order_and_pages_come_back_from_the_host() -> None:
    cache = numbered(6, num_host_pages=3)
    cache.apply(
        [
            PageCopy(np.array([4, 5]), np.array([2, 1]), "to_host"),
            PageCopy(np.array([3]), np.array([4])),
            PageCopy(np.array([1, 2]), np.array([3, 5]), "from_host"),
        ]
    )
    assert held(cache) == [0, 1, 2, 5, 3, 4]


def test_resize_keeps_the_low_pages_and_gives_the_rest_back() -> None:
    cache = numbered(6)
    cache.resize(3)
    assert held(cache) == [0, 1, 2]
    assert sum(tensor.untyped_storage().nbytes() for tensor in cache.keys) == 2 * 3 * 4 * 2 * 4
    cache.resize(5)
    assert held(cache) == [0, 1, 2, 0, 0]
