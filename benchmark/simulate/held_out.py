"""Fit costs to a recorded run, and measure how far off a simulation is of runs that they were not fitted to.

Several engines of one recipe serve a training trace on this machine, and as many serve the trace to predict.
They take turns, a step of each, so that other processes affect all alike. Each has its own clock, which runs
while its engine is at work, also when another process has the core: clients wait for that time too. Costs are
fitted to the steps of the former; the latter are simulated with them, NUM_SIMULATED times, each time with
another seed for which steps are slow. Percentiles are over the requests of all measured runs, and of all
simulated ones.

Two runs of one trace on one machine differ too, and no prediction can be nearer to a run than another run is.
Each error is therefore shown beside the distance of one measured run from the others.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmark.recordings.recorded import Recording
from benchmark.simulate.deployment import SIMULATED, Result, place
from benchmark.simulate.one_run import requests_of, trust_of
from borders.files import check_rereadable, opened, whole_file
from continuous_batching.engine import Engine, Step
from continuous_batching.request import Request
from recipes.assembly.scheduler import scheduler_from
from recipes.schema.command_line import keep_apart
from recipes.schema.reader import read
from recipes.schema.recipe import Recipe
from simulation.fitted import NAMES, Timed, features, fit, in_words, learn
from simulation.replica import in_order, serve
from simulation.run_totals import RunTotals, StepCounter

NUM_SIMULATED = 10
AIM = 0.1  # a prediction within this error is good
RATE = "output_tokens_per_s"
FLOOR = (
    "the largest difference of one measured run from the others; a prediction cannot be expected to be nearer"
)
NUM_BLOCKS = 10


def run(options: argparse.Namespace) -> Result:
    """Return figures of the predicted trace, measured and simulated, their differences, and verdicts."""
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    for path in filter(None, (options.train, options.held)):
        check_rereadable(Path(path))
    planned = place(recipe, None)
    train, held = (
        requests_of(path, recipe, planned.config.vocab_size, skip_bad=False)
        for path in (options.train, options.held or options.train)
    )
    runs = [MeasuredRun(recipe, opened()) for _ in range(options.runs) for opened in (train, held)]
    serve_in_turn(runs)
    fitted = fit(steps_of(runs[0::2]))
    models = [replace(fitted, seed=seed) for seed in range(NUM_SIMULATED)]
    simulated = [
        serve(held(), planned.scheduler(), model, overlap=recipe.scheduler.overlap) for model in models
    ]
    return {
        "SIMULATED": f"{SIMULATED}; beside it {options.runs} runs of the real engine",
        **trust_of(models[0]),
        "apart": FLOOR,
        **compared([each.totals for each in runs[1::2]], simulated),
    }


def compared(measured: Sequence[RunTotals], simulated: Sequence[RunTotals]) -> Result:
    """Compare each figure of the measured runs with that of the simulated ones.

    `apart` is FLOOR; the verdict is "within 10 %", "within the measured runs' spread" or "missed".
    """
    result: Result = {}
    of_simulated = _figures(simulated)
    alone_of = [_figures([each]) for each in measured]
    others_of = [_figures([*measured[:at], *measured[at + 1 :]]) for at in range(len(measured))]
    for name, value in _figures(measured).items():
        foretold = of_simulated[name]
        if not value or not foretold:
            continue
        apart = max(abs(one[name] / other[name] - 1) for one, other in zip(alone_of, others_of))
        off = foretold / value - 1
        result[name] = {
            "real": value,
            "simulated": foretold,
            "off": f"{off:+.1%}",
            "apart": f"{apart:.1%}",
            "verdict": _verdict(abs(off), apart),
            "runs": [each[name] for each in alone_of],
        }
    return result


def _verdict(off: float, apart: float) -> str:
    if off <= AIM:
        return f"within {AIM:.0%}"
    return "within the measured runs' spread" if off <= apart else "missed"


def _figures(runs: Sequence[RunTotals]) -> dict[str, float]:
    """Return the median rate of runs, and percentiles of the requests and tokens of all of them."""
    pooled = RunTotals()
    for each in runs:
        pooled.merge(each)
    figures: dict[str, Any] = pooled.figures()
    return {
        RATE: median(each.figures()[RATE] for each in runs),
        **{
            f"{name} {part}": figures[name].get(part, 0.0)
            for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
            for part in ("p50", "p99")
        },
    }


class WorkClock:
    """A clock that counts the seconds in which its engine is at work, and skipped idle time."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self._since_s: float | None = None

    def __call__(self) -> float:
        return self.passed_s + (0.0 if self._since_s is None else time.perf_counter() - self._since_s)

    def go(self) -> None:
        """Start counting: the engine begins its turn."""
        self._since_s = time.perf_counter()

    def halt(self) -> None:
        """Stop counting: it is another engine's turn."""
        self.passed_s, self._since_s = self(), None


class MeasuredRun:
    """One engine, the trace that it serves, and the times of its steps."""

    def __init__(self, recipe: Recipe, trace: Iterator[Request]) -> None:
        from recipes.assembly.engine import build  # imported here because it imports torch

        self.clock = WorkClock()
        self.engine: Engine = build(recipe, self.clock).engine
        self.totals = RunTotals()
        self.steps: list[Timed] = []
        self._counter = StepCounter(self.engine, self.totals)
        self._coming = deque(in_order(trace))
        self._idle_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._coming) or self.engine.has_work

    def turn(self) -> None:
        """Add the requests that have arrived, and run a step."""
        clock, was_idle = self.clock, not self.engine.has_work
        if was_idle:
            clock.passed_s = max(clock.passed_s, self._coming[0].arrival_s)
        clock.go()
        while self._coming and self._coming[0].arrival_s <= clock():
            request = self._coming.popleft()
            self.totals.came(request)
            self.engine.add(request)
            self._counter.added(request)
        step = self.engine.step()
        clock.halt()
        if step is not None:
            self._count(step, was_idle)

    def _count(self, step: Step, was_idle: bool) -> None:
        self._counter.step(step)
        if step.batch.num_spans:
            since_s = step.start_s if was_idle else self._idle_s
            self.steps.append(Timed(features(step.batch), step.end_s - since_s))
        self._idle_s = step.end_s


def serve_in_turn(runs: Sequence[MeasuredRun]) -> None:
    """Serve every trace to its end."""
    while any(each.has_work for each in runs):
        for each in runs:
            if each.has_work:
                each.turn()


def steps_of(runs: Sequence[MeasuredRun]) -> list[Timed]:
    """Return the steps of all runs as one recording: a tenth of each run, then the next tenth of each.

    Within a tenth, steps stay in their order, so that slow ones stay together; the tenths are in order of
    time, so that a fit sees where the machine's load changed.
    """
    blocks = [np.array_split(np.arange(len(run.steps)), NUM_BLOCKS) for run in runs]
    return [
        run.steps[at] for number in range(NUM_BLOCKS) for run, own in zip(runs, blocks) for at in own[number]
    ]


def run_fit(options: argparse.Namespace) -> None:
    """Fit costs to a recording, write them, and print those that are not 0.

    Raises ValueError for a recording that is damaged, or cut short.
    """
    keep_apart(options.output, options.recording)
    with opened(options.recording) as file:
        recording = Recording(file, options.recording, needs_all=True)
        fitted = learn(recording, scheduler_from(recording.facts))
    with whole_file(options.output) as output:
        output.write(fitted.in_json())
    for name, cost_s in zip(NAMES, fitted.costs_s.tolist()):
        if cost_s:
            print(f"{name:22} {1e6 * cost_s:.4g} us")
    print(f"{'the fit':22} {in_words(fitted.trust.describe())}")
