"""When did a run begin and end, and what did it take by clocks that do not know of one another?

The figures are read from a monotonic clock. The wall's clock and the processor's are read beside it, so that
a gate can hold durations to something that they were not computed from.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime, timezone


@dataclass(frozen=True, slots=True)
class RunClock:
    """Begins when it is made."""

    wall_s: float = field(default_factory=time.time)
    monotonic_s: float = field(default_factory=time.monotonic)
    cpu_s: float = field(default_factory=time.process_time)

    def read(self) -> dict[str, object]:
        """What has passed since, as a result carries it: `monotonic_s` and `cpu_s` in seconds, of the
        processor those of all threads of this process."""
        now_s, monotonic_s, cpu_s = time.time(), time.monotonic(), time.process_time()
        return {
            "started_at": _iso(self.wall_s),
            "ended_at": _iso(now_s),
            "monotonic_s": round(monotonic_s - self.monotonic_s, 6),
            "cpu_s": round(cpu_s - self.cpu_s, 6),
        }


def _iso(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, timezone.utc).isoformat(timespec="microseconds")
