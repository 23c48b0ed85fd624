"""Decide whose request goes to a replica next when all replicas have enough to do.

As in an engine (`continuous_batching.queueing.fair_share`), the tenant that was served least goes first, here
counted over all replicas, so that a tenant with many requests does not fill every queue of the fleet before
another tenant's first request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MOST_TENANTS = 4096  # most tenants that are remembered


class FairTurns:
    """Lets `most_open` requests through at once.

    Further requests wait, and tenants take turns by the prompt tokens that were let through.
    """

    def __init__(self, most_open: Callable[[], int]) -> None:
        self._most_open = most_open
        self.num_open = 0
        self._served: dict[str, float] = {}
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        self._floor = 0.0

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def waiting_tokens(self) -> int:
        return sum(num_tokens for line in self._waiting.values() for _, num_tokens in line)

    async def enter(self, tenant: str, num_tokens: int) -> None:
        """Wait for a turn; a caller that has had it calls `leave`."""
        if self.num_open < self._most_open() and not self._waiting:
            self._let(tenant, num_tokens)
            return
        if tenant not in self._waiting:
            least = min((self._served.get(each, 0.0) for each in self._waiting), default=self._floor)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
            self._waiting[tenant] = deque()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[tenant].append((turn, num_tokens))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # it was let through at the same moment
            raise

    def leave(self) -> None:
        """Record that a request has ended."""
        self.num_open -= 1
        self.fill()

    def fill(self) -> None:
        """Let requests through while there is room."""
        while self._waiting and self.num_open < self._most_open():
            tenant = min(self._waiting, key=self._served.__getitem__)
            line = self._waiting[tenant]
            turn, num_tokens = line.popleft()
            if not line:
                del self._waiting[tenant]
            if not turn.done():
                self._let(tenant, num_tokens)
                turn.set_result(None)

    def _let(self, tenant: str, num_tokens: int) -> None:
        self.num_open += 1
        self._floor = max(self._floor, self._served.get(tenant, 0.0))
        self._served[tenant] = self._served.get(tenant, self._floor) + num_tokens
        if len(self._served) > MOST_TENANTS:
            self._served = {each: self._served[each] for each in self._waiting}
