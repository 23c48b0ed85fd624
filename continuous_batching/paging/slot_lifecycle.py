"""How does a request enter a slot, and what becomes of the slot when it leaves?"""

from __future__ import annotations

import numpy as np

from continuous_batching.counters import Counters
from continuous_batching.paging.held_pages import Arrival, HeldPages
from continuous_batching.paging.page_tables import EMPTY, PageTables
from continuous_batching.paging.prefix_matching import PrefixMatching
from continuous_batching.paging.swap import SwapTier
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.page_keys import TokenIds
from kv_cache.pages import Index, PageCopy, PagePool
from kv_cache.prefix_cache import PrefixCache


class SlotLifecycle:
    """Requests enter rows with the pages that are found for them, and leave rows and pages behind.

    `max_shared_tokens` and `has_tier` as in `Scheduler`; `host` is the pool of pages in the host's memory, or
    None.
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
        has_tier: bool = False,
    ) -> None:
        assert host is not None or not has_tier, "pages come from a tier by way of the host's pool"
        self.slots = slots
        self.prefix = PrefixCache(pool, slots.page_size, host)
        self.tables = PageTables(slots, pool, self.prefix, counters)
        self.swap = SwapTier(host, self.prefix, counters)
        self.held = HeldPages(self.tables, self.prefix, counters)
        self.matching = PrefixMatching(
            slots,
            self.prefix,
            self.tables,
            counters,
            prefix_sharing=prefix_sharing,
            max_shared_tokens=max_shared_tokens,
            has_tier=has_tier,
        )
        self._counters = counters
        self.waiting_beams: dict[int, int] = {}  # row of a beam that waits for its leader -> pages to share
        self.withheld = EMPTY  # rows that end, or may end, with what is on the device

    def num_promised(self) -> int:
        """Pages that busy rows will still take for what they know or reserved at admission."""
        slots, busy = self.slots, self.slots.busy
        wanted = self.tables.pages_for(np.maximum(slots.reserved[busy], slots.num_tokens[busy]))
        promised = int(np.maximum(wanted - slots.num_pages[busy], 0).sum()) + len(self.tables.forked)
        return promised - sum(self.waiting_beams.values())

    def expect(self, name: str, tokens: TokenIds, cache_salt: str, known: list[bytes]) -> Arrival | None:
        """Take pages that another engine is to fill with those of `tokens`, of which no row is in want (see
        `HeldPages.expect`).
        """
        num_spare = self.tables.num_available - self.num_promised()
        return self.held.expect(name, tokens, cache_salt, num_spare, known)

    def lease(self, row: int, reason: str) -> None:
        """Hold the pages of a row's prompt, where its request ends in order and asks for that."""
        request: Request = self.slots.requests[row]
        if request.leases_pages and reason in ("stop", "length"):
            num_full = request.num_prompt_tokens // self.slots.page_size
            self.held.lease(request.id, self.slots.pages(row)[:num_full])

    def find(self, request: Request) -> Index:
        """Cached pages that it can start from; those that it left in the host's pool follow them."""
        pages = self.matching.find(request)
        swapped = self.swap.left(request) if request.num_preemptions else None
        return pages if swapped is None else pages[: swapped.first]

    def enter(self, request: Request, matched: Index, reserved: int) -> int:
        """Give a request a row that starts from `matched` pages; returns the row.

        If another row is computing the page that comes next, the new row is blocked until it is
        published, and so on to the end of what they have in common.
        """
        row = self.slots.take(request)
        self.slots.reserved[row] = reserved
        if len(matched):
            self.matching.start_from(row, matched)
        if request.num_preemptions:
            self._swap_in(row, request)
        self.matching.block_if_in_progress(row)
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

    def enter_beam(self, beam: Request, num_shared: int, reserved: int) -> int:
        """Give a beam a row that waits until it can share `num_shared` pages of its leader's."""
        row = self.slots.take(beam, is_beam=True)
        self.slots.reserved[row] = reserved
        self.slots.num_shareable[row] = 0  # its leader publishes the prompt
        self.waiting_beams[row] = num_shared
        return row

    def start_beam(self, leader: int, row: int) -> None:
        """Let a beam that waits start from its leader's pages, and then from what is found cached beyond."""
        slots, pages = self.slots, self.slots.pages(leader)[: self.waiting_beams.pop(row)]
        self.tables.extend(row, pages)
        slots.num_computed[row] = len(pages) * slots.page_size
        slots.num_published[row] = min(len(pages), slots.num_published[leader])
        self.matching.block_until_looked_up(row)

    def continue_beam(self, row: int, source: int) -> None:
        """Let a beam's row go on from where another stands, in place of what it holds."""
        slots, count = self.slots, self.slots.num_tokens[source]
        self.waiting_beams.pop(row, None)
        self.tables.fork(source, row, int(slots.num_computed[source]))
        slots.token_ids[row, :count] = slots.token_ids[source, :count]
        slots.requests[row].page_keys = slots.requests[source].page_keys
        for column in (slots.num_tokens, slots.num_computed, slots.num_published, slots.draft_lag):
            column[row] = column[source]

    def runnable(self) -> Index:
        """Busy rows that wait for no other and are not withheld, oldest first; blocked ones first take what
        was published."""
        busy = self.slots.busy
        if len(self.withheld):
            busy = busy[~np.isin(busy, self.withheld)]
        blocked = self.matching.blocked
        if not blocked and not self.waiting_beams:
            return busy
        for row in busy[np.isin(busy, blocked)].tolist():
            self.matching.unblock(row)
        waiting = [*self.matching.blocked, *self.waiting_beams]
        return busy[~np.isin(busy, waiting)] if waiting else busy

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
        """Give a row's tokens back to its request, which ends or goes away; its pages stay for now."""
        slots = self.slots
        if failed:  # what it computed may be as wrong as what it answered
            slots.num_tokens[row] -= 1
            self.matching.forget(row)
        request = slots.hand_back(row)
        if not failed:
            request.page_keys = self.matching.keys(request)
        return request

    def vacate(self, row: int, *, failed: bool = False) -> None:
        """Free a row that is settled, and its pages."""
        if failed:
            self.matching.forget(row)
        else:
            self.matching.publish_all(row)
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
        targets = self.swap.leave(request, first, len(sources), num_computed, int(slots.draft_lag[row]))
        if targets is None:
            return None
        self.tables.copy(PageCopy(sources, targets, "to_host"))
        slots.hand_back(row)
        self._free(row)
        return request

    def _free(self, row: int) -> None:
        self.matching.leave(row)
        self.waiting_beams.pop(row, None)
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
            slots.draft_lag[row] = swapped.draft_lag
            self._counters.swapped_in_pages += count
        else:
            self._counters.broken_swaps += 1
        self.swap.forget(request)
