"""Two clocks are read at one moment, also where the process is made to wait between them."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from benchmark.run_clock import RunClock, with_wall

PAUSE_S = 0.2


class Interrupted:
    """A wall's clock after whose first readings something else runs for a while; all clocks go on by that."""

    def __init__(self, times: int) -> None:
        self.now_s, self.left = 0.0, times

    def wall_s(self) -> float:
        told, self.left = 1e9 + self.now_s, self.left - 1
        if self.left >= 0:
            self.now_s += PAUSE_S
        return told

    def monotonic_s(self) -> float:
        self.now_s += 1e-7
        return self.now_s


@pytest.mark.parametrize("times", [0, 1, 7])
def test_a_pause_between_two_clocks_is_seen_and_they_are_read_again(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    clock = Interrupted(times)
    monkeypatch.setattr(time, "time", clock.wall_s)
    wall_s, now_s = with_wall(clock.monotonic_s)
    assert abs(wall_s - 1e9 - now_s) < 1e-5


def test_a_run_has_one_duration_by_both_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate holds one to the other within a millisecond."""
    clock = Interrupted(1)
    monkeypatch.setattr(time, "time", clock.wall_s)
    monkeypatch.setattr(time, "monotonic", clock.monotonic_s)
    run = RunClock()
    clock.now_s, clock.left = clock.now_s + 3.0, 1
    passed = run.read()
    began, ended = (datetime.fromisoformat(str(passed[name])) for name in ("started_at", "ended_at"))
    assert (ended - began).total_seconds() == pytest.approx(float(str(passed["monotonic_s"])), abs=1e-4)
