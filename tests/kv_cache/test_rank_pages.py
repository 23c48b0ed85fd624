"""The leader of several ranks reads and writes whole pages, whatever part of them each rank holds."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from attention.cpu.attention import CpuAttention
from attention.cpu.compiled import attention_source, stored_dtype
from attention.reference import Attention
from continuous_batching.batch import Batch
from continuous_batching.engine import Observer
from devices.cpp_sources import missing_for_sources
from devices.shapes import AttentionShape
from kv_cache.device.rank_pages import MOST_QUEUED, HeldLayer, RankPages, held_by
from kv_cache.device.storage import KVCache, LayerPages
from kv_cache.exchange.shares import Held, Shares, layers_of
from kv_cache.pages import Index, PageCopy
from models.config import RecurrentConfig
from models.parallel.share import Share
from models.step.stage_runner import StageRunner
from tests.kv_cache.test_shares import HEADS, LAYERS, PAGE, PAGES, cache_of, stages, tensor, whole


class Links:
    """What ranks of one process send each other."""

    def __init__(self, rank: int, ways: dict[tuple[int, int], SimpleQueue[torch.Tensor]]) -> None:
        self.rank, self._ways = rank, ways

    def send(self, x: torch.Tensor, rank: int) -> None:
        self._ways[self.rank, rank].put(x.clone())

    def receive(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.copy_(self._ways[rank, self.rank].get())


class Ranks:
    """The parts of all ranks of an engine, and the moves that the leader has told the others."""

    def __init__(
        self,
        caches: Sequence[KVCache],
        shares: Shares,
        heads: int = HEADS,
        state: HeldLayer | None = None,
    ) -> None:
        count = len(shares)
        ways = {(a, b): SimpleQueue[torch.Tensor]() for a in range(count) for b in range(count)}
        holds = [
            held_by(cache, share, [heads] * len(layers_of(share)), state)
            for cache, share in zip(caches, shares)
        ]
        self.parts = [RankPages(cache, Links(rank, ways), holds) for rank, cache in enumerate(caches)]
        self.leader = self.parts[0]
        self.leader.moves = self
        self.told: list[tuple[int, Index, bool]] = []

    def moved(self, layer: int, pages: Index, to_leader: bool) -> None:
        self.told.append((layer, pages, to_leader))

    def read(self, layer: int, pages: Index) -> np.ndarray:
        wait = self.leader.read_layer(layer, pages)
        self._follow()
        return wait()

    def write(self, layer: int, pages: Index, data: np.ndarray) -> None:
        self.leader.write_layer(layer, pages, data)
        self._follow()

    def _follow(self) -> None:
        for told in self.told:
            for each in self.parts[1:]:
                each.move(*told)
        self.told = []

    def close(self) -> None:
        for each in self.parts:
            each.close()


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("heads", [4, 2, 1])
def test_engines_of_any_ranks_exchange_the_pages_that_one_rank_would_hold(heads: int, columns: bool) -> None:
    """From each engine to each other one, compared with the planes of a whole cache, layer by layer."""
    planes = whole(LAYERS, heads, columns=columns)
    kinds: list[Shares] = [tensor(1, heads), tensor(2, heads), tensor(4, heads), stages(2, heads)]
    one = cache_of(kinds[0][0], planes, columns=columns, filled=True)
    sources, targets = np.array([3, 1, 6]), np.array([2, 5, 4])
    for senders in kinds:
        here = Ranks(
            [cache_of(each, planes, columns=columns, filled=True) for each in senders], senders, heads
        )
        assert here.leader.layout == one.layout
        assert here.leader.layer_bytes == one.layer_bytes
        for receivers in kinds:
            caches = [cache_of(each, planes, columns=columns, filled=False) for each in receivers]
            there = Ranks(caches, receivers, heads)
            for layer in range(LAYERS):
                data = here.read(layer, sources)
                assert np.array_equal(data, one.read_layer(layer, sources)())
                there.write(layer, targets, data)
            there.close()
            for cache, share in zip(caches, receivers):
                want = cache_of(share, planes, columns=columns, filled=True)
                for got, expected in zip(cache.planes, want.planes, strict=True):
                    for plane, other in zip(got, expected):
                        assert torch.equal(plane[targets], other[sources])
                        assert not plane[[1, 3, 6]].any(), "no other page is written"
        here.close()


def part_of(
    state: list[torch.Tensor], recurrent: RecurrentConfig, rank: int, ranks: int
) -> list[torch.Tensor]:
    """A rank's part of the planes of a state: equal parts of the heads, in channels those of q, k and v."""
    return [
        torch.cat([each.chunk(ranks, 2)[rank] for each in plane.split(recurrent.widths, 2)], 2)
        if spec.name.endswith("inputs")
        else plane.chunk(ranks, 1 if spec.name == "states" else 2)[rank]
        for plane, spec in zip(state, recurrent.state("float32").planes)
    ]


@pytest.mark.parametrize("kind", ["gated", "kimi"])
def test_engines_of_any_ranks_exchange_states(kind: Literal["gated", "kimi"]) -> None:
    """Key heads divide them, also what is kept beside them for drafts; compared with a whole one."""
    recurrent = RecurrentConfig(kind, 4, 8 if kind == "gated" else 4, 2, 3, 4, num_tail=2)
    state = [torch.randn(PAGES, *each.shape) for each in recurrent.state("float32").planes]
    held = HeldLayer("a state", recurrent.head_runs("float32"), 4, holds_state=True)

    def ranks_of(count: int, *, filled: bool) -> tuple[list[KVCache], Ranks]:
        caches = []
        for rank in range(count):
            parts = part_of(state, recurrent, rank, count)

            def new(pages: int, parts: list[torch.Tensor] = parts) -> tuple[torch.Tensor, ...]:
                return tuple(torch.zeros(pages, *part.shape[1:]) for part in parts)

            caches.append(KVCache([LayerPages(new, 0, 4 // count, holds_state=True)], 1, [PAGES]))
            for plane, part in zip(caches[-1].of(0), parts):
                plane[:] = part * filled
        shares = tuple((Held(0, 1, 4 // count * rank, 4 // count * (rank + 1)),) for rank in range(count))
        return caches, Ranks(caches, shares, 4, held)

    source, target = np.array([3]), np.array([5])
    (one,), whole_ranks = ranks_of(1, filled=True)
    data = one.read_layer(0, source)()
    for count in (1, 2, 4):
        _, here = ranks_of(count, filled=True)
        assert here.leader.layer_bytes == one.layer_bytes
        assert here.leader.are_states == [True]
        assert np.array_equal(here.read(0, source), data)
        caches, there = ranks_of(count, filled=False)
        there.write(0, target, data)
        for each in (here, there):
            each.close()
        for rank, cache in enumerate(caches):
            for plane, part in zip(cache.of(0), part_of(state, recurrent, rank, count), strict=True):
                assert torch.equal(plane[target], part[source])
                assert not plane[source].any(), "no other page is written"
    whole_ranks.close()


def test_heads_that_every_rank_holds_are_sent_by_none() -> None:
    shares = tensor(2, 1)
    planes = whole(LAYERS, 1, columns=False)
    ranks = Ranks([cache_of(each, planes, columns=False, filled=True) for each in shares], shares, 1)
    ranks.leader.read_layer(0, np.array([1]))()
    assert not ranks.told
    ranks.close()


def shape(heads: int, page_size: int) -> AttentionShape:
    return AttentionShape(heads, heads, 32, page_size, 1.0, torch.float32, (None,))


def in_cpp(sizes: AttentionShape) -> CpuAttention:
    library = attention_source(stored_dtype(sizes))
    assert isinstance(library, ctypes.CDLL), library
    return CpuAttention(sizes, library=library)


def held(attention: Attention, key: torch.Tensor, value: torch.Tensor) -> KVCache:
    """A cache of one layer in attention's own order, with these keys and values in pages 1 and 2."""
    own = attention.head_axis, attention.num_runs
    made = LayerPages(attention.new_planes, 0, attention.shape.num_kv_heads, *own, order=attention.order)
    size, count = attention.shape.page_size, len(key)
    cache = KVCache([made], size, [PAGES])
    arrays = np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, count, np.int64)
    batch = Batch(*arrays, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    plan = attention.plan(batch, np.array([[1, 2]], np.int32), size + np.arange(count, dtype=np.int64))
    attention.write(key, value, *cache.of(0), plan)
    return cache


@pytest.mark.parametrize("page_size", [PAGE, 48, 128])
@pytest.mark.parametrize("kind", [Attention, CpuAttention])
def test_the_order_within_a_page_is_that_of_attention(kind: type[Attention], page_size: int) -> None:
    """Each rank writes its own heads by its own attention; together they are what one rank writes."""
    random = torch.Generator().manual_seed(0)
    key, value = (torch.randn(2 * page_size - 1, HEADS, 32, generator=random) for _ in range(2))
    one = held(kind(shape(HEADS, page_size)), key, value)
    for count in (2, 4):
        own = tuple((Held(0, 1, each[0].first_head, each[0].stop_head),) for each in tensor(count))
        cuts = [slice(each[0].first_head, each[0].stop_head) for each in own]
        caches = [held(kind(shape(HEADS // count, page_size)), key[:, cut], value[:, cut]) for cut in cuts]
        ranks = Ranks(caches, own)
        assert np.array_equal(ranks.read(0, np.array([1, 2])), one.read_layer(0, np.array([1, 2]))())
        ranks.write(0, np.array([4]), one.read_layer(0, np.array([1]))())
        for cache in caches:
            for plane in cache.of(0):
                assert torch.equal(plane[4], plane[1])
                assert plane[4].any()
        ranks.close()


def int8(heads: int, page_size: int) -> AttentionShape:
    return replace(shape(heads, page_size), int8_pages=True)


COMPILED = pytest.mark.skipif(missing_for_sources() is not None, reason=str(missing_for_sources()))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    ("kind", "sizes", "page_size"),
    [
        (Attention, shape, 8),
        (Attention, int8, 8),
        (CpuAttention, shape, 12),
        (CpuAttention, shape, 128),
        pytest.param(in_cpp, int8, 128, marks=COMPILED),
    ],
)
def test_ranks_that_divide_pages_exchange_what_one_rank_would_hold(
    kind: Callable[[AttentionShape], Attention],
    sizes: Callable[[int, int], AttentionShape],
    page_size: int,
    heads: int,
) -> None:
    """Each rank writes every second or fourth token by its own attention; other ranks hold other heads."""
    random = torch.Generator().manual_seed(0)
    length = 2 * page_size - 3
    key, value = (torch.randn(length, heads, 32, generator=random) for _ in range(2))
    one = held(kind(sizes(heads, page_size)), key, value)
    for count in (2, 4):
        own = tuple(
            (Held(0, 1, head, head + 1, turn, count),) for head in range(heads) for turn in range(count)
        )
        caches = [
            held(
                kind(sizes(1, page_size // count)), *(each[part.turn :: count, head] for each in (key, value))
            )
            for part, head in ((each[0], slice(each[0].first_head, each[0].stop_head)) for each in own)
        ]
        ranks = Ranks(caches, own, heads)
        assert ranks.leader.layout == one.layout
        assert ranks.leader.layer_bytes == one.layer_bytes
        assert np.array_equal(ranks.read(0, np.array([2, 1])), one.read_layer(0, np.array([2, 1]))())
        ranks.write(0, np.array([4, 3]), one.read_layer(0, np.array([1, 2]))())
        for cache in caches:
            for plane in cache.of(0):
                assert torch.equal(plane[4], plane[1])
                assert torch.equal(plane[3], plane[2])
                assert plane[4].any()
        ranks.close()


def test_a_leader_does_not_wait_for_what_it_has_queued() -> None:
    """Its own parts come when it has computed a batch, which is after it has asked for all of these."""
    planes, shares = whole(LAYERS, 2, columns=False), tensor(2, 2)
    caches = [cache_of(each, planes, columns=False, filled=True) for each in shares]
    ways = {(a, b): SimpleQueue[torch.Tensor]() for a in range(2) for b in range(2)}
    holds = [held_by(cache, share, [2] * LAYERS) for cache, share in zip(caches, shares)]
    due, told = list[Callable[[], None]](), Observer()
    leader = RankPages(caches[0], Links(0, ways), holds, due.append)
    follower = RankPages(caches[1], Links(1, ways), holds)
    leader.moves = told
    waits = [leader.read_layer(0, np.array([1])) for _ in range(2 * MOST_QUEUED + 4)]
    assert not leader.is_behind
    for action in due:
        action()
    for _ in waits:
        follower.move(0, np.array([1]), True)
    one = cache_of(tensor(1, 2)[0], planes, columns=False, filled=True)
    assert all(np.array_equal(wait(), one.read_layer(0, np.array([1]))()) for wait in waits)
    leader.close()
    follower.close()


def test_pages_that_a_rank_does_not_have_are_refused() -> None:
    """Of what a leader says that is no leader of this model."""
    shares, planes = tensor(2, 2), whole(LAYERS, 2, columns=False)
    caches = [cache_of(each, planes, columns=False, filled=True) for each in shares]
    ranks = Ranks(caches, shares, 2)
    follower = ranks.parts[1]
    there = len(caches[1].of(0)[0])
    for layer, pages in ((LAYERS, [1]), (2**53, [1]), (0, [there]), (0, [-1]), (0, [1] * (there + 1))):
        for to_leader in (True, False):
            with pytest.raises(ValueError, match="the leader moves"):
                follower.move(layer, np.array(pages), to_leader)
    one = cache_of(tensor(1, 2)[0], planes, columns=False, filled=True)
    assert np.array_equal(ranks.read(0, np.array([there - 1])), one.read_layer(0, np.array([there - 1]))())
    ranks.close()


def test_where_a_batch_is_computed_later_the_leaders_pages_are_read_and_written_after_it() -> None:
    planes = whole(LAYERS, 1, columns=False)
    share = stages(1, 1)[0]
    cache = cache_of(share, planes, columns=False, filled=True)
    due: list[Callable[[], None]] = []
    holds = [held_by(cache, share, [1] * LAYERS)]
    part = RankPages(cache, Links(0, {}), holds, due.append)
    part.moves = Observer()
    old = cache.read_layer(0, np.array([1, 2]))()
    wait = part.read_layer(0, np.array([1, 2]))
    part.write_layer(0, np.array([3]), old[: len(old) // 2])
    part.apply([PageCopy(np.array([5]), np.array([1]), "within")])
    assert np.array_equal(cache.read_layer(0, np.array([1, 2]))(), old), "nothing is done yet"
    for plane in cache.of(0):
        plane[2] = 7.0  # what the batch in flight computes
    for action in due:
        action()
    assert np.array_equal(wait()[: len(old) // 4], old[: len(old) // 4])
    assert not np.array_equal(wait(), old)
    for plane, before in zip(cache.of(0), planes[0]):
        assert torch.equal(plane[1], before[5])
    part.close()


class Traced(StageRunner):
    """The leader of a last stage, which says what it does in place of computing."""

    def __init__(self, order: list[str]) -> None:
        self._order, self._started = order, deque()
        self.decoder = SimpleNamespace(share=Share())

    def _drafted(self, batch: Any) -> None:
        return None

    def _prepared(self, batch: Any) -> Callable[[], Any]:
        def compute() -> Any:
            self._order.append(batch.name)
            return SimpleNamespace(wait=lambda: batch)

        return compute


def test_what_follows_the_batches_that_were_started_comes_before_the_next() -> None:
    order: list[str] = []
    runner = Traced(order)
    runner.later(lambda: order.append("at once"))
    batches: list[Any] = [SimpleNamespace(name=each, cuts=()) for each in ("first", "second", "third")]
    first, second = (runner.start(each) for each in batches[:2])
    runner.later(lambda: order.append("behind both"))
    third = runner.start(batches[2])
    for wait in (first, second, third):
        wait()
    runner.later(lambda: order.append("at once again"))
    assert order == ["at once", "first", "second", "behind both", "third", "at once again"]
