"""The figures of a run show what its steps did."""

from __future__ import annotations

from benchmark.run_record import StepRecord, means_over_time, percentiles


def test_means_over_time_count_idle_time_and_no_gap_between_steps() -> None:
    def step(start_s: float, end_s: float, running: int, waiting: int, ended: int) -> StepRecord:
        return StepRecord(start_s, end_s, [0], ["a"], [1], [True], 0, running, waiting, ended)

    steps = [step(0, 1, 2, 1, 1), step(1.5, 2, 2, 0, 2), step(8, 9, 1, 0, 1)]
    assert means_over_time(steps, [0, 0, 0, 8], 10.0) == {"mean_running": 0.5, "mean_in_system": 0.6}
    long = [step(0, 1, 2, 0, 1), step(1, 2, 2, 0, 2)]
    assert means_over_time(long, [0, 0, 0.25], 2.0)["mean_in_system"] == 2.375, "it came during a step"


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles([0.001, 0.002, 0.003]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98}
    assert percentiles([]) == {}
