"""Who is admitted next?"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from continuous_batching.request import Request

QueueOrder = Callable[[Request], float]


def fcfs(request: Request) -> float:
    """First come, first served: ties go by arrival number, and this order is all ties."""
    return 0.0


class WaitingQueue:
    """Waiting requests by a key; of equal keys the earlier arrival goes first.

    A preempted request keeps its arrival number, and with it its place.
    """

    def __init__(self, order: QueueOrder = fcfs) -> None:
        self._order = order
        self._heap: list[tuple[float, int, Request]] = []
        self._waiting: dict[str, Request] = {}  # by id; what is only in the heap has left

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Add a request that carries its arrival number."""
        assert request.id not in self._waiting, f"request {request.id} waits already"
        self._waiting[request.id] = request
        heapq.heappush(self._heap, (self._order(request), request.number, request))

    def peek(self) -> Request:
        """The request that goes next."""
        while self.find(self._heap[0][2].id) is not self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def find(self, request_id: str) -> Request | None:
        """The waiting request of this id, if there is one."""
        return self._waiting.get(request_id)

    def remove(self, request: Request) -> None:
        """Take a request out: it was admitted, or it gave up."""
        del self._waiting[request.id]
        if self._heap[0][2] is request:  # so that it can be pushed again: no request is in the heap twice
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._waiting) + 16:  # mostly gone: rebuild rather than grow
            self._heap = [(self._order(r), r.number, r) for r in self._waiting.values()]
            heapq.heapify(self._heap)

    @property
    def longest_since_s(self) -> float:
        """The arrival of the request that joined the queue first."""
        return next(iter(self._waiting.values())).arrival_s

    @property
    def requests(self) -> list[Request]:
        """All waiting requests, by arrival number."""
        return sorted(self._waiting.values(), key=lambda request: request.number)
