"""Draw the slots of a run over time, and label logarithmic axes by plain numbers."""

from __future__ import annotations

import colorsys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # draws files, without a display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter, MaxNLocator

from benchmark.run_record import Timeline

Bar = tuple[float, float]  # start and width, in seconds


def request_colour(number: int, *, decode: bool) -> tuple[float, float, float]:
    """Return a request's colour, far from its neighbours'; a prompt has the dark shade of its answer's."""
    hue = number * 0.6180339887 % 1.0  # the golden ratio spreads any number of hues
    return colorsys.hsv_to_rgb(hue, 0.45, 0.95) if decode else colorsys.hsv_to_rgb(hue, 0.9, 0.5)


def bars(timeline: Timeline) -> dict[tuple[int, str, bool], list[Bar]]:
    """Return stretches of unbroken work by (row, request, is a decode)."""
    drawn: dict[tuple[int, str, bool], list[Bar]] = {}
    for step in timeline.steps:
        for row, request_id, decode in zip(step.rows, step.request_ids, step.decodes):
            stretches = drawn.setdefault((row, request_id, decode), [])
            start, end = step.start_s, step.end_s
            if stretches and start - sum(stretches[-1]) < 0.5 * (end - start):
                start = stretches.pop()[0]
            stretches.append((start, end - start))
    return drawn


def draw_slots(axes: Axes, timeline: Timeline, origin_s: float, title: str) -> None:
    """Draw one row for each slot: a colour for each request."""
    numbers: dict[str, int] = {}
    for (row, request_id, decode), stretches in bars(timeline).items():
        number = numbers.setdefault(request_id, len(numbers))
        axes.broken_barh(
            [(start - origin_s, width) for start, width in stretches],
            (row - 0.45, 0.9),
            facecolors=request_colour(number, decode=decode),
            edgecolors="none",
        )
    axes.set_title(title, loc="left")
    axes.set_ylabel("slot")
    last = max((row for row, *_ in bars(timeline)), default=0)
    axes.set_ylim(last + 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0)


def save_slots(path: Path, runs: list[tuple[str, Timeline, float]]) -> None:
    """Draw runs, each (title, timeline, time of its first arrival), above one another on one time axis."""
    figure, all_axes = plt.subplots(len(runs), 1, sharex=True, figsize=(12, 4.2 * len(runs)), squeeze=False)
    for axes, (title, timeline, origin_s) in zip(all_axes[:, 0], runs):
        draw_slots(axes, timeline, origin_s, title)
    all_axes[-1, 0].set_xlabel("seconds since the first arrival")
    shades = [
        Patch(color=request_colour(0, decode=False), label="prompt (prefill)"),
        Patch(color=request_colour(0, decode=True), label="answer (decode)"),
        Patch(facecolor="white", edgecolor="grey", label="idle"),
    ]
    # The legend is above the axes, beside the title: within them it would hide bars.
    all_axes[0, 0].legend(
        handles=shades, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, borderaxespad=0.3
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


class PlainLogFormatter(LogFormatter):
    """The ticks that matplotlib labels at a logarithmic axis, as 0.1 and 10,000, not as powers of ten."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:,g}" if super().__call__(x, pos) else ""


def show_plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis by numbers, also between powers of ten where it is short."""
    axis.set_major_formatter(PlainLogFormatter())
    axis.set_minor_formatter(PlainLogFormatter(minor_thresholds=(1.5, 0.5)))
