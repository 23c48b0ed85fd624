"""Which pages does each occupied row hold, and what is known of them?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from continuous_batching.batch import Index, NewPages, PageCopy, ragged_ranges
from continuous_batching.counters import Counters
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from kv_cache.prefix import PrefixCache, page_keys

EMPTY: Index = np.empty(0, dtype=np.int64)
EMPTY_ENTRIES: NewPages = (EMPTY, EMPTY, EMPTY)
NO_CHANGES: tuple[NewPages, tuple[PageCopy, ...]] = (EMPTY_ENTRIES, ())


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a preempted request left in the host pool."""

    first: int  # pages before it were shared, and are looked up again
    pages: Index  # host pages that hold its pages from `first` on
    num_computed: int


class Residency:
    """Rows, pages and the prefix cache, changed together: enter, grow, publish, leave.

    Every change keeps the ledger true: a page's holders are the rows whose table names it and the
    prefix cache, if it is cached. `max_shared_tokens` as in `Scheduler`. `host` is the pool of pages in
    the host's memory, None where there is none.
    """

    def __init__(
        self,
        slots: SlotPool,
        pool: PagePool,
        counters: Counters,
        *,
        prefix_sharing: bool,
        max_shared_tokens: int | None,
        host: PagePool | None,
    ) -> None:
        self.slots = slots
        self.pool = pool
        self.prefix = PrefixCache(pool, slots.page_size)
        self._counters = counters
        self._prefix_sharing = prefix_sharing
        self._max_shared_tokens = max_shared_tokens
        self._new_pages: list[NewPages] = []
        self.host = host
        self._swapped: dict[int, Swapped] = {}  # by the arrival number of waiting requests
        self._copies: list[PageCopy] = []
        self._forked: set[int] = set()  # rows whose last page may be shared with the rows they forked from
        self._blocked: dict[int, int] = {}  # row that waits for a page of another -> the cache's version then

    @property
    def num_available(self) -> int:
        """Pages that can be had without taking any from a row."""
        return self.pool.num_free + self.prefix.num_idle

    def pages_for(self, tokens: Index) -> Index:
        """Pages that hold so many tokens."""
        return -(-tokens // self.slots.page_size)

    def num_promised(self) -> int:
        """Pages that busy rows will still take for what they know or reserved at admission."""
        slots, busy = self.slots, self.slots.busy
        wanted = self.pages_for(np.maximum(slots.reserved[busy], slots.num_tokens[busy]))
        return int(np.maximum(wanted - slots.num_pages[busy], 0).sum()) + len(self._forked)

    def keys(self, request: Request) -> list[bytes]:
        """Keys of the full pages of its known tokens, as far as they may be shared."""
        if not self._prefix_sharing:
            return []
        tokens = request.tokens
        if self._max_shared_tokens is not None:
            if request.num_prompt_tokens > self._max_shared_tokens:
                return []
            tokens = tokens[: self._max_shared_tokens]
        return page_keys(tokens, self.slots.page_size, request.cache_salt, request.page_keys)

    def find(self, request: Request) -> Index:
        """Cached pages that it can start from."""
        pages = self.prefix.find(self._usable_keys(request), request.tokens, request.cache_salt)
        swapped = self._swapped.get(request.number)
        return pages if swapped is None else pages[: swapped.first]

    def enter(self, request: Request, matched: Index, reserved: int) -> int:
        """Give a request a row that starts from `matched` pages; returns the row.

        If another row is computing the page that comes next, the new row is blocked until it is
        published, and so on to the end of what they have in common.
        """
        slots = self.slots
        row = slots.take(request)
        slots.reserved[row] = reserved
        if len(matched):
            self._extend(row, matched)
        swapped = self._swapped.pop(request.number, None)
        if swapped is not None and len(matched) == swapped.first:
            self._swap_in(row, swapped)
        elif swapped is not None:
            self._release_host(swapped)
            self._counters.broken_swaps += 1
        if self._in_progress(request, int(slots.num_pages[row])):
            self._blocked[row] = self.prefix.version
        return row

    def forget_swapped(self, request: Request) -> None:
        """Free what a waiting request left in the host pool, because it ended."""
        swapped = self._swapped.pop(request.number, None)
        if swapped is not None:
            self._release_host(swapped)

    def _swap_in(self, row: int, swapped: Swapped) -> None:
        slots = self.slots
        self.grow(np.array([row]), np.array([len(swapped.pages)]))
        targets = slots.pages(row)[swapped.first :]
        slots.num_computed[row] = swapped.num_computed
        self._copies.append(PageCopy(swapped.pages, targets, "from_host"))
        self._counters.swapped_in_pages += len(targets)
        self._release_host(swapped)

    def _release_host(self, swapped: Swapped) -> None:
        assert self.host is not None, "pages were swapped without a host pool"
        self.host.release(swapped.pages)

    def swap_out(self, row: int) -> Request | None:
        """Free a row as `leave` does, but keep its unshared pages in the host pool; None if they do not fit.

        Its shared pages are in the prefix cache, and are looked up again when it comes back.
        """
        slots = self.slots
        request: Request = slots.requests[row]
        first, num_computed = int(slots.num_published[row]), int(slots.num_computed[row])
        sources = slots.pages(row)[first : -(-num_computed // slots.page_size)]
        if self.host is None or not len(sources) or row in self._blocked:
            return None
        if len(sources) > self.host.num_free:
            self._counters.refused_swaps += 1
            return None
        targets = self.host.take(len(sources))
        self._copies.append(PageCopy(sources, targets, "to_host"))
        self._swapped[request.number] = Swapped(first, targets, num_computed)
        self._counters.swapped_out_pages += len(sources)
        self._depart(row)
        return request

    def is_blocked(self, row: int) -> bool:
        """Whether the row waits for a page that another computes."""
        return row in self._blocked

    def runnable(self) -> Index:
        """Busy rows that are not blocked, oldest first; blocked ones first take what was published."""
        busy = self.slots.busy
        if not self._blocked:
            return busy
        for row in busy[np.isin(busy, list(self._blocked))].tolist():
            self._unblock(row)
        return busy[~np.isin(busy, list(self._blocked))] if self._blocked else busy

    def _usable_keys(self, request: Request) -> list[bytes]:
        """Its last known token is always computed, because the next one comes from it."""
        return request.page_keys[: (len(request.tokens) - 1) // self.slots.page_size]

    def _extend(self, row: int, pages: Index) -> None:
        """Let a row that has computed nothing itself continue from these cached pages."""
        slots = self.slots
        held, count = int(slots.num_pages[row]), int(slots.num_pages[row]) + len(pages)
        self.prefix.share(pages)
        slots.page_table[row, held:count] = pages
        slots.num_pages[row] = slots.num_matched[row] = slots.num_published[row] = count
        slots.num_computed[row] = count * slots.page_size
        self._new_pages.append((np.full(len(pages), row), np.arange(held, count), pages))
        request: Request = slots.requests[row]
        if request.num_preemptions:
            self._counters.refound_tokens += len(pages) * slots.page_size
        else:
            request.num_cached_tokens += len(pages) * slots.page_size
            self._counters.hit_tokens += len(pages) * slots.page_size

    def _in_progress(self, request: Request, index: int) -> bool:
        """Whether a row is about to compute and publish the page that `request` needs at `index`."""
        keys, slots = self._usable_keys(request), self.slots
        if index >= len(keys):
            return False
        busy = slots.busy
        computing = busy[(slots.num_published[busy] <= index) & (index < slots.num_shareable[busy])]
        return any(
            row not in self._blocked
            and slots.requests[row] is not request
            and slots.requests[row].page_keys[index] == keys[index]
            for row in computing.tolist()
        )

    def _unblock(self, row: int) -> None:
        """Share what was published since; the row runs when nobody computes its next page."""
        slots = self.slots
        request: Request = slots.requests[row]
        if self._blocked[row] != self.prefix.version:
            keys, held = self._usable_keys(request), slots.pages(row)
            pages = self.prefix.find(keys, request.tokens, request.cache_salt, held)
            if len(pages):
                self._extend(row, pages)
        del self._blocked[row]
        if self._in_progress(request, int(slots.num_pages[row])):
            self._blocked[row] = self.prefix.version

    def fork(self, source: int, request: Request) -> int:
        """Give a request a row that shares all pages of `source`, whose prompt this batch completes."""
        slots = self.slots
        row, count, prompt = slots.take(request), slots.num_pages[source], slots.num_prompt[source]
        pages = slots.pages(source)
        self.prefix.share(pages)
        slots.page_table[row, :count] = pages
        slots.num_pages[row] = count
        slots.num_computed[row] = slots.reserved[row] = prompt
        slots.num_matched[row], slots.num_published[row] = (
            slots.num_matched[source],
            slots.num_published[source],
        )
        request.num_cached_tokens = slots.requests[source].num_cached_tokens
        self._new_pages.append((np.full(count, row), np.arange(count), pages))
        if prompt % slots.page_size:
            self._forked |= {source, row}
        return row

    def missing(self, rows: Index, stops: Index) -> Index:
        """Pages that each row lacks to hold its first `stops` tokens."""
        lacking: Index = np.maximum(self.pages_for(stops) - self.slots.num_pages[rows], 0)
        return lacking

    def num_copies(self, rows: Index) -> int:
        """Pages that these rows need to write on, because what they hold is shared with a fork."""
        if not self._forked:
            return 0
        pages = [self._written_page(row) for row in rows.tolist() if row in self._forked]
        holders = self.pool.holders
        return sum(min(count, int(holders[page]) - 1) for page, count in Counter(pages).items())

    def grow(self, rows: Index, counts: Index) -> None:
        """Give each row so many more pages, and those that share the page they write a copy of it."""
        slots = self.slots
        short = int(counts.sum()) + self.num_copies(rows) - self.pool.num_free
        if short > 0:
            self.prefix.evict(short)
            self._counters.evicted_pages += short
        if self._forked:
            self._copy_on_write([row for row in rows.tolist() if row in self._forked])
        growing = counts > 0
        if not growing.any():
            return
        rows, counts = rows[growing], counts[growing]
        held = slots.num_pages[rows]
        owners, indexes = np.repeat(rows, counts), ragged_ranges(held, held + counts)
        pages = self.pool.take(len(owners))
        slots.page_table[owners, indexes] = pages
        slots.num_pages[rows] += counts
        self._new_pages.append((owners, indexes, pages))

    def _written_page(self, row: int) -> int:
        """The page that the row's next token goes to."""
        return int(self.slots.page_table[row, self.slots.num_computed[row] // self.slots.page_size])

    def _copy_on_write(self, rows: list[int]) -> None:
        """Give each row that is about to write to a shared page one of its own; the last holder keeps it."""
        slots, sources, targets = self.slots, [], []
        for row in rows:
            page = self._written_page(row)
            if self.pool.holders[page] > 1:
                (own,) = self.pool.take(1)
                sources.append(page)
                targets.append(own)
                self._set_page(row, int(slots.num_computed[row]) // slots.page_size, own)
        self._forked.difference_update(rows)
        if sources:
            self._counters.copied_pages += len(sources)
            self._copies.append(PageCopy(np.array(sources), np.array(targets)))

    def _set_page(self, row: int, index: int, page: int) -> None:
        """Put a page that the row holds already in the place of another, which it lets go."""
        old = self.slots.page_table[row, [index]].astype(np.int64)
        self.slots.page_table[row, index] = page
        self.prefix.release(old)
        self._new_pages.append((np.array([row]), np.array([index]), np.array([page])))

    def compact(self, max_pages: int) -> int:
        """Move at most so many held pages towards the low end, between steps; returns how many moved.

        A paged operator does not need it to allocate: it serves a dense live region, which can be cut
        off or exported whole.
        """
        sources, targets = self.pool.scattered(max_pages)
        if len(sources):
            self.pool.move(sources, targets)
            self.prefix.move(sources, targets)
            self._new_pages.append(self.slots.rename_pages(sources, targets, self.pool.num_pages))
            self._copies.append(PageCopy(sources, targets))
            self._counters.compacted_pages += len(sources)
        return len(sources)

    def resize(self, num_pages: int) -> None:
        """Change the number of pages; what is held must fit, and has been brought to the low end."""
        self.pool.resize(num_pages)
        self.prefix.resize(num_pages)

    def publish_prompts(self, rows: Index) -> None:
        """Make the pages of prompts findable that are computed by now."""
        slots = self.slots
        ripe = np.minimum(slots.num_computed[rows] // slots.page_size, slots.num_shareable[rows])
        due = ripe > slots.num_published[rows]
        for row, stop in zip(rows[due].tolist(), ripe[due].tolist()):
            self._publish(row, stop)

    def leave(self, row: int, *, failed: bool = False) -> Request:
        """Free a row and its pages, after its tokens went back to the request.

        Its computed pages stay findable while nobody needs them for something else; those of a
        failed request are forgotten, and so is the token it failed with.
        """
        slots = self.slots
        request: Request = slots.requests[row]
        if failed:  # what it computed may be as wrong as what it answered
            slots.num_tokens[row] -= 1
            self.prefix.forget(slots.pages(row)[slots.num_matched[row] : slots.num_published[row]])
        else:
            request.tokens = slots.token_ids[row, : slots.num_tokens[row]]
            request.page_keys = self.keys(request)
            self._publish(row, min(int(slots.num_computed[row]) // slots.page_size, len(request.page_keys)))
        self._depart(row)
        return request

    def _depart(self, row: int) -> None:
        """Let go of a row and its pages."""
        slots = self.slots
        request: Request = slots.requests[row]
        request.tokens = slots.token_ids[row, : slots.num_tokens[row]].copy()
        del request.logprobs[len(request.answer) :]
        self._blocked.pop(row, None)
        self._forked.discard(row)
        self.prefix.release(slots.pages(row))
        slots.release(row)

    def take_changes(self) -> tuple[NewPages, tuple[PageCopy, ...]]:
        """Page-table entries set, and page copies decided, since the last call."""
        new, self._new_pages = self._new_pages, []
        if not new:
            return EMPTY_ENTRIES, self.take_copies()
        rows, indexes, pages = zip(*new)
        return (np.concatenate(rows), np.concatenate(indexes), np.concatenate(pages)), self.take_copies()

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Page copies decided since the last call, to be made one after the other."""
        copies, self._copies = self._copies, []
        return tuple(copies)

    def _publish(self, row: int, stop: int) -> None:
        """Make the row's pages before its page `stop` findable."""
        slots = self.slots
        first = int(slots.num_published[row])
        if stop <= first:
            return
        request: Request = slots.requests[row]
        pages = slots.pages(row)[:stop]
        standing = self.prefix.publish(
            request.page_keys, slots.token_ids[row], pages, first, request.cache_salt
        )
        slots.num_published[row] = stop
        doubles = np.flatnonzero(standing != pages[first:])
        if len(doubles):  # hold the cached equals instead, so that a chain's pages have the same holders
            indexes, kept = doubles + first, standing[doubles]
            self.prefix.share(kept)
            self.prefix.release(pages[indexes])
            slots.page_table[row, indexes] = kept
            self._new_pages.append((np.full(len(kept), row), indexes, kept))
