"""Read a recording: tell what happened to one request, and fit the costs of steps."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import IO

from borders.files import opened, whole_file
from borders.framing import CutShort, DamagedRecording
from continuous_batching.recording.format import FORMAT, Added, Ended, Entry, Header, read_entries
from continuous_batching.recording.replay import Event, Replayed
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from recipes.assembly.scheduler import scheduler_from
from recipes.schema.command_line import keep_apart
from simulation.fitted import NAMES, in_words, learn

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
