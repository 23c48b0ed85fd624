"""Preempt running requests to make room for others.

The victim's pages are swapped to the host if there is room, or else dropped and recomputed. Which row is
preempted is the choice of a `Victim`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from continuous_batching.counters import Counters
from continuous_batching.paging.slot_lifecycle import SlotLifecycle
from continuous_batching.queueing import WaitingQueue
from continuous_batching.request import Request
from continuous_batching.samples.beam_search import BeamSearches
from continuous_batching.scheduling.in_flight import InFlight
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index

Victim = Callable[[SlotPool, Index], int]


def youngest(slots: SlotPool, rows: Index) -> int:
    """Choose the request that arrived last: first come, first served to the end."""
    return int(rows[-1])


def fewest_lost(slots: SlotPool, rows: Index) -> int:
    """Choose the request with the fewest computed tokens that the prefix cache does not hold."""
    rows = rows[::-1]
    lost = slots.num_computed[rows] - slots.num_published[rows] * slots.page_size
    return int(rows[np.argmin(lost)])


def lowest_priority(slots: SlotPool, rows: Index) -> int:
    """Choose the request of the lowest priority."""
    rows = rows[::-1]
    return int(rows[np.argmin(slots.priority[rows])])


class Preemption:
    """Takes rows from requests, which return to the queue and later get the same tokens.

    The beams of one request are preempted together.
    """

    def __init__(
        self,
        lifecycle: SlotLifecycle,
        waiting: WaitingQueue,
        beam_searches: BeamSearches,
        in_flight: InFlight,
        counters: Counters,
        victim: Victim,
    ) -> None:
        self._lifecycle = lifecycle
        self._waiting = waiting
        self._beam_searches = beam_searches
        self._in_flight = in_flight
        self._counters = counters
        self.victim = victim

    def make_room(self, rows: Index, starts: Index, stops: Index) -> tuple[Index, Index, Index]:
        """Preempt until there are pages for the remaining spans, allocate these, and return the spans.

        Pages held for other engines give way first. Where rows are withheld, whose masks are late, the last
        row that could run waits for them with what it has: nobody would compute in pages that it gave up.
        Where the row to be preempted is in flight, no span is left, and the next step decides again.
        """
        tables, slots = self._lifecycle.tables, self._lifecycle.slots
        while not tables.grow_to(rows, stops):
            if self._lifecycle.held.give_way():
                continue
            others = self._others()
            assert len(others), f"row {slots.busy[0]} is alone and finds no page"
            victim = self.victim(slots, others)
            kept = ~np.isin(rows, self._beam_searches.rows_of(victim))
            if self._in_flight.holds(victim) or (len(self._lifecycle.withheld) and not kept.any()):
                return rows[:0], starts[:0], stops[:0]
            self.preempt(victim)
            rows, starts, stops = rows[kept], starts[kept], stops[kept]
        return rows, starts, stops

    def make_way(self, request: Request) -> bool:
        """Preempt a running request for a waiting one that outranks it; return whether there was any."""
        row = self.outranked(request)
        if row is not None:
            self.preempt(row)
        return row is not None

    def outranked(self, request: Request) -> int | None:
        """Return the row of the lowest priority, of those that a waiting request outranks, or None.

        Their priority is lower, and they stand behind the waiting request in the queue's order, which never
        changes: so a request can be preempted only by those that would have gone before it, and the number
        of these is bounded.
        """
        slots, place = self._lifecycle.slots, self._waiting.place
        others = self._others()[::-1]  # the youngest of equal rows is preempted
        behind = [
            int(row)
            for row in others[slots.priority[others] < request.priority]
            if place(request) < place(slots.requests[row])
        ]
        if not behind:
            return None
        row, *_ = self._beam_searches.rows_of(min(behind, key=slots.priority.__getitem__))
        return row

    def free_pages(self, counts: Sequence[int]) -> None:
        """Preempt until no group has more pages in use, all of them by rows, than so large a pool has.

        The oldest row is preempted last.
        """
        groups, slots = self._lifecycle.tables.groups, self._lifecycle.slots
        while self._lifecycle.held.give_way():
            pass
        while any(group.num_used > count - 1 for group, count in zip(groups, counts)):
            others = self._others()
            self.preempt(self.victim(slots, others if len(others) else slots.busy))

    def preempt(self, row: int) -> None:
        """Return a row's request to the queue, where its arrival number keeps its place.

        Without a host pool, or if that is full, its computed tokens are lost except for the pages that stay
        cached.
        """
        assert not self._in_flight.holds(row), f"row {row} was preempted while the device computes it"
        self._counters.preemptions += 1
        num_computed = int(self._lifecycle.slots.num_computed[row])
        searching = row in self._beam_searches
        request = self._beam_searches.suspend(row) if searching else self._lifecycle.swap_out(row)
        if request is None:
            request = self._lifecycle.leave(row)
            self._counters.lost_tokens += num_computed
        request.num_preemptions += 1
        self._waiting.push(request)

    def _others(self) -> Index:
        """Return all rows except those of the oldest request, of which there may be none."""
        busy = self._lifecycle.slots.busy
        return busy[len(self._beam_searches.rows_of(int(busy[0]))) :] if len(busy) else busy
