"""Record the inputs and decisions of a running engine.

A `Recorder` observes the engine and writes framed entries to its sinks: a file, or the connections to the
ranks that follow. What the entries hold is defined in `format`.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from borders.files import in_one_line
from borders.framing import framed
from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Observer
from continuous_batching.paging.held_pages import Arrival
from continuous_batching.recording.format import (
    BEGIN,
    FORMAT,
    Added,
    Chain,
    Closed,
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
    SampleEntry,
    Scheduled,
    committed,
    copied,
    packed,
)
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.admission import HeldBack
from continuous_batching.scheduling.validation import GiveUp
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index
from kv_cache.tier.lookup import FoundPages

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives the records of a recording, one after the other."""

    def write(self, record: bytes) -> None:
        """Take a record. An exception ends the engine's step, and so the engine."""
        ...

    def close(self, last: bytes) -> None:
        """Take the last record, which is empty if `write` has raised before."""
        ...


class RecordingFile:
    """A new file to which records are appended until it is closed or can no longer be written.

    The file must not exist yet, and only its owner may read it. Each record is handed to the system at once,
    so that it outlives this process. When the file can no longer be written (a full disk), recording ends
    with one line in the log, and serving goes on.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.failed: OSError | None = None
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, record: bytes) -> None:
        """Hand a record to the system. An error ends the recording with one line in the log."""
        if self.failed is not None:
            return
        try:
            while record:  # the system may take only a part of it
                record = record[os.write(self._file, record) :]
        except OSError as error:
            self.failed = error
            error.filename = str(self.path)
            log.error("recording ended: %s; serving goes on without it", in_one_line(error))

    def close(self, last: bytes) -> None:
        """Write the last record and close the file."""
        self.write(last)
        os.close(self._file)


class _Records:
    """Encodes entries as records and passes each to every sink."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._encoder = msgspec.msgpack.Encoder()
        self._check = BEGIN  # checksum of the previous record
        self._lock = threading.Lock()  # closing may happen in another thread, when the process ends
        self._is_closed = False
        self._is_broken = False  # a sink has raised, and the rest is not recorded

    def append(self, entry: Entry) -> None:
        with self._lock:
            if self._is_closed:
                return
            record = self._record(entry)
            try:
                for sink in self._sinks:
                    sink.write(record)
            except BaseException:
                self._is_broken = True
                raise

    def close(self) -> None:
        """Append the closing entry; nothing is appended afterwards."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            last = b"" if self._is_broken else self._record(Closed())
            for sink in self._sinks:
                sink.close(last)

    def _record(self, entry: Entry | Closed) -> bytes:
        record, self._check = framed(self._encoder.encode(entry), self._check)
        return record


class Recorder(Observer):
    """Passes the inputs and decisions of an engine to `sinks`; `facts` describe how the engine is built.

    Unless it is closed before, the recording is closed when its recorder is garbage-collected or the process
    exits: only a killed process leaves it open.
    """

    def __init__(self, facts: dict[str, Any], *sinks: Sink) -> None:
        self._chain = Chain()
        self._last: Batch | None = None
        records = _Records(sinks)
        self._write = records.append
        self._close = weakref.finalize(self, records.close)
        self._write(Header(FORMAT, facts))

    def added(self, request: Request) -> None:
        """Record that a request was accepted."""
        samples = [SampleEntry(each.id, _recorded(each.params)) for each in (request, *request.followers)]
        self._write(
            Added(
                samples,
                packed(request.prompt),
                request.tenant,
                request.cache_salt,
                request.priority,
                request.arrival_s,
                request.timeout_s,
                request.adapter,
                request.leases_pages,
                request.awaits_pages,
                packed(request.known),
            )
        )

    def fetched(self, request_id: str, found: FoundPages) -> None:
        """Record that a lookup in the tier has ended."""
        self._write(Fetched(request_id, found.first, found.count, list(found.beside)))

    def ended(self, request_id: str, reason: str, now_s: float) -> None:
        """Record that a request was ended from outside."""
        self._write(Ended(request_id, reason, now_s))

    def expected(self, request_id: str, arrival: Arrival) -> None:
        """Record that pages were allocated for another engine to fill."""
        self._write(PagesExpected(request_id, packed(arrival.tokens), arrival.cache_salt))

    def arrived(self, request_id: str, is_whole: bool) -> None:
        """Record that expected pages arrived, or that they did not all arrive."""
        self._write(PagesArrived(request_id, is_whole))

    def released(self, request_id: str) -> None:
        """Record that leased pages were released."""
        self._write(PagesReleased(request_id))

    def asked(self, topic: str, name: str, body: bytes = b"") -> None:
        """Record that the leader asks all ranks something (see `agreement`)."""
        self._write(RanksAsked(topic, name, body))

    def told(self, topic: str, name: str, is_agreed: bool) -> None:
        """Record what the leader has decided about a question."""
        self._write(RanksTold(topic, name, is_agreed))

    def moved(self, layer: int, pages: Index, to_leader: bool) -> None:
        """Record that all ranks send the leader parts of pages, or receive them."""
        self._write(PagesMoved(layer, packed(pages), to_leader))

    def resized(self, num_pages: Sequence[int], give_up: GiveUp) -> None:
        """Record that the page pools were resized."""
        self._write(Resized(num_pages[0], give_up, list(num_pages[1:])))

    def forgotten(self) -> None:
        """Record that the prefix cache was emptied."""
        self._write(Forgotten())

    def scheduled(
        self, batch: Batch, slots: SlotPool, now_s: float, held_back: HeldBack | None, late: Index
    ) -> None:
        """Record a batch with at least one span."""
        last, self._last = self._last, batch
        goes_on = (
            last is not None
            and np.array_equal(batch.slots, last.slots)
            and np.array_equal(batch.starts, last.stops)
            and np.array_equal(batch.stops, last.stops + 1)
        )
        all_sample = len(batch.sampled) == batch.num_spans and np.array_equal(batch.owners, batch.slots)
        self._write(
            Scheduled(
                now_s,
                self._chain.add(batch, slots),
                None if goes_on else (packed(batch.slots), packed(batch.starts), packed(batch.stops)),
                None if all_sample else (packed(batch.sampled), packed(batch.owners), packed(batch.targets)),
                copied(batch),
                held_back,
                _drafts(batch, slots) if batch.num_drafts and not batch.makes_drafts else None,
                packed(late),
            )
        )

    def looked(self, now_s: float, late: Index) -> None:
        """Record that no batch was made."""
        self._write(Looked(now_s, packed(late)))

    def committed(self, sampled: Sampled, now_s: float) -> None:
        """Record the device's answer."""
        self._write(committed(sampled, now_s))

    def close(self) -> None:
        """Close the recording; nothing is recorded afterwards."""
        self._close()


def _drafts(batch: Batch, slots: SlotPool) -> bytes:
    guessed = batch.is_draft
    return packed(slots.token_ids[batch.owners[guessed], batch.targets[guessed]])


def _recorded(params: SamplingParams) -> SamplingParams:
    """Shorten parameters for the recording: most allowed tokens and the grammar are left out.

    They may be long, and a replay chooses no tokens. That they exist is kept, because tensor-parallel ranks
    gather all logits for a request with masks. Those of a beam search are kept: it is refused where it is
    added if they are fewer than its beams.
    """
    allowed, grammar = params.allowed_token_ids, params.grammar
    if allowed is None and grammar is None:
        return params
    if allowed is not None and not params.beam_width:
        allowed = allowed[:4]  # the first int32
    return replace(
        params,
        allowed_token_ids=allowed,
        grammar=None if grammar is None else "",
    )
