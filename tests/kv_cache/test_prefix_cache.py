"""Published prefixes are found as far as tokens agree, evicted leaves first, and never given wrongly.

A lookup reports how much of a prefix a newcomer could use, and why no more.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest

from kv_cache.page_keys import page_keys
from kv_cache.pages import PagePool
from kv_cache.prefix_cache import PrefixCache
from tests.kv_cache.short_keys import shorten_keys

SIZE = 4


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


class Owner:
    """A slot as far as the cache is concerned: tokens, pages, and the way through the cache."""

    def __init__(self, pool: PagePool, cache: PrefixCache, ids: Sequence[int], salt: str = "") -> None:
        self.cache, self.tokens, self.salt = cache, tokens(*ids), salt
        self.keys = page_keys(self.tokens, SIZE, salt)
        matched = cache.find(self.keys, self.tokens, salt)
        cache.share(matched[matched > 0])
        resting = matched[matched < 0]
        cache.keep(resting)
        self.brought = cache.bring_back(resting, pool.take(len(resting))) if len(resting) else None
        matched = np.append(matched[matched > 0], self.brought.targets if self.brought else resting)
        self.num_matched = len(matched)
        self.pages = np.concatenate([matched, pool.take(len(self.keys) - len(matched))])

    def publish(self) -> "Owner":
        standing = self.cache.publish(self.keys, self.tokens, self.pages, self.num_matched, self.salt)
        own = self.pages[self.num_matched :]
        doubles = standing != own
        self.cache.share(standing[doubles])
        self.cache.release(own[doubles])
        self.pages = np.append(self.pages[: self.num_matched], standing)
        return self

    def leave(self) -> None:
        self.cache.release(self.pages)


@pytest.fixture
def pool() -> PagePool:
    return PagePool(12)


@pytest.fixture
def cache(pool: PagePool) -> PrefixCache:
    return PrefixCache(pool, SIZE)


def test_keys_are_chained_from_the_salt_and_cover_full_pages_only() -> None:
    ids = tokens(*range(10))
    root = hashlib.sha256(b"salt").digest()
    first = hashlib.sha256(root + ids[:4].tobytes()).digest()
    second = hashlib.sha256(first + ids[4:8].tobytes()).digest()
    assert page_keys(ids, SIZE, "salt") == [first, second]
    assert page_keys(ids, SIZE, "salt", known=[first]) == [first, second]
    assert page_keys(ids, SIZE, "pepper")[0] != first
    assert page_keys(ids[:3], SIZE, "salt") == []


def test_a_published_prefix_is_found_as_far_as_the_tokens_agree(pool: PagePool, cache: PrefixCache) -> None:
    first = Owner(pool, cache, range(12)).publish()
    assert Owner(pool, cache, [*range(8), 99, 99, 99, 99]).num_matched == 2
    assert Owner(pool, cache, range(11)).pages.tolist() == first.pages[:2].tolist()
    assert Owner(pool, cache, [1, *range(1, 4)]).num_matched == 0


def test_find_neither_holds_nor_renews(pool: PagePool, cache: PrefixCache) -> None:
    old, new = Owner(pool, cache, range(4)).publish(), Owner(pool, cache, range(50, 54)).publish()
    old.leave()
    new.leave()
    cache.find(old.keys, old.tokens, "")
    assert cache.idle_pages.tolist() == [*old.pages.tolist(), *new.pages.tolist()]
    assert pool.holders[old.pages].tolist() == [1]


def test_leaves_are_evicted_before_their_parents_and_old_chains_first(
    pool: PagePool, cache: PrefixCache
) -> None:
    old = Owner(pool, cache, range(12)).publish()
    new = Owner(pool, cache, range(50, 58)).publish()
    old.leave()
    new.leave()
    again = Owner(pool, cache, range(4))  # renews the first page of the old chain
    again.leave()
    assert cache.idle_pages.tolist() == [*old.pages[:0:-1], *new.pages[::-1], old.pages[0]]
    cache.evict(1)
    assert cache.find(old.keys, old.tokens, "").tolist() == old.pages[:2].tolist()
    cache.evict(cache.num_idle)
    assert pool.num_free == pool.num_pages - 1
    assert not len(cache.pages)


def test_pages_that_go_first_do_not_go_before_what_continues_them(pool: PagePool, cache: PrefixCache) -> None:
    one = Owner(pool, cache, range(12)).publish()
    other = Owner(pool, cache, [*range(8), 9, 9, 9, 9]).publish()
    one.leave()
    other.leave()
    cache.evict_first(one.pages)
    assert cache.idle_pages.tolist() == [one.pages[2], *other.pages[::-1]]
    cache.evict(2)
    assert cache.find(one.keys, one.tokens, "").tolist() == one.pages[:2].tolist()
    third = Owner(pool, cache, range(12)).publish()
    third.leave()
    cache.evict_first(third.pages)
    assert cache.idle_pages.tolist() == third.pages[::-1].tolist()


def test_pages_in_use_are_not_idle(pool: PagePool, cache: PrefixCache) -> None:
    owner = Owner(pool, cache, range(8)).publish()
    assert cache.num_idle == 0
    other = Owner(pool, cache, range(8))
    owner.leave()
    assert cache.num_idle == 0
    other.leave()
    assert cache.num_idle == 2


def test_equal_content_published_twice_stays_with_the_first(pool: PagePool, cache: PrefixCache) -> None:
    one, two = Owner(pool, cache, range(8)), Owner(pool, cache, range(8))
    copies = two.pages
    one.publish()
    two.publish()
    assert two.pages.tolist() == one.pages.tolist()
    assert pool.holders[copies].tolist() == [0, 0], "its private copies are free at once"


def test_a_chain_continues_from_equal_content_of_another(pool: PagePool, cache: PrefixCache) -> None:
    one, two = Owner(pool, cache, range(4)), Owner(pool, cache, range(8))
    one.publish()
    two.publish()
    assert two.pages[0] == one.pages[0]
    three = Owner(pool, cache, range(8))
    assert three.pages.tolist() == two.pages.tolist()
    for owner in (one, two, three):
        owner.leave()
    assert cache.idle_pages.tolist() == two.pages[::-1].tolist(), "the parent is not evicted first"


def test_forgotten_pages_are_not_found_and_neither_is_what_follows(
    pool: PagePool, cache: PrefixCache
) -> None:
    owner = Owner(pool, cache, range(12)).publish()
    other = Owner(pool, cache, [*range(4), 9, 9, 9, 9]).publish()
    cache.forget(owner.pages[1:2])
    assert cache.find(owner.keys, owner.tokens, "").tolist() == owner.pages[:1].tolist()
    assert len(cache.find(other.keys, other.tokens, "")) == 2, "another branch stays"
    owner.leave()
    assert pool.holders[owner.pages].tolist() == [2, 0, 0]


def test_nothing_is_published_after_a_page_that_was_forgotten(pool: PagePool, cache: PrefixCache) -> None:
    owner = Owner(pool, cache, range(12))
    cache.publish(owner.keys, owner.tokens, owner.pages[:1], 0, "")
    cache.forget(owner.pages[:1])
    cache.publish(owner.keys, owner.tokens, owner.pages, 1, "")
    assert not len(cache.pages)
    assert not len(cache.find(owner.keys, owner.tokens, "", held=owner.pages[:1]))


def test_a_chain_ends_where_a_page_takes_the_key_of_one_before_it(pool: PagePool, cache: PrefixCache) -> None:
    owner = Owner(pool, cache, range(12))
    owner.keys = [b"first", b"first", b"third"]
    standing = cache.publish(owner.keys, owner.tokens, owner.pages, 0, "")
    assert standing.tolist() == owner.pages.tolist()
    assert not len(cache.pages)
    owner.leave()
    assert pool.num_free == pool.num_pages - 1


def test_equal_pages_under_one_key_and_two_salts_stay_apart(pool: PagePool, cache: PrefixCache) -> None:
    one, two = Owner(pool, cache, range(4), salt="a"), Owner(pool, cache, range(4), salt="b")
    two.keys, own = one.keys, two.pages.tolist()
    one.publish()
    two.publish()
    assert two.pages.tolist() == own, "the later takes the key"
    assert cache.find(two.keys, two.tokens, "b").tolist() == own
    assert not len(cache.find(one.keys, one.tokens, "a"))


@pytest.mark.parametrize("seed", range(8))
def test_colliding_keys_never_give_wrong_pages(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    shorten_keys(monkeypatch, bits=4)
    random = np.random.default_rng(seed)
    pool = PagePool(200)
    cache = PrefixCache(pool, SIZE, PagePool(9) if seed % 2 else None)
    # page, negative in the host -> the salt and all tokens up to its end
    content: dict[int, tuple[str, tuple[int, ...]]] = {}
    hits = brought = 0
    for _ in range(60):
        ids = np.repeat(random.integers(0, 2, 4), SIZE).tolist()  # few different pages: chains often meet
        owner = Owner(pool, cache, ids, salt=str(random.integers(0, 2)))
        if (copy := owner.brought) is not None:
            content |= {int(to): content[-int(source)] for source, to in zip(copy.sources, copy.targets)}
            brought += len(copy.targets)
        for index, page in enumerate(owner.pages.tolist()):
            held = owner.salt, tuple(ids[: (index + 1) * SIZE])
            if index < owner.num_matched:
                assert content[page] == held
                hits += 1
            content[page] = held
        owner.publish()
        owner.leave()
        if random.random() < 0.3 and cache.num_idle and (copy := cache.evict(1)) is not None:
            content |= {-int(to): content[int(source)] for source, to in zip(copy.sources, copy.targets)}
    assert hits > 0
    assert bool(brought) == bool(seed % 2)


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
