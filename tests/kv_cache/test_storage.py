"""The cache's tensors hold what they should, and nothing else."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kv_cache.device import storage
from kv_cache.device.storage import KVCache, LayerPages
from kv_cache.pages import Index, PageCopy
from tests.each_of import each_of
from tests.kv_cache.caches import plain_cache, plain_pages

Way = Callable[[Tensor, Index, Tensor, Index], None]


def test_page_bytes_are_what_is_allocated() -> None:
    cache = plain_cache(3, 7, (16, 2, 8), torch.bfloat16)
    allocated = sum(tensor.nbytes for tensor in cache.tensors)
    assert allocated == 7 * sum(cache.layer_bytes) == 7 * 3 * 2 * 16 * 2 * 8 * 2
    assert not any(tensor.any() for tensor in cache.tensors)


def test_a_cpu_is_given_the_memory_of_zeros_as_they_are_written() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    made = storage.zeros((2**20, 512), torch.bfloat16, torch.device("cpu"))
    assert resident_bytes() - before < 2**28
    made[5] = 1
    assert made.nbytes == 2**30
    assert float(made[:10].float().sum()) == 512
    with pytest.raises(RuntimeError, match="cannot be mapped"):
        storage.zeros((2**60,), torch.int8, torch.device("cpu"))


def numbered(num_pages: int, num_host_pages: int = 0, head_dim: int = 2) -> KVCache:
    """A cache each of whose pages holds its number."""
    cache = plain_cache(2, num_pages, (4, 1, head_dim), torch.float32, num_host_pages)
    for tensor in cache.tensors:
        tensor[:] = torch.arange(float(num_pages))[:, None, None, None]
    return cache


def held(cache: KVCache) -> list[float]:
    """The number that each page holds, the same in all tensors and places."""
    for tensor in cache.tensors:
        assert torch.equal(tensor, cache.of(0)[0][:, :1, :1, :1].expand_as(tensor))
    return cache.of(0)[0][:, 0, 0, 0].tolist()


def test_each_group_of_layers_has_pages_of_its_own() -> None:
    """Copies and swaps reach all planes of the layers of their group, and a resize has a number for each."""
    layers = [plain_pages((4, 1, 2), torch.float32, group=group) for group in (1, 0, 1)]
    layers.append(plain_pages((2, 1, 3), torch.float32, num_planes=1))
    cache = KVCache(layers, 4, [9, 4], [5, 3])
    assert [len(each) for each in cache.tensors] == [4, 4, 9, 9, 4, 4, 9]
    assert [[len(each) for each in cache.of_group(group)[1]] for group in (0, 1)] == [[5] * 3, [3] * 4]
    for tensor in cache.tensors:
        tensor[:] = torch.arange(float(len(tensor)))[:, None, None, None]

    def held() -> list[list[float]]:
        pages = [[each[:, 0, 0, 0].tolist() for each in planes] for planes in cache.planes]
        assert all(each[0] == each[-1] for each in pages)
        assert pages[3][0] == pages[1][0], "layers of one group"
        return [each[0] for each in pages[:3]]

    sources, targets = np.array([3]), np.array([1])
    cache.apply([PageCopy(sources, targets, group=1)])
    assert held() == [[0, 3, 2, 3], [*range(9)], [0, 3, 2, 3]]
    cache.apply([PageCopy(np.array([2]), np.array([2]), "to_host", group=1)])
    cache.apply([PageCopy(np.array([8]), np.array([4]), "to_host")])
    cache.apply([PageCopy(np.array([2]), np.array([3]), "from_host", group=1)])
    cache.apply([PageCopy(np.array([4]), np.array([5]), "from_host")])
    assert held() == [[0, 3, 2, 2], [0, 1, 2, 3, 4, 8, 6, 7, 8], [0, 3, 2, 2]]
    cache.resize([6, 5])
    assert held() == [[0, 3, 2, 2, 0], [0, 1, 2, 3, 4, 8], [0, 3, 2, 2, 0]]


@pytest.fixture(params=[1, 3, 1000], ids="{} pages a chunk".format)
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "CHUNK_BYTES", request.param * 4 * 2 * 4)


COPIES = {
    "run to run, apart": ([5, 6, 7], [1, 2, 3]),
    "run to run, one in the midst of the other": ([3, 4], [5, 6]),
    "a run of sources": ([5, 6, 7, 8], [1, 4, 2, 3]),
    "a run of targets": ([9, 5, 7, 6], [1, 2, 3, 4]),
    "no run": ([9, 5, 8], [4, 1, 2]),
    "mixed": ([9, 1, 8, 3], [2, 4, 5, 7]),
    "a run of sources among targets": ([4, 5], [3, 6]),
    "a run of targets among sources": ([3, 6], [4, 5]),
    "one page to several": ([5, 5, 2], [1, 3, 4]),
    "one page": ([7], [2]),
    "none": ([], []),
}


@pytest.mark.usefixtures("_chunks")
@each_of("head_dim", [2, 3, 4])  # pages of a whole number of wide elements, and not
@each_of("case", COPIES)
def test_copies_take_every_page_to_its_target_and_touch_no_other(case: str, head_dim: int) -> None:
    cache, want = numbered(10, head_dim=head_dim), np.arange(10)
    sources, targets = (np.array(pages, dtype=np.int64) for pages in COPIES[case])
    want[targets] = sources
    cache.copy(sources, targets)
    assert held(cache) == want.tolist()


def test_copies_keep_every_bit() -> None:
    cache = plain_cache(1, 40, (16, 2, 8), torch.bfloat16, 12)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, cache.of(0)[0].shape, generator=generator, dtype=torch.int16)
    cache.of(0)[0].copy_(bits.view(torch.bfloat16))  # NaN of every kind among them
    sources, targets = np.array([33, 37, 39, 35]), np.array([2, 9, 4, 7])
    cache.copy(sources, targets)
    cache.apply([PageCopy(targets, np.array([5, 3, 9, 8]), "to_host")])
    cache.apply([PageCopy(np.array([5, 3, 9, 8]), np.array([20, 12, 13, 11]), "from_host")])
    for back in (targets, np.array([20, 12, 13, 11])):
        assert torch.equal(cache.of(0)[0].view(torch.int16)[back], bits[sources])


def test_a_run_is_copied_without_sending_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = plain_cache(1, 8, (16, 2, 8), torch.bfloat16)
    monkeypatch.delattr(storage, "to_device")
    cache.copy(np.array([1, 2]), np.array([5, 6]))


def test_resize_keeps_the_low_pages_and_gives_the_rest_back() -> None:
    cache = numbered(6)
    cache.resize([3])
    assert held(cache) == [0, 1, 2]
    assert sum(tensor.untyped_storage().nbytes() for tensor in cache.tensors) == 2 * 2 * 3 * 4 * 2 * 4
    cache.resize([5])
    assert held(cache) == [0, 1, 2, 0, 0]


def test_no_old_tensor_is_held_when_a_resize_releases_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = numbered(6)
    old = [weakref.ref(tensor) for tensor in cache.tensors]
    held_then: list[bool] = []
    monkeypatch.setattr(
        storage, "_release_memory", lambda device: held_then.extend(each() is not None for each in old)
    )
    cache.resize([3])
    assert held_then == [False] * 4


@each_of("head_dim", [8, 3])
@each_of("indexed", [True, False])
def test_the_bytes_of_a_layer_come_to_the_same_in_other_pages(head_dim: int, indexed: bool) -> None:
    source, target = (plain_cache(2, 9, (5, 1, head_dim), torch.bfloat16, indexed=indexed) for _ in range(2))
    for tensor in source.tensors:
        tensor.normal_()
    assert (
        source.layout == target.layout == [f"bfloat16 [5, 1, {head_dim}] and bfloat16 [5, 1, {head_dim}]"] * 2
    )
    read, written = np.array([7, 1, 2, 3]), np.array([4, 8, 2, 5])
    data = source.read_layer(1, read)()
    assert len(data) == 4 * source.layer_bytes[1] == 4 * 2 * 5 * head_dim * 2
    target.write_layer(1, written, data)
    kept = data.copy()
    data[:] = 0  # what was written does not change with it
    assert not any(ours.any() for ours in target.of(0))
    for ours, theirs in zip(target.of(1), source.of(1)):
        assert torch.equal(ours[written], theirs[read])
        assert not ours[np.setdiff1d(np.arange(9), written)].any()
    assert np.array_equal(target.read_layer(1, written)(), kept)
    with pytest.raises(AssertionError, match="are not those of 3 pages"):
        target.write_layer(1, written[:3], kept)


def test_planes_of_unlike_types_and_a_layer_of_one() -> None:
    def narrow(count: int) -> Tensor:
        return torch.arange(count * 3, dtype=torch.int8).reshape(count, 3).clone()

    def wide(count: int) -> Tensor:
        return torch.arange(count * 16, dtype=torch.float32).reshape(count, 16).clone()

    for planes in ((narrow, wide), (narrow,)):
        layers = [LayerPages(lambda count, planes=planes: tuple(make(count) for make in planes))]
        source, target = (KVCache(layers, 4, [5]) for _ in range(2))
        for tensor in target.tensors:
            tensor.zero_()
        assert source.layer_bytes == [3 + 64 if wide in planes else 3]
        target.write_layer(0, np.array([4, 1]), source.read_layer(0, np.array([1, 4]))())
        for ours, theirs in zip(target.tensors, source.tensors):
            assert torch.equal(ours[[4, 1]], theirs[[1, 4]])
