"""Tensors in huge pages lie apart, begin with a line of the cache, and outlive their arena."""

import itertools

import pytest
import torch

from kv_cache.device.huge_pages import LINE, HugeArena


def test_tensors_of_an_arena_lie_apart() -> None:
    """Small ones that fill several chunks, one larger than a chunk, and none of any number."""
    arena, sizes = HugeArena(chunk=4096), [3, 700, 1, 0, 900, 5000, 64, 1023]
    made = [arena.empty(size, torch.float32) for size in sizes]
    for number, each in enumerate(made):
        assert each.shape == (sizes[number],)
        assert each.data_ptr() % LINE == 0
        each.fill_(number)
    del arena
    for number, each in enumerate(made):
        assert (each == number).all()
    begun = sorted((each.data_ptr(), each.nbytes) for each in made if len(each))
    assert all(first + size <= then for (first, size), (then, _) in itertools.pairwise(begun))


def test_memory_that_cannot_be_had_is_named() -> None:
    with pytest.raises(RuntimeError, match="bytes of memory cannot be mapped"):
        HugeArena().empty(2**60, torch.int8)
