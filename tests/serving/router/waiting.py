"""Wait for a condition, the end of a task, or of connections, in tests of routers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tests.patience import PATIENCE_S

LOOK_S = 0.01
_TURNS = 100  # of the event loop; closing both sides of a connection takes less than ten


async def until(holds: Callable[[], bool]) -> None:
    """Look again and again; raises AssertionError when it has not come to hold in time."""
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, "it never came to hold"
        await asyncio.sleep(LOOK_S)


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel it until it has ended: `asyncio.wait_for` before Python 3.12 swallows what comes as it ends."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


async def close_all() -> None:
    """Let both sides close the connections that one of them has ended.

    It is counted in turns of the event loop: a process that waits for a processor has few in any time.
    """
    for _ in range(_TURNS):
        await asyncio.sleep(0)
