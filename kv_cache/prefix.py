"""Which pages already hold these tokens?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kv_cache.history import Miss, PageHistory
from kv_cache.keys import TokenIds
from kv_cache.pages import Index, PagePool

ROOT = 0  # serial of the chain before a request's first page
EMPTY: Index = np.empty(0, dtype=np.int64)


class PrefixCache:
    """Full pages by the tokens that they hold and all tokens before them.

    The cache is a holder of its pages like any slot. A page whose only holder is the cache is idle:
    it is found and shared again, or evicted, least recently used first, when pages run short.

    Equal keys are not believed: a hit also compares the page's tokens, its salt and its parent. Each
    cached page carries a serial number that is never used twice, and the serial of the page before
    it, so that a chain is right from its root or it ends.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._salt_of: dict[int, str] = {}  # of the first pages of chains only
        self._tokens = np.zeros((pool.num_pages, page_size), dtype=np.int32)
        self._serial = np.zeros(pool.num_pages, dtype=np.int64)  # 0: the page is not cached
        self._parent = np.zeros(pool.num_pages, dtype=np.int64)
        self._next_serial = ROOT + 1
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.history = PageHistory(pool.num_pages)
        self.version = 0  # changes with what can be found

    @property
    def num_pages(self) -> int:
        """Pages that the cache holds, idle or in use."""
        return len(self._key_of)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def pages(self) -> Index:
        """The pages that the cache holds, in the order they were published."""
        return np.fromiter(self._key_of, dtype=np.int64, count=len(self._key_of))

    @property
    def idle_pages(self) -> Index:
        """Idle pages, the next to be evicted first."""
        return np.fromiter(self._idle, dtype=np.int64, count=len(self._idle))

    def is_cached(self, pages: Index) -> NDArray[np.bool_]:
        """Which of these pages the cache holds."""
        cached: NDArray[np.bool_] = self._serial[pages] > 0
        return cached

    def parents(self) -> dict[int, int]:
        """For each cached page but the first of a chain, the cached page that it continues."""
        page_of = dict(zip(self._serial[self.pages].tolist(), self.pages.tolist()))
        return {
            page: page_of[at]
            for page, at in zip(self.pages.tolist(), self._parent[self.pages].tolist())
            if at
        }

    def find(self, keys: Sequence[bytes], tokens: TokenIds, salt: str, held: Index = EMPTY) -> Index:
        """The cached pages that continue the pages `held`, as far as `tokens` go without a gap.

        `keys` and `tokens` are a request's from its start. Neither holds the pages nor renews them.
        """
        first, size, parent = len(held), self._page_size, self._tail(held)
        if parent is None:
            return EMPTY
        found = []
        for key in keys[first:]:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        if not found:
            return EMPTY
        pages = np.array(found, dtype=np.int64)
        wanted = tokens[first * size : (first + len(pages)) * size].reshape(len(pages), size)
        parents = np.empty_like(pages)
        parents[0] = parent
        parents[1:] = self._serial[pages[:-1]]
        right = (self._tokens[pages] == wanted).all(axis=1) & (self._parent[pages] == parents)
        if parent == ROOT:
            right[0] &= self._salt_of.get(found[0]) == salt
        return pages if right.all() else pages[: int(right.argmin())]

    def why_missed(self, keys: Sequence[bytes], tokens: TokenIds, salt: str, matched: Index) -> Miss | None:
        """Why a lookup ended where it did; None if it found a page for every key.

        `keys` are those of the pages that the request could use, `matched` what was found of them.
        """
        at, size, parent = len(matched), self._page_size, self._tail(matched)
        if at == len(keys):
            return None if len(keys) else "too_short"
        if self.history.was_evicted(keys[at]):
            return "evicted"
        wanted = tokens[at * size : (at + 1) * size]
        nexts = np.flatnonzero((self._parent == (ROOT if parent is None else parent)) & (self._serial > 0))
        alike = (self._tokens[nexts] == wanted).cumprod(axis=1).sum(axis=1)  # tokens in common
        if at == 0:
            here = np.array([self._salt_of[page] == salt for page in nexts.tolist()], dtype=np.bool_)
            if (alike[~here] == size).any():
                return "other_salt"
            alike = alike[here]
        return "unaligned" if alike.any() else "unseen"

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
        size, count = self._page_size, len(pages)
        parent = self._tail(pages[:first])
        new_keys, new_pages = keys[first:count], pages[first:]
        if parent is None or not len(new_pages):
            return new_pages
        content = tokens[first * size : count * size].reshape(len(new_pages), size)
        if len(set(new_keys)) == len(new_pages) and self._page_of.keys().isdisjoint(new_keys):
            self._insert(new_keys, content, new_pages, parent, salt, keys[first - 1] if first else None)
            return new_pages
        standing, previous = new_pages.copy(), pages[:first][-1:]
        for index, key in enumerate(new_keys):
            equal = self._equal(key, content[index], parent, salt)
            if self._tail(previous) != parent:
                break  # the page that gave up this key was one before it in the same chain
            if equal is None:
                before = keys[first + index - 1] if first + index else None
                self._insert([key], content[[index]], new_pages[[index]], parent, salt, before)
            else:
                standing[index] = equal
            previous = standing[[index]]
            parent = int(self._serial[previous[0]])
        return standing

    def forget(self, pages: Index) -> None:
        """Make pages unfindable that turned out wrong, and all that continue them.

        Those that are not cached are passed over.
        """
        wrong = set(self._serial[pages[self._serial[pages] > 0]].tolist())
        if not wrong:
            return
        cached = self.pages
        order = cached[np.argsort(self._serial[cached])]  # a page is published after the one it continues
        lost = []
        for page, serial, parent in zip(
            order.tolist(), self._serial[order].tolist(), self._parent[order].tolist()
        ):
            if serial in wrong or parent in wrong:
                wrong.add(serial)
                lost.append(page)
        self._remove(lost)

    def evict(self, count: int) -> None:
        """Free the `count` idle pages that were used longest ago."""
        assert count <= len(self._idle), f"asked to evict {count} pages, {len(self._idle)} are idle"
        pages = list(islice(self._idle, count))
        self.history.evicted([self._key_of[page] for page in pages], np.array(pages, dtype=np.int64))
        self._remove(pages)

    def move(self, sources: Index, targets: Index) -> None:
        """Follow pages that moved: what was found in a source page is found in its target."""
        cached = self._serial[sources] > 0
        sources, targets = sources[cached], targets[cached]
        for column in (self._tokens, self._serial, self._parent):
            column[targets] = column[sources]
        self._serial[sources] = 0
        self.history.moved([self._key_of[page] for page in sources.tolist()], sources, targets)
        target_of = dict(zip(sources.tolist(), targets.tolist()))
        for source, target in target_of.items():
            key = self._key_of.pop(source)
            self._key_of[target] = key
            self._page_of[key] = target
            if source in self._salt_of:
                self._salt_of[target] = self._salt_of.pop(source)
        if not self._idle.keys().isdisjoint(target_of):  # a page keeps its place in the order of eviction
            self._idle = OrderedDict((target_of.get(page, page), None) for page in self._idle)
        self.version += 1

    def resize(self, num_pages: int) -> None:
        """Follow the pool to another number of pages; pages that go are not cached."""
        self.history.resize(num_pages)
        kept = min(num_pages, len(self._serial))
        assert not self._serial[kept:].any(), "a page that goes is cached"
        tokens, serial, parent = self._tokens, self._serial, self._parent
        self._tokens = np.zeros((num_pages, self._page_size), dtype=np.int32)
        self._serial = np.zeros(num_pages, dtype=np.int64)
        self._parent = np.zeros(num_pages, dtype=np.int64)
        self._tokens[:kept], self._serial[:kept], self._parent[:kept] = (
            tokens[:kept],
            serial[:kept],
            parent[:kept],
        )

    def _tail(self, pages: Index) -> int | None:
        """The serial that the page after these continues; None if the last was forgotten."""
        if not len(pages):
            return ROOT
        return int(self._serial[pages[-1]]) or None

    def _equal(self, key: bytes, tokens: TokenIds, parent: int, salt: str) -> int | None:
        """The cached page of this key and content; one of another content gives up the key."""
        page = self._page_of.get(key)
        if page is None:
            return None
        same = self._parent[page] == parent and np.array_equal(self._tokens[page], tokens)
        if same and (parent != ROOT or self._salt_of[page] == salt):
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
        page_list = pages.tolist()
        self._page_of.update(zip(keys, page_list))
        self._key_of.update(zip(page_list, keys))
        if parent == ROOT:
            self._salt_of[page_list[0]] = salt
        serials = np.arange(self._next_serial, self._next_serial + len(pages))
        self._next_serial += len(pages)
        self._tokens[pages] = tokens
        self._serial[pages] = serials
        self._parent[pages] = serials - 1
        self._parent[pages[0]] = parent
        self._pool.share(pages)
        self.history.stored(keys, pages, parent_key)
        self.version += 1

    def _remove(self, pages: list[int]) -> None:
        """Let go of cached pages."""
        gone, keys = np.array(pages, dtype=np.int64), [self._key_of.pop(page) for page in pages]
        for page, key in zip(pages, keys):
            del self._page_of[key]
            self._salt_of.pop(page, None)
            self._idle.pop(page, None)
        self.history.removed(keys, gone)
        self._serial[gone] = 0
        self._pool.release(gone)
        self.version += 1
