"""Run the engine's loop: schedule a batch, run it on the device, commit its tokens.

The scheduler decides what a batch holds and the runner computes it; this module joins the two, overlaps
scheduling with the device where asked, and reports every input and decision to an observer. It also defines
the protocols of the runner and of the tier below the host's pool.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from continuous_batching.batch import NO_BATCH, Batch, Sampled
from continuous_batching.paging.held_pages import Arrival, Leased
from continuous_batching.request import Request
from continuous_batching.samples.mask_maker import MaskMaker
from continuous_batching.scheduling.admission import HeldBack
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.scheduling.validation import GiveUp
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index, PageCopy
from kv_cache.tier.lookup import FoundPages, Lookup, Sought

_NONE = np.empty(0, dtype=np.int64)
NO_TOKENS = Sampled(_NONE)


class Runner(Protocol):
    """A device that computes batches."""

    def run(self, batch: Batch) -> Sampled:
        """Run one forward pass.

        Returns a token for each of `batch.owners` at its position in `batch.targets`.
        """
        ...

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Start a forward pass without waiting for it; the function returned waits and gives the answer."""
        ...

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        """Make the copies, then change the number of pages of each group; the others keep their content."""
        ...


class Tier(Protocol):
    """A tier of pages below the host's pool. None of its methods blocks."""

    def look_up(self, sought: Sought) -> Lookup | None:
        """Start a lookup of the pages that a request could use.

        Returns None if all of them are here, or if the tier knows that it has none.
        """
        ...

    def is_over(self, lookup: Lookup) -> bool:
        """Whether a lookup has ended or reached its time limit."""
        ...

    def hand_over(self, contents: Sequence[bytes]) -> None:
        """Hand over the content of fetched pages, in the order of their `from_tier` copies."""
        ...

    def make(self, copies: tuple[PageCopy, ...]) -> None:
        """Make copies that no batch will carry."""
        ...

    def close(self) -> None:
        """Write out pages that are still to be saved, within a short time limit."""
        ...


class Questions(Protocol):
    """What the leader asks all ranks; what is settled is taken between two steps."""

    def take(self) -> None:
        """Do what follows the questions that are settled."""
        ...

    def close(self) -> None:
        """Ask nothing more."""
        ...


class Observer:
    """Receives every input and decision of an engine.

    This class ignores them; a `Recorder` writes them down.
    """

    def added(self, request: Request) -> None:
        """A request was accepted."""

    def fetched(self, request_id: str, found: FoundPages) -> None:
        """A lookup in the tier, for which a request waited, has ended."""

    def ended(self, request_id: str, reason: str, now_s: float) -> None:
        """A request was ended by its client, by the server or by its timeout."""

    def expected(self, request_id: str, arrival: Arrival) -> None:
        """Pages were allocated for another engine to fill."""

    def arrived(self, request_id: str, is_whole: bool) -> None:
        """The expected pages arrived; they can be found if all of them did, and otherwise none can."""

    def released(self, request_id: str) -> None:
        """The lease on the pages of an ended request is over."""

    def resized(self, num_pages: Sequence[int], give_up: GiveUp) -> None:
        """The page pools were resized, to so many pages of each group, and the device is about to follow."""

    def forgotten(self) -> None:
        """The prefix cache was emptied."""

    def scheduled(
        self, batch: Batch, slots: SlotPool, now_s: float, held_back: HeldBack | None, late: Index
    ) -> None:
        """A batch with at least one span was made from the slot table.

        `held_back` is as in `Scheduler`; the rows `late` were left out.
        """

    def looked(self, now_s: float, late: Index) -> None:
        """No batch was made, although a request may have been given a row.

        Another was in flight, the rows `late` were left out, or all rows were preempted.
        """

    def committed(self, sampled: Sampled, now_s: float) -> None:
        """The device's answer was committed."""

    def asked(self, topic: str, name: str, body: bytes) -> None:
        """All ranks are asked something (see `recording.agreement`)."""

    def told(self, topic: str, name: str, is_agreed: bool) -> None:
        """What all ranks have made ready for a question is used now, or dropped."""

    def moved(self, layer: int, pages: Index, to_leader: bool) -> None:
        """All ranks send the leader their parts of some pages of a layer, or receive them from it."""

    def close(self) -> None:
        """The engine makes no further steps."""


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one step; its batch is empty if requests timed out and nothing was computed.

    `sampled` holds the tokens that were committed, for the rows `owners` [A]. Until the next step,
    `engine.slots.requests[step.owners[i]]` is the request of token i, even if it has finished.
    """

    batch: Batch
    owners: Index
    sampled: Sampled
    finished: list[Request]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """A step that is in flight on the device."""

    batch: Batch
    wait: Callable[[], Sampled]
    start_s: float


class Engine:
    """The loop of schedule, run and commit. `clock` gives seconds and never runs back.

    With `overlap` the next step is scheduled while the device runs this one, wherever it does not depend on
    this one's tokens; a token that a request turns out not to need is dropped. A device of several pipeline
    stages has as many steps in flight, of different requests, as the scheduler's `depth` says. Answers are
    the same in all cases. Rows for whose masks `masks` would wait are left out of a step.

    An `observer`, and a `tier` if the scheduler has one, must be set before the first request. `on_finish`
    receives each request that `finish` or `abort` has ended, which appears in no step's `finished`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        *,
        overlap: bool = False,
        masks: MaskMaker | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.overlap = overlap
        self.masks = masks
        self.observer = Observer()
        self.tier: Tier | None = None
        self.questions: Questions | None = None
        # Whether the owner has something to read; a step in which all rows wait for masks then ends at once
        self.is_called: Callable[[], bool] = bool
        # Requests waiting for a lookup, and the page from which it looks
        self._awaited: list[tuple[Request, Lookup]] = []
        self.on_finish: Callable[[Request], None] = _ignore
        self._started = deque[Started]()
        self._landed: list[Step] = []  # steps that have completed and are still to be returned

    @property
    def slots(self) -> SlotPool:
        return self.scheduler.slots

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a completed step is still to be returned."""
        return self.scheduler.has_work or bool(self._landed)

    def add(self, request: Request) -> None:
        """Accept a request.

        Raises ValueError if it can never be served and QueueFull if the queue is too long.
        """
        self.scheduler.add(request)
        if self.tier is not None:
            self._look_up(self.tier, request)
        self.observer.added(request)

    def finish(self, request_id: str, reason: str = "stop") -> Request | None:
        """Finish a request whose text is complete; return None if it has already ended."""
        request = self.scheduler.end(request_id, reason)
        if request is not None:
            request.finish_s = self.clock()
            self.observer.ended(request_id, reason, request.finish_s)
            self.on_finish(request)
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request whose client has gone; return None if it has already ended."""
        return self.finish(request_id, "abort")

    def expect_pages(self, request: Request) -> tuple[Arrival, tuple[PageCopy, ...]] | None:
        """Allocate pages for the part of a prompt that another engine computes, before the request is added.

        The known beginning of an answer is computed there like the prompt before it.
        Returns the pages to fill and the copies that the device must make first, or None if nothing would be
        saved or no pages can be spared. Only the caller writes to these pages, until `pages_arrived`; before
        each write it asks `arriving_pages` whether they had to give way.
        """
        scheduler = self.scheduler
        keys = scheduler.page_keys(request)[: request.num_findable // self.slots.page_size]
        tokens = request.tokens[: len(keys) * self.slots.page_size]
        arrival = scheduler.lifecycle.expect(request.id, tokens, request.cache_salt, keys)
        if arrival is None:
            return None
        self.observer.expected(request.id, arrival)
        return arrival, scheduler.tables.take_copies()

    def arriving_pages(self, request_id: str) -> Arrival | None:
        """Return the pages being filled for a request, or None if they had to give way."""
        return self.scheduler.lifecycle.held.arriving(request_id)

    def pages_arrived(self, request_id: str, *, is_whole: bool) -> None:
        """End an arrival: its pages can be found from now on if all of them are whole."""
        self.scheduler.lifecycle.held.arrived(request_id, is_whole=is_whole)
        self.observer.arrived(request_id, is_whole)

    def leased_pages(self, request_id: str) -> Leased | None:
        """Return the prompt pages held for an ended request, or None if they had to give way.

        See `Request.leases_pages`.
        """
        return self.scheduler.lifecycle.held.leased(request_id)

    def release_pages(self, request_id: str) -> None:
        """End the lease on a request's pages, which nobody reads any more."""
        self.scheduler.lifecycle.held.release(request_id)
        self.observer.released(request_id)

    def resize(self, num_pages: int, give_up: GiveUp = "nothing", window_pages: Sequence[int] = ()) -> None:
        """Change the numbers of pages while serving (see `Scheduler.resize`), once the device is idle."""
        self.drain()
        counts = self.scheduler.resize(num_pages, give_up, window_pages)
        # The observer hears it first, because ranks wait for each other within the runner's resize
        self.observer.resized(counts, give_up)
        self.runner.resize(counts, self.scheduler.tables.take_copies())

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, but not the tier below; running requests keep their pages.

        What was to be copied to that tier is, so that no copy is left for another tier in its place.
        """
        self.drain()
        if self.tier is not None:
            self.tier.make(self.scheduler.tables.take_copies())
        self.scheduler.lifecycle.matching.forget_all()
        self.observer.forgotten()

    def close(self) -> None:
        """Close the observer and the tier; no step may follow."""
        if self.questions is not None:
            self.questions.close()
        # At once, as the server lets neither wait for long: the observer may wait for other ranks
        closing = None
        if self.tier is not None:
            closing = threading.Thread(target=self.tier.close, name="tier-closes", daemon=True)
            closing.start()
        try:
            self.observer.close()
        finally:
            if closing is not None:
                closing.join()

    @property
    def has_landed(self) -> bool:
        """Whether `step` would return a step that was completed before, and begin none."""
        return bool(self._landed)

    def drain(self) -> None:
        """Wait until the device is idle; the next calls of `step` return the steps that it completed."""
        while self._started:
            self._landed.append(self._land(self._started.popleft()))

    def step(self) -> Step | None:
        """Complete one step and return it, or None if there is nothing to compute now."""
        if self._landed:
            return self._landed.pop(0)
        if self.questions is not None:
            self.questions.take()
        now_s = self.clock()
        expired = self.scheduler.expire(now_s)
        for request in expired:
            self.observer.ended(request.id, "timeout", now_s)
        self.take_in()
        self._fill(now_s)
        if not self._started:
            return Step(NO_BATCH, _NONE, NO_TOKENS, expired, now_s, now_s) if expired else None
        step = self._land(self._started.popleft())
        return replace(step, finished=expired + step.finished) if expired else step

    def take_in(self) -> bool:
        """Release the requests whose lookup in the tier has ended, and return whether others still wait.

        Each step does so, too.
        """
        if self.tier is None:
            return False
        awaited, self._awaited = self._awaited, []
        for request, lookup in awaited:
            if not self.tier.is_over(lookup):
                self._awaited.append((request, lookup))
            # The request has not been aborted meanwhile
            elif self.scheduler.waiting.find(request.id) is request:
                found = lookup.found()
                taken = self.scheduler.lifecycle.matching.arrive(request, found)
                self.observer.fetched(request.id, found)
                self.tier.hand_over([lookup.contents[page] for page in taken])
        return bool(self._awaited)

    def _fill(self, now_s: float) -> None:
        """Start as many steps as the device may have in flight before its next answer is known."""
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
        """Start a lookup in the tier for the pages that a new request lacks here.

        The request waits for it. Only a step takes in what was found: until the next one, which a paused
        engine does not make, no lookup is started once what others have found would fill the host's pool.
        """
        num_held = sum(len(lookup.contents) for _, lookup in self._awaited)
        if num_held and num_held >= self.scheduler.prefix.num_host_pages:
            return
        lookup = tier.look_up(self.scheduler.lifecycle.matching.sought(request))
        if lookup is not None:
            request.awaits_pages = True
            self._awaited.append((request, lookup))

    def _start(self, now_s: float) -> Started | None:
        late, flight = _NONE, self.scheduler.in_flight
        if self.masks is not None:
            late = self.masks.late_rows(self.slots, flight.withheld())
        preemptions = self.scheduler.counters.preemptions
        batch = self.scheduler.schedule(now_s, late)
        if not batch.num_spans:
            if len(flight) or len(late) or self.scheduler.counters.preemptions != preemptions:
                self.observer.looked(now_s, late)
            if self.masks is not None and len(late) and not len(flight):
                self.masks.wait(late, self.slots, self.is_called)
            return None
        self.observer.scheduled(batch, self.slots, now_s, self.scheduler.held_back, late)
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
    """Ignore a finished request."""
