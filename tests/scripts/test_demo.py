"""The demo draws what its steps did.

The tests import matplotlib, which takes a second.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.run_record import StepRecord, Timeline
from continuous_batching.counters import Counters


def test_the_legend_lies_outside_of_the_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot as plt

    from benchmark.demo import save_slots

    drawn: list[plt.Figure] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    timeline = Timeline(Counters())
    timeline.steps.append(StepRecord(0, 1, [0], ["a"], [True], 0, 1, 0, 0))
    save_slots(tmp_path / "demo.png", [("static", timeline, 0.0), ("continuous", timeline, 0.0)])
    (figure,) = drawn
    axes = figure.axes[0]
    legend = axes.get_legend()
    assert legend is not None
    assert not legend.get_window_extent().overlaps(axes.patch.get_window_extent())
    monkeypatch.undo()
    plt.close(figure)


def test_bars_join_steps_that_follow_each_other_and_part_prompts_from_answers() -> None:
    from benchmark.demo import bars

    timeline = Timeline(Counters())
    for at, decode in [(0, False), (1, True), (2, True), (5, True)]:
        timeline.steps.append(StepRecord(at, at + 1, [3], ["a"], [decode], 0, 1, 0, 0))
    assert bars(timeline) == {(3, "a", False): [(0, 1)], (3, "a", True): [(1, 2), (5, 1)]}
