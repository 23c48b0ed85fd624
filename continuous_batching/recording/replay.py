"""Replay a recording with a new scheduler and compare every decision.

The recorded inputs are applied in order; each batch is decided again and its digest compared with the
recorded one. A device may compute the batches, as a following rank does, or nothing may be computed, as when
a recording is inspected. Drafts are read from the recording: a follower does not run the proposer itself,
because its drafts, and how many of them are verified, depend on everything that the recorded engine had
learnt.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from continuous_batching.batch import SPOILT, Batch, Sampled
from continuous_batching.recording.format import (
    Added,
    Chain,
    Committed,
    Copied,
    Ended,
    Entry,
    Fetched,
    Forgotten,
    Header,
    Looked,
    PagesArrived,
    PagesExpected,
    PagesMoved,
    PagesReleased,
    RanksAsked,
    RanksTold,
    Resized,
    Scheduled,
    answered,
    copied,
    unpacked,
)
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.scheduling.validation import GiveUp
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Offers, Verdicts
from continuous_batching.speculation.proposer import Guesses
from continuous_batching.speculation.speculation import Speculation
from kv_cache.pages import Index, PageCopy
from kv_cache.tier.lookup import FoundPages, PageName


class RecordedDrafts:
    """A proposer and length control that reads the drafts of the next recorded batch from its entry.

    `upcoming` returns that entry, if any. It waits for the tokens of the batch in flight where the recorded
    engine did: there the next entry is the device's answer.
    """

    asks = True

    def __init__(self, slots: SlotPool, upcoming: Callable[[], Entry | None]) -> None:
        self._slots = slots
        self._upcoming = upcoming

    @property
    def is_hopeful(self) -> bool:
        """Whether the recorded engine made no batch at this point."""
        return isinstance(self._upcoming(), Committed)

    def guess(self, rows: Index, most: int) -> Guesses:
        """Return the recorded drafts of these rows [N].

        Drafts of other rows are left out, which shows in the digest. If the device proposed the drafts, only
        their number is recorded here and their tokens are in its answer.
        """
        tokens, counts = np.zeros((len(rows), most), dtype=np.int32), np.zeros(len(rows), dtype=np.int64)
        entry = self._upcoming()
        if not isinstance(entry, Scheduled) or entry.spans is None or entry.samples is None:
            # A span with drafts neither continues by one token nor yields one token
            return Guesses(tokens, counts)
        stops = unpacked(entry.spans[2])
        sampled, owners, targets = map(unpacked, entry.samples)
        is_draft = targets < stops[sampled]
        owners, targets = owners[is_draft], targets[is_draft]
        at = np.full(self._slots.num_slots, -1, dtype=np.int64)
        at[rows] = np.arange(len(rows))
        ahead = targets - self._slots.num_tokens[owners]
        fits = (at[owners] >= 0) & (ahead >= 0) & (ahead < most)
        if entry.drafts is not None:
            tokens[at[owners[fits]], ahead[fits]] = unpacked(entry.drafts)[fits]
        np.add.at(counts, at[owners[fits]], 1)
        return Guesses(tokens, counts)

    def choose(self, offers: Offers) -> Index:
        """Choose all of them."""
        return offers.counts

    def learn(self, verdicts: Verdicts) -> None:
        """Learn nothing."""

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """Learn nothing."""


def recorded_speculation(
    slots: SlotPool, asked: Speculation, upcoming: Callable[[], Entry | None]
) -> Speculation:
    """Return a Speculation that gives rows the drafts of a recording in place of what was configured.

    See `RecordedDrafts`.
    """
    drafts = RecordedDrafts(slots, upcoming)
    return Speculation(slots, drafts, drafts, asked.most, rows_per_pause=sys.maxsize, spans=asked.spans)


class Divergence(ValueError):
    """The first decision that differs from the recording, with the step, the field and both values."""


class Device(Protocol):
    """A device that computes what a replay decides."""

    def start(self, batch: Batch) -> Callable[[], object]:
        """Start a batch; the function returned waits for its end."""
        ...

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        """Resize the cache, as `Runner.resize` does."""
        ...

    def copy(self, copies: tuple[PageCopy, ...]) -> None:
        """Make page copies that no batch carries."""
        ...

    def told(self, topic: str, name: str, is_agreed: bool) -> None:
        """Use what was made ready for a question to all ranks, or drop it."""
        ...

    def move(self, layer: int, pages: Index, to_leader: bool) -> None:
        """Send the leader this rank's part of some pages of a layer, or receive it from there."""
        ...

    def look_up(self, request: Request) -> None:
        """Look up pages in the tier for a request that waits for what all ranks find."""
        ...

    def hand_over(self, request: Request, taken: Sequence[PageName]) -> None:
        """Hand over these pages of a lookup, in the order of their copies."""
        ...


class NoDevice:
    """A device that computes nothing."""

    def start(self, batch: Batch) -> Callable[[], object]:
        """Start nothing."""
        return _nothing

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        """Resize nothing."""

    def copy(self, copies: tuple[PageCopy, ...]) -> None:
        """Copy nothing."""

    def told(self, topic: str, name: str, is_agreed: bool) -> None:
        """Use nothing: nothing was made ready."""

    def move(self, layer: int, pages: Index, to_leader: bool) -> None:
        """Move nothing."""

    def look_up(self, request: Request) -> None:
        """Look up nothing: the recording says what was found."""

    def hand_over(self, request: Request, taken: Sequence[PageName]) -> None:
        """Hand over nothing."""


def _nothing() -> None:
    pass


NO_DEVICE = NoDevice()


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step that was decided again with the same result."""

    number: int  # counted from 1
    batch: Batch
    ids: list[str]  # id of the request of each span
    owner_ids: list[str]  # id of the request of each token that was committed
    held_back: str | None
    start_s: float
    end_s: float
    finished: list[Request]


# A request was added or ended from outside, the pool was resized, or a step completed
Event = Request | Ended | Resized | Replayed


def request_of(entry: Added) -> Request:
    """Return the request as it was added, with its other samples as followers."""
    leader, *followers = (
        Request(
            sample.id,
            unpacked(entry.prompt).astype(np.int32),
            sample.params,
            tenant=entry.tenant,
            cache_salt=entry.cache_salt,
            priority=entry.priority,
            arrival_s=entry.arrival_s,
            timeout_s=entry.timeout_s,
            adapter=entry.adapter,
            leases_pages=entry.leases_pages,
            known=unpacked(entry.known).astype(np.int32),
        )
        for sample in entry.samples
    )
    leader.followers = followers
    return leader


def replay(entries: Iterable[Entry], scheduler: Scheduler, device: Device = NO_DEVICE) -> Iterator[Event]:
    """Apply a recording to a new scheduler, drafts included, and yield its events in order.

    An event is yielded when the scheduler is in the state that it left behind. The device computes each batch
    that is decided. The scheduler must be built from the header's facts; the header itself is skipped. Raises
    Divergence at the first decision that differs.
    """
    chain, number, landed = Chain(), 0, 0
    started = deque[tuple[Batch, Scheduled, Callable[[], object]]]()
    last: Batch | None = None
    entry: Entry | None = None
    if scheduler.speculation is not None:
        asked = scheduler.speculation
        scheduler.speculation = recorded_speculation(scheduler.slots, asked, lambda: entry)
    for entry in entries:
        if isinstance(entry, (Header, RanksAsked)):
            continue
        if isinstance(entry, Added):
            request = request_of(entry)
            scheduler.add(request)
            request.awaits_pages = entry.awaits_pages
            if request.awaits_pages:
                device.look_up(request)
            yield request
        elif isinstance(entry, Ended):
            scheduler.end(entry.id, entry.reason)
            yield entry
        elif isinstance(entry, Quiet):
            _replay_quiet(scheduler, entry, device)
        elif isinstance(entry, Resized):
            counts = scheduler.resize(entry.num_pages, cast(GiveUp, entry.give_up), entry.window_pages)
            device.resize(counts, scheduler.tables.take_copies())
            yield entry
        elif isinstance(entry, Scheduled):
            number += 1
            batch = scheduler.schedule(entry.now_s, unpacked(entry.late))
            if chain.add(batch, scheduler.slots) != entry.digest:
                raise Divergence(f"step {number}: {_difference(entry, batch, last)}")
            last = batch
            started.append((batch, entry, device.start(batch)))
        elif isinstance(entry, Looked):
            if scheduler.schedule(entry.now_s, unpacked(entry.late)).num_spans:
                raise Divergence(f"after step {number}: a batch was made where there was nothing to compute")
        else:
            assert isinstance(entry, Committed), "an entry of another kind"
            if not started:
                raise Divergence(f"after step {number}: a commit without a batch")
            (batch, made, wait), landed = started.popleft(), landed + 1
            wait()
            requests = scheduler.slots.requests
            ids = [requests[row].id for row in batch.slots.tolist()]
            booked = scheduler.commit(batch, _answer_to(batch, entry, scheduler), entry.now_s)
            device.copy(booked.copies)
            owner_ids = [requests[row].id for row in booked.owners.tolist()]
            finished = booked.finished
            yield Replayed(landed, batch, ids, owner_ids, made.held_back, made.now_s, entry.now_s, finished)


def _answer_to(batch: Batch, entry: Committed, scheduler: Scheduler) -> Sampled:
    """Return the device's answer to a batch; raises Divergence for one that no device could have given."""
    answer = answered(entry)
    ids = [answer.tokens, answer.drafts, *(each.tokens for each in answer.candidates.values())]
    has_its_shape = len(answer.tokens) == len(batch.sampled) and all(
        0 <= index < len(answer.tokens) and len(each.tokens) == len(each.scores)
        for index, each in answer.candidates.items()
    )
    known = (not len(each) or SPOILT <= each.min() <= each.max() < scheduler.vocab_size for each in ids)
    if not has_its_shape or not all(known):
        raise Divergence(f"what was committed is no answer to a batch of {len(batch.sampled)} tokens")
    return answer


# They make no event
Quiet = Fetched | Forgotten | PagesExpected | PagesArrived | PagesReleased | PagesMoved | RanksTold


def _replay_quiet(scheduler: Scheduler, entry: Quiet, device: Device) -> None:
    """Apply a change of the prefix cache, of pages from elsewhere, or of what all ranks have made ready."""
    lifecycle = scheduler.lifecycle
    if isinstance(entry, RanksTold):
        device.told(entry.topic, entry.name, entry.is_agreed)
    elif isinstance(entry, PagesMoved):
        device.move(entry.layer, unpacked(entry.pages), entry.to_leader)
    elif isinstance(entry, Fetched):
        waiting = scheduler.waiting.find(entry.id)
        if waiting is None:
            raise Divergence(f"{entry.id} waits no more, and its pages arrive")
        found = FoundPages(entry.first, entry.count, tuple(entry.beside))
        device.hand_over(waiting, lifecycle.matching.arrive(waiting, found))
    elif isinstance(entry, Forgotten):
        if scheduler.has_tier:
            device.copy(scheduler.tables.take_copies())
        lifecycle.matching.forget_all()
    elif isinstance(entry, PagesExpected):
        if lifecycle.held.arriving(entry.id) is not None:
            raise Divergence(f"pages are expected twice for {entry.id}")
        tokens = unpacked(entry.tokens).astype(np.int32)
        if lifecycle.expect(entry.id, tokens, entry.cache_salt, []) is None:
            raise Divergence(f"no pages are found for {entry.id}, for which there were some")
        device.copy(scheduler.tables.take_copies())
    elif isinstance(entry, PagesArrived):
        lifecycle.held.arrived(entry.id, is_whole=entry.is_whole)
    else:
        lifecycle.held.release(entry.id)


def _difference(entry: Scheduled, batch: Batch, last: Batch | None) -> str:
    """Describe the first field of a batch that differs from the recording, with both values."""
    if entry.spans is None:
        assert last is not None, "the first batch has no batch before it"
        slots, starts, stops = last.slots, last.stops, last.stops + 1
    else:
        slots, starts, stops = map(unpacked, entry.spans)
    sampled, owners, targets = (
        (np.arange(len(slots)), slots, stops) if entry.samples is None else map(unpacked, entry.samples)
    )
    recorded = {"slots": slots, "starts": starts, "stops": stops, "sampled": sampled, "owners": owners}
    for name, old_array in (recorded | {"targets": targets}).items():
        decided = getattr(batch, name)
        if not np.array_equal(old_array, decided):
            return f"{name} were {old_array.tolist()}, and are {decided.tolist()} now"
    copies = copied(batch)
    if copies != entry.copies:
        return f"{_in_words(entry.copies)} were asked for, and {_in_words(copies)} are now"
    return "its spans end on other pages than they did, or its cuts or what it copies differ otherwise"


def _in_words(copies: list[Copied]) -> str:
    return ", ".join(f"{len(unpacked(copy.sources))} pages {copy.way}" for copy in copies) or "no copies"
