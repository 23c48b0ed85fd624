"""Write a recording, or a simulated run, as trace events for the viewers of Chrome and Perfetto.

Format: https://perfetto.dev/docs/getting-started/other-formats
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import IO, Any

import numpy as np

from benchmark.recordings.recorded import Recording
from continuous_batching.engine import Engine, Step
from continuous_batching.recording.format import Ended
from continuous_batching.recording.replay import Event, Replayed
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler

ENGINE, SLOTS, REQUESTS = 1, 2, 3  # process numbers, by which the viewer groups


class TraceWriter:
    """Writes events as they are made, one a line, so that nothing is kept but who is in each slot.

    Times are in seconds, and shown since `origin_s`. A stay in a slot becomes one box when it is over.
    """

    def __init__(self, file: IO[str], groups: Mapping[int, str], **said: str) -> None:
        self._file, self.count, self.origin_s = file, 0, 0.0
        self._stays: dict[int, tuple[str, float, float]] = {}  # slot -> name, since and until when
        file.write(json.dumps({"displayTimeUnit": "ms", "otherData": said})[:-1] + ', "traceEvents": [')
        for number, name in groups.items():
            self._write(ph="M", name="process_name", pid=number, args={"name": name})

    def box(self, pid: int, tid: int, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Write something that took time, in one lane of a group."""
        at_us = self._us(start_s)
        shown = {"args": args} if args else {}
        self._write(ph="X", name=name, pid=pid, tid=tid, ts=at_us, dur=self._us(end_s) - at_us, **shown)

    def counts(self, at_s: float, **values: int) -> None:
        """Write the value of each counter from here on."""
        for name, value in values.items():
            said = name.replace("_", " ")
            self._write(ph="C", name=said, pid=ENGINE, ts=self._us(at_s), args={said: value})

    def mark(self, pid: int, name: str, at_s: float, *, is_global: bool = False) -> None:
        """Write a moment of a group, or one that is drawn over all groups."""
        scope = "g" if is_global else "p"
        self._write(ph="i", s=scope, name=name, pid=pid, tid=0, ts=self._us(at_s))

    def stay(self, slot: int, name: str, since_s: float, until_s: float) -> None:
        """Note that a step computed what a slot holds, and write the stay before if that was another's."""
        before = self._stays.get(slot)
        if before is not None and before[0] != name:
            self.box(SLOTS, slot, *before)
            before = None
        self._stays[slot] = name, since_s if before is None else before[1], until_s

    def close(self) -> None:
        """Write the stays that last, and the end of the file."""
        for slot, stay in self._stays.items():
            self.box(SLOTS, slot, *stay)
        self._file.write("\n]}\n")

    def _us(self, now_s: float) -> float:
        return round(1e6 * (now_s - self.origin_s), 3)

    def _write(self, **event: Any) -> None:
        self._file.write((",\n" if self.count else "\n") + json.dumps(event))
        self.count += 1


class RecordedTrace:
    """Writes a replay on `scheduler`; times are since the first arrival."""

    def __init__(self, file: IO[str], scheduler: Scheduler) -> None:
        groups = {ENGINE: "engine", SLOTS: "slots", REQUESTS: "arrivals and ends"}
        self._writer = TraceWriter(file, groups)
        self._scheduler = scheduler
        self._idle_s = -math.inf

    def write(self, recording: Recording, events: Iterable[Event]) -> int:
        """Write all events, and a mark where the recording is damaged; returns their number."""
        writer, has_begun = self._writer, False
        for event in events:
            if isinstance(event, Request):
                writer.origin_s = writer.origin_s if has_begun else event.arrival_s
                has_begun = True
                writer.mark(REQUESTS, f"{event.id} arrived", event.arrival_s)
            elif isinstance(event, Ended):
                writer.mark(REQUESTS, f"{event.id} ended: {event.reason}", event.now_s)
            elif isinstance(event, Replayed):
                self._step(event)
        if recording.damage is not None:
            name = f"the recording is damaged from here: {recording.damage}"
            writer.mark(ENGINE, name, max(self._idle_s, writer.origin_s), is_global=True)
        writer.close()
        return writer.count

    def _step(self, step: Replayed) -> None:
        writer, batch, scheduler = self._writer, step.batch, self._scheduler
        start_s = max(step.start_s, self._idle_s)  # a step may be made while the one before it runs
        self._idle_s = step.end_s
        said = {"spans": batch.num_spans, "tokens": batch.num_tokens, "page copies": len(batch.copies)}
        writer.box(ENGINE, 0, f"step {step.number}", start_s, step.end_s, **said)
        waiting, held = len(scheduler.waiting), scheduler.pool.num_held
        writer.counts(start_s, tokens=batch.num_tokens, waiting=waiting, held_pages=held)
        for request in step.finished:
            writer.mark(REQUESTS, f"{request.id} ended: {request.finish_reason}", step.end_s)
        if batch.num_drafts:
            self._drafts(step, start_s)
        for slot, request_id in zip(batch.slots.tolist(), step.ids):
            writer.stay(slot, request_id, step.start_s, step.end_s)

    def _drafts(self, step: Replayed, start_s: float) -> None:
        """Write the spans with drafts, within the stays of their requests: how many drafts were accepted."""
        num_tokens, num_drafts = Counter(step.owner_ids), step.batch.drafts_by_span
        for span in np.flatnonzero(num_drafts).tolist():
            drafts, slot = int(num_drafts[span]), int(step.batch.slots[span])
            right = max(0, num_tokens[step.ids[span]] - 1)  # a request that was ended meanwhile gets no token
            name = f"{right} of {drafts} drafts right"
            self._writer.box(SLOTS, slot, name, start_s, step.end_s, drafts=drafts, right=right)


class SimulatedTrace:
    """Writes each step of a simulated run; a slot shows the prompt and then the answer of its request."""

    def __init__(self, file: IO[str]) -> None:
        groups = {ENGINE: "SIMULATED steps", SLOTS: "SIMULATED slots"}
        self._writer = TraceWriter(file, groups, SIMULATED="not measured")
        self.close = self._writer.close

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
        self._writer.counts(step.start_s, tokens=batch.num_tokens, waiting=waiting)
        for row, prompt in zip(batch.slots.tolist(), is_prompt.tolist()):
            name = f"{slots.requests[row].id}: {'prompt' if prompt else 'answer'}"
            self._writer.stay(row, name, step.start_s, step.end_s)

    def lane(self, name: str, lane: int, start_s: float, end_s: float, said: dict[str, Any]) -> None:
        """Write something that took time, in one of the lanes above the slots."""
        self._writer.box(ENGINE, lane, name, start_s, end_s, **said)
