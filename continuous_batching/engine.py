"""How do requests become tokens, step by step?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from continuous_batching.batch import Batch, Sampled
from continuous_batching.door import GiveUp
from continuous_batching.recorder import Recorder
from continuous_batching.request import Request
from continuous_batching.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PageCopy

NO_TOKENS = Sampled(np.empty(0, dtype=np.int64))


class Runner(Protocol):
    """Computes a batch on a device."""

    def run(self, batch: Batch) -> Sampled:
        """One forward pass; one token for each span of `batch.sampled`."""
        ...

    def resize(self, num_pages: int, copies: tuple[PageCopy, ...]) -> None:
        """Make the copies, then change the number of pages, keeping what the low ones hold."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did. Its batch is empty where requests ended by the clock and nothing was computed.

    Until the next step, `engine.slots.requests[step.batch.slots[i]]` is the request of span i, also
    when it ended.
    """

    batch: Batch
    sampled: Sampled
    finished: list[Request]
    start_s: float
    end_s: float


class Engine:
    """The loop: schedule, run, commit. `clock` gives seconds and never runs back.

    A `recorder`, which must be there before the first request, writes down what it is told and decides.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.recorder: Recorder | None = None

    @property
    def slots(self) -> SlotPool:
        return self.scheduler.slots

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Take a request; raises ValueError if it could never be served, QueueFull if too much waits."""
        self.scheduler.add(request)
        if self.recorder is not None:
            self.recorder.added(request)

    def finish(self, request_id: str, reason: str = "stop") -> Request | None:
        """End a request whose text is complete; None if it has ended already."""
        request = self.scheduler.end(request_id, reason)
        if request is not None:
            request.finish_s = self.clock()
            if self.recorder is not None:
                self.recorder.ended(request_id, reason, request.finish_s)
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request that nobody waits for any more; None if it has ended already."""
        return self.finish(request_id, "abort")

    def resize(self, num_pages: int, give_up: GiveUp = "nothing") -> None:
        """Change the size of the cache while serving (see `Scheduler.resize`)."""
        self.scheduler.resize(num_pages, give_up)
        self.runner.resize(num_pages, self.scheduler.residency.tables.take_copies())
        if self.recorder is not None:
            self.recorder.resized(num_pages, give_up)

    def step(self) -> Step | None:
        """Compute one batch; None when there is nothing to compute now."""
        start_s = self.clock()
        expired = self.scheduler.expire(start_s)
        if self.recorder is not None:
            for request in expired:
                self.recorder.ended(request.id, "timeout", start_s)
        batch = self.scheduler.schedule(start_s)
        if not batch.num_spans:
            return Step(batch, NO_TOKENS, expired, start_s, start_s) if expired else None
        if self.recorder is not None:
            self.recorder.scheduled(batch, start_s, self.scheduler.held_back)
        sampled = self.runner.run(batch)
        end_s = self.clock()
        finished = expired + self.scheduler.commit(batch, sampled, end_s)
        if self.recorder is not None:
            self.recorder.committed(sampled, end_s)
        return Step(batch, sampled, finished, start_s, end_s)
