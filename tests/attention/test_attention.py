"""Every implementation of attention computes for each request what that request alone would compute.

Each implementation is built as a recipe would get it, on each device that is present. Requests grow span by
span over shuffled pages. Every place that no request has written holds NaN, and so do the places of requests
that have left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.int8_pages import packed, unpacked
from attention.reference import QUERY_ROWS, Attention
from continuous_batching.batch import Batch
from devices.shapes import AttentionShape
from kv_cache.device.storage import KVCache, LayerPages
from tests.attention.planned import planned
from tests.device_kinds import Kind, Way, on_each, operators
from tests.each_of import each_of
from tests.thorough import cases, first_quick

Pair = tuple[Kind, Way]

NOTHING = np.empty(0, np.int64)
ROWS, MOST_TOKENS = 6, 320


def shape(**changes: object) -> AttentionShape:
    plain = AttentionShape(
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        scale=0.125,
        dtype=torch.float32,
        windows=(None, 1, 7, 40),
    )
    return replace(plain, **changes)


@dataclass
class Told:
    """What one request has been given so far: [length, K, D] a layer."""

    pages: list[int] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    length: int = 0


class Bench:
    """A cache, a page table and requests in its rows; `step` runs spans and holds them to the oracle."""

    def __init__(self, attention: Attention, seed: int = 0) -> None:
        shape = attention.shape
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.attention, self.device = attention, attention.device
        self.attention.check()
        self.layers = range(len(shape.windows))
        drawn = torch.randn(len(self.layers), shape.num_heads, generator=torch.Generator().manual_seed(seed))
        for layer, sinks in enumerate(drawn if shape.has_sinks else ()):
            attention.sinks[layer] = (2 * sinks).bfloat16().to(self.device)  # stored ones are bfloat16
        max_pages = -(-MOST_TOKENS // shape.page_size)
        num_pages = 1 + ROWS * max_pages
        layers = [LayerPages(attention.new_planes)] * len(self.layers)
        self.cache = KVCache(layers, shape.page_size, [num_pages], indexed=attention.indexed)
        for tensor in self.cache.tensors:
            spoil(tensor[1:])
        self.free = [int(page) for page in 1 + self.rng.permutation(num_pages - 1)]
        self.page_table = np.zeros((ROWS, max_pages), np.int32)
        self.told = [Told() for _ in range(ROWS)]

    def leave(self, row: int) -> None:
        """The request of a row goes; what it wrote turns to NaN, its stale page numbers stay."""
        for tensor in self.cache.tensors:
            for page in self.told[row].pages:
                spoil(tensor[page])
        self.free += self.told[row].pages
        self.rng.shuffle(self.free)
        self.told[row] = Told()

    def step(self, spans: dict[int, int]) -> None:
        """Compute so many further tokens of each row, in the order given."""
        starts = np.array([self.told[row].length for row in spans], np.int64)
        stops = starts + np.array(list(spans.values()), np.int64)
        for row, stop in zip(spans, stops.tolist()):
            pages = self.told[row].pages
            while len(pages) * self.shape.page_size < stop:
                self.page_table[row, len(pages)] = self.free[-1]
                pages.append(self.free.pop())
        batch = Batch(np.array(list(spans), np.int64), starts, stops, NOTHING, NOTHING, NOTHING)
        metadata = planned(self.attention, batch, self.page_table)
        for layer in self.layers:
            self._step_layer(layer, spans, metadata)
        for row, stop in zip(spans, stops.tolist()):
            self.told[row].length = stop

    def _step_layer(self, layer: int, spans: dict[int, int], metadata: object) -> None:
        total, dim = sum(spans.values()), self.shape.head_dim
        query, key, value = (
            torch.from_numpy(self.rng.standard_normal((total, heads, dim))).to(self.shape.dtype)
            for heads in (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        )
        keys, values = self.cache.of(layer)
        ends = np.cumsum(list(spans.values()))
        begins = [end - count for end, (row, count) in zip(ends, spans.items()) if not self.told[row].length]
        if self.shape.first_key:
            key[begins], value[begins] = 0, 0
        kept_key, kept_value = self.kept(key, value)
        before, size = self._places(layer), self.shape.page_size
        sent = [tensor.to(self.device) for tensor in (query, key, value)]
        output = self.computed(sent, keys, values, metadata, layer).cpu()
        now = self._places(layer)
        assert output.shape == query.shape
        assert output.dtype == query.dtype
        at = 0
        for row, count in spans.items():
            told, new = self.told[row], slice(at, at + count)
            if len(told.keys) <= layer:
                told.keys.append(kept_key[:0])
                told.values.append(kept_value[:0])
            told.keys[layer] = torch.cat((told.keys[layer], kept_key[new]))
            told.values[layer] = torch.cat((told.values[layer], kept_value[new]))
            sinks = self.attention.sinks.get(layer)
            expected = alone(query[new], told.keys[layer], told.values[layer], self.shape, layer, sinks)
            is_seen = np.arange(told.length, told.length + count) >= self.shape.first_key
            near = 2e-5 if self.shape.dtype == torch.float32 else 2e-2
            found = output[new].double()
            torch.testing.assert_close(found[is_seen], expected[is_seen], rtol=near, atol=near)
            addresses = self._addresses(row, told.length, told.length + count)
            for place, tensor, part in zip(now, before, (kept_key[new], kept_value[new])):
                assert torch.equal(place[addresses], part)
                tensor[addresses] = part
            at += count
        for place, tensor in zip(now, before):
            assert torch.equal(place[size:].nan_to_num(7.0), tensor[size:].nan_to_num(7.0)), "wrote elsewhere"

    def kept(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers that the cache keeps of these."""
        if not self.shape.int8_pages:
            return key, value
        # On the device, since a GPU divides by a number as it multiplies by its inverse, one bit apart
        kept_key, kept_value = (unpacked(packed(each.to(self.device))).cpu() for each in (key, value))
        return kept_key, kept_value

    def computed(self, sent: list[Tensor], keys: Tensor, values: Tensor, metadata: Any, layer: int) -> Tensor:
        """What queries attend to, once keys and values have been written."""
        self.attention.write(*sent[1:], keys, values, metadata)
        return self.attention.attend(sent[0], keys, values, metadata, layer)

    def _places(self, layer: int) -> tuple[Tensor, ...]:
        """Keys and values of all places of the cache, in order."""
        index = torch.arange(self.cache.num_pages[0] * self.shape.page_size, device=self.device)
        found = self.attention.read(*self.cache.of(layer), index)
        return tuple(each.cpu() for each in found)

    def _addresses(self, row: int, start: int, stop: int) -> Tensor:
        size, pages = self.shape.page_size, self.told[row].pages
        return torch.tensor([pages[at // size] * size + at % size for at in range(start, stop)])


def bench_of(pair: Pair, shape: AttentionShape, seed: int = 0) -> Bench:
    if pair == ("npu", "fused") and (shape.head_dim not in (64, 128) or shape.page_size % 16):
        pytest.skip("beyond a limit of the operator, which tests of `check` hold it to")
    return Bench(operators(*pair, shape)[1], seed)


def spoil(pages: Tensor) -> None:
    """Fill pages with NaN; in int8 the four bytes of a scale that are all -1 are one."""
    pages.fill_(torch.nan if pages.is_floating_point() else -1)


def alone(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    shape: AttentionShape,
    layer: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """The last len(query) positions of a request, in float64; what one does not see weighs nothing."""
    group, window = shape.num_heads // shape.num_kv_heads, shape.windows[layer] or len(keys)
    keys, values = (tensor.double().repeat_interleave(group, 1) for tensor in (keys, values))
    at, place = torch.arange(len(keys) - len(query), len(keys))[:, None], torch.arange(len(keys))
    seen = (place <= at) & (place > at - window) & ((place >= shape.first_key) | (place == at))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * shape.scale
    if shape.score_cap is not None:
        scores = shape.score_cap * torch.tanh(scores / shape.score_cap)
    weights = scores.exp().masked_fill(~seen, 0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += sinks.cpu().double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, values)


# In plain torch on an NPU the same lines run as on a CPU: once is enough
PAIRS = [each for each in on_each("reference", "fused") if each.values[0] != ("npu", "reference")]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return request.param


@pytest.mark.parametrize("pair", on_each("reference", "fused"))
@pytest.mark.parametrize("page_size", first_quick(1, [16, 1, 128]))
def test_mixed_spans_decodes_and_leavers(pair: Pair, page_size: int) -> None:
    bench = bench_of(pair, shape(page_size=page_size), seed=page_size)
    bench.step({2: 5})
    bench.step({0: 33, 2: 1, 4: 1})
    bench.step({4: 1, 0: 1, 2: 1})
    bench.leave(0)
    bench.step({1: 130, 4: 20, 0: 3, 2: 1})
    bench.step({5: 1, 1: 1, 0: 14, 4: 2})
    bench.leave(1)
    bench.leave(4)
    bench.step(dict.fromkeys((0, 1, 2, 4, 5), 1))
    for _ in range(3):
        bench.step(dict.fromkeys((5, 4, 2, 1, 0), 1))


@pytest.mark.parametrize("page_size", [16, 128])
def test_a_span_longer_than_a_query_block(pair: Pair, page_size: int) -> None:
    windows = (None, QUERY_ROWS - 1, 40)
    bench = bench_of(pair, shape(page_size=page_size, num_heads=2, num_kv_heads=1, windows=windows))
    bench.step({3: 9, 1: 1})
    bench.step({1: QUERY_ROWS + 30, 3: 1})
    bench.step({3: QUERY_ROWS, 1: 1})


@pytest.mark.parametrize("head_dim", [8, 128])
@each_of("heads", [(4, 4), (6, 2), (8, 1), (1, 1)])
def test_grouped_heads(pair: Pair, heads: tuple[int, int], head_dim: int) -> None:
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    bench = bench_of(pair, shape(**sizes, scale=1 / math.sqrt(head_dim), windows=(None, 9)))
    bench.step({0: 21, 3: 2})
    bench.step({3: 1, 0: 1, 1: 18})
    bench.step({3: 1, 0: 1, 1: 1})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(pair: Pair, dtype: torch.dtype) -> None:
    bench = bench_of(pair, shape(dtype=dtype, windows=(None, 7)))
    bench.step({0: 40, 3: 2, 1: 1})
    bench.step({3: 1, 0: 1, 1: 18})
    bench.step({3: 1, 0: 1, 1: 1})


@each_of("seed", range(cases(3, 12)))
def test_random_schedules(pair: Pair, seed: int) -> None:
    sizes = [16, 32, 48, 128] if pair == ("npu", "fused") else [1, 8, 16, 32]
    run_random_schedule(pair, seed, sizes, windows=(None, 13))


WIDE = {"head_dim": 256, "windows": (None, None), "page_size": 128}


@pytest.mark.npu
@each_of("seed, heads", enumerate([(4, 2), (3, 3), (8, 1)]))
def test_random_schedules_over_heads_of_256(seed: int, heads: tuple[int, int]) -> None:
    """Fused attention reads them as single queries, and a longer span in a call of its own."""
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1]}
    disturb(Bench(operators("npu", "fused", shape(**sizes, **WIDE))[1], seed), np.random.default_rng(seed))


@each_of("seed, dtype", [(0, torch.float32), (1, torch.bfloat16), (2, torch.float32)])
@pytest.mark.parametrize("pair", [each for each in on_each("reference") if each.values[0][0] != "npu"])
def test_random_schedules_over_pages_of_int8(pair: Pair, dtype: torch.dtype, seed: int) -> None:
    head_dim = (8, 10, 64)[seed]  # 10 would place scales where no float32 may lie
    run_random_schedule(pair, seed, [1, 8, 16], dtype=dtype, head_dim=head_dim, int8_pages=True)


@each_of("seed, dtype", enumerate([torch.float32, torch.bfloat16] * cases(1, 4)))
def test_no_query_sees_what_lies_before_the_first_key(pair: Pair, dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([16, 32] if pair == ("npu", "fused") else [1, 8, 16, 32]))
    bench = bench_of(pair, shape(page_size=page_size, windows=(None,), first_key=1, dtype=dtype), seed)
    bench.step(dict.fromkeys(range(ROWS), 1))  # no query stands there
    bench.step({1: 2, 4: 1, 2: 70, 0: 5})
    for _ in range(4):
        rows = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)].tolist()
        bench.step({row: int(rng.choice([1, 1, rng.integers(2, 60)])) for row in rows})


def run_random_schedule(pair: Pair, seed: int, page_sizes: list[int], **changes: object) -> None:
    rng = np.random.default_rng(seed)
    disturb(bench_of(pair, shape(page_size=int(rng.choice(page_sizes)), **changes), seed), rng)


def disturb(bench: Bench, rng: np.random.Generator) -> None:
    """Let requests come, grow by spans of any length, and leave."""
    for _ in range(6):
        for row in range(ROWS):
            if bench.told[row].length and (rng.random() < 0.1 or bench.told[row].length > MOST_TOKENS - 60):
                bench.leave(row)
        rows = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)].tolist()
        bench.step({row: int(rng.choice([1, 1, 1, rng.integers(2, 60)])) for row in rows})


OWN_SCORES = [{"has_sinks": True}, {"score_cap": 0.5}, {"has_sinks": True, "score_cap": 1.5}]


@pytest.mark.parametrize(
    ("own", "dtype"),
    [*((each, torch.float32) for each in OWN_SCORES), (OWN_SCORES[-1], torch.bfloat16)],
    ids=str,
)
def test_sinks_and_caps_of_scores(pair: Pair, dtype: torch.dtype, own: dict[str, object]) -> None:
    if pair == ("npu", "fused") and "score_cap" in own:
        with pytest.raises(ValueError, match=r"has no cap of scores: .* set device.attention to reference"):
            bench_of(pair, shape(**own))
        return
    bench = bench_of(pair, shape(**own, dtype=dtype, windows=(None, 7, 40)))
    bench.step({2: 5, 0: 1})
    bench.step({0: 33, 2: 1, 4: 130})
    bench.step({4: 1, 0: 1, 2: 3})
    bench.step({1: QUERY_ROWS + 30, 4: 1})
    bench.step(dict.fromkeys((4, 2, 1), 1))


def test_all_rows_decode_with_unequal_lengths(pair: Pair) -> None:
    bench = bench_of(pair, shape(windows=(None, 33)))
    bench.step({0: 15, 1: 16, 2: 17, 3: 64, 4: 1, 5: 190})
    for _ in range(3):
        bench.step(dict.fromkeys(range(ROWS), 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 5}, "num_attention_heads is 5 .* multiple"),
        ({"page_size": 0}, "cache.page_size is 0; it must be at least 1"),
        ({"windows": (None, 0)}, "window of layer 1 is 0; it must be at least 1"),
    ],
)
def test_a_shape_that_cannot_be_served_is_refused(pair: Pair, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        operators(*pair, shape(**changes))[1].check()
