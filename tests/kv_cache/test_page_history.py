"""Why lookups missed, how long pages lived, and what a router would hear of it."""

from __future__ import annotations

import numpy as np
import pytest

from kv_cache.page_history import Ages, PageEvent
from kv_cache.pages import PagePool
from kv_cache.prefix_cache import PrefixCache
from tests.kv_cache.test_prefix_cache import Owner


@pytest.fixture
def pool() -> PagePool:
    return PagePool(12)


@pytest.fixture
def cache(pool: PagePool) -> PrefixCache:
    return PrefixCache(pool, 4)


def why(pool: PagePool, cache: PrefixCache, ids: list[int], salt: str = "") -> str | None:
    asking = Owner(pool, cache, ids, salt)
    reason = cache.why_missed(asking.keys, asking.tokens, salt, asking.pages[: asking.num_matched])
    asking.leave()
    return reason


def test_a_lookup_says_why_it_found_no_more(pool: PagePool, cache: PrefixCache) -> None:
    Owner(pool, cache, [*range(8)]).publish()
    assert why(pool, cache, [*range(8)]) is None
    assert why(pool, cache, [1, 2, 3]) == "too_short"
    assert why(pool, cache, [50, 51, 52, 53]) == "unseen"
    assert why(pool, cache, [0, 1, 2, 99]) == "unaligned"
    assert why(pool, cache, [*range(6), 99, 99]) == "unaligned"
    assert why(pool, cache, [*range(4), 99, 5, 6, 7]) == "unseen"
    assert why(pool, cache, [*range(4)], salt="other") == "other_salt"
    assert why(pool, cache, [0, 1, 2, 99], salt="other") == "unseen", "nothing is told of another tenant"


def test_what_was_evicted_is_remembered_until_it_is_stored_again(pool: PagePool, cache: PrefixCache) -> None:
    owner = Owner(pool, cache, [*range(8)]).publish()
    owner.leave()
    cache.evict(2)
    assert why(pool, cache, [*range(8)]) == "evicted"
    again = Owner(pool, cache, [*range(8)]).publish()
    assert why(pool, cache, [*range(8)]) is None
    cache.forget(again.pages)
    assert why(pool, cache, [*range(8)]) == "unseen", "it did not go for want of room"


def test_of_many_evictions_the_latest_are_remembered(pool: PagePool, cache: PrefixCache) -> None:
    for first in range(0, 4 * 20, 4):
        Owner(pool, cache, [*range(first, first + 4)]).publish().leave()
        cache.evict(1)
    reasons = [why(pool, cache, [*range(first, first + 4)]) for first in range(0, 4 * 20, 4)]
    assert reasons == ["unseen"] * (20 - pool.num_pages) + ["evicted"] * pool.num_pages


def test_ages_are_those_of_the_clock(pool: PagePool, cache: PrefixCache) -> None:
    history = cache.history
    owner = Owner(pool, cache, [*range(8)]).publish()
    history.now_s = 2.0
    owner.leave()
    history.now_s = 5.0
    again = Owner(pool, cache, [*range(8)])
    assert history.reuse_gap.sum_s == 2 * 3.0
    again.leave()
    history.now_s = 30.0
    cache.evict(2)
    assert history.lifetime.sum_s == 2 * 30.0
    assert history.idle_before_eviction.sum_s == 2 * 25.0


def test_ages_fall_into_their_buckets() -> None:
    ages = Ages()
    ages.observe(np.array([0.0, 0.01, 0.011, 7200.0]))
    assert ages.counts.tolist() == [2, 1, 0, 0, 0, 0, 0, 1]


def test_events_tell_what_can_be_found_where(pool: PagePool, cache: PrefixCache) -> None:
    events = cache.history.events = []
    filler = pool.take(2)
    owner = Owner(pool, cache, [*range(8)]).publish()
    one, two = owner.keys
    pool.release(filler)
    sources, targets = pool.scattered(2)
    pool.move(sources, targets)
    cache.move(sources, targets)
    owner.pages = targets
    cache.forget(cache.find(owner.keys, owner.tokens, "")[1:])
    assert events == [
        PageEvent("stored", one, 3),
        PageEvent("stored", two, 4, parent=one),
        PageEvent("moved", one, 1),
        PageEvent("moved", two, 2),
        PageEvent("removed", two, 2),
    ]
