"""Keep computed pages so that later requests with the same prefix find them, and evict the others.

The cache is one more holder of its pages. Evicted pages may rest in the host's memory and be copied back.
Which page holds which tokens is the task of `prefix_index`; the copies are made by `storage`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_cache.eviction_order import EvictionOrder
from kv_cache.page_keys import TokenIds
from kv_cache.pages import Index, PageCopy, PagePool
from kv_cache.prefix_index import EMPTY, Lookup, PrefixIndex

CHOSEN_AT_ONCE = 16  # least number of pages chosen for eviction together, since each choice looks at all ends


class PageListener:
    """Is told after each change which pages can be found.

    This class ignores it; a `PageEvents` publishes it.
    """

    def stored(self, keys: Sequence[bytes], tokens: TokenIds, before: bytes | None, salt: str) -> None:
        """Pages of `tokens` [n, B] can be found; they continue each other and the page with key `before`."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """Pages can no longer be found."""

    def stored_beside(self, keys: Sequence[bytes], group: int, window: int) -> None:
        """Beside the pages of these keys lie those of a group whose queries see a `window` of tokens.

        A window of 0 says that they are recurrent states, of which the one behind a prefix is needed.
        """

    def removed_beside(self, keys: Sequence[bytes], group: int) -> None:
        """Pages of a group no longer lie beside those of these keys."""


class PagesBeside(Protocol):
    """Pages that hold the same tokens as entries of the cache, and follow what happens to these."""

    number: int  # the group that they belong to
    window: int  # positions that a query sees; 0 if that is not what bounds what is kept
    gone: Lookup  # why a lookup ends before an entry that lacks its page here
    changes: int  # counts the changes of what can be resumed from
    # Is called with entries that have gained a page beside them (True) or lost it
    announce: Callable[[bool, Index], None]

    def is_here(self, entries: Index) -> NDArray[np.bool_]:
        """Which of these entries have a page beside them."""
        ...

    def least_expected(self) -> Index:
        """Return entries with a page beside them from which requests go on, the last to be needed first.

        Entries of which nothing is known are left out.
        """
        ...

    def removed(self, entries: Sequence[int]) -> None:
        """Release the pages beside entries that leave the cache."""

    def renamed(self, sources: Index, targets: Index) -> None:
        """Follow entries that were renamed."""

    def resize_entries(self, num_entries: int) -> None:
        """Follow the pool of entries to another number of pages; none that is removed may be an entry."""


class PrefixCache:
    """Full pages that are found again by their tokens and all tokens before them (see `PrefixIndex`).

    The cache is a holder of its pages like any slot. A page whose only holder is the cache is idle: it is
    found and shared again, or evicted, least recently used first, when pages run short.

    With a pool of the `host`, evicted pages come to rest there: they are found as before, and copied back for
    a request that needs them, which pays as far as copying a page is cheaper than computing it. Any other use
    of that pool takes precedence. A page is in one place at a time: one that was brought back is copied out
    again if it is evicted again, so that no two copies have to be kept equal.

    The pages here are those of group 0 (`groups`); other groups have pages `beside` them.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        host: PagePool | None = None,
        beside: Sequence[PagesBeside] = (),
    ) -> None:
        self._pool = pool
        self._host = host
        self._page_size = page_size
        num_host_pages = 0 if host is None else host.num_pages
        self.index = PrefixIndex(pool.num_pages, num_host_pages, page_size)
        self._idle = EvictionOrder(pool.num_pages)  # least recently used first
        # [P] whether a page was moved to the front of that order; it may no longer be idle
        self._goes_first = np.zeros(pool.num_pages, dtype=np.bool_)
        self._resting: OrderedDict[int, None] = OrderedDict()  # names in `index`, in the same order
        self._beside = beside
        for group in beside:
            group.announce = partial(self._tell, group)
        self._version = 0
        self.listener = PageListener()
        self.lookups: Counter[Lookup] = Counter()  # outcomes of the lookups of new requests
        # Keys that were evicted recently, the oldest first
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._most_evicted = pool.num_pages + num_host_pages

    @property
    def version(self) -> int:
        """A number that changes whenever what can be found changes."""
        return self._version + sum(each.changes for each in self._beside)

    @property
    def keeps_states(self) -> bool:
        """Whether a prefix can be resumed from only where a recurrent state stands behind it."""
        return any(not group.window for group in self._beside)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_host_pages(self) -> int:
        """Number of usable pages of the host's pool."""
        return 0 if self._host is None else self._host.num_pages - 1

    @property
    def num_resting(self) -> int:
        """Number of pages of the host's pool that the cache holds."""
        return len(self._resting)

    @property
    def pages(self) -> Index:
        """The pages that the cache holds on the device, idle or in use."""
        names = self.index.names
        return names[names > 0]

    @property
    def idle_pages(self) -> Index:
        """Idle pages, the next to be evicted first."""
        return self._idle.pages

    @property
    def resting_pages(self) -> Index:
        """Pages of the host's pool that the cache holds, the next to be dropped first."""
        return -np.fromiter(self._resting, dtype=np.int64, count=len(self._resting))

    def is_cached(self, pages: Index) -> NDArray[np.bool_]:
        """Which of these pages the cache holds."""
        return self.index.has(pages)

    def find(self, keys: Sequence[bytes], tokens: TokenIds, salt: str, held: Index = EMPTY) -> Index:
        """Return the cached pages that continue the pages `held`, as far as `tokens` match without a gap.

        `keys` and `tokens` are a request's from its start, and either may go on beyond the other. Pages of
        the device come first; a value -h after
        them stands for page h of the host, to be shared once it is brought back. The call neither holds the
        pages nor renews them.
        """
        return self.index.find(keys, tokens, salt, held)

    def has_known(self, key: bytes) -> bool:
        """Whether a page with this key is cached, or was evicted a short time ago."""
        return key in self._evicted or self.index.page_of(key) is not None

    def evict_first(self, pages: Index) -> None:
        """Let the last of these pages, which continue each other, be evicted before all others.

        Pages that others continue keep their places, since no page is evicted before those that continue it.
        """
        pages = pages[self.is_cached(pages)]
        self._move_to_front([self._lone(pages)])

    def _lone(self, pages: Index) -> Index:
        """Return the idle ones of the last of these pages that no others continue, the last page first."""
        lone = pages[len(pages) - self.index.num_lone(pages) :]
        lone = lone[lone > 0]
        return lone[self._idle.has(lone)][::-1]

    def _move_to_front(self, parts: Sequence[Index]) -> None:
        pages = np.concatenate([EMPTY, *parts])
        self._goes_first[pages] = True
        self._idle.move_to_front(pages)

    def _choose(self, count: int) -> None:
        """Move at least `count` pages to the front of the eviction order, by when they are expected again.

        Whole prefixes are chosen, the one first whose end is expected to be needed last: once a prefix has
        lost its last page, it cannot be resumed from its end, and its other pages are worth little.
        """
        first = self._idle.first(count)
        parts = [first[self._goes_first[first]]]
        if len(parts[0]) == count:
            return
        entries = np.concatenate([EMPTY, *(group.least_expected() for group in self._beside)])
        entries = entries[entries > 0]
        entries = entries[self._idle.has(entries)]
        if not len(entries):
            return
        short = max(count - len(parts[0]), CHOSEN_AT_ONCE)
        for entry in entries[self.index.are_last(entries)].tolist():
            parts.append(self._lone(self.index.chain(entry)))
            short -= len(parts[-1])
            if short <= 0:
                break
        self._move_to_front(parts)

    def count_lookup(
        self, keys: Sequence[bytes], tokens: TokenIds, salt: str, matched: Index, num_usable: int
    ) -> None:
        """Count a lookup as "whole" if it found all it could use, or by the reason why it ended earlier.

        The request could use the pages of the first `num_usable` keys; those `matched` were found.
        """
        at = len(matched)
        if at == num_usable:
            found: Lookup = "whole" if num_usable else "too_short"
        elif keys[at] in self._evicted:
            found = "evicted"
        elif self._beside and self.index.page_of(keys[at]) is not None:
            # The page is cached, but what other layers keep of the tokens before it is gone
            found = self._beside[0].gone
        else:
            found = self.index.why_missed(tokens, salt, matched)
        self.lookups[found] += 1

    def everything_beside(self) -> list[tuple[list[bytes], int, int]]:
        """Return for each other group the keys that have a page beside them, its number and its window."""
        names = self.index.names
        return [
            ([*map(self.index.key, names[group.is_here(names)].tolist())], group.number, group.window)
            for group in self._beside
        ]

    def share(self, pages: Index) -> None:
        """Give each of these held pages, cached or not, one more holder."""
        self._idle.remove(pages[self._idle.has(pages)])
        self._goes_first[pages] = False
        self._pool.share(pages)

    def release(self, pages: Index) -> None:
        """Remove a slot's hold from its pages, given in the order of its tokens.

        Pages that only the cache still holds become idle. The last of a chain is the first to be evicted, so
        that no page outlives the page it depends on.
        """
        pages = pages[::-1]
        self._goes_first[pages] = False
        self._pool.release(pages)
        self._idle.append(pages[(self._pool.holders[pages] == 1) & self.is_cached(pages)])

    def publish(self, keys: Sequence[bytes], tokens: TokenIds, pages: Index, first: int, salt: str) -> Index:
        """Make pages `first` and up of a request findable; return the pages that now stand for them.

        `keys`, `tokens` and `pages` are the request's from its start, `pages` ending with the last to
        publish; their keys and values have been computed. If an equal page is cached already, that one is
        returned in its place, and the caller should hold it instead of its own. Nothing is published after a
        page that was forgotten.
        """
        index, size, count = self.index, self._page_size, len(pages)
        parent = index.tail(pages[:first])
        new_keys, new_pages = keys[first:count], pages[first:]
        if parent is None or not len(new_pages):
            return new_pages
        content = tokens[first * size : count * size].reshape(len(new_pages), size)
        if not index.uses(new_keys):
            self._insert(new_keys, content, new_pages, parent, salt)
            self.listener.stored(new_keys, content, _before(keys, first), salt)
            return new_pages
        standing, previous = new_pages.copy(), pages[:first][-1:]
        for at, key in enumerate(new_keys):
            own = new_pages[[at]]
            equal = self._equal(key, content[at], parent, salt)
            if index.tail(previous) != parent:
                break  # the page that gave up this key preceded it in the same chain
            if equal is None:
                self._insert([key], content[[at]], own, parent, salt)
                self.listener.stored([key], content[[at]], _before(keys, first + at), salt)
            elif equal < 0:  # it was computed again while it rested
                self._wake(np.array([equal]), own)
            else:
                standing[at] = equal
            previous = standing[[at]]
            parent = index.tail(previous)
            assert parent is not None, "a page that stands is cached"
        return standing

    def forget(self, pages: Index) -> list[bytes]:
        """Remove wrong pages, and all pages that continue them, from the cache; return their keys.

        Pages that are not cached are ignored.
        """
        lost = self.index.with_what_follows(pages)
        return self._remove(np.array(lost, dtype=np.int64)) if lost else []

    def forget_all(self) -> None:
        """Remove all pages from the cache, in this pool and in the host's."""
        self.forget(self.index.names)

    def evict(self, count: int) -> PageCopy | None:
        """Free the `count` least recently used idle pages.

        As many of them as fit into the host's pool, the most recently used ones, come to rest there. The copy
        that takes them out is returned, and must be made before anything else is written to them.
        """
        assert count <= len(self._idle), f"asked to evict {count} pages, {len(self._idle)} are idle"
        room = 0 if self._host is None else min(count, self._host.num_free + len(self._resting))
        if self._beside:
            self._choose(count)
        pages = self._idle.first(count)
        if room < count:
            self._drop(pages[: count - room])
        return self._rest(pages[count - room :]) if room else None

    def keep(self, names: Index) -> None:
        """Protect these resting pages, which are about to be brought back."""
        for name in names.tolist():
            del self._resting[name]

    def bring_back(self, names: Index, pages: Index) -> PageCopy:
        """Replace kept resting pages by these device pages, which the caller holds.

        Returns the copy that brings their content back, which must be made before the pages are read.
        """
        self._wake(names, pages)
        return PageCopy(-names, pages, "from_host")

    def take_in(
        self, keys: Sequence[bytes], tokens: TokenIds, matched: Index, count: int, salt: str
    ) -> Index:
        """Let up to `count` pages that continue `matched` rest in the host's pool.

        `keys` and `tokens` are a request's from its start. Their content comes from elsewhere. Returns the
        host's pages taken for them, as many as fit beside the matched ones; they must be written before they
        are read.
        """
        assert self._host is not None, "there is no host pool"
        first, size = len(matched), self._page_size
        parent, resting = self.index.tail(matched), matched[matched < 0]
        room = self._host.num_free + len(self._resting) - len(resting)
        new = list(keys[first : first + min(count, room)])
        while self.index.uses(new):  # a page with other content has the key of one of them
            del new[-1]
        if parent is None or not new:
            return EMPTY
        for name in resting[::-1].tolist():  # none of the matched pages is dropped for them
            self._resting.move_to_end(name)
        has_room = self.yield_host(len(new))
        assert has_room, f"{len(new)} pages find no room in the host's pool"
        pages = self._host.take(len(new))
        content = tokens[first * size : (first + len(new)) * size].reshape(len(new), size)
        self.index.insert(new, content, -pages, parent, salt)
        # The last page of the chain is dropped first, and all new pages before those that they continue
        self._resting.update(dict.fromkeys((-pages[::-1]).tolist()))
        for name in resting[::-1].tolist():
            self._resting.move_to_end(name)
        for key in new:
            self._evicted.pop(key, None)
        self._version += 1
        self.listener.stored(new, content, _before(keys, first), salt)
        return pages

    def yield_host(self, count: int) -> bool:
        """Drop resting pages until `count` host pages are free.

        Returns False, with none dropped, if impossible.
        """
        assert self._host is not None, "there is no host pool"
        short = count - self._host.num_free
        if short > len(self._resting):
            return False
        if short > 0:
            self._drop(np.fromiter(islice(self._resting, short), dtype=np.int64, count=short))
        return True

    def move(self, sources: Index, targets: Index) -> None:
        """Follow pages that were moved from `sources` to `targets`."""
        cached = self.is_cached(sources)
        sources, targets = sources[cached], targets[cached]
        self._rename(sources, targets)
        self._idle.rename(sources, targets)
        self._goes_first[targets] = self._goes_first[sources]
        self._version += 1

    def resize(self, num_pages: int) -> None:
        """Follow the pool to another number of pages; no page that is removed may be cached."""
        self.index.resize(num_pages)
        self._idle.resize(num_pages)
        goes_first = self._goes_first[:num_pages]
        self._goes_first = np.pad(goes_first, (0, num_pages - len(goes_first)))
        for group in self._beside:
            group.resize_entries(num_pages)
        self._most_evicted = num_pages + (0 if self._host is None else self._host.num_pages)

    def _equal(self, key: bytes, tokens: TokenIds, parent: int, salt: str) -> int | None:
        """Return the cached page with this key and content; a page with other content loses the key."""
        page = self.index.page_of(key)
        if page is None or self.index.is_same(page, tokens, parent, salt):
            return page
        self.forget(np.array([page]))  # two prefixes have the same key: the later one replaces the other
        return None

    def _insert(
        self,
        keys: Sequence[bytes],
        tokens: TokenIds,
        pages: Index,
        parent: int,
        salt: str,
    ) -> None:
        """Hold pages [n] of `tokens` [n, B] that continue each other, under unused keys."""
        self.index.insert(keys, tokens, pages, parent, salt)
        self._pool.share(pages)
        if not self._evicted.keys().isdisjoint(keys):
            for key in keys:
                self._evicted.pop(key, None)
        self._version += 1

    def _rest(self, sources: Index) -> PageCopy:
        """Move idle pages to the host, in their order of eviction; resting pages give way to them."""
        assert self._host is not None, "there is no host pool"
        has_room = self.yield_host(len(sources))
        assert has_room, f"{len(sources)} pages find no room in the host's pool"
        targets = self._host.take(len(sources))
        self._rename(sources, -targets)
        self._idle.remove(sources)
        self._resting.update(dict.fromkeys((-targets).tolist()))
        self._pool.release(sources)
        self._version += 1
        return PageCopy(sources, targets, "to_host")

    def _wake(self, names: Index, pages: Index) -> None:
        """Replace resting pages by held pages of the device, and free their host pages."""
        assert self._host is not None, "there is no host pool"
        for name in names.tolist():
            self._resting.pop(name, None)
        self._rename(names, pages)
        self._pool.share(pages)
        self._host.release(-names)
        self._version += 1

    def _rename(self, sources: Index, targets: Index) -> None:
        """Rename entries, and what lies beside them."""
        self.index.rename(sources, targets)
        for group in self._beside:
            group.renamed(sources, targets)

    def _tell(self, group: PagesBeside, is_stored: bool, names: Index) -> None:
        """Tell the listener of pages of a group that lie beside these entries from now on, or no longer."""
        keys = [*map(self.index.key, names.tolist())]
        if is_stored:
            self.listener.stored_beside(keys, group.number, group.window)
        else:
            self.listener.removed_beside(keys, group.number)

    def _drop(self, names: Index) -> None:
        """Remove cached pages for lack of room."""
        self._evicted.update(dict.fromkeys(self._remove(names)))
        for _ in range(len(self._evicted) - self._most_evicted):
            self._evicted.popitem(last=False)

    def _remove(self, names: Index) -> list[bytes]:
        """Remove cached pages and release them; return their keys."""
        for group in self._beside:
            group.removed(names.tolist())
        keys = self.index.remove(names)
        on_device = names[names > 0]
        self._idle.remove(on_device[self._idle.has(on_device)])
        self._pool.release(on_device)
        if self._host is not None:
            resting = names[names < 0]
            for name in resting.tolist():
                self._resting.pop(name, None)
            self._host.release(-resting)
        self._version += 1
        self.listener.removed(keys)
        return keys


def _before(keys: Sequence[bytes], at: int) -> bytes | None:
    return keys[at - 1] if at else None
