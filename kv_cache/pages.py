"""Count the holders of each page, and hand out the pages that nobody holds.

A page has no owner: rows of the slot table and the prefix cache hold it together, and it is free when the
last of them releases it. The content of pages is in `storage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]

NULL_PAGE = 0  # never handed out: a legal page number for padding and for unused rows


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Whole pages of one group to copy in all its layers, sources[i] to targets[i].

    Within the device, sources and targets are disjoint.

    With a tier below, `to_tier` copies pages of the device there, under `keys`; `from_tier` writes what was
    found there to pages of the host; `off_tier` removes pages that turned out wrong, and lists only their
    keys.
    """

    sources: Index
    targets: Index
    way: Literal["within", "to_host", "from_host", "to_tier", "from_tier", "off_tier"] = "within"
    keys: tuple[bytes, ...] = ()  # keys of pages that go to the tier or are removed from it
    group: int = 0  # whose pages these are, see `groups`


class PagePool:
    """Counts the holders of every page, and keeps a stack of the free pages.

    A holder is a slot or the prefix cache; the pool does not know which. `holders[page]` is the count; a page
    with none is free. The pages given to one call are distinct, because a slot never holds a page twice.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(
                f"a pool of {num_pages} pages has none to give beside the null page; use 2 or more"
            )
        self.num_pages = num_pages
        self.holders = np.zeros(num_pages, dtype=np.int32)
        self.holders[NULL_PAGE] = 1
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int64)  # low pages are handed out first
        self._num_free = num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def free_pages(self) -> Index:
        """A copy of the free pages, in no particular order."""
        return self._free[: self._num_free].copy()

    def take(self, count: int) -> Index:
        """Hand out `count` free pages, each held once, by the caller."""
        assert 0 <= count <= self._num_free, f"asked for {count} pages, {self._num_free} are free"
        rest = self._num_free - count
        pages = self._free[rest : self._num_free][::-1].copy()
        self._num_free = rest
        self.holders[pages] = 1
        return pages

    def share(self, pages: Index) -> None:
        """Add one holder to each of these held pages."""
        held = self.holders[pages]
        assert (held > 0).all(), f"shared pages that nobody holds: {pages[held <= 0].tolist()}"
        self.holders[pages] = held + 1

    def release(self, pages: Index) -> None:
        """Remove one holder from each of these pages; those without any become free."""
        left = self.holders[pages] - 1
        is_right = left.min(initial=0) >= 0 and pages.all()  # the null page is 0
        wrong = pages if is_right else pages[(left < 0) | (pages == NULL_PAGE)]
        assert is_right, f"released pages that nobody holds: {wrong.tolist()}"
        self.holders[pages] = left
        freed = pages[left == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)

    @property
    def num_held(self) -> int:
        """Number of held pages, without the null page."""
        return self.num_pages - 1 - self._num_free

    @property
    def highest_held(self) -> int:
        """The held page with the highest number; 0 if none is held."""
        return int(np.flatnonzero(self.holders)[-1])

    def scattered(self, count: int) -> tuple[Index, Index]:
        """Return held pages and free pages to move them to, so that held pages become dense at the low end.

        There are at most `count` moves. Every source lies above `num_held` and every target at or below it,
        so the two sets are disjoint and all copies may be made at once.
        """
        dense = self.num_held
        sources = np.flatnonzero(self.holders[dense + 1 :]) + dense + 1
        count = min(count, len(sources))
        targets = np.flatnonzero(self.holders[: dense + 1] == 0)[:count]
        return sources[len(sources) - count :], targets

    def move(self, sources: Index, targets: Index) -> None:
        """Transfer the holders of each source page to its target page, which was free."""
        assert (self.holders[sources] > 0).all(), "moved a page that nobody holds"
        assert not self.holders[targets].any(), "moved a page onto one that is held"
        self.holders[targets] = self.holders[sources]
        self.holders[sources] = 0
        self._recount_free()

    def resize(self, num_pages: int) -> None:
        """Add free pages at the high end, or remove pages there that nobody holds."""
        assert num_pages > self.highest_held, (
            f"page {self.highest_held} is held; {num_pages} pages end before it"
        )
        holders = np.zeros(num_pages, dtype=np.int32)
        kept = min(num_pages, self.num_pages)
        holders[:kept] = self.holders[:kept]
        self.holders, self.num_pages = holders, num_pages
        self._free = np.empty(num_pages - 1, dtype=np.int64)
        self._recount_free()

    def _recount_free(self) -> None:
        free = np.flatnonzero(self.holders == 0)[::-1]
        self._free[: len(free)] = free
        self._num_free = len(free)
