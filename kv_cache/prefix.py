"""Which pages are kept to be found again, and which go?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kv_cache.chains import EMPTY, Chains, Miss
from kv_cache.history import PageHistory
from kv_cache.keys import TokenIds
from kv_cache.pages import Index, PagePool


class PrefixCache:
    """Full pages that are found again by the tokens they hold and all tokens before them (see `Chains`).

    The cache is a holder of its pages like any slot. A page whose only holder is the cache is idle:
    it is found and shared again, or evicted, least recently used first, when pages run short.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self.chains = Chains(pool.num_pages, page_size)
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.history = PageHistory(pool.num_pages)
        self.version = 0  # changes with what can be found

    @property
    def num_pages(self) -> int:
        """Pages that the cache holds, idle or in use."""
        return len(self.chains)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def pages(self) -> Index:
        """The pages that the cache holds."""
        return self.chains.pages

    @property
    def idle_pages(self) -> Index:
        """Idle pages, the next to be evicted first."""
        return np.fromiter(self._idle, dtype=np.int64, count=len(self._idle))

    def is_cached(self, pages: Index) -> NDArray[np.bool_]:
        """Which of these pages the cache holds."""
        return self.chains.has(pages)

    def find(self, keys: Sequence[bytes], tokens: TokenIds, salt: str, held: Index = EMPTY) -> Index:
        """The cached pages that continue the pages `held`, as far as `tokens` go without a gap.

        `keys` and `tokens` are a request's from its start. Neither holds the pages nor renews them.
        """
        return self.chains.find(keys, tokens, salt, held)

    def why_missed(self, keys: Sequence[bytes], tokens: TokenIds, salt: str, matched: Index) -> Miss | None:
        """Why a lookup ended where it did; None if it found a page for every key.

        `keys` are those of the pages that the request could use, `matched` what was found of them.
        """
        at = len(matched)
        if at == len(keys):
            return None if len(keys) else "too_short"
        if self.history.was_evicted(keys[at]):
            return "evicted"
        return self.chains.why_missed(tokens, salt, matched)

    def share(self, pages: Index) -> None:
        """Give each of these held pages, cached or not, one more holder."""
        idle = pages[(self._pool.holders[pages] == 1) & self.is_cached(pages)]
        for page in idle.tolist():
            del self._idle[page]
        self.history.reused(idle)
        self._pool.share(pages)

    def release(self, pages: Index) -> None:
        """Take a slot's hold from its pages, given in the order of its tokens.

        Pages left with the cache as only holder become idle, the last of the chain as the first to
        be evicted, so that no page outlives the page it depends on.
        """
        pages = pages[::-1]
        self._pool.release(pages)
        idle = pages[(self._pool.holders[pages] == 1) & self.is_cached(pages)]
        for page in idle.tolist():
            self._idle[page] = None
        self.history.idled(idle)

    def publish(self, keys: Sequence[bytes], tokens: TokenIds, pages: Index, first: int, salt: str) -> Index:
        """Make pages `first` and up of a request findable; returns the pages that now stand for them.

        `keys`, `tokens` and `pages` are the request's from its start, `pages` ending with the last to
        publish; their keys and values are computed. Where an equal page is cached already, that one is
        returned in its place; the caller should hold it instead of its own. Nothing is published after
        a page that was forgotten.
        """
        chains, size, count = self.chains, self._page_size, len(pages)
        parent = chains.tail(pages[:first])
        new_keys, new_pages = keys[first:count], pages[first:]
        if parent is None or not len(new_pages):
            return new_pages
        content = tokens[first * size : count * size].reshape(len(new_pages), size)
        if not chains.uses(new_keys):
            self._insert(new_keys, content, new_pages, parent, salt, keys[first - 1] if first else None)
            return new_pages
        standing, previous = new_pages.copy(), pages[:first][-1:]
        for index, key in enumerate(new_keys):
            equal = self._equal(key, content[index], parent, salt)
            if chains.tail(previous) != parent:
                break  # the page that gave up this key was one before it in the same chain
            if equal is None:
                before = keys[first + index - 1] if first + index else None
                self._insert([key], content[[index]], new_pages[[index]], parent, salt, before)
            else:
                standing[index] = equal
            previous = standing[[index]]
            parent = chains.tail(previous)
            assert parent is not None, "a page that stands is cached"
        return standing

    def forget(self, pages: Index) -> None:
        """Make pages unfindable that turned out wrong, and all that continue them.

        Those that are not cached are passed over.
        """
        lost = self.chains.with_what_follows(pages)
        if lost:
            self._remove(lost)

    def evict(self, count: int) -> None:
        """Free the `count` idle pages that were used longest ago."""
        assert count <= len(self._idle), f"asked to evict {count} pages, {len(self._idle)} are idle"
        pages = list(islice(self._idle, count))
        self.history.evicted(map(self.chains.key, pages), np.array(pages, dtype=np.int64))
        self._remove(pages)

    def move(self, sources: Index, targets: Index) -> None:
        """Follow pages that moved: what was found in a source page is found in its target."""
        cached = self.is_cached(sources)
        sources, targets = sources[cached], targets[cached]
        self.history.moved(self.chains.rename(sources, targets), sources, targets)
        target_of = dict(zip(sources.tolist(), targets.tolist()))
        if not self._idle.keys().isdisjoint(target_of):  # a page keeps its place in the order of eviction
            self._idle = OrderedDict((target_of.get(page, page), None) for page in self._idle)
        self.version += 1

    def resize(self, num_pages: int) -> None:
        """Follow the pool to another number of pages; pages that go are not cached."""
        self.history.resize(num_pages)
        self.chains.resize(num_pages)

    def _equal(self, key: bytes, tokens: TokenIds, parent: int, salt: str) -> int | None:
        """The cached page of this key and content; one of another content gives up the key."""
        page = self.chains.page_of(key)
        if page is None or self.chains.is_same(page, tokens, parent, salt):
            return page
        self.forget(np.array([page]))  # two prefixes of one key: the later takes the place
        return None

    def _insert(
        self,
        keys: Sequence[bytes],
        tokens: TokenIds,
        pages: Index,
        parent: int,
        salt: str,
        parent_key: bytes | None,
    ) -> None:
        """Hold pages [n] of `tokens` [n, B] that continue each other, under keys that are not in use."""
        self.chains.insert(keys, tokens, pages, parent, salt)
        self._pool.share(pages)
        self.history.stored(keys, pages, parent_key)
        self.version += 1

    def _remove(self, pages: list[int]) -> None:
        """Let go of cached pages."""
        gone = np.array(pages, dtype=np.int64)
        self.history.removed(self.chains.remove(pages), gone)
        for page in pages:
            self._idle.pop(page, None)
        self._pool.release(gone)
        self.version += 1
