"""Draw results as SVG charts, whose colours are set by the surrounding page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # draws text, without a display

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogFormatter

from benchmark.serve.html_page import KINDS

INK, LINE, WAIT = "#0a0a01", "#0a0a02", "#0a0a03"
COLOURS = tuple(f"#0a0a{number:02}" for number in range(4, 4 + len(KINDS)))  # colours of the sides, in order
# The page's CSS variable that replaces a colour.
VARIABLES = {INK: "--ink", LINE: "--line", WAIT: "--wait"}
VARIABLES |= {colour: f"--{kind}" for colour, kind in zip(COLOURS, KINDS)}
STYLE = {
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 11,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # a file may have any name
    "xtick.color": INK,
    "ytick.color": INK,
}
MOST_POINTS = 400  # most points of a line: a percentile curve needs no more
MOST_LANES = 300
LEAST_MS = 0.001  # pieces may come together, and a logarithmic axis has no 0
Result = Mapping[str, Any]
Named = Sequence[tuple[str, Result]]


def svg(draw: Callable[[Axes], object], *, height: float = 3.4) -> str:
    """Draw a picture of one pair of axes, for insertion into a page."""
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, height))
        try:
            draw(axes)
            figure.tight_layout()
            out = io.StringIO()
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        finally:
            plt.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    head, mark, rest = text.partition(">")
    return re.sub(r' (width|height)="[^"]*"', "", head) + mark + rest  # the page determines the size


def curves(axes: Axes, sweeps: Sequence[tuple[str, Sequence[Result]]], latency: str) -> None:
    """Draw a latency, p50 and p99, over the served rate."""
    for (name, points), colour in zip(sweeps, cycle(COLOURS)):
        known = [each for each in points if f"{latency}_ms" in each]
        served = [each["requests_per_s"] for each in known]
        for part, style in (("p50", "-"), ("p99", "--")):
            values = [max(LEAST_MS, each[f"{latency}_ms"][part]) for each in known]
            axes.plot(served, values, style, color=colour, marker=".", label=_label(f"{name} {part}"))
    axes.set_yscale("log")
    _plain(axes.yaxis)
    axes.set_xlabel("requests/s served")
    axes.set_ylabel(f"{latency.upper()}, ms")
    _name(axes)


def goodput(axes: Axes, sweeps: Sequence[tuple[str, Sequence[Result]]]) -> None:
    """Draw the served rate, and the rate that met the objectives, over the offered rate."""
    for (name, points), colour in zip(sweeps, cycle(COLOURS)):
        known = [each for each in points if isinstance(each["request_rate"], (int, float))]
        offered = [each["request_rate"] for each in known]
        axes.plot(
            offered,
            [each["requests_per_s"] for each in known],
            ":",
            color=colour,
            label=_label(f"{name} served"),
        )
        if all("request_goodput" in each for each in known):
            good = [each["request_goodput"] for each in known]
            axes.plot(offered, good, "-", color=colour, marker=".", label=_label(f"{name} good"))
    axes.set_xlabel("requests/s offered")
    axes.set_ylabel("requests/s")
    _name(axes)


def distribution(axes: Axes, runs: Named, latency: str) -> None:
    """Draw the share of requests (of gaps, for ITL) that took at most a time."""
    for (name, result), colour in zip(runs, cycle(COLOURS)):
        values_ms = np.sort(_values_ms(result, latency))
        if len(values_ms):
            shares = np.linspace(0, 1, min(len(values_ms), MOST_POINTS))
            axes.plot(
                np.maximum(LEAST_MS, np.quantile(values_ms, shares)), shares, color=colour, label=_label(name)
            )
    axes.set_xscale("log")
    _plain(axes.xaxis)
    axes.set_xlabel(f"{latency.upper()}, ms")
    axes.set_ylabel("share")
    _name(axes)


def lanes(axes: Axes, result: Result) -> None:
    """Draw requests over time: light until the first token, dark while they are answered.

    A lane is free again when its request has ended, so the lanes in use at once are the requests in flight.
    """
    free_s: list[float] = []
    waits: dict[int, list[tuple[float, float]]] = {}
    answers: dict[int, list[tuple[float, float]]] = {}
    for record in sorted(result["records"], key=lambda each: each["arrival_s"]):
        if record.get("finish_s") is None or record.get("first_token_s") is None:
            continue
        start_s, first_s, end_s = (record[name] for name in ("arrival_s", "first_token_s", "finish_s"))
        lane = next((number for number, each in enumerate(free_s) if each <= start_s), len(free_s))
        if lane == len(free_s):
            if lane == MOST_LANES:
                continue
            free_s.append(0.0)
        free_s[lane] = end_s
        waits.setdefault(lane, []).append((start_s, first_s - start_s))
        answers.setdefault(lane, []).append((first_s, end_s - first_s))
    for stretches, colour in ((waits, WAIT), (answers, COLOURS[0])):
        for lane, bars in stretches.items():
            axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=colour, edgecolors="none")
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests on their way")


def over_time(axes: Axes, runs: Named, column: str, label: str) -> None:
    """Draw one of the server's own gauges over time."""
    for (name, result), colour in zip(runs, cycle(COLOURS)):
        if column in columns(result):
            at = columns(result).index(column)
            readings = [each for each in result["metrics"]["readings"] if each[at] is not None]
            axes.plot(
                [each[0] for each in readings],
                [each[at] for each in readings],
                color=colour,
                label=_label(name),
            )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel(label)
    _name(axes)


def columns(result: Result) -> list[str]:
    """Return the columns of a result's readings: times and gauges."""
    return (result.get("metrics") or {}).get("columns", [])


def _label(name: str) -> str:
    """Put a space before a leading underscore: matplotlib leaves such names out of a legend."""
    return f" {name}" if name.startswith("_") else name


def _name(axes: Axes) -> None:
    """Add a legend, if a line has a name."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _plain(axis: Axis) -> None:
    """Show milliseconds as plain numbers, not as powers of ten."""
    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))


def _values_ms(result: Result, latency: str) -> np.ndarray:
    done = [each for each in result.get("records", ()) if each.get("first_token_s") is not None]
    if latency == "ttft":
        return 1e3 * np.array([each["first_token_s"] - each["arrival_s"] for each in done])
    times = [each.get("piece_times_s", each.get("token_times_s")) or [] for each in done]
    return 1e3 * np.concatenate([np.diff(each) for each in times] or [np.array([])])
