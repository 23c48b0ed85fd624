"""Run jobs through an engine of this process and collect their answers.

A job is a request with the options of its text. Jobs join the engine when they arrive on its clock, and every
answer is reported as soon as it is known. Requests that arrive over HTTP are served elsewhere (async_llm.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from borders.refusal import BadRequest
from continuous_batching.engine import Engine, Step
from continuous_batching.queueing import QueueFull
from continuous_batching.request import Request
from serving.answers.answers import AnswerDelta, SampleAnswers
from serving.text.tokenizer import Text, TextOptions

_IDLE_S = 0.001  # pause between checks of an engine that waits for more requests
_SHORTEST_SLEEP_S = 1e-6  # longer than what rounding of times could lose
_PLAIN = TextOptions()


@dataclass(frozen=True, slots=True)
class Job:
    """A request with its other samples as followers, of which `num_answers` become answers.

    `show_logprobs` says that log-probabilities were asked for, and are not only needed to rank samples.
    `fits_prompt` says that the prompt is to be cut to the length that fits, which only the engine's side
    knows.
    """

    request: Request
    options: TextOptions = _PLAIN
    num_answers: int = 1
    show_logprobs: bool = True
    fits_prompt: bool = False


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """One whole answer to a job."""

    job: Job
    answer: AnswerDelta
    request: Request  # the sample or the beam search that the answer comes from
    is_last: bool  # no other answer of the job follows


@dataclass(frozen=True, slots=True)
class JobRefused:
    """A job that the engine did not accept."""

    job: Job
    reason: BadRequest | QueueFull


class _Running:
    """A job in the engine, with its answers so far."""

    def __init__(self, job: Job, text: Text | None) -> None:
        self.job = job
        self.progress = SampleAnswers(job.request, text, job.options, job.num_answers)
        # Its text is decoded at every step, since stop strings may end it.
        self.reads_along = bool(job.request.params.stop)
        assert text is not None or not self.reads_along, "stop strings without a tokenizer"
        self._growing: dict[int, AnswerDelta] = {}

    def take(self, deltas: Iterable[AnswerDelta]) -> Iterator[JobAnswer]:
        """Add new parts of answers and yield the answers that are whole now."""
        whole = []
        for delta in deltas:
            known = self._growing.setdefault(delta.index, delta)
            if known is not delta:
                known.extend(delta)
            if known.finish_reason is not None:
                whole.append(known)
        is_over = not self.progress.num_open
        for at, answer in enumerate(whole, 1):
            request = self.progress.samples[answer.sample].request
            yield JobAnswer(self.job, answer, request, is_over and at == len(whole))


class JobRun:
    """One pass over jobs, which join the engine in the order of their arrival.

    Arrival times count from `origin_s`, which is now, and are converted to the engine's clock, so a job can
    be used only once. A `patient` run waits while the engine's queue is full; otherwise such a job is
    refused.
    """

    def __init__(
        self,
        engine: Engine,
        text: Text | None,
        jobs: Iterable[Job],
        sleep: Callable[[float], None] = time.sleep,
        *,
        patient: bool = False,
    ) -> None:
        self._engine = engine
        self._text = text
        self._sleep = sleep
        self._patient = patient
        self._pending = deque(sorted(jobs, key=lambda job: job.request.arrival_s))
        # Keys are samples' ids, values the job and the sample's index in it.
        self._running: dict[str, tuple[_Running, int]] = {}
        self._finished: deque[Request] = deque()  # requests that were ended in the engine by anyone
        self._reading: set[str] = set()  # ids of the samples that stop strings may end
        for job in self._pending:  # keys are computed now, so that no step has to wait for them
            job.request.page_keys = engine.scheduler.page_keys(job.request)
        self.origin_s = engine.clock()
        for job in self._pending:
            for request in (job.request, *job.request.followers):
                request.arrival_s += self.origin_s

    def answers(self, observe: Callable[[Step], None] | None = None) -> Iterator[JobAnswer | JobRefused]:
        """Yield each answer when it is known, also of a job that somebody else ends in the engine.

        `observe` sees every step; until it returns, the slots stay as the step left them.
        """
        before, self._engine.on_finish = self._engine.on_finish, self._finished.append
        try:
            while self._pending or self._engine.has_work or self._finished:
                yield from self._admit()
                step = None if self._finished else self._step()
                if step is not None:
                    if observe is not None:
                        observe(step)
                    yield from self._follow(step)
                while self._finished:
                    yield from self._end(self._finished.popleft())
        finally:
            self._engine.on_finish = before

    def abort(self) -> None:
        """Abort all jobs that still run."""
        for name in self._running:
            self._engine.abort(name)
        self._running.clear()
        self._reading.clear()

    def _admit(self) -> Iterator[JobRefused]:
        """Give the engine the requests that have arrived by now."""
        now_s = self._engine.clock()
        while self._pending and self._pending[0].request.arrival_s <= now_s:
            job = self._pending[0]
            try:
                self._engine.add(job.request)
            except QueueFull as error:
                if self._patient:
                    return
                yield JobRefused(self._pending.popleft(), error)
                continue
            except BadRequest as error:
                yield JobRefused(self._pending.popleft(), error)
                continue
            self._pending.popleft()
            running = _Running(job, self._text)
            for index, sample in enumerate(running.progress.samples):
                self._running[sample.request.id] = running, index
                if running.reads_along:
                    self._reading.add(sample.request.id)

    def _step(self) -> Step | None:
        """Run one step; returns None, after a sleep, if there was nothing to compute."""
        step = self._engine.step() if self._engine.has_work else None
        if step is not None:
            return step
        rest_s = _IDLE_S
        if self._pending:
            until_next_s = self._pending[0].request.arrival_s - self._engine.clock()
            rest_s = min(rest_s, until_next_s) if self._engine.has_work else until_next_s
        self._sleep(max(rest_s, _SHORTEST_SLEEP_S))
        return None

    def _follow(self, step: Step) -> Iterator[JobAnswer]:
        """Read the new tokens of requests with stop strings, and yield the answers of requests that ended."""
        if self._reading:
            yield from self._read_along(step)
        for request in step.finished:
            yield from self._end(request)

    def _read_along(self, step: Step) -> Iterator[JobAnswer]:
        """Decode the new tokens of requests with stop strings, and end requests whose text contains one."""
        owners = step.owners.tolist()
        last = {row: index for index, row in enumerate(owners)}  # a step may bring a row several tokens
        for index, (row, token) in enumerate(zip(owners, step.sampled.tokens.tolist())):
            request: Request = self._engine.slots.requests[row]
            reason = request.finish_reason if index == last[row] else None
            if request.id not in self._reading or reason not in (None, "stop", "length"):
                continue
            running, sample = self._running[request.id]
            entry = step.sampled.logprobs.get(index)
            entries = () if entry is None else (entry,)
            deltas = running.progress.push(sample, (token,), entries, reason)
            if running.progress.samples[sample].finish_reason is not None:
                del self._running[request.id]
                self._reading.discard(request.id)
                if request.finish_reason is None:
                    self._engine.finish(request.id, reason="stop")
            yield from running.take(deltas)

    def _end(self, request: Request) -> Iterator[JobAnswer]:
        """Yield the answers that a sample's end makes whole, unless its text had already ended it."""
        if request.id not in self._running:
            return
        (running, index), reason = self._running.pop(request.id), request.finish_reason
        assert reason is not None, f"{request.id} has not ended"
        self._reading.discard(request.id)
        if running.reads_along or request.params.beam_width:
            deltas = running.progress.end(index, reason, request.hypotheses)
        else:
            deltas = running.progress.push(index, request.answer.tolist(), request.logprobs, reason)
        yield from running.take(deltas)
