"""Wait until a condition holds, or until a task has ended, in tests of routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LOOK_S, MOST_LOOKS = 0.01, 6000


async def until(holds: Callable[[], bool]) -> None:
    """Look again and again; raises AssertionError after a minute."""
    for _ in range(MOST_LOOKS):
        if holds():
            return
        await asyncio.sleep(LOOK_S)
    raise AssertionError("it never came to hold")


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel it until it has ended: `asyncio.wait_for` before Python 3.12 swallows what comes as it ends."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
