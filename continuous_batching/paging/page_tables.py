"""Keep the page tables of each row (a slot of the batch), and the reference counts of their pages.

A row has a table of group 0, for full attention, and one for each group of sliding-window layers
(`kv_cache/groups.py`). They grow, are shared and are released together, so that few callers need to know the
groups. This covers growth, sharing, copy on write after a fork, freeing pages behind a window, compaction and
resizing. Matching prompts against the cache is left to `prefix_matching`, and the choice of whom to preempt
to the scheduler.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from continuous_batching.batch import ragged_ranges
from continuous_batching.counters import Counters
from continuous_batching.slots import SlotPool
from kv_cache.groups import WindowGroup
from kv_cache.pages import Index, PageCopy, PagePool
from kv_cache.prefix_cache import PrefixCache

EMPTY: Index = np.empty(0, dtype=np.int64)


class PageTables:
    """The page tables of all rows, changed together with the holders of their pages.

    After every change the holders of a page are the rows whose table names it, and the prefix cache if it is
    cached. Copies that the device must make are collected until the next batch takes them. `groups` are those
    of windows; what is said of pages without a group is said of group 0.
    """

    def __init__(self, slots: SlotPool, pool: PagePool, prefix: PrefixCache, counters: Counters) -> None:
        self.slots = slots
        self.pool = pool
        self.prefix = prefix
        self._counters = counters
        self.groups = prefix.groups
        self._copies: list[PageCopy] = []
        self.pinned: Index = EMPTY  # pages that must not be moved
        self.forked: set[int] = set()  # rows whose last page may be shared with the rows they forked from
        # Row of a beam that waits for its leader -> number of pages to share
        self.waiting_beams: dict[int, int] = {}

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated without preempting a row."""
        return self.pool.num_free + self.prefix.num_idle

    def pages_for(self, tokens: Index) -> Index:
        """Return the number of pages that hold `tokens` tokens."""
        return -(-tokens // self.slots.page_size)

    def missing(self, rows: Index, stops: Index) -> Index:
        """Return the number of pages that each row lacks for its first `stops` tokens."""
        lacking: Index = np.maximum(self.pages_for(stops) - self.slots.num_pages[rows], 0)
        return lacking

    def num_copies(self, rows: Index) -> int:
        """Return the number of pages that these rows need for copy on write after a fork."""
        if not self.forked:
            return 0
        pages = [self._written_page(row) for row in rows.tolist() if row in self.forked]
        holders = self.pool.holders
        return sum(min(count, int(holders[page]) - 1) for page, count in Counter(pages).items())

    def fitting(self, rows: Index, starts: Index, stops: Index) -> Index:
        """Return how far spans may go with the available pages of windows (see `WindowGroup.fitting`)."""
        for group in self.groups:
            stops = group.fitting(rows, starts, stops, group.num_shared(*self._forked_among(rows)))
        return stops

    def can_go_on(self, rows: Index) -> bool:
        """Whether each of these rows can compute at least its next token without a preemption.

        A row that lacks pages for all of its known tokens may need pages of group 0 for all of them, and of a
        window at most one more, since its spans are shortened to those that fit.
        """
        stops, forked = self.slots.num_tokens[rows] + 1, len(self.forked)
        if int(self.missing(rows, stops).sum()) + forked > self.num_available:
            return False
        return all(
            int(np.minimum(group.missing(rows, stops), 1).sum()) + forked <= group.num_available
            for group in self.groups
        )

    def has_free(self, rows: Index, stops: Index, longer: Index) -> bool:
        """Whether pages that are free and promised to nobody let spans end at `longer` in place of `stops`.

        Nothing is evicted for them. A group in which they need no more pages is not asked.
        """
        extra = int((self.missing(rows, longer) - self.missing(rows, stops)).sum())
        if extra and extra > self.pool.num_free - self.num_promised():
            return False
        for group in self.groups:
            extra = int((group.missing(rows, longer) - group.missing(rows, stops)).sum())
            if extra and extra > group.pool.num_free - self.promised_of(group):
                return False
        return True

    def num_promised(self) -> int:
        """Return how many pages busy rows will still need for their known tokens or their reservation."""
        slots, busy = self.slots, self.slots.busy
        wanted = self.pages_for(np.maximum(slots.reserved[busy], slots.num_tokens[busy]))
        promised = int(np.maximum(wanted - slots.num_pages[busy], 0).sum()) + len(self.forked)
        return promised - sum(self.waiting_beams.values())

    def promised_of(self, group: WindowGroup) -> int:
        """Return what `num_promised` does, for a group of windows."""
        slots, busy = self.slots, self.slots.busy
        tokens = np.maximum(slots.reserved[busy], slots.num_tokens[busy])
        promised = int(group.promised(busy, tokens).sum()) + len(self.forked)
        size = slots.page_size
        return promised - sum(group.needed(count * size) for count in self.waiting_beams.values())

    def free_behind(self) -> None:
        """Give back the pages of windows that no query of a row will see, once they have been published.

        The next query of a row stands at its first token that is not computed. Pages that are still to be
        published stay, so that what is found again does not depend on how a prompt was cut.
        """
        if not self.groups:
            return
        slots, busy = self.slots, self.slots.busy
        computed = slots.num_computed[busy]
        published = np.where(
            slots.num_published[busy] < slots.num_shareable[busy], slots.num_published[busy], slots.max_pages
        )
        for group in self.groups:
            group.free_behind(busy, np.minimum(group.first_seen(computed), published))

    def grow_to(self, rows: Index, stops: Index) -> bool:
        """Give each row the pages for its first `stops` tokens.

        Returns False, with nothing changed, if there are too few.
        """
        missing = self.missing(rows, stops)
        total = int(missing.sum())
        if total + self.num_copies(rows) > self.num_available:
            return False
        forked = self._forked_among(rows)
        lacking = [group.missing(rows, stops) for group in self.groups]
        for group, counts in zip(self.groups, lacking):
            if int(counts.sum()) + group.num_shared(*forked) > group.num_available:
                return False
        for group, counts in zip(self.groups, lacking):
            self._copies += group.copy_on_write(*forked)
            self._copies += group.grow(rows, counts)
        if total or self.forked:
            self.grow(rows, missing)
        return True

    def grow(self, rows: Index, counts: Index) -> None:
        """Give each row `counts` more pages, and a copy of the page that it writes if that page is shared.

        Idle cached pages are evicted if too few pages are free. Only group 0 grows here.
        """
        slots = self.slots
        total = int(counts.sum())
        short = total + self.num_copies(rows) - self.pool.num_free
        if short > 0:
            self.evict(short)
        if self.forked:
            self._copy_on_write([row for row in rows.tolist() if row in self.forked])
        if not total:
            return
        growing = counts > 0
        rows, counts = rows[growing], counts[growing]
        held = slots.num_pages[rows]
        if total == len(rows):  # one page each, the usual case of decodes
            owners, indexes = rows, held
        else:
            owners, indexes = np.repeat(rows, counts), ragged_ranges(held, held + counts)
        slots.page_table[owners, indexes] = self.pool.take(total)
        slots.num_pages[rows] = held + counts

    def resumable(self, entries: Index, row: int | None = None) -> Index:
        """Return the first of these cached pages, up to the last from which every window can be resumed.

        They are those of a request's start, or continue the pages of a row. Nothing was promised to such a
        row for copies of resting pages.
        """
        if not self.groups or not len(entries):
            return entries
        held = 0 if row is None else int(self.slots.num_pages[row])
        able = []
        for group in self.groups:
            first = 0 if row is None else int(group.first[row])
            able.append(group.resumable(entries, held, first, rests=row is None))
        longest = int(np.flatnonzero(np.logical_and.reduce(able))[-1])
        return entries[: max(0, longest - held)]

    def resume(self, row: int, entries: Index) -> None:
        """Let a row go on after these cached pages in the groups of windows.

        `extend` shares those of group 0.
        """
        for group in self.groups:
            self._copies += group.resume(row, entries)

    def publish(self, row: int, first: int, entries: Index) -> None:
        """Let the row's pages of windows from page `first` on be found beside these cached entries."""
        if self.groups:
            is_cached = self.prefix.is_cached(entries)
            for group in self.groups:
                group.publish(row, first, entries, is_cached)

    def extend(self, row: int, pages: Index) -> None:
        """Append these held pages to a row, sharing them."""
        slots = self.slots
        held = int(slots.num_pages[row])
        count = held + len(pages)
        self.prefix.share(pages)
        slots.page_table[row, held:count] = pages
        slots.num_pages[row] = count

    def bring_back(self, row: int, names: Index) -> None:
        """Append these resting pages (see `PrefixCache.find`) to a row, each copied to a new page."""
        held, count = self.slots.num_pages[row], len(names)
        self.prefix.keep(names)
        self.grow(np.array([row]), np.array([count]))
        self.copy(self.prefix.bring_back(names, self.slots.pages(row)[held:]))
        self._counters.promoted_pages += count

    def evict(self, count: int) -> None:
        """Evict the least recently used idle cached pages; the host pool takes as many as it can."""
        copy = self.prefix.evict(count)
        self._counters.evicted_pages += count
        if copy is not None:
            self._counters.rested_pages += len(copy.sources)
            self.copy(copy)

    def fork(self, source: int, row: int, num_tokens: int) -> None:
        """Share the pages of a row's first tokens with another row, replacing what that row held.

        If the last page is not full, the first of the two rows that writes to it copies it.
        """
        slots = self.slots
        old, new = slots.pages(row), slots.pages(source)[: -(-num_tokens // slots.page_size)]
        width = min(len(old), len(new))
        kept = int(np.append(old[:width] != new[:width], True).argmax())  # pages that both rows hold already
        slots.num_pages[row] = kept
        self.extend(row, new[kept:])
        self.prefix.release(old[kept:])
        for group in self.groups:
            group.fork(source, row, -(-num_tokens // slots.page_size))
        self.forked.discard(row)
        if num_tokens % slots.page_size:
            self.forked |= {source, row}

    def replace(self, row: int, indexes: Index, pages: Index) -> None:
        """Replace the pages at `indexes` by `pages`, which the row holds already.

        The old pages are released.
        """
        old = self.slots.page_table[row, indexes].astype(np.int64)
        self.slots.page_table[row, indexes] = pages
        self.prefix.release(old)

    def clear(self, row: int) -> None:
        """Release all pages of a row."""
        self.forked.discard(row)
        self.prefix.release(self.slots.pages(row))
        self.slots.num_pages[row] = 0
        for group in self.groups:
            group.clear(row)

    def compact(self, max_pages: int) -> int:
        """Move at most `max_pages` held pages of each group towards the low end.

        Returns the most that moved of one group.
        """
        sources, targets = self.pool.scattered(max_pages)
        if len(self.pinned):
            may_move = ~np.isin(sources, self.pinned)
            sources, targets = sources[may_move], targets[may_move]
        if len(sources):
            self.pool.move(sources, targets)
            self.prefix.move(sources, targets)
            self.slots.rename_pages(sources, targets, self.pool.num_pages)
            self.copy(PageCopy(sources, targets))
            self._counters.compacted_pages += len(sources)
        moved = len(sources)
        for group in self.groups:
            copy = group.compact(max_pages)
            if copy is not None:
                self.copy(copy)
                moved = max(moved, len(copy.sources))
        return moved

    def resize(self, num_pages: int) -> None:
        """Change the number of pages; the held pages must fit, and must have been moved to the low end.

        Pools of windows keep their size.
        """
        self.pool.resize(num_pages)
        self.prefix.resize(num_pages)

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

    def _written_page(self, row: int) -> int:
        """Return the page that the row's next token is written to."""
        return int(self.slots.page_table[row, self.slots.num_computed[row] // self.slots.page_size])

    def _copy_on_write(self, rows: list[int]) -> None:
        """Give each row that is about to write to a shared page a copy of it.

        The last holder keeps the original.
        """
        sources, targets = [], []
        for row in rows:
            page = self._written_page(row)
            if self.pool.holders[page] > 1:
                own = self.pool.take(1)
                sources.append(page)
                targets.append(int(own[0]))
                self.replace(row, self.slots.num_computed[[row]] // self.slots.page_size, own)
        self.forked.difference_update(rows)
        if sources:
            self._counters.copied_pages += len(sources)
            self.copy(PageCopy(np.array(sources), np.array(targets)))


class Compaction:
    """Compacts every `every_steps` steps, and moves at most `pages_per_step` pages a step (0: all)."""

    def __init__(self, tables: PageTables, every_steps: int, pages_per_step: int) -> None:
        self._tables = tables
        self._every_steps = every_steps
        self._pages_per_step = pages_per_step or tables.pool.num_pages
        self._going_on = False

    def step(self, num_steps: int) -> None:
        """Move the pages that are due after `num_steps` steps."""
        if num_steps % self._every_steps == 0:
            self._going_on = True
        if self._going_on:
            self._going_on = self._tables.compact(self._pages_per_step) == self._pages_per_step
