"""Attention in attention.cpp agrees with each request alone, with the same bits in any batch and cut."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from attention.cpu.attention import CpuAttention
from attention.cpu.compiled import attention_source, stored_dtype
from attention.reference import Attention
from continuous_batching.batch import Batch
from devices.cpp_sources import missing_for_sources
from kv_cache.device.storage import KVCache, LayerPages
from tests.attention.planned import planned
from tests.attention.test_attention import NOTHING, Bench, disturb, shape
from tests.attention.test_channel_scales import ChannelBench
from tests.thorough import first_quick

pytestmark = pytest.mark.skipif(missing_for_sources() is not None, reason=str(missing_for_sources()))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attention_of(**changes: object) -> CpuAttention:
    of = shape(**changes)
    source = attention_source(stored_dtype(of))
    assert isinstance(source, ctypes.CDLL), source
    made = CpuAttention(of, library=source)
    assert made.compiled is not None, "its vectors are whole"
    return made


def fill(attention: CpuAttention, cache: KVCache, generator: torch.Generator) -> None:
    """Write random keys and values to every place of all layers."""
    own, places = attention.shape, torch.arange(cache.num_pages[0] * cache.page_size)
    sizes = len(places), own.num_kv_heads, own.head_dim
    assert attention.compiled is not None
    for layer in range(len(cache.layers)):
        key, value = (torch.randn(sizes, generator=generator) for _ in range(2))
        if not own.int8_pages:
            key, value = key.to(own.dtype), value.to(own.dtype)
        attention.compiled.write(key, value, *cache.of(layer), places)


of_each_kind_of_pages = pytest.mark.parametrize(
    "changes",
    [{"dtype": torch.float32}, {"dtype": torch.bfloat16}, {"dtype": torch.float32, "int8_pages": True}],
    ids=["float32", "bfloat16", "int8"],
)


SCHEDULED: dict[str, dict[str, Any]] = {
    "windows": {"dtype": torch.float32, "page_size": 16, "windows": (None, 7, 40)},
    "one kv head": {
        "dtype": torch.bfloat16, "page_size": 128, "num_heads": 8, "num_kv_heads": 1, "head_dim": 128,
    },
    "int8": {"dtype": torch.float32, "page_size": 16, "windows": (None, 7, 40), "int8_pages": True},
    "float16": {
        "dtype": torch.float16, "page_size": 64, "num_heads": 3, "num_kv_heads": 3, "head_dim": 48,
    },
    "15 heads a kv head, cap": {
        "dtype": torch.float32, "page_size": 32, "num_heads": 30, "num_kv_heads": 2, "score_cap": 5.0,
    },
    "sinks": {"dtype": torch.float32, "page_size": 16, "has_sinks": True, "first_key": 1},
    "int8, bfloat16": {
        "dtype": torch.bfloat16, "page_size": 128, "num_heads": 30, "head_dim": 48, "int8_pages": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", first_quick(3, SCHEDULED))
def test_random_schedules(name: str) -> None:
    disturb(Bench(attention_of(**SCHEDULED[name]), seed=3), np.random.default_rng(3))


@pytest.mark.parametrize("seed", range(2))
def test_pages_of_int8_hold_multiples_of_a_checkpoints_scales(seed: int) -> None:
    sizes = {"page_size": (16, 128)[seed], "dtype": (torch.float32, torch.bfloat16)[seed]}
    disturb(ChannelBench(attention_of(**sizes, int8_pages=True), seed), np.random.default_rng(seed))


@of_each_kind_of_pages
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(changes: dict[str, Any]) -> None:
    """Rows of a few tokens, of several parts, and one that others share pages with."""
    attention = attention_of(page_size=16, windows=(None, 40), num_heads=6, **changes)
    dtype = attention.shape.dtype
    stops, generator = np.array([1, 17, 300, 1100, 640]), torch.Generator().manual_seed(1)
    table = 1 + np.arange(5 * 70, dtype=np.int32).reshape(5, 70)
    table[2, :10] = table[3, :10]
    cache = KVCache([LayerPages(attention.new_planes)] * 2, 16, [1 + table.size])
    fill(attention, cache, generator)
    query = torch.randn(5, 6, 64, generator=generator).to(dtype)

    def read(rows: list[int], layer: int, num_threads: int) -> torch.Tensor:
        torch.set_num_threads(num_threads)
        chosen = np.array(rows)
        batch = Batch(chosen, stops[chosen] - 1, stops[chosen], NOTHING, NOTHING, NOTHING)
        return attention.attend(query[rows], *cache.of(layer), planned(attention, batch, table), layer)

    for layer in (0, 1):
        alone = torch.cat([read([row], layer, 1) for row in range(5)])
        for rows in ([0, 1, 2, 3, 4], [4, 2, 0], [3, 1]):
            for num_threads in (1, 2, 5):
                assert torch.equal(read(rows, layer, num_threads), alone[rows])


def test_pages_of_part_vectors_are_read_by_torch() -> None:
    source = attention_source(torch.float32)
    assert isinstance(source, ctypes.CDLL), source
    made = CpuAttention(shape(page_size=8), library=source)
    assert made.compiled is None
    disturb(Bench(made), np.random.default_rng(0))


@pytest.mark.parametrize("changes", [{"page_size": 8}, {"head_dim": 40}, {}], ids=str)
def test_pages_of_int8_that_are_not_read_are_refused(changes: dict[str, Any]) -> None:
    source = attention_source(torch.int8)
    assert isinstance(source, ctypes.CDLL), source
    made = CpuAttention(shape(**changes, int8_pages=True), library=source if changes else None)
    with pytest.raises(ValueError, match=r"cache\.dtype: int8 pages .* set device\.attention to reference"):
        made.check()


def test_more_rows_than_are_read_at_a_time_have_the_bits_of_one() -> None:
    """All of them read the same pages, so that each has the same parts."""
    heads, rows, stop = 64, 400, 1500
    sizes = {"num_heads": heads, "num_kv_heads": 8, "head_dim": 128, "page_size": 128, "windows": (None,)}
    attention, generator = attention_of(**sizes), torch.Generator().manual_seed(2)
    table = np.tile(1 + np.arange(12, dtype=np.int32), (rows, 1))
    cache = KVCache([LayerPages(attention.new_planes)], 128, [13])
    fill(attention, cache, generator)
    query = torch.randn(1, heads, 128, generator=generator).expand(rows, -1, -1)

    def read(count: int) -> torch.Tensor:
        stops = np.full(count, stop)
        batch = Batch(np.arange(count), stops - 1, stops, NOTHING, NOTHING, NOTHING)
        return attention.attend(query[:count], *cache.of(0), planned(attention, batch, table), 0)

    one = read(1)
    assert torch.equal(read(rows), one.expand(rows, -1, -1))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32, "windows": (None, 40)},
        {
            "dtype": torch.bfloat16,
            "windows": (None, 600),
            "num_heads": 8,
            "num_kv_heads": 2,
            "has_sinks": True,
        },
        {"dtype": torch.float32, "num_heads": 6, "num_kv_heads": 2, "score_cap": 5.0, "first_key": 1},
        {"dtype": torch.float32, "windows": (None, 600), "int8_pages": True},
        {"dtype": torch.bfloat16, "windows": (40, 600), "num_kv_heads": 1, "head_dim": 128, "first_key": 1},
        {"dtype": torch.bfloat16, "windows": (None, 40), "page_size": 128, "head_dim": 96, "score_cap": 5.0},
        {"dtype": torch.bfloat16, "windows": (None, 40), "head_dim": 48},  # no multiple of AMX's 32 channels
    ],
    ids=["windows", "sinks", "cap", "int8", "bfloat16", "bfloat16, cap", "bfloat16 in pairs"],
)
def test_a_query_has_the_same_bits_however_its_prompt_is_cut(changes: dict[str, Any]) -> None:
    """In whole, in chunks, token by token, and beside another prompt; over borders of blocks and of parts."""
    attention, stop = attention_of(**{"page_size": 16} | changes), 1100
    own, generator = attention.shape, torch.Generator().manual_seed(4)
    table = 1 + np.arange(2 * 70, dtype=np.int32).reshape(2, 70)
    cache = KVCache([LayerPages(attention.new_planes)] * len(own.windows), own.page_size, [1 + table.size])
    fill(attention, cache, generator)
    query = torch.randn(stop, own.num_heads, own.head_dim, generator=generator).to(own.dtype)

    def read(spans: list[tuple[int, int, int]], layer: int, num_threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(num_threads)
        rows, starts, stops = np.array(spans).T.copy()
        batch = Batch(rows, starts, stops, NOTHING, NOTHING, NOTHING)
        packed = torch.cat([query[first:last] for _, first, last in spans])
        output = attention.attend(packed, *cache.of(layer), planned(attention, batch, table), layer)
        return list(output.split((stops - starts).tolist()))

    if own.has_sinks:
        attention.sinks |= {layer: torch.randn(own.num_heads, generator=generator) for layer in (0, 1)}
    for layer in range(len(own.windows)):
        whole = read([(1, 0, stop)], layer, 1)[0]
        cuts = [0, 5, 64, 511, 513, 700, 1099, stop]
        for first, last in itertools.pairwise(cuts):
            beside = [(0, 3, 90), (1, first, last)] if first else [(1, first, last), (0, 77, 80)]
            assert torch.equal(read(beside, layer, 2)[beside.index((1, first, last))], whole[first:last])
        for at in (0, 63, 511, 512, 1024, 1099):
            assert torch.equal(read([(1, at, at + 1)], layer, 1)[0], whole[at : at + 1])


@of_each_kind_of_pages
def test_what_no_query_of_a_span_sees_may_be_anything(changes: dict[str, Any]) -> None:
    """Before the window and behind the last token, even in the pair or the vector of one that is seen."""
    attention = attention_of(page_size=16, windows=(None, 7), num_heads=6, **changes)
    own, places, generator = attention.shape, torch.arange(16 * 5), torch.Generator().manual_seed(6)
    table = np.arange(1, 5, dtype=np.int32)[None]
    cache = KVCache([LayerPages(attention.new_planes)] * 2, 16, [5])
    query = torch.randn(64, own.num_heads, own.head_dim, generator=generator).to(own.dtype)
    parts = torch.randn(2, len(places), own.num_kv_heads, own.head_dim, generator=generator)
    stored = torch.float32 if own.int8_pages else own.dtype

    def read(start: int, stop: int, layer: int, others: float) -> torch.Tensor:
        window = own.windows[layer] or stop
        position = places - 16
        is_seen = (position < stop) & (position > start - window)
        key, value = torch.where(is_seen[:, None, None], parts, others).to(stored)
        assert attention.compiled is not None
        attention.compiled.write(key, value, *cache.of(layer), places)
        batch = Batch(np.zeros(1, int), np.array([start]), np.array([stop]), NOTHING, NOTHING, NOTHING)
        return attention.attend(query[start:stop], *cache.of(layer), planned(attention, batch, table), layer)

    for layer, stop in itertools.product((0, 1), (33, 34, 51)):
        for start in (stop - 1, stop - 20, stop - 33):
            seen = read(start, stop, layer, 0.0)
            assert seen.isfinite().all()
            assert torch.equal(read(start, stop, layer, torch.nan), seen)


@pytest.mark.parametrize("broken_parts", [(0, 1, 2), (1,), (0,)], ids=["all", "keys", "queries"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"int8_pages": True}, {"dtype": torch.bfloat16, "has_sinks": True}],
    ids=["float32", "int8", "bfloat16, sinks"],
)
def test_a_broken_request_breaks_no_other(changes: dict[str, Any], broken_parts: tuple[int, ...]) -> None:
    """What it computes is NaN, in pages beside those of the other."""
    attention = attention_of(page_size=16, windows=(None,), **changes)
    if attention.shape.has_sinks:
        attention.sinks[0] = torch.zeros(4)
    table, generator = 1 + np.arange(2 * 4, dtype=np.int32).reshape(2, 4), torch.Generator().manual_seed(5)
    batch = Batch(np.arange(2), np.zeros(2, np.int64), np.array([40, 40]), NOTHING, NOTHING, NOTHING)
    dtype = attention.shape.dtype
    parts = [torch.randn(80, heads, 64, generator=generator).to(dtype) for heads in (4, 2, 2)]

    def read() -> torch.Tensor:
        cache = KVCache([LayerPages(attention.new_planes)], 16, [9])
        metadata = planned(attention, batch, table)
        attention.write(*parts[1:], *cache.of(0), metadata)
        return attention.attend(parts[0], *cache.of(0), metadata, 0)

    healthy = read()
    for number in broken_parts:
        parts[number][40:] = torch.nan
    broken = read()
    assert torch.equal(broken[:40], healthy[:40])
    assert broken[40:].isnan().all()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_rows_that_pad_a_step_are_zeros(is_compiled: bool) -> None:
    """What a kernel of oneDNN makes of a row may depend on whether the next one is finite."""
    compiled = attention_of(page_size=16, dtype=torch.bfloat16)
    attention = compiled if is_compiled else Attention(compiled.shape)
    own, table = attention.shape, np.array([[1, 2], [3, 4]], np.int32)
    cache = KVCache([LayerPages(attention.new_planes)] * len(own.windows), 16, [5])
    for tensor in cache.tensors:
        tensor.zero_()
    batch = Batch(np.array([0, 1]), np.array([20, 4]), np.array([21, 30]), NOTHING, NOTHING, NOTHING)
    query = torch.ones(1 + 26 + 5, own.num_heads, own.head_dim, dtype=own.dtype)
    torch.use_deterministic_algorithms(True)  # which fills new tensors with NaN
    try:
        output = attention.attend(query, *cache.of(0), planned(attention, batch, table), 0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not output[27:].any()
    assert output.isfinite().all()
