"""Simulate pipeline parallelism: stages of layers that work on several batches in flight.

As many schedulers as stages take turns, each with its part of the slots and of the pages, so that their
batches are disjoint. A stage that waits for the one before it stands in a bubble of one of three kinds
(Sarathi, 2023): PB1 between prompts of different lengths, PB2 between a prompt and decodes, PB3 of decodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from continuous_batching.batch import Batch, Sampled
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PageCopy
from simulation.replica import Clock, CostModel, Replica, in_order
from simulation.run_totals import RunTotals

ObserveStage = Callable[[int, int, Batch, float, float], None]  # stage, scheduler, its batch, start and end


@dataclass(slots=True)
class Stages:
    """When each stage is free, and how long the stages stood in bubbles of each kind."""

    costs: Sequence[CostModel]  # cost model of each stage
    send_s: Callable[[int], float]  # seconds for the hidden states of so many tokens to reach the next stage
    observe: ObserveStage | None = None
    busy_s: float = 0.0
    bubbles_s: dict[str, float] = field(default_factory=lambda: {"PB1": 0.0, "PB2": 0.0, "PB3": 0.0})
    _free_s: list[float] = field(init=False)
    _had_prompt: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._free_s = [0.0] * len(self.costs)
        self._had_prompt = [False] * len(self.costs)

    def pass_through(self, batch: Batch, slots: SlotPool, now_s: float, number: int) -> float:
        """Return when a batch that this scheduler launches now has passed all stages."""
        has_prompt = bool((batch.starts < slots.num_prompt[batch.slots]).any())
        at_s, last_s = now_s, self._free_s[-1]
        for stage, costs in enumerate(self.costs):
            since_s = self._free_s[stage]
            begin_s = max(at_s, since_s)
            # The first stage waits for a batch to return, the others for the stage before them
            waited_s = min(begin_s, last_s) - since_s if stage == 0 else begin_s - max(since_s, now_s)
            if waited_s > 0:
                both = has_prompt + self._had_prompt[stage]
                self.bubbles_s[("PB3", "PB2", "PB1")[both]] += waited_s
            took_s = costs.step_s(batch, slots)
            self.busy_s += took_s
            self._free_s[stage] = begin_s + took_s
            self._had_prompt[stage] = has_prompt
            if self.observe is not None:
                self.observe(stage, number, batch, begin_s, begin_s + took_s)
            at_s = begin_s + took_s + (self.send_s(batch.num_tokens) if stage + 1 < len(self.costs) else 0.0)
        return at_s


class _StageRunner:
    """Launches the batches of one scheduler."""

    def __init__(self, clock: Clock, stages: Stages, slots: SlotPool, number: int) -> None:
        self._clock = clock
        self._stages = stages
        self._slots = slots
        self._number = number

    def run(self, batch: Batch) -> Sampled:
        return self.start(batch)()

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        done_s = self._stages.pass_through(batch, self._slots, self._clock.now_s, self._number)

        def wait() -> Sampled:
            self._clock.reach(done_s)
            return Sampled(np.zeros(len(batch.owners), dtype=np.int64))

        return wait

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        pass


class Pipeline:
    """Schedulers that take turns at the stages, with one RunTotals."""

    def __init__(self, schedulers: Sequence[Scheduler], stages: Stages, totals: RunTotals) -> None:
        self.totals = totals
        self.stages = stages
        self._replicas = [self._replica(each, number) for number, each in enumerate(schedulers)]

    def serve(self, trace: Iterable[Request]) -> None:
        """Serve requests, in order of arrival, to the end; each goes to the scheduler with the fewest."""
        for request in in_order(trace):
            self._advance(request.arrival_s)
            replica = min(self._replicas, key=lambda each: each.num_requests)
            replica.clock.reach(request.arrival_s)
            replica.add(request)
        self._advance(math.inf)
        for replica in self._replicas:
            replica.counter.close()

    def _replica(self, scheduler: Scheduler, number: int) -> Replica:
        def runner(clock: Clock) -> _StageRunner:
            return _StageRunner(clock, self.stages, scheduler.slots, number)

        return Replica(scheduler, self.stages.costs[0], self.totals, runner=runner)

    def _advance(self, until_s: float) -> None:
        """Advance the engines in the order of their clocks, because the batch launched first passes first."""
        while True:
            late = [each for each in self._replicas if each.engine.has_work and each.clock.now_s < until_s]
            if not late:
                return
            min(late, key=lambda each: each.clock.now_s).step(until_s)
