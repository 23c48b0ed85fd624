"""Keys and values in int8 by scales of channels: what the definition and an NPU's operators compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.reference import Attention
from continuous_batching.batch import Batch
from tests.attention.planned import eager, planned, replayed
from tests.attention.test_attention import NOTHING, WIDE, Bench, Pair, disturb, shape
from tests.device_kinds import on_each, operators, stand_in_alone
from tests.each_of import each_of
from tests.thorough import cases

PAIRS = [
    each
    for each in on_each("reference", "fused")
    if each.values[0] in (("cpu", "reference"), ("npu", "fused"))
]
DTYPES = [torch.float32, torch.bfloat16]
CHANNELS = {"page_size": 32, "windows": (None,), "int8_pages": True}


class ChannelBench(Bench):
    """A bench whose layers have scales that bfloat16 holds as well."""

    def __init__(self, attention: Attention, seed: int = 0) -> None:
        super().__init__(attention, seed)
        heads = self.shape.num_kv_heads, self.shape.head_dim
        drawn = torch.from_numpy(0.02 + 0.04 * self.rng.random((2, *heads)))
        self.drawn = drawn.bfloat16().float()
        self.scales = attention.pack_scales(*(each.flatten().to(self.device) for each in self.drawn))

    def kept(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (
            (each.float() / scale).round().clamp(-128, 127) * scale
            for each, scale in zip((key, value), self.drawn)
        )
        return keys, values

    def computed(self, sent: list[Tensor], keys: Tensor, values: Tensor, metadata: Any, layer: int) -> Tensor:
        query, key, value = sent
        self.attention.write_by_channel(key, value, self.scales, keys, values, metadata)
        return self.attention.attend_by_channel(query, self.scales, keys, values, metadata, layer)

    def _places(self, layer: int) -> tuple[Tensor, ...]:
        return tuple(units * scale for units, scale in zip(super()._places(layer), self.drawn))


@pytest.mark.parametrize("pair", PAIRS)
@each_of("seed, dtype", cases([*zip(range(4), DTYPES * 2)], [*itertools.product(range(4), DTYPES)]))
def test_random_schedules(pair: Pair, dtype: torch.dtype, seed: int) -> None:
    """Of single queries, of short spans and of long ones, in one step and in steps of their own."""
    rng = np.random.default_rng(seed)
    heads = ((4, 2), (3, 3), (8, 1), (4, 2))[seed]
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": (64, 128)[seed % 2]}
    changes = {"page_size": int(rng.choice([32, 128])), "windows": (None, None), "int8_pages": True}
    disturb(ChannelBench(operators(*pair, shape(dtype=dtype, **sizes, **changes))[1], seed), rng)


@pytest.mark.npu
def test_long_spans_are_gathered_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention.npu import fused_attention

    monkeypatch.setattr(fused_attention, "MOST_GATHERED", 100)
    attention = operators("npu", "fused", shape(**CHANNELS))[1]
    bench, planned = ChannelBench(attention), []
    plan = attention.plan
    monkeypatch.setattr(attention, "plan", lambda *asked: planned.append(plan(*asked)) or planned[-1])
    bench.step({0: 60, 1: 40, 2: 17, 3: 1, 4: 120, 5: 16})
    assert [each.kv_ends for each in planned[-1].long] == [[60, 100], [17], [120]]
    assert planned[-1].singles.kv_lens == list(range(1, 2)) + list(range(1, 17))


@pytest.mark.npu
@stand_in_alone
@each_of("kind, changes", [(ChannelBench, CHANNELS), (Bench, WIDE)])
@each_of("width", [1, 3])
def test_a_captured_row_of_drafts_sees_what_it_sees_in_an_eager_step(
    width: int, kind: type[Bench], changes: dict[str, Any]
) -> None:
    """Each token of a row all keys up to its own, which a replay is told on the host; so of heads of 256."""
    attention = operators("npu", "fused", shape(**changes))[1]
    bench, lens = kind(attention), {4: 37, 1: 70}
    bench.step(lens)
    query, pages = torch.randn(len(lens) * width, 4, bench.shape.head_dim, device="npu:0"), bench.cache.of(0)

    def attend(metadata: Any) -> Tensor:
        if isinstance(bench, ChannelBench):
            return attention.attend_by_channel(query, bench.scales, *pages, metadata, 0)
        return attention.attend(query, *pages, metadata, 0)

    rows, stops = np.array(list(lens)), np.array(list(lens.values()))
    batch = Batch(rows, stops - width, stops, NOTHING, NOTHING, NOTHING)
    expected, found = (way(attention, batch, bench.page_table, attend) for way in (eager, replayed))
    torch.testing.assert_close(found.cpu(), expected.cpu())


@pytest.mark.npu
@stand_in_alone
@pytest.mark.parametrize("way", [eager, replayed])
def test_sums_are_those_of_what_is_kept(way: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """The logarithm of the sum of exponents of each query's scores, in double precision."""
    attention = operators("npu", "fused", shape(**CHANNELS))[1]
    bench, lens = ChannelBench(attention), {4: 37, 1: 70}
    bench.step(lens)
    query = torch.randn(len(lens), 4, 64)
    rows, stops = np.array(list(lens)), np.array(list(lens.values()))
    batch = Batch(rows, stops - 1, stops, NOTHING, NOTHING, NOTHING)
    asked = query.to("npu:0"), bench.scales, *bench.cache.of(0)
    output, sums = way(
        attention,
        batch,
        bench.page_table,
        lambda metadata: attention.attend_with_sums_by_channel(*asked, metadata, 0),
    )
    plain = attention.attend_by_channel(*asked, planned(attention, batch, bench.page_table), 0)
    torch.testing.assert_close(output.cpu(), plain.cpu())
    for row, found, heads in zip(rows.tolist(), sums.cpu().double(), query.double()):
        keys = bench.told[row].keys[0].double().repeat_interleave(2, 1)
        scores = torch.einsum("hd,lhd->hl", heads, keys) * attention.shape.scale
        torch.testing.assert_close(found, scores.logsumexp(1), rtol=1e-5, atol=1e-5)


@pytest.mark.npu
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"windows": (None, 7)},
            "has a sliding window of 7, and cache.dtype is int8; attention of the",
        ),
        (
            {"has_sinks": True},
            "has attention sinks, and cache.dtype is int8; .* set cache.dtype to auto",
        ),
        (
            {"dtype": torch.float16},
            "dtype is float16, and cache.dtype is int8; .* only for queries in bf",
        ),
        ({"page_size": 48}, "cache.page_size is 48, and cache.dtype is int8; .* a multiple of 32 to 512"),
        ({"page_size": 1024}, "cache.page_size is 1024, and cache.dtype is int8; .* set 128"),
    ],
)
def test_what_fused_attention_does_not_read_in_int8_is_refused(changes: dict[str, Any], words: str) -> None:
    plain = {"page_size": 32, "windows": (None, None), "int8_pages": True}
    with pytest.raises(ValueError, match=words):
        operators("npu", "fused", shape(**plain | changes))[1].check()
