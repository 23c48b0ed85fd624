"""Serve one trace by the tiny model in static and in continuous batches, and draw who was in which slot."""

from __future__ import annotations

import colorsys
import gc
import random
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from benchmark.offline.offline import serve
from benchmark.options import Column
from benchmark.run_record import Timeline, summarise
from borders.files import whole_file
from recipes.assembly.engine import build
from recipes.schema.reader import read
from recipes.tiny.corpus import demo_requests
from serving.answers.jobs import Job
from serving.offline import Record
from serving.text.request_fields import parse_request, text_options
from serving.text.tokenizer import Text

mpl.use("Agg")  # draws files, without a display

RECIPE = "recipes/tiny/cpu.yaml"
NUM_SLOTS, SEED = 16, 7
RUNS = {
    "static batching": [
        "scheduler.policy=static",
        f"scheduler.batch_size={NUM_SLOTS}",
        "scheduler.max_wait_ms=500",
    ],
    "continuous batching": ["scheduler.policy=stall_free"],
}
TWO_DIGITS = "{:,.2f}"
ROWS = (  # rows of the table: figures of `summarise`
    Column("requests_per_s", "requests/s", TWO_DIGITS),
    Column("output_tokens_per_s", "output tokens/s", TWO_DIGITS),
    Column("ttft_ms.p50", "time to first token, p50, ms", TWO_DIGITS),
    Column("ttft_ms.p99", "time to first token, p99, ms", TWO_DIGITS),
    Column("tpot_ms.p50", "time per output token, p50, ms", TWO_DIGITS),
    Column("tpot_ms.p99", "time per output token, p99, ms", TWO_DIGITS),
    Column("e2e_ms.p50", "whole request, p50, ms", TWO_DIGITS),
    Column("mean_batch", "mean batch, requests", TWO_DIGITS),
    Column("mean_page_use", "pages in use, mean share", TWO_DIGITS),
    Column("prefix_hit_rate", "prompt tokens found cached, share", TWO_DIGITS),
)

Bar = tuple[float, float]  # start and width, in seconds


def trace(num_requests: int, rate_per_s: float, text: Text) -> list[Job]:
    """Return chats that arrive by a Poisson process, the same ones at every call."""
    arrivals, at_s = random.Random(SEED), 0.0
    jobs = []
    for number, messages in enumerate(demo_requests(num_requests, seed=SEED)):
        fields = {
            "id": f"{number}",
            "messages": messages,
            "max_tokens": 96,
            "temperature": 0,
            "arrival_s": at_s,
        }
        jobs.append(Job(parse_request(fields, text), text_options(fields, text)))
        at_s += arrivals.expovariate(rate_per_s)
    return jobs


def run(
    overrides: list[str], num_requests: int, rate_per_s: float
) -> tuple[dict[str, Any], Timeline, list[Record], float]:
    """Run one way of batching; returns figures, timeline, answers, and when the first request came."""
    recipe = read(RECIPE, [f"scheduler.num_slots={NUM_SLOTS}", *overrides]).recipe
    text = Text.of(recipe)
    assert text is not None, f"{RECIPE} names a model with a tokenizer"
    engine = build(recipe).engine
    serve(engine, text, trace(8, 1e9, text))  # warms caches; not counted
    engine.forget_prefixes()
    gc.collect()
    jobs = trace(num_requests, rate_per_s, text)
    timeline, records = serve(engine, text, jobs)
    requests = [job.request for job in jobs]
    return summarise(engine, requests, timeline), timeline, records, min(r.arrival_s for r in requests)


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
    with whole_file(path) as file:
        figure.savefig(file.buffer, dpi=110, format=path.suffix[1:])
    plt.close(figure)
