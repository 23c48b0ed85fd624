"""Draw the chart of an experiment's results."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # draws files, without a display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmark.reproduce.case_runs import Results
from benchmark.reproduce.experiment import Chart, Column, Experiment, figure

WIDTH, HEIGHT = 3.6, 3.2  # inches of one pair of axes
STYLE = {"axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "font.size": 8}


def save(path: Path, experiment: Experiment, results: Results) -> None:
    """Draw the chart of an experiment."""
    chart = experiment.chart
    count = len(chart.columns)
    with mpl.rc_context(STYLE):
        height = HEIGHT if chart.over_rate else 0.8 + 0.22 * len(results)
        figure_, all_axes = plt.subplots(
            1, count, figsize=(1.2 + WIDTH * count, height), squeeze=False, sharey=not chart.over_rate
        )
        for axes, column in zip(all_axes[0], chart.columns):
            (_lines if chart.over_rate else _bars)(axes, experiment, chart, column, results)
        if chart.over_rate:
            handles, names = all_axes[0][0].get_legend_handles_labels()
            figure_.legend(handles, names, loc="upper right", ncols=len(names), frameon=False)
        figure_.suptitle("SIMULATED", x=0.01, ha="left", fontsize=7)
        figure_.tight_layout(rect=(0, 0, 1, 0.97 if chart.over_rate else 1))
        figure_.savefig(path, dpi=100, metadata={"Software": None})
        plt.close(figure_)


def _bars(axes: Axes, experiment: Experiment, chart: Chart, column: Column, results: Results) -> None:
    labels = [case.label for case in experiment.cases]
    values = [figure(results[label], column.name) for label in labels]
    shown = axes.barh(labels, values, color="#35608d", height=0.65)
    axes.bar_label(shown, [f"{value:,.{column.places}f}" for value in values], padding=2, fontsize=7)
    axes.set_title(column.heading)
    axes.margins(x=0.25)
    axes.grid(axis="y", visible=False)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    if chart.log:
        axes.set_xscale("log")


def _lines(axes: Axes, experiment: Experiment, chart: Chart, column: Column, results: Results) -> None:
    for series in dict.fromkeys(case.series for case in experiment.cases):
        same = [case for case in experiment.cases if case.series == series]
        axes.plot(
            [case.offered.rate_per_s for case in same],
            [figure(results[case.label], column.name) for case in same],
            marker=".",
            label=series,
        )
    axes.set_xlabel("requests/s offered")
    axes.set_title(column.heading)
    if chart.log:
        axes.set_yscale("log")
