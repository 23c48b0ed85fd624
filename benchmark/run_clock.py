"""Record when a run began and ended, on independent clocks, and how busy others kept the machine.

The figures are read from a monotonic clock. The clocks of the wall and of the processor are read beside it,
so that a gate can compare durations with something that they were not computed from.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

NEAR_S = 5e-5  # seconds between two readings of one moment, unless something else ran in between
TRIES = 20
STAT = Path("/proc/stat")


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


class OtherLoad:
    """The processor time of this machine that neither this process nor its ended children took.

    It counts from when it is made, by Linux's `/proc/stat`, with what a hypervisor took from the machine.
    """

    __slots__ = ("_own_s", "_since_s", "_taken_s")

    def __init__(self) -> None:
        self._since_s, self._taken_s, self._own_s = time.monotonic(), taken_s(STAT.read_text()), own_s()

    def share(self) -> float:
        """Return the others' share of the processor time of all cores."""
        others_s = taken_s(STAT.read_text()) - self._taken_s - (own_s() - self._own_s)
        all_s = (time.monotonic() - self._since_s) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, others_s) / all_s)


def taken_s(stat: str) -> float:
    """Return the seconds that all cores were not idle: user, nice, system, both interrupts, and stolen."""
    user, nice, system, _idle, _waiting, hard, soft, stolen = map(int, stat.split()[1:9])
    return (user + nice + system + hard + soft + stolen) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])
