"""Does a simulation decide as the engine did, when its steps take as long?

A recording gives the simulation when requests came, what they were answered and how long each step took; it
is not shown a single batch. Its own batches must then come to the recording's digests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.recording.format import (
    Added,
    Chain,
    Committed,
    Ended,
    Entry,
    Looked,
    Resized,
    Scheduled,
)
from continuous_batching.recording.replay import Divergence, replay, request_of
from continuous_batching.request import Request, TokenIds
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PageCopy
from simulation.clock import Clock
from simulation.runner import Speaker


class RecordedRunner:
    """A device that answers when, and what, the recorded one did.

    `moments` are the entries of a recording that have a time of the engine's own: a batch was made, or looked
    for in vain, or answered.
    """

    def __init__(
        self,
        clock: Clock,
        slots: SlotPool,
        speaker: Speaker,
        moments: deque[Scheduled | Looked | Committed],
    ) -> None:
        self._slots = slots
        self._clock = clock
        self._speaker = speaker
        self._moments = moments
        self._chain = Chain()
        self.num_steps = 0

    def run(self, batch: Batch) -> Sampled:
        """The recorded answer, at its recorded time."""
        return self.start(batch)()

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Raises Divergence for a batch that was not made in the recording."""
        self.num_steps += 1
        entry, digest = self._moments.popleft(), self._chain.add(batch, self._slots)
        if not isinstance(entry, Scheduled) or entry.digest != digest:
            raise Divergence(f"step {self.num_steps}: the simulation decided otherwise")
        if self._moments and not isinstance(self._moments[0], Committed):
            self._clock.reach(self._moments[0].now_s)  # when the host looked for the next batch
        return lambda: self._land(batch)

    def _land(self, batch: Batch) -> Sampled:
        if isinstance(self._moments[0], Looked):
            self._moments.popleft()
        entry = self._moments.popleft()
        if not isinstance(entry, Committed):
            raise Divergence(f"step {self.num_steps}: the simulation made no batch where there was one")
        self._clock.reach(entry.now_s)
        return self._speaker.say(batch)

    def resize(self, num_pages: int, copies: tuple[PageCopy, ...]) -> None:
        """This device holds no pages."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a simulation takes from a recording."""

    arrivals: list[tuple[float, Added | Ended]]  # with the time at which the engine heard of it
    moments: deque[Scheduled | Looked | Committed]
    answers: dict[str, TokenIds]


def recorded_run(entries: Iterable[Entry], scheduler: Scheduler) -> RecordedRun:
    """What a simulation takes; `scheduler` is used up to find the answers. Raises ValueError for a recording
    whose pool changed its size.
    """
    arrivals: list[tuple[float, Added | Ended]] = []
    moments = deque[Scheduled | Looked | Committed]()
    kept = list(entries)
    now_s = -np.inf
    for entry in kept:
        if isinstance(entry, Resized):
            raise ValueError("the recorded pool was resized: not simulated")
        if isinstance(entry, (Scheduled, Looked, Committed)):
            now_s = entry.now_s
            moments.append(entry)
        elif isinstance(entry, Added):
            arrivals.append((max(now_s, entry.arrival_s), entry))
        elif isinstance(entry, Ended) and entry.reason != "timeout":
            arrivals.append((max(now_s, entry.now_s), entry))
    found: dict[str, Request] = {}
    for event in replay(kept, scheduler):
        if isinstance(event, Request):
            found.update((each.id, each) for each in (event, *event.followers))
    return RecordedRun(arrivals, moments, {name: each.answer for name, each in found.items()})


def follow(recorded: RecordedRun, scheduler: Scheduler, *, overlap: bool = False) -> int:
    """Simulate it on a new scheduler of the same facts: every digest is the recording's, or Divergence is
    raised at the first that is not. Returns the number of steps.
    """
    clock, arrivals = Clock(), deque(recorded.arrivals)
    runner = RecordedRunner(
        clock, scheduler.slots, Speaker(scheduler.slots, recorded.answers), recorded.moments
    )
    engine = Engine(scheduler, runner, clock, overlap=overlap)
    while recorded.moments:
        clock.reach(recorded.moments[0].now_s)
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
