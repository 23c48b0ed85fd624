"""Every picture that the project draws is rendered, and read as its viewer would: nothing hides or is lost.

The tests import matplotlib, which takes a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark.run_record import StepRecord, Timeline
from continuous_batching.counters import Counters
from tests.thorough import first_quick

NAMES = ("scheduler.num_slots=8", "_a" * 60)


def timeline(num_slots: int) -> Timeline:
    """A run in which each slot has a prompt, and its answer."""
    made, rows = Timeline(Counters()), [*range(num_slots)]
    for at in range(20):
        ids, decodes = [f"{row}/{at // 10}" for row in rows], [at % 10 > 0] * num_slots
        made.steps.append(StepRecord(at, at + 1, rows, ids, decodes, 0, num_slots, at, 0))
    return made


def swept(rate: float) -> dict[str, Any]:
    """A result at a rate."""
    part = {"p50": 1e-6, "p99": 30.0 * rate}
    latencies = {f"{name}_ms": part if name == "itl" else {"p50": 10.0 * rate, "p99": 40.0 * rate**2}
                 for name in ("ttft", "itl", "e2e")}  # fmt: skip
    rates = {"request_rate": rate, "requests_per_s": min(rate, 5.0), "request_goodput": 5.0 - rate / 3}
    return {**rates, **latencies}


def of_a_report(_: Path) -> None:
    from benchmark.serve import report

    sweeps = [(name, [swept(rate) for rate in (1.0, 4.0, 9.0)]) for name in NAMES]
    assert len([*report.curves(sweeps), report.goodput(sweeps)]) == 4


def of_runs(folder: Path) -> None:
    from benchmark import demo

    demo.save_slots(folder / "slots.png", [(name, timeline(16), 0.0) for name in ("static", "continuous")])


@pytest.mark.parametrize("draw", first_quick(1, [of_runs, of_a_report]))
def test_every_picture_can_be_read(
    draw: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot as plt

    close, figures = plt.close, []
    monkeypatch.setattr(plt, "close", figures.append)
    try:
        draw(tmp_path)
        assert len(figures) == {of_a_report: 4, of_runs: 1}[draw]
        for figure in figures:
            figure.canvas.draw()
            for axes in figure.axes:
                judge(figure, axes)
    finally:
        for figure in figures:
            close(figure)


def judge(figure: Any, axes: Any) -> None:
    """Its words lie within the picture and apart, and its lines take up most of it."""
    within = figure.bbox.padded(1.0)
    words = [axes.title, axes.xaxis.label, axes.yaxis.label]
    for axis, low, high in ((axes.xaxis, *axes.get_xlim()), (axes.yaxis, *sorted(axes.get_ylim()))):
        shown = [
            each.label1
            for each in axis.get_major_ticks()
            if min(low, high) <= each.get_loc() <= max(low, high) and each.label1.get_visible()
        ]
        shown = [each for each in shown if each.get_text()]
        for one, other in itertools.combinations(shown, 2):
            assert not one.get_window_extent().overlaps(other.get_window_extent()), (one, other)
        words += shown
        is_count = axis.label.get_text() == "slot"
        assert not (is_count and [each for each in shown if not each.get_text().lstrip("−").isdigit()])
    for word in words:
        extent = word.get_window_extent()
        assert not word.get_text() or within.containsx(extent.x0), word
        assert not word.get_text() or within.containsy(extent.y1), word
    legend = axes.get_legend()
    assert legend is None or not axes.lines or not figure.axes[0].get_xlabel() or _is_beside(axes, legend)
    ends = [axes.transData.transform(line.get_xydata()) for line in axes.lines if len(line.get_xdata()) > 2]
    if ends:
        xs = np.concatenate(ends)[:, 0]
        assert np.ptp(xs) > 0.6 * axes.bbox.width, "most of the picture is empty"
    if len(axes.patches):
        assert axes.get_axisbelow() is True, "a grid lies over bars"
        assert legend is None or not legend.get_window_extent().overlaps(axes.patch.get_window_extent())


def _is_beside(axes: Any, legend: Any) -> bool:
    """Whether a legend hides no point of a line."""
    points = np.concatenate([axes.transData.transform(line.get_xydata()) for line in axes.lines])
    box = legend.get_window_extent()
    return not [point for point in points if box.contains(*point)]


def test_bars_join_steps_that_follow_each_other_and_part_prompts_from_answers() -> None:
    from benchmark.demo import bars

    run = Timeline(Counters())
    for at, decode in [(0, False), (1, True), (2, True), (5, True)]:
        run.steps.append(StepRecord(at, at + 1, [3], ["a"], [decode], 0, 1, 0, 0))
    assert bars(run) == {(3, "a", False): [(0, 1)], (3, "a", True): [(1, 2), (5, 1)]}


def test_figures_are_written_whole_and_words_are_not_broken() -> None:
    from benchmark.serve import report

    point = swept(1.0) | {"verdict": {"outcome": "pass"}, "output_tokens_per_s": 16087.48}
    table = report.points_table([point | {"request_goodput": 0.05812}])
    assert "<td>16,087</td>" in table
    assert "<td>0.05812</td>" in table
    assert '<table class="figures">' in table
    assert ".figures th, .figures td { overflow-wrap: normal; }" in report.STYLE
