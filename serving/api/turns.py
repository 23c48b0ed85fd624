"""How does long work in the event loop let all others have their turn?

Reading a body of two megabytes, and writing log-probabilities by the thousand, are pieces of work of some
milliseconds each. Whoever has such a piece waits for a turn first, and there is one in each round of the
loop: however many wait, everything else runs between any two of them.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """The turns of one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Returns in a round of the loop that nobody else has; until the next await, the turn is ours."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._give)
        await turn

    def _give(self) -> None:
        """Wake the first; it stays in the queue until the round after, so that nobody starts a second."""
        if not self._waiting[0].done():
            self._waiting[0].set_result(None)
        asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        self._waiting.popleft()
        if self._waiting:
            self._give()
