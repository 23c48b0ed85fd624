"""What does a request bring into a row, and what does it leave behind?"""

from __future__ import annotations

import numpy as np

from continuous_batching.counters import Counters
from continuous_batching.paging.page_tables import EMPTY, PageTables
from continuous_batching.paging.swap import SwapTier
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.page_keys import page_keys
from kv_cache.pages import Index, PageCopy, PagePool
from kv_cache.prefix_cache import PrefixCache


class Residency:
    """Requests enter rows with the pages that are found for them, publish theirs, and leave.

    `max_shared_tokens` as in `Scheduler`; `host` is the pool of pages in the host's memory, or None.
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
        self.prefix = PrefixCache(pool, slots.page_size, host)
        self.tables = PageTables(slots, pool, self.prefix, counters)
        self.swap = SwapTier(host, self.prefix, counters)
        self._counters = counters
        self._prefix_sharing = prefix_sharing
        self._max_shared_tokens = max_shared_tokens
        self.seated: dict[int, int] = {}  # row of a beam that waits for its leader -> pages to share
        self.withheld = EMPTY  # rows that end, or may end, with what is on the device
        self._blocked: dict[int, int] = {}  # row that waits for a page of another -> the cache's version then

    def num_promised(self) -> int:
        """Pages that busy rows will still take for what they know or reserved at admission."""
        slots, busy = self.slots, self.slots.busy
        wanted = self.tables.pages_for(np.maximum(slots.reserved[busy], slots.num_tokens[busy]))
        promised = int(np.maximum(wanted - slots.num_pages[busy], 0).sum()) + len(self.tables.forked)
        return promised - sum(self.seated.values())

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
        """Cached pages that it can start from (see `PrefixCache.find`)."""
        pages = self.prefix.find(self._usable_keys(request), request.tokens, request.cache_salt)
        swapped = self.swap.left(request)
        return pages if swapped is None else pages[: swapped.first]

    def count_lookup(self, request: Request, matched: Index) -> None:
        """Count why a newcomer's lookup found no more, if it could, and no other row is computing it."""
        keys = self._usable_keys(request)
        if self._prefix_sharing and not self._in_progress(request, len(matched)):
            reason = self.prefix.why_missed(keys, request.tokens, request.cache_salt, matched)
            if reason is None:
                self.prefix.history.num_whole_hits += 1
            else:
                self.prefix.history.misses[reason] += 1

    def enter(self, request: Request, matched: Index, reserved: int) -> int:
        """Give a request a row that starts from `matched` pages; returns the row.

        If another row is computing the page that comes next, the new row is blocked until it is
        published, and so on to the end of what they have in common.
        """
        row = self.slots.take(request)
        self.slots.reserved[row] = reserved
        if len(matched):
            self._start_from(row, matched)
        self._swap_in(row, request)
        if self._in_progress(request, int(self.slots.num_pages[row])):
            self._blocked[row] = self.prefix.version
        return row

    def fork(self, source: int, request: Request) -> int:
        """Give a request a row that shares all pages of `source`, whose prompt this batch completes."""
        slots = self.slots
        row, prompt = slots.take(request), slots.num_prompt[source]
        self.tables.fork(source, row, int(prompt))
        slots.num_computed[row] = slots.reserved[row] = prompt
        slots.num_published[row] = slots.num_published[source]
        request.num_cached_tokens = slots.requests[source].num_cached_tokens
        return row

    def seat(self, beam: Request, num_shared: int, reserved: int) -> int:
        """Give a beam a row that waits until it can share `num_shared` pages of its leader's."""
        row = self.slots.take(beam)
        self.slots.reserved[row] = reserved
        self.slots.num_shareable[row] = 0  # its leader publishes the prompt
        self.seated[row] = num_shared
        return row

    def branch(self, leader: int, row: int) -> None:
        """Let a seated row start from its leader's pages, and then from what is found cached beyond."""
        slots, pages = self.slots, self.slots.pages(leader)[: self.seated.pop(row)]
        self.tables.extend(row, pages)
        slots.num_computed[row] = len(pages) * slots.page_size
        slots.num_published[row] = min(len(pages), slots.num_published[leader])
        self._blocked[row] = -1  # no version: look once

    def take_over(self, row: int, source: int) -> None:
        """Let a beam's row go on from where another stands, in place of what it holds."""
        slots, count = self.slots, self.slots.num_tokens[source]
        self.seated.pop(row, None)
        self.tables.fork(source, row, int(slots.num_computed[source]))
        slots.token_ids[row, :count] = slots.token_ids[source, :count]
        slots.requests[row].page_keys = slots.requests[source].page_keys
        for column in (slots.num_tokens, slots.num_computed, slots.num_published):
            column[row] = column[source]

    def is_blocked(self, row: int) -> bool:
        """Whether the row waits for a page that another computes."""
        return row in self._blocked

    def runnable(self) -> Index:
        """Busy rows that wait for no other and are not withheld, oldest first; blocked ones first take what
        was published."""
        busy = self.slots.busy
        if len(self.withheld):
            busy = busy[~np.isin(busy, self.withheld)]
        if not self._blocked and not self.seated:
            return busy
        for row in busy[np.isin(busy, list(self._blocked))].tolist():
            self._unblock(row)
        waiting = [*self._blocked, *self.seated]
        return busy[~np.isin(busy, waiting)] if waiting else busy

    def publish_prompts(self, rows: Index) -> None:
        """Make the pages of prompts findable that are computed by now."""
        slots = self.slots
        ripe = np.minimum(slots.num_computed[rows] // slots.page_size, slots.num_shareable[rows])
        due = ripe > slots.num_published[rows]
        for row, stop in zip(rows[due].tolist(), ripe[due].tolist()):
            self._publish(row, stop)

    def leave(self, row: int, *, failed: bool = False) -> Request:
        """Free a row and its pages, after its tokens went back to the request.

        Its computed pages stay findable while nobody needs them for something else. A failed request's
        are forgotten, those that it found too, for it may have failed by them; so is the token it failed
        with.
        """
        request = self.settle(row, failed=failed)
        self.vacate(row, failed=failed)
        return request

    def settle(self, row: int, *, failed: bool = False) -> Request:
        """Bring a row's tokens back to its request, which ends or goes away; its pages stay for now."""
        slots = self.slots
        request: Request = slots.requests[row]
        if failed:  # what it computed may be as wrong as what it answered
            slots.num_tokens[row] -= 1
            self._forget(row)
        self._bring_back(row)
        if not failed:
            request.page_keys = self.keys(request)
        return request

    def vacate(self, row: int, *, failed: bool = False) -> None:
        """Free a row that is settled, and its pages."""
        slots = self.slots
        if failed:
            self._forget(row)
        else:
            num_keys = len(slots.requests[row].page_keys)
            self._publish(row, min(int(slots.num_computed[row]) // slots.page_size, num_keys))
        self._free(row)

    def swap_out(self, row: int) -> Request | None:
        """Free a row, but keep what it alone has computed in the host pool; None if that does not fit.

        Its shared pages are in the prefix cache, on the device or at rest in the same pool, and are looked
        up again when it comes back.
        """
        slots = self.slots
        request: Request = slots.requests[row]
        first, num_computed = int(slots.num_published[row]), int(slots.num_computed[row])
        sources = slots.pages(row)[first : -(-num_computed // slots.page_size)]
        targets = self.swap.leave(request, first, len(sources), num_computed)
        if targets is None:
            return None
        self.tables.copy(PageCopy(sources, targets, "to_host"))
        self._bring_back(row)
        self._free(row)
        return request

    def _bring_back(self, row: int) -> None:
        slots = self.slots
        tokens = slots.token_ids[row, : slots.num_tokens[row]].copy()
        slots.requests[row].come_back(tokens, int(slots.num_computed[row]))

    def _forget(self, row: int) -> None:
        self.prefix.forget(self.slots.pages(row)[: self.slots.num_published[row]])

    def _free(self, row: int) -> None:
        self._blocked.pop(row, None)
        self.seated.pop(row, None)
        self.tables.clear(row)
        self.slots.release(row)

    def _swap_in(self, row: int, request: Request) -> None:
        """Bring back what a request left, if the shared pages before it were found."""
        slots, swapped = self.slots, self.swap.left(request)
        if swapped is None:
            return
        if slots.num_pages[row] == swapped.first:
            count = len(swapped.pages)
            self.tables.grow(np.array([row]), np.array([count]))
            self.tables.copy(PageCopy(swapped.pages, slots.pages(row)[swapped.first :], "from_host"))
            slots.num_computed[row] = swapped.num_computed
            self._counters.swapped_in_pages += count
        else:
            self._counters.broken_swaps += 1
        self.swap.forget(request)

    def _usable_keys(self, request: Request) -> list[bytes]:
        return request.page_keys[: request.num_findable // self.slots.page_size]

    def _start_from(self, row: int, pages: Index) -> None:
        """Let a row that has computed nothing itself continue from these cached pages."""
        slots = self.slots
        resting = pages[pages < 0]
        self.tables.extend(row, pages[: len(pages) - len(resting)])
        if len(resting):
            self.tables.bring_back(row, resting)
        slots.num_published[row] = slots.num_pages[row]
        slots.num_computed[row] = slots.num_pages[row] * slots.page_size
        request: Request = slots.requests[row]
        found = len(pages) * slots.page_size
        if request.num_preemptions:
            self._counters.refound_tokens += found
        else:
            request.num_cached_tokens += found
            self._counters.hit_tokens += found
            self._counters.host_hit_tokens += len(resting) * slots.page_size

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
            pages = pages[pages > 0]  # the row was not promised others to bring resting ones back to
            if len(pages):
                self._start_from(row, pages)
        del self._blocked[row]
        if self._in_progress(request, int(slots.num_pages[row])):
            self._blocked[row] = self.prefix.version

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
            self.prefix.share(standing[doubles])
            self.tables.replace(row, doubles + first, standing[doubles])
