"""The clocks of a run are read at one moment, and its figures show what its steps did."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from benchmark.run_record import RunClock, StepRecord, means_over_time, percentiles, with_wall

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


def test_means_over_time_count_idle_time_and_no_gap_between_steps() -> None:
    def step(start_s: float, end_s: float, running: int, waiting: int, ended: int) -> StepRecord:
        return StepRecord(start_s, end_s, [0], ["a"], [True], 0, running, waiting, ended)

    steps = [step(0, 1, 2, 1, 1), step(1.5, 2, 2, 0, 2), step(8, 9, 1, 0, 1)]
    assert means_over_time(steps, [0, 0, 0, 8], 10.0) == {"mean_running": 0.5, "mean_in_system": 0.6}
    long = [step(0, 1, 2, 0, 1), step(1, 2, 2, 0, 2)]
    assert means_over_time(long, [0, 0, 0.25], 2.0)["mean_in_system"] == 2.375, "it came during a step"


def test_percentiles_are_in_milliseconds() -> None:
    found = {"mean": 2.0, "std": 0.816, "p50": 2.0, "p90": 2.8, "p99": 2.98}
    assert percentiles([0.001, 0.002, 0.003]) == found
    assert percentiles([]) == {}
