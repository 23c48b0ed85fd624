"""Decide whose request goes to a replica next when all replicas of a model have enough to do.

As in an engine (`continuous_batching.queueing`), the tenant that was served least goes first, here
counted over all replicas, so that a tenant with many requests does not fill every queue of the fleet before
another tenant's first request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

MOST_TENANTS = 4096  # most tenants that are remembered


class ModelTurns:
    """The turns of each model, so that requests for one do not wait for the replicas of another.

    `most_open` returns how many requests for a model may be let through at once.
    """

    def __init__(self, most_open: Callable[[str], int]) -> None:
        self._most_open = most_open
        self._turns: dict[str, FairTurns] = {}

    def of(self, model: str) -> FairTurns:
        """Return the turns of a model that a replica serves."""
        if model not in self._turns:
            self._turns[model] = FairTurns(lambda: self._most_open(model))
        return self._turns[model]

    @property
    def num_open(self) -> int:
        return sum(each.num_open for each in self._turns.values())

    @property
    def num_waiting(self) -> int:
        return sum(each.num_waiting for each in self._turns.values())

    @property
    def waiting_tokens(self) -> int:
        return sum(each.waiting_tokens for each in self._turns.values())

    def fill(self) -> None:
        """Let requests through while there is room."""
        for each in self._turns.values():
            each.fill()


class FairTurns:
    """Lets `most_open` requests through at once.

    Further requests wait, and tenants take turns by the prompt tokens that were let through.
    """

    def __init__(self, most_open: Callable[[], int]) -> None:
        self._most_open = most_open
        self.num_open = 0
        self._served: dict[str, float] = {}
        # The tokens of each turn that is waited for, in the order of their requests
        self._waiting: dict[str, OrderedDict[asyncio.Future[None], int]] = {}
        self._floor = 0.0

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def waiting_tokens(self) -> int:
        return sum(num_tokens for line in self._waiting.values() for num_tokens in line.values())

    async def enter(self, tenant: str, num_tokens: int) -> None:
        """Wait for a turn; a caller that has had it calls `leave`."""
        if self.num_open < self._most_open() and not self._waiting:
            self._let(tenant, num_tokens)
            return
        if tenant not in self._waiting:
            least = min((self._served.get(each, 0.0) for each in self._waiting), default=self._floor)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
            self._waiting[tenant] = OrderedDict()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[tenant][turn] = num_tokens
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._withdraw(tenant, turn)
            else:
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
            turn, num_tokens = next(iter(self._waiting[tenant].items()))
            self._withdraw(tenant, turn)
            if not turn.cancelled():
                self._let(tenant, num_tokens)
                turn.set_result(None)

    def _withdraw(self, tenant: str, turn: asyncio.Future[None]) -> None:
        """Let a turn wait no longer, if it still does."""
        line = self._waiting.get(tenant)
        if line is not None:
            line.pop(turn, None)
            if not line:
                del self._waiting[tenant]

    def _let(self, tenant: str, num_tokens: int) -> None:
        self.num_open += 1
        self._floor = max(self._floor, self._served.get(tenant, 0.0))
        self._served[tenant] = self._served.get(tenant, self._floor) + num_tokens
        if len(self._served) > MOST_TENANTS:
            self._served = {each: self._served[each] for each in self._waiting}
