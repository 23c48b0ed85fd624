"""Simulate how an engine serves a trace on a device that is not present.

    run = serve(trace, scheduler, costs)
    run.figures()["ttft_ms"]["p50"]

Everything is decided by the real `Engine` and `Scheduler`; only time and tokens are simulated. A virtual
clock is moved by the cost model of a simulated device, so only modelled work takes time. `Replica` advances
one engine step by step, which fleets of them need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine, Runner, Step
from continuous_batching.request import Request, TokenIds
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PageCopy
from simulation.run_totals import RunTotals, StepCounter


class Clock:
    """A clock that stands still until it is moved; called as an engine's clock, it returns its seconds."""

    __slots__ = ("now_s",)

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def reach(self, time_s: float) -> None:
        """Move to a time, unless it is in the past."""
        if time_s > self.now_s:
            self.now_s = time_s


class CostModel(Protocol):
    """A model of the time that a device takes for a step."""

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        """Return the seconds from the batch to its tokens; rows are as they were when the batch was made."""
        ...


class Speaker:
    """Gives each request its known answer."""

    def __init__(self, slots: SlotPool, answers: Mapping[str, TokenIds]) -> None:
        self._slots = slots
        self._answers = answers

    def say(self, batch: Batch) -> Sampled:
        """Return the token for each position that a batch samples."""
        tokens = []
        for row, target in zip(batch.owners.tolist(), batch.targets.tolist()):
            request = self._slots.requests[row]
            tokens.append(int(self._answers[request.id][target - request.num_prompt_tokens]))
        return Sampled(np.array(tokens, dtype=np.int64))


class SimulatedRunner:
    """Answers every batch at the time of the cost model, by the speaker, or with token 0 for every position.

    Without a speaker answers are as long as requests ask for: give them `ignore_eos`, and no stop token 0. It
    is one device, which does one step after the other.
    """

    def __init__(
        self, clock: Clock, costs: CostModel, slots: SlotPool, speaker: Speaker | None = None
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._slots = slots
        self._speaker = speaker
        self._free_s = 0.0  # time at which the device has finished every step that was started

    def run(self, batch: Batch) -> Sampled:
        """Return the answer, after moving the clock to its time."""
        return self.start(batch)()

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Start a step behind those that were started before; waiting for it moves the clock."""
        done_s = max(self._clock.now_s, self._free_s) + self._costs.step_s(batch, self._slots)
        self._free_s = done_s
        return lambda: self.answer_at(batch, done_s)

    def answer_at(self, batch: Batch, done_s: float) -> Sampled:
        """Return the tokens of a batch, after moving the clock to when it is done."""
        self._clock.reach(done_s)
        return self.answer(batch)

    def answer(self, batch: Batch) -> Sampled:
        """Return the tokens of a batch."""
        if self._speaker is not None:
            return self._speaker.say(batch)
        return Sampled(np.zeros(len(batch.owners), dtype=np.int64))

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        """Do nothing: this device holds no pages."""


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
        observe: Observe | None = None,
        runner: MakeRunner | None = None,
    ) -> None:
        self.clock = Clock()
        made = SimulatedRunner(self.clock, costs, scheduler.slots) if runner is None else runner(self.clock)
        self.engine = Engine(scheduler, made, self.clock, overlap=overlap)
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
        if self._observe is not None:
            self._observe(self.engine, step)
        return step


def serve(
    trace: Iterable[Request],
    scheduler: Scheduler,
    costs: CostModel,
    *,
    overlap: bool = False,
    keep_records: bool = False,
    observe: Observe | None = None,
) -> RunTotals:
    """Serve requests, in order of arrival, to the end; raises ValueError if they are not in order.

    Each answer has `max_tokens` tokens if the request says `ignore_eos`. The trace is read as it is served
    and nothing is kept of a request that ended, so memory does not grow with the trace; with `keep_records`
    it does, and `totals.records` has the figures of each request.
    """
    totals = RunTotals(records=[] if keep_records else None)
    replica = Replica(scheduler, costs, totals, overlap=overlap, observe=observe)
    for request in in_order(trace):
        replica.advance(request.arrival_s)
        replica.add(request)
    replica.advance(math.inf)
    replica.counter.close()
    return totals


def in_order(trace: Iterable[Request]) -> Iterable[Request]:
    """Yield the same requests; raises ValueError at one that arrives before its predecessor."""
    before_s = -math.inf
    for request in trace:
        if request.arrival_s < before_s:
            raise ValueError(
                f"request {request.id} arrives at {request.arrival_s:g} s, after one of {before_s:g} s;"
                " sort the trace by arrival_s"
            )
        before_s = request.arrival_s
        yield request
