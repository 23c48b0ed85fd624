"""How is a running engine recorded?"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Observer
from continuous_batching.recording.format import (
    BEGIN,
    FORMAT,
    Added,
    Chain,
    Closed,
    Copied,
    Ended,
    Entry,
    Header,
    Looked,
    Resized,
    SampleEntry,
    Scheduled,
    committed,
    packed,
)
from continuous_batching.recording.framing import framed
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.admission import HeldBack
from continuous_batching.scheduling.validation import GiveUp
from continuous_batching.slots import SlotPool
from continuous_batching.system_error import in_one_line

log = logging.getLogger(__name__)


class RecordingFile:
    """A new file that entries are appended to, until it is closed or can no longer be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed: OSError | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._check = BEGIN  # the checksum of the record before
        self._lock = threading.Lock()  # a process that is to end closes it from another thread
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def append(self, entry: Entry | Closed) -> None:
        """Hand an entry to the system. An error ends the recording, and is one line in the log."""
        with self._lock:
            self._append(entry)

    def close(self) -> None:
        """Append that it was closed in order; nothing is appended afterwards."""
        with self._lock:
            if self._file is not None:
                self._append(Closed())
                os.close(self._file)
                self._file = None

    def _append(self, entry: Entry | Closed) -> None:
        if self._file is None or self.failed is not None:
            return
        record, self._check = framed(self._encoder.encode(entry), self._check)
        try:
            while record:  # the system may take a part, and refuse the rest
                record = record[os.write(self._file, record) :]
        except OSError as error:
            self.failed = error
            error.filename = str(self.path)
            log.error("recording ended: %s; serving goes on without it", in_one_line(error))


class Recorder(Observer):
    """Appends the inputs and decisions of an engine to a new file; `facts` say what the engine is made of.

    The file must not be there yet, and only its owner may read it. Each entry is handed to the system at
    once, so that it outlives this process. When the file can no longer be written (a full disk), recording
    ends with one line in the log, and serving goes on. Unless it is closed before, the recording is closed
    when nothing refers to its recorder, or at the end of the process: only one that is killed leaves it open.
    """

    def __init__(self, path: Path | str, facts: dict[str, Any]) -> None:
        self._chain = Chain()
        self._last: Batch | None = None
        file = RecordingFile(Path(path))
        self._write = file.append
        self._close = weakref.finalize(self, file.close)
        self._write(Header(FORMAT, facts))

    def added(self, request: Request) -> None:
        """A request was accepted."""
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
            )
        )

    def ended(self, request_id: str, reason: str, now_s: float) -> None:
        """A request was ended from outside."""
        self._write(Ended(request_id, reason, now_s))

    def resized(self, num_pages: int, give_up: GiveUp) -> None:
        """The pool got another number of pages."""
        self._write(Resized(num_pages, give_up))

    def scheduled(self, batch: Batch, slots: SlotPool, now_s: float, held_back: HeldBack | None) -> None:
        """A batch was made, with at least one span."""
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
                [Copied(packed(copy.sources), packed(copy.targets), copy.way) for copy in batch.copies],
                held_back,
                _drafts(batch, slots) if batch.num_drafts and not batch.makes_drafts else None,
            )
        )

    def looked_ahead(self, now_s: float) -> None:
        """With a batch in flight, no other was made."""
        self._write(Looked(now_s))

    def committed(self, sampled: Sampled, now_s: float) -> None:
        """The device answered."""
        self._write(committed(sampled, now_s))

    def close(self) -> None:
        """Nothing is recorded afterwards."""
        self._close()


def _drafts(batch: Batch, slots: SlotPool) -> bytes:
    guessed = batch.is_draft
    return packed(slots.token_ids[batch.owners[guessed], batch.targets[guessed]])


def _recorded(params: SamplingParams) -> SamplingParams:
    """Parameters without the allowed tokens, which may be thousands: a replay chooses no tokens."""
    return params if params.allowed_token_ids is None else replace(params, allowed_token_ids=None)
