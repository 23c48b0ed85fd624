"""Move requests into slots and out of them, with their pages.

A request enters with its prefix hits and swapped pages, may fork for samples and beams, and leaves its
computed pages in the prefix cache or in the host pool, where a preempted request's pages stay until it
resumes. When that happens is decided by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from continuous_batching.counters import Counters
from continuous_batching.paging.held_pages import Arrival, HeldPages
from continuous_batching.paging.page_tables import EMPTY, PageTables
from continuous_batching.paging.prefix_matching import PrefixMatching
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.groups import BesideGroup, FullGroup, PageGroup
from kv_cache.page_keys import TokenIds
from kv_cache.pages import Index, PageCopy, PagePool
from kv_cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Swapped:
    """The pages that one request left in the host pools."""

    # Each group's index of its first swapped page, and its host pages
    parts: tuple[tuple[int, Index], ...]
    num_computed: int  # tokens computed in the shared and swapped pages together
    draft_lag: int  # copied from SlotPool.draft_lag
    state_lag: int  # copied from SlotPool.state_lag

    @property
    def first(self) -> int:
        """The number of pages before the swapped ones, which are shared and looked up again."""
        return self.parts[0][0]

    @property
    def pages(self) -> Index:
        """The host pages of group 0."""
        return self.parts[0][1]


class SwapTier:
    """Swapped pages of waiting requests in the host pools of `groups`; without these nothing is kept.

    Cached pages that rest in the same pools give way to them.
    """

    def __init__(self, groups: Sequence[PageGroup], counters: Counters) -> None:
        self._groups = groups
        self._counters = counters
        self._left: dict[int, Swapped] = {}  # keyed by the request's arrival number

    def leave(
        self,
        request: Request,
        parts: Sequence[tuple[int, Index]],
        num_computed: int,
        lags: tuple[int, int],
    ) -> Swapped | None:
        """Allocate host pages for `parts`, the pages of each group and the index of the first.

        `lags` are the row's `draft_lag` and `state_lag`.

        Returns None, with no resting page dropped, if they do not fit, or if all of its pages can be found
        in the cache.
        """
        groups = self._groups
        if groups[0].host is None or not len(parts[0][1]):
            return None
        if not all(group.can_yield_host(len(pages)) for group, (_, pages) in zip(groups, parts)):
            self._counters.refused_swaps += 1
            return None
        for group, (_, pages) in zip(groups, parts):
            has_room = group.yield_host(len(pages))
            assert has_room, f"{len(pages)} {group.name} find no room in the host's pool"
        taken = tuple((at, group.swap_out(len(pages))) for group, (at, pages) in zip(groups, parts))
        left = self._left[request.number] = Swapped(taken, num_computed, *lags)
        return left

    def left(self, request: Request) -> Swapped | None:
        """The pages that a request left, or None."""
        return self._left.get(request.number)

    def forget(self, request: Request) -> None:
        """Free the host pages of a request that has resumed or ended.

        A copy out of these pages, if there is one, has been requested before any copy into them can be.
        """
        swapped = self._left.pop(request.number, None)
        if swapped is not None:
            for group, (_, pages) in zip(self._groups, swapped.parts):
                group.release_host(pages)

    @property
    def all_left(self) -> dict[int, Swapped]:
        """The pages that all waiting requests left, by arrival number."""
        return dict(self._left)


class SlotLifecycle:
    """Moves requests into rows with the pages found for them, and out again.

    `max_shared_tokens`, `has_tier` and `groups` are as in `Scheduler`; `host` is the pool of pages in the
    host's memory, or None.
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
        groups: Sequence[BesideGroup] = (),
    ) -> None:
        assert host is not None or not has_tier, "pages come from a tier by way of the host's pool"
        self.slots = slots
        self.prefix = PrefixCache(pool, slots.page_size, host, groups)
        columns = slots.page_table, slots.num_pages
        full = FullGroup(slots.page_size, pool, host, self.prefix, *columns, counters)
        self.tables = PageTables(slots, self.prefix, full, groups)
        self.swap = SwapTier(self.tables.groups, counters)
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
        self.waiting_beams = self.tables.waiting_beams
        self.withheld = EMPTY  # rows that end, or may end, with a batch in flight

    def expect(self, name: str, tokens: TokenIds, cache_salt: str, known: list[bytes]) -> Arrival | None:
        """Allocate pages that no row will need for another engine to fill (see `HeldPages.expect`)."""
        return self.held.expect(name, tokens, cache_salt, self.tables.num_spare(), known)

    def lease(self, row: int, reason: str) -> None:
        """Lease the pages of a row's prompt if its request finishes normally and asks for that.

        A state is of use only if it stands behind the last of these pages.
        """
        request: Request = self.slots.requests[row]
        if request.leases_pages and reason in ("stop", "length"):
            num_full = request.num_prompt_tokens // self.slots.page_size
            end = num_full * self.slots.page_size
            if self.tables.states is None or self.slots.num_computed[row] == end:
                self.held.lease(request.id, row, num_full)

    def find(self, request: Request, most: int | None = None) -> Index:
        """Return the cached pages that a request can start from, at most so many.

        If its swapped pages continue them, they are cut there. What its windows see has been swapped, too, so
        that nothing needs to be found for them.
        """
        pages = self.matching.find(request)[:most]
        swapped = self.swap.left(request)
        if swapped is not None and len(pages) >= swapped.first:
            return pages[: swapped.first]
        return self.tables.resumable(pages)

    def comes_back(self, request: Request, matched: Index) -> bool:
        """Whether the request left pages in the host pool that continue its `matched` pages."""
        swapped = self.swap.left(request)
        return swapped is not None and len(matched) == swapped.first

    def enter(self, request: Request, matched: Index, reserved: int) -> int:
        """Give a request a row that starts from its `matched` pages; return the row.

        If another row is computing the next page, the new row is blocked until that page is published, and so
        on through their common prefix; not if it comes back with a last page that is not cached.
        """
        row = self.slots.take(request)
        self.slots.reserved[row] = reserved
        swapped, comes_back = self.swap.left(request), self.comes_back(request, matched)
        if len(matched):
            self.matching.start_from(row, matched, comes_back=comes_back)
        if swapped is not None:
            if comes_back:
                self._swap_in(row, swapped)
            else:
                self._counters.broken_swaps += 1
            self.swap.forget(request)
        self.matching.begin(row)
        return row

    def fork(self, source: int, request: Request) -> int:
        """Give a request a row that shares all pages of `source`, whose prompt completes in this batch."""
        slots = self.slots
        row, prompt = slots.take(request), slots.num_prompt[source]
        self.tables.fork(source, row, int(prompt))
        slots.num_computed[row] = slots.reserved[row] = prompt
        slots.num_published[row] = slots.num_published[source]
        request.num_cached_tokens = slots.requests[source].num_cached_tokens
        request.admitted_s = slots.requests[source].admitted_s
        if self.matching.checkpoints is not None:
            self.matching.checkpoints.answers(row)
        return row

    def enter_beam(self, beam: Request, num_shared: int, reserved: int) -> int:
        """Give a beam a row that waits until it can share `num_shared` pages of its leader."""
        row = self.slots.take(beam, is_beam=True)
        self.slots.reserved[row] = reserved
        self.slots.num_shareable[row] = 0  # the leader publishes the prompt
        self.waiting_beams[row] = num_shared
        return row

    def start_beam(self, leader: int, row: int) -> None:
        """Start a waiting beam from its leader's pages; what is cached beyond them is looked up next."""
        slots, count = self.slots, self.waiting_beams.pop(row)
        self.tables.fork(leader, row, count * slots.page_size)
        slots.num_computed[row] = count * slots.page_size
        slots.num_published[row] = min(count, slots.num_published[leader])
        self.matching.block_until_looked_up(row)

    def continue_beam(self, row: int, source: int) -> None:
        """Let a beam's row continue from the state of another row, replacing what it holds."""
        slots, count = self.slots, self.slots.num_tokens[source]
        self.waiting_beams.pop(row, None)
        self.tables.fork(source, row, int(slots.num_computed[source]))
        slots.token_ids[row, :count] = slots.token_ids[source, :count]
        slots.requests[row].page_keys = slots.requests[source].page_keys
        for column in (slots.num_tokens, slots.num_computed, slots.num_published, slots.draft_lag):
            column[row] = column[source]

    def runnable(self) -> Index:
        """Return the busy rows that can run, oldest first.

        Blocked rows first take the pages that they waited for; rows that still wait, and withheld rows, are
        left out.
        """
        busy = self._not_withheld()
        if not self.matching.blocked and not self.waiting_beams:
            return busy
        self.matching.unblock(busy[np.isin(busy, self.matching.blocked)])
        waiting = [*self.matching.blocked, *self.waiting_beams]
        return busy[~np.isin(busy, waiting)] if waiting else busy

    def share_published(self) -> bool:
        """Let blocked rows share what has been published, so that less is promised to them.

        Returns whether any did.
        """
        rows, blocked = self._not_withheld(), self.matching.blocked
        return bool(blocked) and self.matching.unblock(rows[np.isin(rows, blocked)], at_once=True)

    def _not_withheld(self) -> Index:
        busy = self.slots.busy
        return busy[~np.isin(busy, self.withheld)] if len(self.withheld) else busy

    def leave(self, row: int, *, failed: bool = False, is_wrong: bool = False) -> Request:
        """Free a row and its pages, after its tokens have been handed back to the request.

        Its computed pages can be found until they are evicted. If the request failed, what it got in place of
        a token is dropped. If what the row computed may be wrong, because the model's logits were, all that
        it computed or found is removed from the cache.
        """
        request = self.settle(row, failed=failed, is_wrong=is_wrong)
        self.vacate(row, is_wrong=is_wrong)
        return request

    def settle(self, row: int, *, failed: bool = False, is_wrong: bool = False) -> Request:
        """Hand a row's tokens back to its request, which ends or leaves; the row keeps its pages for now."""
        slots = self.slots
        if failed:
            slots.num_tokens[row] -= 1
        if is_wrong:  # its cached pages may be as wrong as its answer
            self.matching.forget(row)
        request = slots.hand_back(row)
        if not is_wrong:
            request.page_keys = self.matching.keys(request)
        return request

    def vacate(self, row: int, *, is_wrong: bool = False) -> None:
        """Free a settled row and its pages."""
        if is_wrong:
            self.matching.forget(row)
        else:
            self.matching.publish_all(row)
        if self.matching.checkpoints is None:
            self._free(row)
            return
        useless = self.slots.pages(row)[self.matching.checkpoints.num_useful(row) :].copy()
        self._free(row)
        self.prefix.evict_first(useless)

    def swap_out(self, row: int) -> Request | None:
        """Free a row but keep the pages that only it has computed in the host pool; None if they do not fit.

        Its shared pages are in the prefix cache, on the device or at rest in the same pool, and are looked up
        again when it resumes.
        """
        slots = self.slots
        request: Request = slots.requests[row]
        groups, num_computed = self.tables.groups, int(slots.num_computed[row])
        parts = [group.to_swap(row, int(slots.num_published[row]), num_computed) for group in groups]
        lags = int(slots.draft_lag[row]), int(slots.state_lag[row])
        left = self.swap.leave(request, parts, num_computed, lags)
        if left is None:
            return None
        for group, (_, pages), (_, targets) in zip(groups, parts, left.parts):
            self.tables.copy(PageCopy(pages, targets, "to_host", group=group.number))
        slots.hand_back(row)
        self._free(row)
        return request

    def _free(self, row: int) -> None:
        self.matching.leave(row)
        self.waiting_beams.pop(row, None)
        self.tables.clear(row)
        self.slots.release(row)

    def _swap_in(self, row: int, swapped: Swapped) -> None:
        """Copy a request's swapped pages back, behind the shared pages that were found."""
        slots = self.slots
        for group, (first, pages) in zip(self.tables.groups, swapped.parts):
            for copy in group.come_back(row, first, pages):
                self.tables.copy(copy)
        slots.num_computed[row] = swapped.num_computed
        slots.draft_lag[row] = swapped.draft_lag
        slots.state_lag[row] = swapped.state_lag
