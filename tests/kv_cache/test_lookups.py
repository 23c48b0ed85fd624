"""A lookup reports how much of a prefix a newcomer could use, and why no more."""

from __future__ import annotations

import pytest

from kv_cache.pages import PagePool
from kv_cache.prefix_cache import PrefixCache
from tests.kv_cache.test_prefix_cache import Owner


@pytest.fixture
def pool() -> PagePool:
    return PagePool(12)


@pytest.fixture
def cache(pool: PagePool) -> PrefixCache:
    return PrefixCache(pool, 4)


def why(pool: PagePool, cache: PrefixCache, ids: list[int], salt: str = "") -> str:
    """As what a lookup of these tokens is counted."""
    asking, before = Owner(pool, cache, ids, salt), cache.lookups.copy()
    matched = asking.pages[: asking.num_matched]
    cache.count_lookup(asking.keys, asking.tokens, salt, matched, len(asking.keys))
    asking.leave()
    (reason,) = cache.lookups - before
    return reason


def test_a_lookup_says_why_it_found_no_more(pool: PagePool, cache: PrefixCache) -> None:
    Owner(pool, cache, [*range(8)]).publish()
    assert why(pool, cache, [*range(8)]) == "whole"
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
    assert why(pool, cache, [*range(8)]) == "whole"
    cache.forget(again.pages)
    assert why(pool, cache, [*range(8)]) == "unseen", "it did not go for want of room"


def test_of_many_evictions_the_latest_are_remembered(pool: PagePool, cache: PrefixCache) -> None:
    for first in range(0, 4 * 20, 4):
        Owner(pool, cache, [*range(first, first + 4)]).publish().leave()
        cache.evict(1)
    reasons = [why(pool, cache, [*range(first, first + 4)]) for first in range(0, 4 * 20, 4)]
    assert reasons == ["unseen"] * (20 - pool.num_pages) + ["evicted"] * pool.num_pages
