"""Turn a recording into trace events for the viewers of Chrome and Perfetto.

Format: https://perfetto.dev/docs/getting-started/other-formats
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np

from benchmark.recordings.recording_file import Recording
from continuous_batching.recording.format import Ended
from continuous_batching.recording.replay import Event, Replayed
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler

ENGINE, SLOTS, REQUESTS = 1, 2, 3  # process numbers, by which the viewer groups

TraceEvent = dict[str, Any]


class Tracer:
    """Turns the events of a replay on `scheduler` into trace events; times are since the first arrival."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._origin_s: float | None = None
        self._idle_s = -math.inf
        self._stays: dict[int, tuple[str, float, float]] = {}  # slot -> request, since and until when

    def events(self, replayed: Iterable[Event]) -> Iterator[TraceEvent]:
        """Yield all trace events, in no particular order."""
        for number, name in ((ENGINE, "engine"), (SLOTS, "slots"), (REQUESTS, "arrivals and ends")):
            yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
        for event in replayed:
            if isinstance(event, Request):
                self._origin_s = event.arrival_s if self._origin_s is None else self._origin_s
                yield self._instant(f"{event.id} arrived", event.arrival_s)
            elif isinstance(event, Ended):
                yield self._instant(f"{event.id} ended: {event.reason}", event.now_s)
            elif isinstance(event, Replayed):
                yield from self._step(event)
        for slot in list(self._stays):
            yield self._leave(slot)

    def damaged(self, why: str) -> TraceEvent:
        """Return a mark over all tracks at the end of what could be read."""
        at_us = 0.0 if self._origin_s is None or math.isinf(self._idle_s) else self._us(self._idle_s)
        name = f"the recording is damaged from here: {why}"
        return {"ph": "i", "s": "g", "name": name, "pid": ENGINE, "tid": 0, "ts": at_us}

    def _step(self, step: Replayed) -> Iterator[TraceEvent]:
        batch, scheduler = step.batch, self._scheduler
        start_s = max(step.start_s, self._idle_s)  # a step may be made while the one before it runs
        self._idle_s = step.end_s
        at_us, lasted_us = self._us(start_s), 1e6 * (step.end_s - start_s)
        yield {
            "ph": "X",
            "name": f"step {step.number}",
            "pid": ENGINE,
            "tid": 0,
            "ts": at_us,
            "dur": lasted_us,
            "args": {"spans": batch.num_spans, "tokens": batch.num_tokens, "page copies": len(batch.copies)},
        }
        counts = {
            "tokens": batch.num_tokens,
            "waiting": len(scheduler.waiting),
            "held pages": scheduler.pool.num_held,
        }
        for name, count in counts.items():
            yield {"ph": "C", "name": name, "pid": ENGINE, "ts": at_us, "args": {name: count}}
        for request in step.finished:
            yield self._instant(f"{request.id} ended: {request.finish_reason}", step.end_s)
        if batch.num_drafts:
            yield from self._runs(step, at_us, lasted_us)
        for slot, request_id in zip(batch.slots.tolist(), step.ids):
            stay = self._stays.get(slot)
            if stay is not None and stay[0] != request_id:
                yield self._leave(slot)
                stay = None
            since_s = step.start_s if stay is None else stay[1]
            self._stays[slot] = request_id, since_s, step.end_s

    def _runs(self, step: Replayed, at_us: float, lasted_us: float) -> Iterator[TraceEvent]:
        """Yield the spans with drafts, within the stays of their requests: how many drafts were accepted."""
        batch, num_tokens = step.batch, Counter(step.owner_ids)
        num_drafts = batch.drafts_by_span
        for span in np.flatnonzero(num_drafts).tolist():
            right = max(0, num_tokens[step.ids[span]] - 1)  # a request that was ended meanwhile gets no token
            yield {
                "ph": "X",
                "name": f"{right} of {num_drafts[span]} drafts right",
                "pid": SLOTS,
                "tid": int(batch.slots[span]),
                "ts": at_us,
                "dur": lasted_us,
                "args": {"drafts": int(num_drafts[span]), "right": right},
            }

    def _leave(self, slot: int) -> TraceEvent:
        request_id, since_s, until_s = self._stays.pop(slot)
        return {
            "ph": "X",
            "name": request_id,
            "pid": SLOTS,
            "tid": slot,
            "ts": self._us(since_s),
            "dur": 1e6 * (until_s - since_s),
        }

    def _instant(self, name: str, now_s: float) -> TraceEvent:
        return {"ph": "i", "s": "p", "name": name, "pid": REQUESTS, "tid": 0, "ts": self._us(now_s)}

    def _us(self, now_s: float) -> float:
        assert self._origin_s is not None, "nothing happens before a request arrives"
        return round(1e6 * (now_s - self._origin_s), 3)


def timeline(recording: Recording, scheduler: Scheduler, events: Iterable[Event]) -> Iterator[TraceEvent]:
    """Yield the trace events of a replay on `scheduler`, and at the end a mark of any damage."""
    tracer = Tracer(scheduler)
    yield from tracer.events(events)
    if recording.damage is not None:
        yield tracer.damaged(recording.damage)


def write(file: IO[str], events: Iterable[TraceEvent]) -> int:
    """Write a trace, one event a line; returns the number of events."""
    count = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for event in events:
        file.write(",\n" if count else "\n")
        json.dump(event, file)
        count += 1
    file.write("\n]}\n")
    return count
