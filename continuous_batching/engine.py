"""How do requests become tokens, step by step?"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from continuous_batching.batch import NO_BATCH, Batch, Sampled
from continuous_batching.paging.held_pages import Arrival
from continuous_batching.request import Request
from continuous_batching.scheduling.admission import HeldBack
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.scheduling.validation import GiveUp
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index, PageCopy
from kv_cache.tier.reads import Lookup

_NONE = np.empty(0, dtype=np.int64)
NO_TOKENS = Sampled(_NONE)


class Runner(Protocol):
    """Computes a batch on a device."""

    def run(self, batch: Batch) -> Sampled:
        """One forward pass; one token for each of `batch.owners`, at its position `batch.targets`."""
        ...

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Begin a forward pass, and do not wait for it; what is returned does."""
        ...

    def resize(self, num_pages: int, copies: tuple[PageCopy, ...]) -> None:
        """Make the copies, then change the number of pages, keeping what the low ones hold."""
        ...


class Tier(Protocol):
    """A tier of pages below the host's pool; no call waits for it."""

    def look_up(self, keys: Sequence[bytes]) -> Lookup | None:
        """Begin to look for the pages of these keys, which continue each other; None: it would be in vain."""
        ...

    def is_over(self, lookup: Lookup) -> bool:
        """Whether a lookup has ended, or has taken as long as it may."""
        ...

    def hand_over(self, contents: Sequence[bytes]) -> None:
        """What pages hold that the scheduler was told of, in the order of their copies `from_tier`."""
        ...

    def make(self, copies: tuple[PageCopy, ...]) -> None:
        """Make copies that no batch will."""
        ...

    def close(self) -> None:
        """Keep what was to be kept, as far as there is a moment for it."""
        ...


class Observer:
    """Is called with every input and decision of an engine; this one ignores them, a `Recorder` does not."""

    def added(self, request: Request) -> None:
        """A request was accepted."""

    def fetched(self, request_id: str, first: int, count: int) -> None:
        """A lookup in the tier has found `count` pages of a waiting request, from its page `first` on."""

    def ended(self, request_id: str, reason: str, now_s: float) -> None:
        """A request was ended from outside, or by the clock."""

    def expected(self, request_id: str, arrival: Arrival) -> None:
        """Pages were taken that another engine is to fill."""

    def arrived(self, request_id: str, is_whole: bool) -> None:
        """All of them came, and can be found; or not all, and none can."""

    def released(self, request_id: str) -> None:
        """The pages of a request that has ended are held no longer."""

    def resized(self, num_pages: int, give_up: GiveUp) -> None:
        """The pool got another number of pages, and the device is about to."""

    def forgotten(self) -> None:
        """No page is findable any more."""

    def scheduled(self, batch: Batch, slots: SlotPool, now_s: float, held_back: HeldBack | None) -> None:
        """A batch with at least one span was made from the slot table; `held_back` as in `Scheduler`."""

    def looked_ahead(self, now_s: float) -> None:
        """With a batch in flight, no other was made; a request may have got its row all the same."""

    def committed(self, sampled: Sampled, now_s: float) -> None:
        """The device answered, and what it answered was booked."""

    def close(self) -> None:
        """The engine makes no more steps."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did. Its batch is empty where requests ended by the clock and nothing was computed.

    `sampled` holds the tokens that were booked, for the rows `owners` [A]. Until the next step,
    `engine.slots.requests[step.owners[i]]` is the request of token i, also when it ended.
    """

    batch: Batch
    owners: Index
    sampled: Sampled
    finished: list[Request]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """A step that the device is at."""

    batch: Batch
    wait: Callable[[], Sampled]
    start_s: float


class Engine:
    """The loop: schedule, run, commit. `clock` gives seconds and never runs back.

    With `overlap`, the next step is scheduled while the device runs this one, wherever it does not depend on
    it; a token that a request turns out not to need is then dropped. So are as many steps, of different
    requests, as the scheduler's `depth` says, for a device of several stages. Answers are the same.

    An `observer`, and a `tier` if the scheduler has one, must be there before the first request. `on_finish`
    gets each request that `finish` or `abort` has ended: such a one is in no step's `finished`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        *,
        overlap: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.overlap = overlap
        self.observer = Observer()
        self.tier: Tier | None = None
        self._awaited: list[tuple[Request, int, Lookup]] = []  # who waits for pages, from which on
        self.on_finish: Callable[[Request], None] = _ignore
        self._started = deque[Started]()
        self._landed: list[Step] = []  # done, and not yet given out

    @property
    def slots(self) -> SlotPool:
        return self.scheduler.slots

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running, or a step is to be given out."""
        return self.scheduler.has_work or bool(self._landed)

    def add(self, request: Request) -> None:
        """Take a request; raises ValueError if it could never be served, QueueFull if too much waits."""
        self.scheduler.add(request)
        if self.tier is not None:
            self._look_up(self.tier, request)
        self.observer.added(request)

    def finish(self, request_id: str, reason: str = "stop") -> Request | None:
        """End a request whose text is complete; None if it has ended already."""
        request = self.scheduler.end(request_id, reason)
        if request is not None:
            request.finish_s = self.clock()
            self.observer.ended(request_id, reason, request.finish_s)
            self.on_finish(request)
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request that nobody waits for any more; None if it has ended already."""
        return self.finish(request_id, "abort")

    def expect_pages(self, request: Request) -> tuple[Arrival, tuple[PageCopy, ...]] | None:
        """Take pages for what another engine computes of a request that is still to be added: what is to be
        filled, and the copies that the device must make before. None where nothing could be spared by it,
        or no pages can be.

        Only who calls this writes to these pages, until `pages_arrived`; before each write it asks
        `arriving_pages` whether they had to give way.
        """
        scheduler = self.scheduler
        keys = scheduler.page_keys(request)[: request.num_findable // self.slots.page_size]
        tokens = request.prompt[: len(keys) * self.slots.page_size]
        arrival = scheduler.lifecycle.expect(request.id, tokens, request.cache_salt, keys)
        if arrival is None:
            return None
        self.observer.expected(request.id, arrival)
        return arrival, scheduler.tables.take_copies()

    def arriving_pages(self, request_id: str) -> Arrival | None:
        """What is being filled for a request; None where it had to give way."""
        return self.scheduler.lifecycle.held.arriving(request_id)

    def pages_arrived(self, request_id: str, *, is_whole: bool) -> None:
        """All pages have come, which can be found from now on, or else none can."""
        self.scheduler.lifecycle.held.arrived(request_id, is_whole=is_whole)
        self.observer.arrived(request_id, is_whole)

    def leased_pages(self, request_id: str) -> Index | None:
        """The pages of an ended request's prompt (see `Request.leases_pages`); None where they had to give
        way.
        """
        return self.scheduler.lifecycle.held.leased(request_id)

    def release_pages(self, request_id: str) -> None:
        """Nobody reads them any more."""
        self.scheduler.lifecycle.held.release(request_id)
        self.observer.released(request_id)

    def resize(self, num_pages: int, give_up: GiveUp = "nothing") -> None:
        """Change the size of the cache while serving (see `Scheduler.resize`), when the device is done."""
        self.drain()
        self.scheduler.resize(num_pages, give_up)
        self.observer.resized(num_pages, give_up)  # before ranks wait for each other within it
        self.runner.resize(num_pages, self.scheduler.tables.take_copies())

    def forget_prefixes(self) -> None:
        """Let no request find what was computed before, but in the tier below; what runs keeps its pages."""
        self.drain()
        self.scheduler.prefix.forget_all()
        self.observer.forgotten()

    def close(self) -> None:
        """The engine makes no more steps."""
        self.observer.close()
        if self.tier is not None:
            self.tier.close()

    def drain(self) -> None:
        """Wait until the device is idle; what it was at is given out by the next `step`."""
        while self._started:
            self._landed.append(self._land(self._started.popleft()))

    def step(self) -> Step | None:
        """Compute one batch; None when there is nothing to compute now."""
        if self._landed:
            return self._landed.pop(0)
        now_s = self.clock()
        expired = self.scheduler.expire(now_s)
        for request in expired:
            self.observer.ended(request.id, "timeout", now_s)
        if self.tier is not None:
            self._take_in(self.tier)
        self._fill(now_s)
        if not self._started:
            return Step(NO_BATCH, _NONE, NO_TOKENS, expired, now_s, now_s) if expired else None
        step = self._land(self._started.popleft())
        return replace(step, finished=expired + step.finished) if expired else step

    def _fill(self, now_s: float) -> None:
        """Start what the device can begin, or have waiting for it, before its next answer is known."""
        most = max(self.scheduler.depth, 1 + self.overlap)
        while len(self._started) < most:
            if self._started:
                if not self.scheduler.can_look_ahead:
                    return
                now_s = self.clock()
            started = self._start(now_s)
            if started is None:
                return
            self._started.append(started)

    def _look_up(self, tier: Tier, request: Request) -> None:
        """Look for the pages of a newcomer that are not found here; it waits for them."""
        first, keys = self.scheduler.lifecycle.matching.lacking(request)
        lookup = tier.look_up(keys) if keys else None
        if lookup is not None:
            request.awaits_pages = True
            self._awaited.append((request, first, lookup))

    def _take_in(self, tier: Tier) -> None:
        """Let those go on whose pages have been looked up."""
        awaited, self._awaited = self._awaited, []
        for request, first, lookup in awaited:
            if not tier.is_over(lookup):
                self._awaited.append((request, first, lookup))
            elif self.scheduler.waiting.find(request.id) is request:  # it has not been given up meanwhile
                count = len(lookup.contents)
                taken = self.scheduler.lifecycle.matching.arrive(request, first, count)
                self.observer.fetched(request.id, first, count)
                tier.hand_over(lookup.contents[taken])

    def _start(self, now_s: float) -> Started | None:
        batch = self.scheduler.schedule(now_s)
        if not batch.num_spans:
            if len(self.scheduler.in_flight):
                self.observer.looked_ahead(now_s)
            return None
        self.observer.scheduled(batch, self.slots, now_s, self.scheduler.held_back)
        if self.overlap or self.scheduler.depth > 1:
            return Started(batch, self.runner.start(batch), now_s)
        sampled = self.runner.run(batch)
        return Started(batch, lambda: sampled, now_s)

    def _land(self, started: Started) -> Step:
        batch, sampled = started.batch, started.wait()
        end_s = self.clock()
        booked = self.scheduler.commit(batch, sampled, end_s)
        self.observer.committed(sampled, end_s)
        if booked.copies and self.tier is not None:
            self.tier.make(booked.copies)
        return Step(batch, booked.owners, booked.sampled, booked.finished, started.start_s, end_s)


def _ignore(request: Request) -> None:
    """Nobody follows the requests that end."""
