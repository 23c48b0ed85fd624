"""Hold the waiting requests, tell which is admitted next, and limit how many wait and for how long.

An order is a key that a request keeps for as long as it waits. Ageing needs no more: where every request
gains urgency at the same rate, the difference of two of them stays what it was, and with it their order. So
the oldest goes first in the end, at the cost of a heap. Within `FairShare`, tenants take turns by the tokens
that each was served. A request beyond the limits is refused with a hint when to retry; one that has waited or
run for too long is found here and ended by the scheduler. Whether the next request fits is decided by
admission.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from continuous_batching.policies.policy import ALL
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index

QueueOrder = Callable[[Request], float]  # the smallest goes first; ties go by arrival number


def shortest_first(request: Request) -> float:
    """Order by prompt and longest answer together.

    The key does not age: a long request waits while short ones come.
    """
    return float(request.num_prompt_tokens + request.params.max_tokens)


@dataclass(frozen=True, slots=True)
class Aged:
    """An order by waiting time, priority and length, each converted to seconds.

    A level of priority counts as `priority_s` seconds of waiting, and 1,000 tokens of prompt and longest
    answer as `length_s` seconds less of it. A request is overtaken only by those that arrive within the
    seconds that it is behind; against later ones its age decides. The composite of
    the article "Dynamic batching" (动态批处理) is weighed in this way, with its hyperbola of the length
    (by which ten tokens count as 1,000 s) replaced by a line.
    """

    priority_s: float
    length_s: float

    def __call__(self, request: Request) -> float:
        """Return the arrival time that the request is treated as having."""
        tokens = request.num_prompt_tokens + request.params.max_tokens
        return request.arrival_s - self.priority_s * request.priority + self.length_s * tokens / 1000


@dataclass(frozen=True, slots=True)
class EarliestDeadline:
    """An order by the time at which a request times out.

    It is `deadline_s` after the arrival if the request has no timeout.
    """

    deadline_s: float

    def __call__(self, request: Request) -> float:
        """Return the deadline on the engine's clock."""
        return request.arrival_s + (self.deadline_s if request.timeout_s is None else request.timeout_s)


_SPARE = 64  # number of idle tenants remembered beyond those that matter, so that forgetting them is rare


class FairShare:
    """A counter for each tenant that waits, runs, or was served more than its share.

    A tenant starts at the floor, which is the virtual time of weighted fair queueing (Demers, Keshav and
    Shenker, 1989): whatever is served raises it by the share of each tenant that waits or is served. So
    tenants that are new each time pass over one that had more than its share only until it has paid for that.
    """

    def __init__(self, slots: SlotPool, weights: Mapping[str, float]) -> None:
        self._slots = slots
        self._weights = dict(weights)  # tenants that are not listed weigh 1
        self._index: dict[str, int] = {}
        self._names: list[str] = []
        self._served: NDArray[np.float64] = np.zeros(0)  # tokens served, divided by the weight
        self._weight: NDArray[np.float64] = np.zeros(0)
        self._num_waiting: Index = np.zeros((0, 2), dtype=np.int64)  # short and long requests
        # Arrival number of the request with which a tenant's present wait began
        self._joined: Index = np.zeros(0, dtype=np.int64)
        self._floor = 0.0  # counter with which a tenant starts; it never falls
        self.short_only = False  # whether long prompts had no place when a request was last admitted
        # Arrival number of the row's request when its tenant was looked up: a cache of `_row_tenant`
        self._row_number: Index = np.full(slots.num_slots, -1, dtype=np.int64)
        self._row_tenant: Index = np.zeros(slots.num_slots, dtype=np.int64)

    def join(self, request: Request, is_long: bool) -> None:
        """Count a request of a tenant that begins to wait."""
        tenant = self._tenant(request.tenant)
        if not self._num_waiting[tenant].any():
            waiting = self._num_waiting.any(axis=1)
            if waiting.any():
                self._floor = max(self._floor, float(self._served[waiting].min()))
            self._served[tenant] = max(self._served[tenant], self._floor)
            self._joined[tenant] = request.number
        self._num_waiting[tenant, int(is_long)] += 1

    def leave(self, request: Request, is_long: bool) -> None:
        """Count a request of a tenant that has left the queue."""
        self._num_waiting[self._index[request.tenant], int(is_long)] -= 1

    def next(self, short_only: bool) -> str | None:
        """Return the waiting tenant whose request goes next, or None; ties go by arrival."""
        waiting = self._num_waiting[:, 0] > 0 if short_only else self._num_waiting.any(axis=1)
        served = np.where(waiting, self._served, np.inf)
        least = served.min(initial=np.inf)
        if least == np.inf:
            return None
        equal = np.flatnonzero(served == least)
        return self._names[int(equal[np.argmin(self._joined[equal])])]

    def _may_be_served(self) -> NDArray[np.bool_]:
        num: Index = self._num_waiting[:, 0] if self.short_only else self._num_waiting.sum(axis=1)
        return num > 0

    def charge_prompt(self, request: Request, num_tokens: int) -> None:
        """Charge a tenant for the known tokens that its admitted request will compute."""
        tenant = self._tenant(request.tenant)
        self._charge(np.bincount([tenant], [num_tokens], len(self._names)))

    def charge_answers(self, rows: Index) -> None:
        """Charge the tenants of these rows for one token each."""
        slots = self._slots
        unknown = rows[self._row_number[rows] != slots.number[rows]]
        for row in unknown.tolist():
            # No tenant is forgotten here, because the indices found for earlier rows would then be stale.
            self._row_tenant[row] = self._tenant(slots.requests[row].tenant, may_forget=False)
            self._row_number[row] = slots.number[row]
        self._charge(np.bincount(self._row_tenant[rows], minlength=len(self._names)))

    def _charge(self, num_tokens: NDArray[np.float64] | Index) -> None:
        """Charge each tenant for so many tokens, of which all that wait or are charged have their shares.

        Tenants whose long prompts alone wait have none while these have no place, and rise with the floor:
        what others got meanwhile gives them nothing to catch up on.
        """
        self._served += num_tokens / self._weight
        entitled = self._may_be_served() | (num_tokens > 0)
        if not entitled.any():
            return
        share = float(num_tokens.sum() / self._weight[entitled].sum())
        self._floor += share
        self._served[self._num_waiting.any(axis=1) & ~entitled] += share

    def served(self, tenant: str) -> float:
        """Return a tenant's counter: tokens served, divided by its weight."""
        return float(self._served[self._index[tenant]])

    def _tenant(self, name: str, *, may_forget: bool = True) -> int:
        if name not in self._index:
            if may_forget:
                self._forget()
            self._index[name] = len(self._names)
            self._names.append(name)
            self._served = np.append(self._served, self._floor)
            self._weight = np.append(self._weight, self._weights.get(name, 1.0))
            self._num_waiting = np.append(self._num_waiting, [[0, 0]], axis=0)
            self._joined = np.append(self._joined, 0)
        return self._index[name]

    def _forget(self) -> None:
        """Drop the tenants whose counter equals that of a new tenant."""
        kept = self._num_waiting.any(axis=1) | (self._served > self._floor)
        if len(kept) - np.count_nonzero(kept) < _SPARE:
            return
        self._names = [name for name, keep in zip(self._names, kept.tolist()) if keep]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._served, self._weight = self._served[kept], self._weight[kept]
        self._num_waiting, self._joined = self._num_waiting[kept], self._joined[kept]
        self._row_number[:] = -1


_Heap = list[tuple[float, int, Request]]


class WaitingQueue:
    """Waiting requests by the key of an order; ties, and all requests without an order, go by arrival.

    A preempted request keeps its arrival number, and with it its place. With `shares`, tenants take turns by
    what they were served, and the order applies within each tenant. A request of more than `long_tokens`
    known tokens is long, and can be passed over for the next that is not.
    """

    def __init__(
        self, order: QueueOrder | None = None, shares: FairShare | None = None, long_tokens: int = ALL
    ) -> None:
        self.shares = shares
        self.num_tokens = 0  # known tokens of all waiting requests
        self.num_removed = self.num_removed_tokens = 0  # totals since the start
        self._order = order
        self.long_tokens = long_tokens
        # Keyed by tenant (if they take turns) and whether the requests are long
        self._heaps: dict[tuple[str, bool], _Heap] = {}
        self._waiting: dict[str, Request] = {}  # keyed by id; an entry of a heap that is not in here has left

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def push(self, request: Request) -> None:
        """Add a request that has its arrival number."""
        assert request.id not in self._waiting, f"request {request.id} waits already"
        self._waiting[request.id] = request
        self.num_tokens += len(request.tokens)
        heapq.heappush(self._heaps.setdefault(self._line(request), []), (*self.place(request), request))
        if self.shares:
            self.shares.join(request, self.is_long(request))

    def peek(self, short_only: bool = False) -> Request | None:
        """Return the request that goes next, or the next that is not long, or None."""
        tenant = self.shares.next(short_only) if self.shares else ""
        if tenant is None:
            return None
        tops = [self._top((tenant, is_long)) for is_long in ((False,) if short_only else (False, True))]
        return min((top for top in tops if top is not None), default=(0.0, 0, None))[2]

    def find(self, request_id: str) -> Request | None:
        """Return the waiting request with this id, or None."""
        return self._waiting.get(request_id)

    def remove(self, request: Request) -> None:
        """Remove a request that was admitted or has ended."""
        del self._waiting[request.id]
        self.num_tokens -= len(request.tokens)
        self.num_removed += 1
        self.num_removed_tokens += len(request.tokens)
        if self.shares:
            self.shares.leave(request, self.is_long(request))
        line = self._line(request)
        heap = self._heaps[line]
        if heap[0][2] is request:  # it may be pushed again, and no request may be in the heap twice
            heapq.heappop(heap)
        # Most entries have left: rebuild the heap rather than let it grow
        if len(heap) > 2 * len(self._waiting) + 16:
            heap[:] = [(*self.place(r), r) for r in self._waiting.values() if self._line(r) == line]
            heapq.heapify(heap)
        if self._top(line) is None:
            del self._heaps[line]

    def place(self, request: Request) -> tuple[float, int]:
        """Return the key by which a request is ordered; it never changes."""
        return 0.0 if self._order is None else self._order(request), request.number

    def is_long(self, request: Request) -> bool:
        """Whether a request may be passed over because it is long."""
        return len(request.tokens) > self.long_tokens

    @property
    def longest_since_s(self) -> float:
        """Arrival time of the request that joined the queue first."""
        return next(iter(self._waiting.values())).arrival_s

    @property
    def requests(self) -> list[Request]:
        """All waiting requests by arrival number."""
        return sorted(self._waiting.values(), key=lambda request: request.number)

    def oldest(self, count: int) -> list[Request]:
        """Return at most so many waiting requests, those that have waited longest in this queue."""
        return [*islice(self._waiting.values(), count)]

    def _line(self, request: Request) -> tuple[str, bool]:
        return (request.tenant if self.shares else "", self.is_long(request))

    def _stands_in(self, line: tuple[str, bool], request: Request) -> bool:
        """Whether a request waits in this line.

        One that was admitted before those ahead of it is left in its heap, and may come back as a long one.
        """
        return self._waiting.get(request.id) is request and self._line(request) == line

    def _top(self, line: tuple[str, bool]) -> tuple[float, int, Request] | None:
        heap = self._heaps.get(line, [])
        while heap and not self._stands_in(line, heap[0][2]):
            heapq.heappop(heap)
        return heap[0] if heap else None


_WINDOW = 32  # steps with admissions from which the retry hint is computed
_UNKNOWN_S = 1.0  # the hint before any request has left a queue that was full, or in which others waited on
_MOST_S = 60.0  # the longest hint; usual clients follow none that is longer


class QueueFull(ValueError):
    """A request was refused because the queue is too long.

    It may be retried in about `retry_after_s` seconds.
    """

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait, and how long; a request beyond that is refused or given up."""

    max_waiting_requests: int = ALL
    max_waiting_tokens: int = ALL  # prompt tokens of all waiting requests
    max_queue_wait_s: float = math.inf  # longest time from arrival to first admission


class QueueGate:
    """Refuses requests behind too long a queue, and finds those that have waited or run for too long."""

    def __init__(self, limits: QueueLimits, waiting: WaitingQueue) -> None:
        self._limits = limits
        self._waiting = waiting
        # (due time, tie-breaker, whether it applies only while the request waits, the request)
        self._due: list[tuple[float, int, bool, Request]] = []
        self._most_due = 64
        # (seconds, requests, tokens) that left the queue at their end, since some had left it before
        self._pace: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)
        # (time, requests, tokens) that had left the queue when some last did, or when the queue began that is
        # full now; None if nobody waited on
        self._since: tuple[float, int, int] | None = None
        self._measured_s = -math.inf  # time of the last step

    def check(self, request: Request, num_following: int) -> None:
        """Raise QueueFull if a request and its samples are too many.

        `num_following` samples wait for other prompts.
        """
        waiting, limits = self._waiting, self._limits
        if not len(waiting):
            self._since = None  # the last may have left it without a step
            return  # an empty queue is never too long, however large the request
        num_requests = len(waiting) + num_following + 1 + len(request.followers)
        num_tokens = waiting.num_tokens + request.num_prompt_tokens
        for column, what, count, limit in (
            (1, "requests", num_requests, limits.max_waiting_requests),
            (2, "tokens", num_tokens, limits.max_waiting_tokens),
        ):
            if count > limit:
                if self._since is None:
                    # All that wait have joined, or come back, since the last step
                    began_s = max(waiting.longest_since_s, self._measured_s)
                    self._since = began_s, waiting.num_removed, waiting.num_removed_tokens
                retry_after_s = self._seconds_for(count - limit, column)
                raise QueueFull(
                    f"request {request.id} would be in a queue of {count} {what}; it may hold {limit}"
                    f" (scheduler.max_waiting_{what}): try again in {retry_after_s:.1f} s",
                    retry_after_s,
                )

    def watch(self, request: Request) -> None:
        """Remember when a request's time limits end."""
        wait_s, timeout_s = self._limits.max_queue_wait_s, request.timeout_s
        if wait_s < math.inf:
            heapq.heappush(self._due, (request.arrival_s + wait_s, 2 * request.number, True, request))
        if timeout_s is not None:
            heapq.heappush(self._due, (request.arrival_s + timeout_s, 2 * request.number + 1, False, request))
        if len(self._due) > self._most_due:  # most entries belong to requests that have ended; drop them
            self._due = [each for each in self._due if each[3].finish_reason is None]
            heapq.heapify(self._due)
            self._most_due = 64 + 2 * len(self._due)

    def lift_wait_limit(self) -> None:
        """Let requests that are watched from now on wait for any time."""
        self._limits = replace(self._limits, max_queue_wait_s=math.inf)

    def over(self, now_s: float) -> Iterator[Request]:
        """Yield the requests whose time is over; each must be ended before the next is asked for."""
        following = list[tuple[float, int, bool, Request]]()
        while self._due and self._due[0][0] <= now_s:
            due = heapq.heappop(self._due)
            only_waiting, request = due[2:]
            waits = self._waiting.find(request.id) is request and not request.num_preemptions
            if request.finish_reason is not None:
                continue
            if waits or not only_waiting:
                yield request
            elif request.admitted_s is None:  # its leader runs, and it may have to wait again for a row
                following.append(due)
        for due in following:
            heapq.heappush(self._due, due)

    def measure(self, now_s: float) -> None:
        """Record how far the queue has been served, of the time in which requests waited."""
        num_requests, num_tokens = self._waiting.num_removed, self._waiting.num_removed_tokens
        since, self._measured_s = self._since, now_s
        if since is not None and num_requests != since[1]:
            self._pace.append((now_s - since[0], num_requests - since[1], num_tokens - since[2]))
        if not len(self._waiting):
            self._since = None
        elif since is None or num_requests != since[1]:
            self._since = now_s, num_requests, num_tokens

    def _seconds_for(self, excess: int, column: int) -> float:
        """Estimate the time until so many requests (column 1) or tokens (2) have left the queue.

        The recent pace is assumed.
        """
        seconds = sum(each[0] for each in self._pace)
        left = sum(each[column] for each in self._pace)
        return min(seconds * excess / left, _MOST_S) if seconds > 0 else _UNKNOWN_S
