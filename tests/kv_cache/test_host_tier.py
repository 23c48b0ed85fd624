"""Evicted pages that rest in the host's pool are found, brought back, and go when they must."""

from __future__ import annotations

import numpy as np
import pytest

from kv_cache.pages import PagePool
from kv_cache.prefix_cache import PrefixCache
from tests.kv_cache.test_prefix_cache import SIZE, Owner

NUM_HOST = 5  # pages of the host's pool but for its null page


@pytest.fixture
def pool() -> PagePool:
    return PagePool(12)


@pytest.fixture
def host() -> PagePool:
    return PagePool(1 + NUM_HOST)


@pytest.fixture
def cache(pool: PagePool, host: PagePool) -> PrefixCache:
    return PrefixCache(pool, SIZE, host)


def left(pool: PagePool, cache: PrefixCache, first: int, num_pages: int) -> Owner:
    """Somebody who published a chain of `num_pages`, and left."""
    owner = Owner(pool, cache, range(first, first + SIZE * num_pages)).publish()
    owner.leave()
    return owner


def found(cache: PrefixCache, owner: Owner) -> list[int]:
    return cache.find(owner.keys, owner.tokens, owner.salt).tolist()


def bring_back(pool: PagePool, cache: PrefixCache, names: list[int]) -> list[int]:
    """The pages of a row that takes these resting pages."""
    kept = np.array(names)
    cache.keep(kept)
    pages = pool.take(len(names))
    copy = cache.bring_back(kept, pages)
    assert (copy.way, copy.sources.tolist(), copy.targets.tolist()) == (
        "from_host",
        [-name for name in names],
        pages.tolist(),
    )
    return pages.tolist()


def counted_as(cache: PrefixCache, owner: Owner) -> str:
    before = cache.lookups.copy()
    cache.count_lookup(owner.keys, owner.tokens, "", np.array(found(cache, owner)), len(owner.keys))
    (reason,) = cache.lookups - before
    return reason


def test_evicted_pages_rest_and_are_found_after_those_on_the_device(
    pool: PagePool, host: PagePool, cache: PrefixCache
) -> None:
    owner = left(pool, cache, 0, 3)
    one, two, three = owner.pages.tolist()
    copy = cache.evict(2)
    assert copy is not None
    assert copy.way == "to_host"
    assert copy.sources.tolist() == [three, two]
    assert pool.holders[[one, two, three]].tolist() == [1, 0, 0]
    place_of = dict(zip(copy.sources.tolist(), copy.targets.tolist()))
    assert found(cache, owner) == [one, -place_of[two], -place_of[three]]
    assert (cache.num_idle, cache.num_resting, host.num_held) == (1, 2, 2)
    assert counted_as(cache, owner) == "whole"


def test_of_more_than_there_is_room_for_the_last_used_and_the_first_of_chains_rest(
    pool: PagePool, cache: PrefixCache
) -> None:
    old, new = left(pool, cache, 0, 4), left(pool, cache, 100, 4)
    copy = cache.evict(7)
    assert copy is not None
    assert copy.sources.tolist() == [*old.pages[1::-1], *new.pages[:0:-1]]
    assert len(found(cache, old)) == 2
    assert len(found(cache, new)) == 4
    assert counted_as(cache, old) == "evicted"


def test_resting_pages_give_way_to_later_ones(pool: PagePool, cache: PrefixCache) -> None:
    old = left(pool, cache, 0, 4)
    cache.evict(4)
    new = left(pool, cache, 100, 3)
    cache.evict(3)
    assert len(found(cache, old)) == 2, "leaves go first"
    assert len(found(cache, new)) == 3


def test_resting_pages_give_way_to_whoever_needs_the_host_or_all_stay(
    pool: PagePool, host: PagePool, cache: PrefixCache
) -> None:
    owner = left(pool, cache, 0, 4)
    cache.evict(4)
    other = host.take(1)
    assert cache.yield_host(0)
    assert not cache.yield_host(5)
    assert len(found(cache, owner)) == 4
    assert cache.yield_host(3)
    assert host.num_free == 3
    assert len(found(cache, owner)) == 1
    host.release(other)


def test_pages_that_are_about_to_come_back_give_way_to_nobody(
    pool: PagePool, host: PagePool, cache: PrefixCache
) -> None:
    owner = left(pool, cache, 0, NUM_HOST)
    cache.evict(NUM_HOST)
    names = np.array(found(cache, owner))
    cache.keep(names)
    left(pool, cache, 100, 2)
    assert cache.evict(2) is None, "the host has no room but theirs"
    assert found(cache, owner) == names.tolist()
    copy = cache.bring_back(names, pool.take(NUM_HOST))
    assert found(cache, owner) == copy.targets.tolist()
    assert host.num_held == 0


def test_a_page_that_came_back_is_shared_and_what_rests_after_it_still_found(
    pool: PagePool, host: PagePool, cache: PrefixCache
) -> None:
    owner = left(pool, cache, 0, 3)
    cache.evict(3)
    one, two, three = found(cache, owner)
    pages = bring_back(pool, cache, [one, two])
    assert found(cache, owner) == [*pages, three]
    assert pool.holders[pages].tolist() == [2, 2], "the row's and the cache's"
    assert host.num_held == cache.num_resting == 1
    cache.release(np.array(pages))
    assert cache.idle_pages.tolist() == pages[::-1]
    cache.evict(2)
    assert len(found(cache, owner)) == 3
    assert cache.resting_pages[0] == -three, "a leaf goes before the page it continues"


def test_what_continues_a_forgotten_page_is_forgotten_at_rest_too(
    pool: PagePool, host: PagePool, cache: PrefixCache
) -> None:
    owner, other = left(pool, cache, 0, 3), left(pool, cache, 100, 1)
    again = Owner(pool, cache, range(SIZE))
    cache.evict(cache.num_idle)
    assert host.num_held == 3
    cache.forget(again.pages)
    assert found(cache, owner) == []
    assert len(found(cache, other)) == 1
    assert host.num_held == 1


def test_pages_from_elsewhere_rest_beside_what_they_continue_and_go_before_it(
    pool: PagePool, host: PagePool, cache: PrefixCache
) -> None:
    asking = Owner(pool, cache, range(6 * SIZE))
    left(pool, cache, 100, 2)
    left(pool, cache, 0, 3)
    cache.evict(5)
    assert host.num_free == 0
    matched = cache.find(asking.keys, asking.tokens, "")
    assert len(matched) == 3
    pages = cache.take_in(asking.keys, asking.tokens, matched, 3, "")
    assert len(pages) == 2, "only the other chain gives way"
    assert found(cache, asking) == [*matched.tolist(), *(-pages).tolist()]
    assert cache.resting_pages.tolist() == [*pages[::-1].tolist(), *(-matched[::-1]).tolist()]
