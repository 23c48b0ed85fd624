"""Let several engines of one recipe serve traces on this machine under the same load from other processes.

They take turns, a step of each, so that other processes affect all alike. Each has its own clock, which runs
while its engine is at work, also when another process has the core: clients wait for that time too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from continuous_batching.engine import Engine, Step
from continuous_batching.request import Request
from recipes.assembly.engine import build
from recipes.schema.recipe import Recipe
from simulation.fitted import Timed, features
from simulation.run_totals import RunTotals, StepCounter
from simulation.serve import in_order

NUM_BLOCKS = 10


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
