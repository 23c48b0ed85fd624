"""Hold the waiting requests and tell which is admitted next.

The order is a key function (`ordering`), by tenant if they take turns (`fair_share`), and preempted requests
keep their place. Whether the next request fits is decided by admission.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from continuous_batching.policies.policy import ALL
from continuous_batching.queueing.fair_share import FairShare
from continuous_batching.queueing.ordering import QueueOrder
from continuous_batching.request import Request

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
        self._long_tokens = long_tokens
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
        return len(request.tokens) > self._long_tokens

    @property
    def longest_since_s(self) -> float:
        """Arrival time of the request that joined the queue first."""
        return next(iter(self._waiting.values())).arrival_s

    @property
    def requests(self) -> list[Request]:
        """All waiting requests by arrival number."""
        return sorted(self._waiting.values(), key=lambda request: request.number)

    def _line(self, request: Request) -> tuple[str, bool]:
        return (request.tenant if self.shares else "", self.is_long(request))

    def _top(self, line: tuple[str, bool]) -> tuple[float, int, Request] | None:
        heap = self._heaps.get(line, [])
        while heap and self._waiting.get(heap[0][2].id) is not heap[0][2]:
            heapq.heappop(heap)
        return heap[0] if heap else None
