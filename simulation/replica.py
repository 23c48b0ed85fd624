"""How does one simulated engine advance, step by step?"""

from __future__ import annotations

from collections.abc import Callable

from continuous_batching.engine import Engine, Runner, Step
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from simulation.clock import Clock
from simulation.run_totals import RunTotals, StepCounter
from simulation.runner import CostModel, SimulatedRunner, Speaker

REST_S = 1e-3  # between two looks while a policy waits for a fuller batch; the same as in `serving.offline`
Observe = Callable[[Engine, Step], None]
MakeRunner = Callable[[Clock], Runner]


class Replica:
    """The real engine and scheduler, on a virtual clock and a device that a cost model stands for.

    `observe` sees every step until the next is made. What it counts goes to `totals`, which many may share.
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
        """Requests that wait or run."""
        scheduler = self.engine.scheduler
        return len(scheduler.waiting) + len(scheduler.slots.busy)

    def add(self, request: Request) -> None:
        """Take a request at the clock's time, which is its arrival or later. A refused request has failed
        and is only counted.
        """
        self.totals.came(request)
        try:
            self.engine.add(request)
        except ValueError as error:
            request.finish_reason, request.error = "error", str(error)
        else:
            self.counter.added(request)

    def advance(self, until_s: float) -> None:
        """Make steps until the clock is there; the last one may end later. Without work time just goes by,
        but for the end of all times: then the clock stays."""
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
        """End requests that have their whole recorded answer: a stop string is not known here."""
        assert self._speaker is not None, "nobody knows the answers"
        for request in self.engine.slots.requests[step.owners]:
            if self._speaker.hears(request) and request.finish_reason is None:
                self.engine.finish(request.id)
                self.totals.ended(request)
