"""Let long pieces of work in the event loop take turns with everything else.

Decoding a body of two megabytes, and writing thousands of log-probabilities, take some milliseconds each.
Such a piece of work waits for a turn first, and each round of the loop has one turn: however many pieces
wait, everything else runs between any two of them.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """The turns of one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Return in a round of the loop that no other waiter has.

        The turn lasts until the caller's next await.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._give)
        await turn

    def _give(self) -> None:
        """Wake the first waiter; it stays in the queue until the next round, so that no second one starts."""
        if not self._waiting[0].done():
            self._waiting[0].set_result(None)
        asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        self._waiting.popleft()
        if self._waiting:
            self._give()
