"""The bytes that are read of a page are those that a page of the host's pool gets when they are written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kv_cache.device.page_bytes import PageBytes
from kv_cache.device.storage import KVCache, LayerPages
from kv_cache.pages import PageCopy
from tests.kv_cache.caches import plain_pages


def filled(dtype: torch.dtype, *, indexed: bool, seed: int) -> KVCache:
    """A cache of two layers with values wider than keys, and of features, of which every byte is random."""

    def keys_and_values(count: int) -> tuple[torch.Tensor, ...]:
        return torch.zeros(count, 4, 2, 6, dtype=dtype), torch.zeros(count, 4, 2, 10, dtype=dtype)

    layers = [*[LayerPages(keys_and_values)] * 2, plain_pages((4, 5), torch.float32, 1)]
    cache = KVCache(layers, 4, [9], [7], indexed=indexed)
    random = torch.Generator().manual_seed(seed)
    for tensor in cache.tensors:
        tensor.flatten(1).view(torch.uint8).random_(0, 256, generator=random)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("indexed", [True, False])
def test_pages_go_to_bytes_and_to_the_host_and_back(dtype: torch.dtype, indexed: bool) -> None:
    source, target = (filled(dtype, indexed=indexed, seed=seed) for seed in (1, 2))
    contents = PageBytes(source).read(np.array([3, 8, 1]))()
    (size,) = PageBytes(source).page_bytes
    assert {len(each) for each in contents} == {size}
    assert size == 4 * 2 * (2 * (6 + 10)) * dtype.itemsize + 4 * 5 * 4
    PageBytes(target).write_host(np.array([5, 2, 6]), contents)
    target.apply([PageCopy(np.array([2, 6, 5]), np.array([4, 7, 2]), "from_host")])
    for one, other in zip(source.tensors, target.tensors):
        raw, got = one.flatten(1).view(torch.uint8), other.flatten(1).view(torch.uint8)
        assert torch.equal(got[[2, 4, 7]], raw[[3, 8, 1]])


def test_what_was_read_stays_as_it_was_when_the_page_is_used_again() -> None:
    cache = filled(torch.float32, indexed=True, seed=1)
    wait = PageBytes(cache).read(np.array([3]))
    before = PageBytes(cache).read(np.array([3]))()
    cache.apply([PageCopy(np.array([4]), np.array([3]))])
    assert wait() == before != PageBytes(cache).read(np.array([3]))()


def test_a_layout_tells_caches_apart() -> None:
    layouts = [
        PageBytes(filled(dtype, indexed=True, seed=1)).layout for dtype in (torch.float32, torch.bfloat16)
    ]
    assert layouts[0] != layouts[1]
    with pytest.raises(AssertionError, match="no page"):
        PageBytes(filled(torch.float32, indexed=True, seed=1)).write_host(np.array([1]), [b"short"])
