"""Write a recording, or a simulated run, as trace events for the viewers of Chrome and Perfetto.

Format: https://perfetto.dev/docs/getting-started/other-formats
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np

from benchmark.recordings.recorded import Recording
from continuous_batching.engine import Engine, Step
from continuous_batching.recording.format import Ended
from continuous_batching.recording.replay import Event, Replayed
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler

ENGINE, SLOTS, REQUESTS = 1, 2, 3  # process numbers, by which the viewer groups
TraceEvent = dict[str, Any]


def process(number: int, name: str) -> TraceEvent:
    """Return the name of a group."""
    return {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}


def box(pid: int, tid: int, name: str, start_us: float, lasted_us: float, **args: Any) -> TraceEvent:
    """Return something that took time, in one lane of a group."""
    shown = {"args": args} if args else {}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start_us, "dur": lasted_us, **shown}


def counts(at_us: float, **values: int) -> Iterator[TraceEvent]:
    """Yield the value of each counter from here on."""
    for name, value in values.items():
        said = name.replace("_", " ")
        yield {"ph": "C", "name": said, "pid": ENGINE, "ts": at_us, "args": {said: value}}


class SlotStays:
    """Follows who is in each slot, since when (in microseconds); a stay becomes one box when it is over."""

    def __init__(self) -> None:
        self._stays: dict[int, tuple[str, float, float]] = {}  # slot -> name, since and until when

    def seen(self, slot: int, name: str, since_us: float, until_us: float) -> Iterator[TraceEvent]:
        """Note that a step computed what a slot holds; yields the stay before, if that was another's."""
        before = self._stays.get(slot)
        if before is not None and before[0] != name:
            yield self._box(slot)
            before = None
        self._stays[slot] = name, since_us if before is None else before[1], until_us

    def over(self) -> Iterator[TraceEvent]:
        """Yield all stays that last."""
        for slot in list(self._stays):
            yield self._box(slot)

    def _box(self, slot: int) -> TraceEvent:
        name, since_us, until_us = self._stays.pop(slot)
        return box(SLOTS, slot, name, since_us, until_us - since_us)


class Tracer:
    """Turns the events of a replay on `scheduler` into trace events; times are since the first arrival."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._origin_s: float | None = None
        self._idle_s = -math.inf
        self._stays = SlotStays()

    def events(self, replayed: Iterable[Event]) -> Iterator[TraceEvent]:
        """Yield all trace events, in no particular order."""
        for number, name in ((ENGINE, "engine"), (SLOTS, "slots"), (REQUESTS, "arrivals and ends")):
            yield process(number, name)
        for event in replayed:
            if isinstance(event, Request):
                self._origin_s = event.arrival_s if self._origin_s is None else self._origin_s
                yield self._instant(f"{event.id} arrived", event.arrival_s)
            elif isinstance(event, Ended):
                yield self._instant(f"{event.id} ended: {event.reason}", event.now_s)
            elif isinstance(event, Replayed):
                yield from self._step(event)
        yield from self._stays.over()

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
        said = {"spans": batch.num_spans, "tokens": batch.num_tokens, "page copies": len(batch.copies)}
        yield box(ENGINE, 0, f"step {step.number}", at_us, lasted_us, **said)
        waiting, held = len(scheduler.waiting), scheduler.pool.num_held
        yield from counts(at_us, tokens=batch.num_tokens, waiting=waiting, held_pages=held)
        for request in step.finished:
            yield self._instant(f"{request.id} ended: {request.finish_reason}", step.end_s)
        if batch.num_drafts:
            yield from self._drafts(step, at_us, lasted_us)
        for slot, request_id in zip(batch.slots.tolist(), step.ids):
            yield from self._stays.seen(slot, request_id, self._us(step.start_s), self._us(step.end_s))

    def _drafts(self, step: Replayed, at_us: float, lasted_us: float) -> Iterator[TraceEvent]:
        """Yield the spans with drafts, within the stays of their requests: how many drafts were accepted."""
        num_tokens, num_drafts = Counter(step.owner_ids), step.batch.drafts_by_span
        for span in np.flatnonzero(num_drafts).tolist():
            right = max(0, num_tokens[step.ids[span]] - 1)  # a request that was ended meanwhile gets no token
            said = {"drafts": int(num_drafts[span]), "right": right}
            name, slot = f"{right} of {num_drafts[span]} drafts right", int(step.batch.slots[span])
            yield box(SLOTS, slot, name, at_us, lasted_us, **said)

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


class TraceEventFile:
    """Writes events as they are made, one a line, so that nothing is kept; `close` ends the file."""

    def __init__(self, file: IO[str], **said: str) -> None:
        self._file, self.count = file, 0
        file.write(json.dumps({"displayTimeUnit": "ms", "otherData": said})[:-1] + ', "traceEvents": [')

    def write(self, event: TraceEvent) -> None:
        """Write one event."""
        self._file.write((",\n" if self.count else "\n") + json.dumps(event))
        self.count += 1

    def close(self) -> None:
        """Write the end."""
        self._file.write("\n]}\n")


def write(file: IO[str], events: Iterable[TraceEvent]) -> int:
    """Write a trace; returns the number of events."""
    output = TraceEventFile(file)
    for event in events:
        output.write(event)
    output.close()
    return output.count


class SimulatedTrace:
    """Writes each step of a simulated run; a slot shows the prompt and then the answer of its request."""

    def __init__(self, file: IO[str]) -> None:
        self._output = TraceEventFile(file, SIMULATED="not measured")
        self._stays = SlotStays()
        for number, name in ((ENGINE, "SIMULATED steps"), (SLOTS, "SIMULATED slots")):
            self._output.write(process(number, name))

    def observe(self, engine: Engine, step: Step) -> None:
        """Write one step."""
        batch, slots = step.batch, engine.slots
        if not batch.num_spans:
            return
        is_prompt = batch.starts < slots.num_prompt[batch.slots]
        said = {
            "spans": batch.num_spans,
            "tokens": batch.num_tokens,
            "spans of prompts": int(is_prompt.sum()),
        }
        self.lane("step", 0, step.start_s, step.end_s, said)
        waiting = len(engine.scheduler.waiting)
        self._write_all(counts(1e6 * step.start_s, tokens=batch.num_tokens, waiting=waiting))
        for row, prompt in zip(batch.slots.tolist(), is_prompt.tolist()):
            name = f"{slots.requests[row].id}: {'prompt' if prompt else 'answer'}"
            self._write_all(self._stays.seen(row, name, 1e6 * step.start_s, 1e6 * step.end_s))

    def lane(self, name: str, lane: int, start_s: float, end_s: float, said: dict[str, Any]) -> None:
        """Write something that took time, in one of the lanes above the slots."""
        self._output.write(box(ENGINE, lane, name, 1e6 * start_s, 1e6 * (end_s - start_s), **said))

    def close(self) -> None:
        """Write the requests that are still in a slot, and the end."""
        self._write_all(self._stays.over())
        self._output.close()

    def _write_all(self, events: Iterable[TraceEvent]) -> None:
        for event in events:
            self._output.write(event)
