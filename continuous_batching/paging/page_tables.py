"""Which pages does each row hold, and how do they change?"""

from __future__ import annotations

from collections import Counter

import numpy as np

from continuous_batching.batch import ragged_ranges
from continuous_batching.counters import Counters
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index, PageCopy, PagePool
from kv_cache.prefix_cache import PrefixCache

EMPTY: Index = np.empty(0, dtype=np.int64)


class PageTables:
    """The page table of every row, changed together with the holders of its pages.

    After every change a page's holders are the rows whose table names it, and the prefix cache if it is
    cached. Pages that the device must copy are kept until the next batch takes them.
    """

    def __init__(self, slots: SlotPool, pool: PagePool, prefix: PrefixCache, counters: Counters) -> None:
        self.slots = slots
        self.pool = pool
        self.prefix = prefix
        self._counters = counters
        self._copies: list[PageCopy] = []
        self.pinned: Index = EMPTY  # pages that are never moved
        self.forked: set[int] = set()  # rows whose last page may be shared with the rows they forked from

    @property
    def num_available(self) -> int:
        """Pages that can be had without taking any from a row."""
        return self.pool.num_free + self.prefix.num_idle

    def pages_for(self, tokens: Index) -> Index:
        """Pages that hold so many tokens."""
        return -(-tokens // self.slots.page_size)

    def missing(self, rows: Index, stops: Index) -> Index:
        """Pages that each row lacks to hold its first `stops` tokens."""
        lacking: Index = np.maximum(self.pages_for(stops) - self.slots.num_pages[rows], 0)
        return lacking

    def num_copies(self, rows: Index) -> int:
        """Pages that these rows need to write on, because what they hold is shared with a fork."""
        if not self.forked:
            return 0
        pages = [self._written_page(row) for row in rows.tolist() if row in self.forked]
        holders = self.pool.holders
        return sum(min(count, int(holders[page]) - 1) for page, count in Counter(pages).items())

    def grow_to(self, rows: Index, stops: Index) -> bool:
        """Give each row the pages that its first `stops` tokens need; False, and nothing done, if there are
        not enough."""
        missing = self.missing(rows, stops)
        total = int(missing.sum())
        if total + self.num_copies(rows) > self.num_available:
            return False
        if total or self.forked:
            self.grow(rows, missing)
        return True

    def grow(self, rows: Index, counts: Index) -> None:
        """Give each row so many more pages, and those that share the page they write a copy of it.

        Idle cached pages are evicted where none is free.
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
        if total == len(rows):  # one each, as where decodes grow
            owners, indexes = rows, held
        else:
            owners, indexes = np.repeat(rows, counts), ragged_ranges(held, held + counts)
        slots.page_table[owners, indexes] = self.pool.take(total)
        slots.num_pages[rows] = held + counts

    def extend(self, row: int, pages: Index) -> None:
        """Let a row continue with these held pages, sharing them."""
        slots = self.slots
        held = int(slots.num_pages[row])
        count = held + len(pages)
        self.prefix.share(pages)
        slots.page_table[row, held:count] = pages
        slots.num_pages[row] = count

    def bring_back(self, row: int, names: Index) -> None:
        """Let a row continue with these resting pages (see `PrefixCache.find`), each copied to a page that
        the row takes for it."""
        held, count = self.slots.num_pages[row], len(names)
        self.prefix.keep(names)
        self.grow(np.array([row]), np.array([count]))
        self.copy(self.prefix.bring_back(names, self.slots.pages(row)[held:]))
        self._counters.promoted_pages += count

    def evict(self, count: int) -> None:
        """Free the idle cached pages that were used longest ago; the host pool takes in what it can."""
        copy = self.prefix.evict(count)
        self._counters.evicted_pages += count
        if copy is not None:
            self._counters.rested_pages += len(copy.sources)
            self.copy(copy)

    def fork(self, source: int, row: int, num_tokens: int) -> None:
        """Share the pages of a row's first tokens with another row, in place of what that one held.

        The first of them to write to the last page copies it, unless it is full.
        """
        slots = self.slots
        old, new = slots.pages(row), slots.pages(source)[: -(-num_tokens // slots.page_size)]
        width = min(len(old), len(new))
        kept = int(np.append(old[:width] != new[:width], True).argmax())  # what both hold already
        slots.num_pages[row] = kept
        self.extend(row, new[kept:])
        self.prefix.release(old[kept:])
        self.forked.discard(row)
        if num_tokens % slots.page_size:
            self.forked |= {source, row}

    def replace(self, row: int, indexes: Index, pages: Index) -> None:
        """Let a row hold other pages, whose holder it is already, in place of those at `indexes`."""
        old = self.slots.page_table[row, indexes].astype(np.int64)
        self.slots.page_table[row, indexes] = pages
        self.prefix.release(old)

    def clear(self, row: int) -> None:
        """Let go of all pages of a row."""
        self.forked.discard(row)
        self.prefix.release(self.slots.pages(row))
        self.slots.num_pages[row] = 0

    def compact(self, max_pages: int) -> int:
        """Move at most so many held pages towards the low end; returns how many moved (see compaction.py)."""
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
        return len(sources)

    def resize(self, num_pages: int) -> None:
        """Change the number of pages; what is held must fit, and has been brought to the low end."""
        self.pool.resize(num_pages)
        self.prefix.resize(num_pages)

    def copy(self, copy: PageCopy) -> None:
        """Have pages copied before the next batch, after all copies that were asked for until now."""
        self._copies.append(copy)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Copies asked for since the last call, to be made one after the other."""
        copies, self._copies = self._copies, []
        return tuple(copies)

    def _written_page(self, row: int) -> int:
        """The page that the row's next token goes to."""
        return int(self.slots.page_table[row, self.slots.num_computed[row] // self.slots.page_size])

    def _copy_on_write(self, rows: list[int]) -> None:
        """Give each row that is about to write to a shared page one of its own; the last holder keeps it."""
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
