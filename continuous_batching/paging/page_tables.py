"""Keep the page tables of each row (a slot of the batch), and the reference counts of their pages.

A row has a table of each group of layers (`kv_cache/groups.py`). The tables grow, are shared and are released
together, so that few callers need to know the groups. This covers growth, sharing, copy on write after a
fork, freeing pages behind a window, compaction and resizing. Matching prompts against the cache is left to
`prefix_matching`, and the choice of whom to preempt to the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from continuous_batching.slots import SlotPool
from kv_cache.groups import BesideGroup, FullGroup, PageGroup
from kv_cache.pages import Index, PageCopy
from kv_cache.prefix_cache import PrefixCache
from kv_cache.states import StateGroup

EMPTY: Index = np.empty(0, dtype=np.int64)


class PageTables:
    """The page tables of all rows, changed together with the holders of their pages.

    After every change the holders of a page are the rows whose table names it, and the prefix cache if it is
    cached. Copies that the device must make are collected until the next batch takes them. The pages of the
    first of the `groups`, `full`, are the entries of the prefix cache, the others' are found `beside` them.
    """

    def __init__(
        self, slots: SlotPool, prefix: PrefixCache, full: FullGroup, beside: Sequence[BesideGroup]
    ) -> None:
        self.slots = slots
        self.prefix = prefix
        self.groups: tuple[PageGroup, ...] = (full, *beside)
        self.beside = beside
        self._freeing = [group for group in self.groups if group.gives_back]
        self.states: StateGroup | None = None
        for group in beside:
            if isinstance(group, StateGroup):
                self.states, slots.state_pages = group, group.live
        slots.window_tables = tuple(group.table for group in beside if not group.is_of_rows)
        self._copies: list[PageCopy] = []
        self.forked: set[int] = set()  # rows whose last page may be shared with the rows they forked from
        # Counts the pages of group 0 that rows still need and will share with rows that hold them
        self.num_to_share: Callable[[], int] = int
        # Row of a beam that waits for its leader -> number of pages to share
        self.waiting_beams: dict[int, int] = {}

    @property
    def must_stop_to_fork(self) -> bool:
        """Whether a row must not have gone further than where another is to fork from it.

        It would have given back pages, or have changed its state.
        """
        return bool(self._freeing) or self.states is not None

    def fitting(self, rows: Index, starts: Index, stops: Index) -> Index:
        """Return how far spans may go with the available pages (see `PageGroup.fitting`)."""
        if not self._freeing:
            return stops
        forked = self._forked_among(rows)
        for group in self._freeing:
            stops = group.fitting(rows, starts, stops, group.num_shared(*forked))
        return stops

    def can_go_on(self, rows: Index) -> bool:
        """Whether each of these rows can compute at least its next token without a preemption.

        Where a group has one page for each row, there is always one.
        """
        stops, forked = self.slots.num_tokens[rows] + 1, len(self.forked)
        return all(
            group.is_of_rows or int(group.least(rows, stops).sum()) + forked <= group.num_available
            for group in self.groups
        )

    def has_free(self, rows: Index, stops: Index, longer: Index) -> bool:
        """Whether pages that are free and promised to nobody let spans end at `longer` in place of `stops`.

        Nothing is evicted for them, and nobody preempted: spans may take more of a window than was promised.
        A group in which they need no more pages is not asked.
        """
        for group in self.groups:
            own = int(group.missing(rows, stops).sum())
            extra = int(group.missing(rows, longer).sum()) - own
            if extra > 0:
                taken = max(self.num_promised(group), own + len(self.forked))
                if extra > group.pool.num_free - taken:
                    return False
        return True

    def num_spare(self) -> Index:
        """Return the number of available pages of each group that are promised to nobody."""
        return np.array([group.num_available - self.num_promised(group) for group in self.groups])

    def num_promised(self, group: PageGroup) -> int:
        """Return how many pages busy rows will still need for their known tokens or their reservation.

        Pages that they will share with rows that hold them are not counted.
        """
        slots, busy = self.slots, self.slots.busy
        tokens = np.maximum(slots.reserved[busy], slots.num_tokens[busy])
        promised = int(group.promised(busy, tokens).sum())
        if group.is_of_rows:
            return promised
        promised += len(self.forked)
        if group is self.groups[0]:
            promised -= self.num_to_share()
        size = slots.page_size
        return promised - sum(group.needed(count * size) for count in self.waiting_beams.values())

    def free_behind(self) -> None:
        """Give back the pages that no query of a row will see, once they have been published.

        The next query of a row stands at its first token that is not computed. Pages that are still to be
        published stay, so that what is found again does not depend on how a prompt was cut.
        """
        if not self._freeing:
            return
        slots, busy = self.slots, self.slots.busy
        computed = slots.num_computed[busy]
        published = np.where(
            slots.num_published[busy] < slots.num_shareable[busy], slots.num_published[busy], slots.max_pages
        )
        for group in self._freeing:
            group.free_behind(busy, np.minimum(group.first_seen(computed), published))

    def grow_to(self, rows: Index, stops: Index) -> bool:
        """Give each row the pages for its first `stops` tokens, and a copy of a shared page that it writes.

        Idle cached pages are evicted if too few pages are free. Returns False, with nothing changed, if there
        are too few.
        """
        forked = self._forked_among(rows)
        growing = []
        for group in self.groups:
            if group.is_settled:
                continue
            counts = group.missing(rows, stops)
            total = int(counts.sum()) + (group.num_shared(*forked) if self.forked else 0)
            if total:
                if total > group.pool.num_free and total > group.num_available:
                    return False
                growing.append((group, counts))
        for group, counts in growing:
            self._copies += group.grow(rows, counts, *forked)
        if self.states is not None:
            self.states.give_up(rows)
        self.forked.difference_update(forked[0])
        return True

    def resumable(self, entries: Index, row: int | None = None) -> Index:
        """Return the first of these cached pages, up to the last from which every group can be resumed.

        They are those of a request's start, or continue the pages of a row. Nothing was promised to such a
        row for copies of resting pages.
        """
        if not len(entries):
            return entries
        held = 0 if row is None else int(self.slots.num_pages[row])
        able = []
        for group in self.groups:
            first = 0 if row is None else int(group.first[row])
            able.append(group.resumable(entries, held, first, rests=row is None))
        longest = int(np.flatnonzero(np.logical_and.reduce(able))[-1])
        return entries[: max(0, longest - held)]

    def resume(self, row: int, entries: Index, *, comes_back: bool) -> None:
        """Let a row go on after these cached pages (see `PageGroup.resume`).

        Group 0 comes last, because entries that it brings back from the host have other names afterwards.
        """
        for group in reversed(self.groups):
            self._copies += group.resume(row, entries, comes_back=comes_back)

    def publish(
        self, row: int, first: int, entries: Index, were_found: NDArray[np.bool_]
    ) -> list[tuple[Index, Index]]:
        """Let the row's pages from page `first` on be found by these entries (see `PageGroup.publish`).

        Those that `were_found` before have been published by another sample or beam, with the same pages.
        """
        is_cached = self.prefix.is_cached(entries)
        (new, pages), *beside = [group.publish(row, first, entries, is_cached) for group in self.groups]
        is_new = ~were_found[new]
        return [(new[is_new], pages[is_new]), *beside]

    def evict(self, count: int, group: int = 0) -> None:
        """Evict the least recently used idle cached pages; the host pool takes as many as it can."""
        copy = self.groups[group].evict(count)
        if copy is not None:
            self.copy(copy)

    def fork(self, source: int, row: int, num_tokens: int) -> None:
        """Share the pages of a row's first tokens with another row, replacing what that row held.

        If the last page is not full, the first of the two rows that writes to it copies it.
        """
        for group in self.groups:
            group.fork(source, row, -(-num_tokens // self.slots.page_size))
        self.forked.discard(row)
        if num_tokens % self.slots.page_size:
            self.forked |= {source, row}

    def clear(self, row: int) -> None:
        """Release all pages of a row."""
        self.forked.discard(row)
        for group in self.groups:
            group.clear(row)

    def compact(self, max_pages: int) -> int:
        """Move at most `max_pages` held pages of each group towards the low end.

        Returns the most that moved of one group.
        """
        moved = 0
        for group in self.groups:
            copy = group.compact(max_pages)
            if copy is not None:
                self.copy(copy)
                moved = max(moved, len(copy.sources))
        return moved

    def resize(self, counts: Sequence[int]) -> None:
        """Change the number of pages of each group (see `PageGroup.resize`)."""
        for group, num_pages in zip(self.groups, counts):
            group.resize(num_pages)

    def copy(self, copy: PageCopy) -> None:
        """Have pages copied before the next batch, after all copies requested so far."""
        self._copies.append(copy)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Return the copies requested since the last call, to be made one after the other."""
        copies, self._copies = self._copies, []
        return tuple(copies)

    def _forked_among(self, rows: Index) -> tuple[list[int], list[int]]:
        """Return which rows may write to a shared page, and the index of that page in their requests."""
        if not self.forked:
            return [], []
        forked = [row for row in rows.tolist() if row in self.forked]
        return forked, (self.slots.num_computed[forked] // self.slots.page_size).tolist()


class Compaction:
    """Compacts every `every_steps` steps, and moves at most `pages_per_step` pages a step (0: all)."""

    def __init__(self, tables: PageTables, every_steps: int, pages_per_step: int) -> None:
        self._tables = tables
        self._every_steps = every_steps
        self._pages_per_step = pages_per_step or max(group.pool.num_pages for group in tables.groups)
        self._going_on = False

    def step(self, num_steps: int) -> None:
        """Move the pages that are due after `num_steps` steps."""
        if num_steps % self._every_steps == 0:
            self._going_on = True
        if self._going_on:
            self._going_on = self._tables.compact(self._pages_per_step) == self._pages_per_step
