"""Tell in a few lines what happened to one request of a recording."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from continuous_batching.recording.format import Ended
from continuous_batching.recording.replay import Event, Replayed
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler


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
