"""Record when a run began and ended, and its duration on independent clocks.

The figures are read from a monotonic clock. The clocks of the wall and of the processor are read beside it,
so that a gate can compare durations with something that they were not computed from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone

NEAR_S = 5e-5  # seconds between two readings of one moment, unless something else ran in between
TRIES = 20


def with_wall(clock: Callable[[], float]) -> tuple[float, float]:
    """Return the wall clock's and another clock's readings of one moment.

    On a busy machine this process may have to wait between both; they are then read again.
    """
    nearest, found = float("inf"), (0.0, 0.0)
    for _ in range(TRIES):
        before_s, wall_s, after_s = clock(), time.time(), clock()
        if after_s - before_s < nearest:
            nearest, found = after_s - before_s, (wall_s, (before_s + after_s) / 2)
        if nearest <= NEAR_S:
            break
    return found


class RunClock:
    """A clock that starts when it is made."""

    __slots__ = ("_cpu_s", "_monotonic_s", "_wall_s")

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._wall_s, self._monotonic_s = with_wall(time.monotonic)

    def read(self) -> dict[str, object]:
        """Return what has passed since, in the form of a result: `monotonic_s` and `cpu_s` in seconds.

        The processor time is of all threads of this process.
        """
        wall_s, monotonic_s = with_wall(time.monotonic)
        return {
            "started_at": _iso(self._wall_s),
            "ended_at": _iso(wall_s),
            "monotonic_s": round(monotonic_s - self._monotonic_s, 6),
            "cpu_s": round(time.process_time() - self._cpu_s, 6),
        }


def _iso(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, timezone.utc).isoformat(timespec="microseconds")
