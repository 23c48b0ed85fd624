"""Check a simulation against a recorded run: given the same step times, it must decide the same.

A recording gives the simulation the arrivals of requests, the sampled tokens, the time of each step and the
drafts, but not a single batch. The simulation's own batches must then have the recording's digests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.recording.format import (
    Added,
    Chain,
    Committed,
    Ended,
    Entry,
    Looked,
    PagesExpected,
    PagesReleased,
    Resized,
    Scheduled,
    answered,
)
from continuous_batching.recording.replay import Divergence, recorded_speculation, request_of
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PageCopy
from simulation.replica import Clock


class RecordedRunner:
    """A device that gives the recorded answers at the recorded times.

    `moments` are the entries of a recording with a time of the engine's own: a batch was made, looked for in
    vain, or answered.
    """

    def __init__(
        self,
        clock: Clock,
        slots: SlotPool,
        moments: deque[Scheduled | Looked | Committed],
    ) -> None:
        self._slots = slots
        self._clock = clock
        self._moments = moments
        self._chain = Chain()
        self.num_steps = 0

    def run(self, batch: Batch) -> Sampled:
        """Return the recorded answer, at its recorded time."""
        return self.start(batch)()

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Start a batch; raises Divergence if it was not made in the recording."""
        self.num_steps += 1
        if isinstance(self._moments[0], Looked):  # all rows of a step before were preempted
            self._moments.popleft()
        entry, digest = self._moments.popleft(), self._chain.add(batch, self._slots)
        if not isinstance(entry, Scheduled) or entry.digest != digest:
            raise Divergence(f"step {self.num_steps}: the simulation decided otherwise")
        if self._moments and not isinstance(self._moments[0], Committed):
            self._clock.reach(self._moments[0].now_s)  # time at which the host looked for the next batch
        return self._land

    def _land(self) -> Sampled:
        if isinstance(self._moments[0], Looked):
            self._moments.popleft()
        entry = self._moments.popleft()
        if not isinstance(entry, Committed):
            raise Divergence(f"step {self.num_steps}: the simulation made no batch where there was one")
        self._clock.reach(entry.now_s)
        return answered(entry)

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        """Do nothing: this device holds no pages."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a simulation takes from a recording."""

    arrivals: list[tuple[float, Added | Ended]]  # each has the time at which the engine received it
    moments: deque[Scheduled | Looked | Committed]


def recorded_run(entries: Iterable[Entry]) -> RecordedRun:
    """Extract what a simulation needs from a recording.

    Raises ValueError for a recording in which the pool was resized, or pages were exchanged with another
    engine.
    """
    arrivals: list[tuple[float, Added | Ended]] = []
    moments = deque[Scheduled | Looked | Committed]()
    now_s = -math.inf
    for entry in entries:
        if isinstance(entry, Resized):
            raise ValueError("the recorded pool was resized: not simulated")
        if isinstance(entry, (PagesExpected, PagesReleased)):
            raise ValueError("the recorded engine had pages from another or for one: not simulated")
        if isinstance(entry, (Scheduled, Looked, Committed)):
            now_s = entry.now_s
            moments.append(entry)
        elif isinstance(entry, Added):
            arrivals.append((max(now_s, entry.arrival_s), entry))
        elif isinstance(entry, Ended) and entry.reason != "timeout":
            arrivals.append((max(now_s, entry.now_s), entry))
    return RecordedRun(arrivals, moments)


def follow(recorded: RecordedRun, scheduler: Scheduler, *, overlap: bool = False) -> int:
    """Simulate a recorded run on a new scheduler built from the same facts; return the number of steps.

    Raises Divergence at the first digest that differs from the recording's.
    """
    clock, arrivals, moments = Clock(), deque(recorded.arrivals), recorded.moments
    if scheduler.speculation is not None:
        scheduler.speculation = recorded_speculation(
            scheduler.slots, scheduler.speculation, lambda: moments[0] if moments else None
        )
    runner = RecordedRunner(clock, scheduler.slots, moments)
    engine = Engine(scheduler, runner, clock, overlap=overlap)
    while moments:
        clock.reach(moments[0].now_s)
        while arrivals and arrivals[0][0] <= clock.now_s:
            _, entry = arrivals.popleft()
            if isinstance(entry, Added):
                engine.add(request_of(entry))
            else:
                engine.finish(entry.id, entry.reason)
        if engine.step() is None:
            raise Divergence(
                f"after step {runner.num_steps}: the simulation made no batch where there was one"
            )
    return runner.num_steps
