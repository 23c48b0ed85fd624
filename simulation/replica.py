"""Advance one simulated engine step by step."""

from __future__ import annotations

from collections.abc import Callable

from continuous_batching.engine import Engine, Runner, Step
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from simulation.clock import Clock
from simulation.run_totals import RunTotals, StepCounter
from simulation.runner import CostModel, SimulatedRunner, Speaker

# Pause between two looks while a policy waits for a fuller batch, as in `serving.offline`
REST_S = 1e-3
Observe = Callable[[Engine, Step], None]
MakeRunner = Callable[[Clock], Runner]


class Replica:
    """The real engine and scheduler, on a virtual clock and a device that a cost model stands for.

    `observe` receives every step before the next is made. Counts go to `totals`, which several replicas may
    share.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        costs: CostModel,
        totals: RunTotals,
        *,
        overlap: bool = False,
        speaker: Speaker | None = None,
        observe: Observe | None = None,
        runner: MakeRunner | None = None,
    ) -> None:
        self.clock = Clock()
        made = (
            SimulatedRunner(self.clock, costs, scheduler.slots, speaker)
            if runner is None
            else runner(self.clock)
        )
        self.engine = Engine(scheduler, made, self.clock, overlap=overlap)
        self._speaker = speaker
        self.totals = totals
        self.counter = StepCounter(self.engine, totals)
        self._observe = observe

    @property
    def num_requests(self) -> int:
        """Number of requests that wait or run."""
        scheduler = self.engine.scheduler
        return len(scheduler.waiting) + len(scheduler.slots.busy)

    def add(self, request: Request) -> None:
        """Accept a request at the clock's time, which is its arrival or later.

        A refused request is only counted as failed.
        """
        self.totals.came(request)
        try:
            self.engine.add(request)
        except ValueError as error:
            request.finish_reason, request.error = "error", str(error)
        else:
            self.counter.added(request)

    def advance(self, until_s: float) -> None:
        """Make steps until the clock reaches `until_s`; the last one may end later.

        Without work the clock moves there at once, but it stays if `until_s` is infinite.
        """
        engine, clock = self.engine, self.clock
        while clock.now_s < until_s:
            if not engine.has_work:
                if until_s < float("inf"):
                    clock.now_s = until_s
                return
            self.step(until_s)

    def step(self, until_s: float) -> Step | None:
        """Make one step; if nothing was computed, rest until `until_s` at most, and return None."""
        step = self.engine.step()
        if step is None:
            since_s = self.clock.now_s
            self.clock.reach(min(since_s + REST_S, until_s))
            self.counter.rest(since_s, self.clock.now_s)
            return None
        self.counter.step(step)
        if self._speaker is not None:
            self._stop(step)
        if self._observe is not None:
            self._observe(self.engine, step)
        return step

    def _stop(self, step: Step) -> None:
        """End requests that have their whole recorded answer, because stop strings are not known here."""
        assert self._speaker is not None, "nobody knows the answers"
        for request in self.engine.slots.requests[step.owners]:
            if self._speaker.hears(request) and request.finish_reason is None:
                self.engine.finish(request.id)
                self.totals.ended(request)
