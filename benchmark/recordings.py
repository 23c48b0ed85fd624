"""Read a recording: tell what happened to one request, draw a time line, and fit the costs of steps.

Time lines, of simulated runs too, are trace events for the viewers of Chrome and Perfetto:
https://perfetto.dev/docs/getting-started/other-formats
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import numpy as np

from borders.files import opened, whole_file
from borders.framing import CutShort, DamagedRecording
from continuous_batching.engine import Engine, Step
from continuous_batching.recording.format import FORMAT, Added, Ended, Entry, Header, read_entries
from continuous_batching.recording.replay import Event, Replayed
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from recipes.assembly.scheduler import scheduler_from
from recipes.schema.command_line import keep_apart
from simulation.fitted import NAMES, in_words, learn

ENGINE, SLOTS, REQUESTS = 1, 2, 3  # process numbers, by which the viewer groups
DAMAGED, CUT_SHORT = 2, 3  # exit statuses of a command that has read such a recording


class Recording:
    """The entries of a file up to its end, or to where it is damaged, which is reported on stderr.

    Afterwards `status` is the exit status of the command that read it, 0 for a whole recording, and `damage`
    says where it is damaged; a file made from it must say so, too. With `needs_all`, damage raises ValueError
    instead.
    """

    def __init__(self, file: IO[bytes], name: str, *, needs_all: bool = False) -> None:
        self._entries = read_entries(file)
        self._name = name
        self._needs_all = needs_all
        self.status = 0
        self.damage: str | None = None
        try:
            header = next(self._entries)
        except (StopIteration, DamagedRecording) as error:
            raise ValueError(
                f"{name} is no recording of format {FORMAT}: {str(error) or 'it is empty'}"
            ) from error
        assert isinstance(header, Header), "a recording starts with its header"
        self.facts = header.facts
        self.added: list[Added] = []

    def __iter__(self) -> Iterator[Entry]:
        try:
            for entry in self._entries:
                if isinstance(entry, Added):
                    self.added.append(entry)
                yield entry
        except DamagedRecording as damage:
            if self._needs_all:
                raise ValueError(f"{self._name}: {damage}; a recording that is whole is needed") from damage
            self.damage = str(damage)
            self.status = CUT_SHORT if isinstance(damage, CutShort) else DAMAGED
            print(f"{self._name}: {damage}; only what comes before is used", file=sys.stderr)


class Story:
    """Follows one request through a replay on `scheduler`; `lines` holds what happened to it.

    Times are seconds since the first arrival of the recording.
    """

    def __init__(self, request_id: str, scheduler: Scheduler) -> None:
        self.request_id = request_id
        self._scheduler = scheduler
        self.lines: list[str] = []
        self._origin_s: float | None = None
        self._request: Request | None = None
        self._waits: Counter[str] = Counter()  # steps that did not compute it, by reason
        self._waits_since_s = 0.0
        self._num_preemptions = 0
        self._num_steps = 0
        self._computing_prompt = True

    def follow(self, events: Iterable[Event]) -> None:
        """Read all events; raises ValueError if the request is in none of them."""
        for event in events:
            if isinstance(event, Request):
                self._arrive(event)
            elif isinstance(event, Ended) and event.id == self.request_id:
                self._say(event.now_s, f"ended from outside: {event.reason}")
            elif isinstance(event, Replayed) and self._request is not None:
                self._step(event, self._request)
        if self._request is None:
            raise ValueError(f"request {self.request_id} is not in this recording")
        if self._waits:
            self._tell_wait(self._waits_since_s)

    def _arrive(self, leader: Request) -> None:
        if self._origin_s is None:
            self._origin_s = leader.arrival_s
        for request in (leader, *leader.followers):
            if request.id != self.request_id:
                continue
            self._request, self._waits_since_s = request, request.arrival_s
            also = f", with {len(leader.followers)} samples beside it" if leader.followers else ""
            self._say(
                request.arrival_s,
                f"arrived: {request.num_prompt_tokens} prompt tokens, up to {request.params.max_tokens} more,"
                f" priority {request.priority}{also}",
            )

    def _step(self, step: Replayed, request: Request) -> None:
        if request.num_preemptions > self._num_preemptions:
            self._num_preemptions = request.num_preemptions
            self._say(step.start_s, f"preempted before step {step.number}: others needed its pages")
            self._waits_since_s = step.start_s
        if request.id in step.ids:
            self._compute(step, step.ids.index(request.id), request)
        elif request.finish_s is None:
            self._waits[self._why_not(step, request)] += 1
        if request in step.finished:
            num_tokens = len(request.answer)
            self._say(
                step.end_s, f"ended ({request.finish_reason}): {num_tokens} tokens in {self._num_steps} steps"
            )

    def _compute(self, step: Replayed, span: int, request: Request) -> None:
        if self._waits:
            self._tell_wait(step.start_s)
        start, stop = int(step.batch.starts[span]), int(step.batch.stops[span])
        self._num_steps += 1
        if self._num_steps == 1:
            self._say(
                step.start_s,
                f"step {step.number}: into slot {step.batch.slots[span]},"
                f" {request.num_cached_tokens} prompt tokens found in the cache",
            )
        num_drafts = step.batch.drafts_by_span[span] if step.batch.num_drafts else 0
        if num_drafts:
            right = max(0, step.owner_ids.count(request.id) - 1)  # 0 where the request was ended meanwhile
            self._say(step.start_s, f"step {step.number}: {right} of {num_drafts} drafts were right")
        elif stop - start > 1:
            self._say(step.start_s, f"step {step.number}: computed tokens {start} to {stop - 1}")
        if self._computing_prompt and stop >= request.num_prompt_tokens:
            self._computing_prompt = False
            self._say(
                step.end_s,
                f"step {step.number}: first token, {step.end_s - request.arrival_s:.4f} s after it arrived",
            )

    def _why_not(self, step: Replayed, request: Request) -> str:
        waiting = self._scheduler.waiting
        if waiting.find(request.id) is None:
            return "in a slot, without a share of the step"
        if waiting.peek() is not request:
            return "behind others in the queue"
        return step.held_back or "it came while the step ran"

    def _tell_wait(self, until_s: float) -> None:
        reasons = ", ".join(f"{reason} ({count} steps)" for reason, count in self._waits.most_common(4))
        self._say(until_s, f"waited {until_s - self._waits_since_s:.4f} s: {reasons}")
        self._waits.clear()

    def _say(self, now_s: float, text: str) -> None:
        assert self._origin_s is not None, "a request arrived before anything happened to it"
        self.lines.append(f"{now_s - self._origin_s:10.4f}  {text}")


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
        at_us, shown = self._us(start_s), {"args": args} if args else {}
        lasted_us = round(self._us(end_s) - at_us, 3)
        self._write(ph="X", name=name, pid=pid, tid=tid, ts=at_us, dur=lasted_us, **shown)

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


def run_fit(options: argparse.Namespace) -> None:
    """Fit costs to a recording, write them, and print those that are not 0.

    Raises ValueError for a recording that is damaged, or cut short.
    """
    keep_apart(options.output, options.recording)
    with opened(options.recording) as file:
        recording = Recording(file, options.recording, needs_all=True)
        fitted = learn(recording, scheduler_from(recording.facts))
    with whole_file(options.output) as output:
        output.write(fitted.in_json())
    for name, cost_s in zip(NAMES, fitted.costs_s.tolist()):
        if cost_s:
            print(f"{name:22} {1e6 * cost_s:.4g} us")
    print(f"{'the fit':22} {in_words(fitted.trust.describe())}")
