"""Keep idle pages in the order in which they are evicted.

A long request that ends makes hundreds of pages idle in one step, and a linked list would take as many steps
of the interpreter. Here they are one array: a segment of the order, in which each page has a stamp that is
never used twice. A page that leaves the order loses its stamp and nothing else; its entry is dead from then
on, and is skipped when its segment comes to the front.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kv_cache.pages import Index

_MOST_DEAD = 1024  # dead entries, beside as many as live ones, that are kept before the order is rebuilt
_LEAST_LOOK = 64  # least number of entries of a segment that are compared together
_EMPTY: Index = np.empty(0, dtype=np.int64)


class EvictionOrder:
    """Distinct pages below `num_pages`, the next to be evicted first.

    The arrays given to it are kept, and must not be changed afterwards.
    """

    def __init__(self, num_pages: int) -> None:
        # The stamp of each page's live entry; 0 if there is none
        self._stamp: Index = np.zeros(num_pages, dtype=np.int64)
        self._next = 1
        # The stamp of a segment's first entry, and its pages; the stamps of the others follow without a gap
        self._segments: deque[tuple[int, Index]] = deque()
        self._num_entries = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def pages(self) -> Index:
        """A copy of all pages in their order."""
        live = [pages[self._is_live(stamp, pages)] for stamp, pages in self._segments]
        return np.concatenate([_EMPTY, *live])

    def has(self, pages: Index) -> NDArray[np.bool_]:
        """Which of these pages are in the order."""
        here: NDArray[np.bool_] = self._stamp[pages] > 0
        return here

    def append(self, pages: Index) -> None:
        """Add pages that are not in the order, to be evicted after all others and in this order."""
        if len(pages):
            self._segments.append(self._new(pages))
            self._count += len(pages)
            self._drop_dead()

    def move_to_front(self, pages: Index) -> None:
        """Let pages of the order be evicted before all others, and in this order."""
        if len(pages):
            self._segments.appendleft(self._new(pages))
            self._drop_dead()

    def remove(self, pages: Index) -> None:
        """Take pages of the order out of it."""
        self._stamp[pages] = 0
        self._count -= len(pages)

    def first(self, count: int) -> Index:
        """Return the `count` pages that are to be evicted first."""
        assert count <= self._count, f"asked for {count} pages, {self._count} are in the order"
        found, missing, behind = [_EMPTY], count, []
        while missing:
            stamp, pages = self._segments.popleft()
            look = max(_LEAST_LOOK, missing)
            if look < len(pages):  # the rest of the segment is not compared
                self._segments.appendleft((stamp + look, pages[look:]))
                pages = pages[:look]
            live = np.flatnonzero(self._is_live(stamp, pages))
            if not len(live):
                self._num_entries -= len(pages)
                continue
            self._num_entries -= int(live[0])
            behind.append((stamp + int(live[0]), pages[live[0] :]))
            found.append(pages[live[:missing]])
            missing -= len(found[-1])
        self._segments.extendleft(reversed(behind))
        return np.concatenate(found)

    def rename(self, sources: Index, targets: Index) -> None:
        """Let targets, which are not in the order, take the places of those sources that are."""
        here = self.has(sources)
        if not here.any():
            return
        pages, name_of = self.pages, np.arange(len(self._stamp))
        name_of[sources[here]] = targets[here]
        self._stamp[sources[here]] = 0
        self._rebuild(name_of[pages])

    def resize(self, num_pages: int) -> None:
        """Follow the pool to another number of pages; none that is removed may be in the order."""
        pages = self.pages
        assert int(pages.max(initial=0)) < num_pages, "a page that goes is idle"
        self._stamp = np.zeros(num_pages, dtype=np.int64)
        self._rebuild(pages)  # no dead entry may name a page that goes

    def _is_live(self, stamp: int, pages: Index) -> NDArray[np.bool_]:
        live: NDArray[np.bool_] = self._stamp[pages] == np.arange(stamp, stamp + len(pages))
        return live

    def _new(self, pages: Index) -> tuple[int, Index]:
        """Stamp a new segment of these pages; entries that they have already are dead from now on."""
        stamp = self._next
        self._next += len(pages)
        self._num_entries += len(pages)
        self._stamp[pages] = np.arange(stamp, self._next)
        return stamp, pages

    def _drop_dead(self) -> None:
        """Rebuild the order if most of its entries are dead."""
        if self._num_entries > 2 * self._count + _MOST_DEAD:
            self._rebuild(self.pages)

    def _rebuild(self, pages: Index) -> None:
        """Replace all segments by one of all pages."""
        self._segments.clear()
        self._num_entries = 0
        if len(pages):
            self._segments.append(self._new(pages))
