"""Ranks use the pages that each of them has found; one that lacks some, or does not answer, costs a miss."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from continuous_batching.engine import Engine
from continuous_batching.recording.agreement import LEADER, Agreement, RankQuestions
from continuous_batching.recording.listeners import Listeners
from continuous_batching.recording.rank_tier import FollowersTier, LeadersTier
from continuous_batching.recording.recorder import Recorder
from continuous_batching.request import Request, SamplingParams
from kv_cache.pages import PageCopy
from kv_cache.tier import page_tier
from kv_cache.tier.page_tier import PageTier
from tests.continuous_batching.checksum import ChecksumRunner
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_follower import FACTS, Following
from tests.continuous_batching.test_slot_lifecycle import ask, check, make
from tests.continuous_batching.test_tier import PAGE_SIZE
from tests.kv_cache.test_page_tier import EMPTY, Store, until
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiers that close write and remove all, as those of stores that are quick enough do."""
    for name in ("CLOSE_S", "REMOVALS_S"):
        monkeypatch.setattr(page_tier, name, PATIENCE_S)


class Ranks:
    """An engine of three ranks, each with its own store, and a clock of its leader's questions."""

    def __init__(self, stores: list[Store], **options: Any) -> None:
        self.engine = make(num_host_pages=40, has_tier=True, **options)
        self.tiers = [self._tier(self.engine, stores[0], 0)]
        self.following = []
        for rank, store in enumerate(stores[1:], 1):
            twin = make(num_host_pages=40, has_tier=True, **options)
            self.tiers.append(self._tier(twin, store, rank))
            following = Following(twin.scheduler, twin.runner)
            beats = following.beats
            following.follower._tier = FollowersTier(
                self.tiers[rank], lambda answer, beats=beats: beats.answer(answer.line)
            )
            self.following.append(following)
        listeners = Listeners(
            {f"rank {rank}": each.near for rank, each in enumerate(self.following, 1)}, PATIENCE_S
        )
        agreement = Agreement((LEADER, *listeners.names))
        listeners.answered = agreement.answered
        self.engine.observer = recorder = Recorder(FACTS, listeners)
        questions = RankQuestions(agreement, {}, recorder)
        self.engine.questions = questions
        self.engine.tier = LeadersTier(self.tiers[0], questions, PATIENCE_S)

    def _tier(self, engine: Engine, store: Store, rank: int) -> PageTier:
        runner = engine.runner
        assert isinstance(runner, ChecksumRunner)
        runner.tier = tier = PageTier(
            store, runner, runner.make, bytes([rank] * 32), PATIENCE_S, f"rank {rank}"
        )
        return tier

    def serve(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            self.engine.step()
            recount(self.engine.scheduler)

    def end(self) -> None:
        assert self.tiers[0].settle(PATIENCE_S)
        self.engine.close()
        assert [each.end() for each in self.following] == [None] * len(self.following)


@pytest.mark.parametrize("windows", [(), (9,)])
def test_every_rank_has_the_bytes_of_each_page_that_is_found(windows: tuple[int, ...]) -> None:
    """Against the least of what the ranks' stores have, counted from their keys."""
    drawn = random.Random(4)
    kept: list[dict[bytes, bytes]] = [{}, {}, {}]
    first = [ask(name, 30, 9) for name in ("one", "two", "three", "four")]
    ranks = Ranks([Store(each) for each in kept], windows=windows)
    ranks.serve(*first)
    ranks.end()
    assert kept[0].keys() == kept[1].keys() == kept[2].keys()
    assert all(len({*each}) == 3 for each in zip(*(one.values() for one in kept)))  # the identities are three
    firsts = {each.page_keys[0]: each for each in first}
    assert len(firsts) == len(first)
    for request, rank in zip(first, (1, 2, 1)):  # the fourth is whole everywhere
        at = drawn.randrange(1, 7)
        for gone in request.page_keys[at:]:
            kept[rank].pop(gone)
    ranks = Ranks([Store(each) for each in kept], windows=windows)
    least = {
        each.id: min(
            next((at for at, key in enumerate(each.page_keys[:9]) if key not in one), 9) for one in kept
        )
        for each in first
    }
    again = [Request(f"{each.id} again", each.tokens, SamplingParams(max_tokens=3)) for each in first]
    ranks.serve(*again)
    check(*again)
    found = [each.num_cached_tokens // PAGE_SIZE for each in again]
    unequal = [0 if windows else least[each.id] for each in first[:3]]
    assert found == [*unequal, least[first[3].id]]
    assert found[3] == 9
    ranks.end()


def test_a_rank_whose_store_fails_makes_a_miss_and_stops_nobody() -> None:
    kept: list[dict[bytes, bytes]] = [{}, {}, {}]
    first = ask("one", 30, 9)
    ranks = Ranks([Store(each) for each in kept])
    ranks.serve(first)
    ranks.end()
    ranks = Ranks([Store(each, fails=rank == 2) for rank, each in enumerate(kept)])
    again = [Request(name, first.tokens, SamplingParams(max_tokens=3)) for name in ("a", "b")]
    for each in again:
        ranks.serve(each)
    check(*again)
    assert again[0].num_cached_tokens == 0
    assert again[1].num_cached_tokens == (len(first.tokens) - 1) // PAGE_SIZE * PAGE_SIZE, "computed here"
    ranks.end()


def test_all_ranks_close_their_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else wrong pages that are still to be taken off a slow store would be found by other engines."""
    monkeypatch.setattr(page_tier, "CLOSE_S", 0.0)  # what a rank still writes is dropped
    stores = [Store({}) for _ in range(3)]
    ranks = Ranks(stores)
    ranks.serve(ask("one", 30, 9))
    for tier, store in zip(ranks.tiers, stores):
        assert tier.settle(PATIENCE_S)
        store.gate.clear()
        tier.apply(PageCopy(EMPTY, EMPTY, "off_tier", tuple(store.entries)))
        until(lambda store=store: store.calls[-1] == "remove")

    def open_gates() -> None:
        for tier, store in zip(ranks.tiers, stores):
            until(lambda tier=tier: tier._writes._is_closing)
            store.gate.set()

    opening = threading.Thread(target=open_gates)
    opening.start()
    ranks.engine.close()
    assert [each.end() for each in ranks.following] == [None, None]
    opening.join()
    assert not any(store.entries for store in stores)
    until(lambda: all(store.calls[-1] == "close" for store in stores))
