"""How far off is a simulation, of a trace that its costs were not fitted to?

Two engines serve two traces on this machine, a step of one and a step of the other in turn, so that both meet
the same neighbours; each has a clock of its own, which runs while it is at work, also where another process
has the core: that is what its clients wait for. Costs are fitted to the steps of the first, and the second is
simulated with them: five times, each with its own seed of which steps are slow. Each figure is the median.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from benchmark.simulate.deployment import SIMULATED, Result
from benchmark.simulate.one_run import trust_of
from benchmark.simulate.placement import place
from benchmark.simulate.trace_loading import requests_of
from continuous_batching.engine import Engine, Step
from continuous_batching.request import Request
from recipes.build.engine import build
from recipes.schema.reader import read
from recipes.schema.recipe import Recipe
from simulation.fitted import Timed, features, fit
from simulation.run_totals import RunTotals, StepCounter
from simulation.serve import in_order, serve

NUM_SIMULATED = 5


class WorkClock:
    """Seconds in which its engine is at work, and what passed without work."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self._since_s: float | None = None

    def __call__(self) -> float:
        return self.passed_s + (0.0 if self._since_s is None else time.perf_counter() - self._since_s)

    def go(self) -> None:
        """Start counting: its engine goes to work."""
        self._since_s = time.perf_counter()

    def halt(self) -> None:
        """Stop counting: it is the other engine's turn."""
        self.passed_s, self._since_s = self(), None


class Served:
    """One engine, the trace that it serves, and what its steps took."""

    def __init__(self, recipe: Recipe, trace: Iterator[Request]) -> None:
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
        """Add the requests that have arrived, and make a step."""
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


def held_out(options: argparse.Namespace) -> Result:
    """Figures of the held-out trace, real and simulated, and by how much they differ."""
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    planned = place(recipe, None)
    vocab_size = planned.config.vocab_size
    traces = [requests_of(path, recipe, vocab_size, skip_bad=False) for path in (options.train, options.held)]
    train, held = (Served(recipe, opened()) for opened in traces)
    while train.has_work or held.has_work:
        for each in (train, held):
            if each.has_work:
                each.turn()
    fitted, real = fit(train.steps), held.totals.figures()
    models = [replace(fitted, seed=seed) for seed in range(NUM_SIMULATED)]
    foretold = [
        serve(traces[1](), planned.scheduler(), model, overlap=recipe.scheduler.overlap).figures()
        for model in models
    ]
    result: Result = {"SIMULATED": f"{SIMULATED}; beside it the real engine's", **trust_of(models[0])}
    for name, part in (
        ("output_tokens_per_s", None),
        *((name, part) for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms") for part in ("p50", "p99")),
    ):
        was, *are = (each[name] if part is None else each[name].get(part) for each in (real, *foretold))
        if was:
            is_now = median(are)
            label = name if part is None else f"{name} {part}"
            result[label] = {"real": was, "simulated": is_now, "off": f"{100 * (is_now / was - 1):+.1f} %"}
    return result
