"""Wait until a condition holds, or until a task has ended, in tests of routers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tests.patience import PATIENCE_S

LOOK_S = 0.01


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
