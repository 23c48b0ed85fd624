"""How do requests become answers in this process?"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from continuous_batching.engine import Engine, Step
from continuous_batching.queueing.limits import QueueFull
from continuous_batching.request import Hypothesis, Request, TokenLogprobs
from serving.answers.samples import Samples
from serving.text.detokenizer import PLAIN_TEXT, Detokenizer, TextOptions
from serving.text.tokenizer import Text

_IDLE_S = 0.001  # between looks at an engine that waits for more requests
_LEAST_S = 1e-6  # a rest that no rounding can swallow


@dataclass(frozen=True, slots=True)
class Job:
    """A request, with its other samples as followers, of which `num_answers` are wanted.

    `show_logprobs`: they were asked for, not only needed to rank samples.
    """

    request: Request
    options: TextOptions = PLAIN_TEXT
    num_answers: int = 1
    show_logprobs: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer to a job."""

    job: Job
    index: int  # which of the job's answers
    is_last: bool  # of the job's to come out
    request: Request  # the sample, or the search, that it is from
    tokens: list[int]  # with the one that ended it
    text: str | None  # None: the model has no tokenizer
    finish_reason: str | None
    stop_reason: int | str | None  # the stop string or token of the request that ended it
    logprobs: Sequence[TokenLogprobs] | None  # None: not asked for
    found: Hypothesis | None  # by a search


@dataclass(frozen=True, slots=True)
class Refused:
    """A job that the engine did not take."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads along with a request that has stop strings."""

    detokenizer: Detokenizer
    reasons: tuple[str | None, ...]  # for a request that ended by them the last token counts
    pieces: list[str] = field(default_factory=list)

    def read(self, token: int) -> None:
        self.pieces.append(self.detokenizer.push([token]))

    def close(self) -> str:
        return "".join(self.pieces) + self.detokenizer.flush()


class Run:
    """One pass over jobs, which join in the order of their arrival.

    Times of arrival count from `origin_s`, which is now, and are brought onto the engine's clock; so a job
    serves once. A `patient` run waits where the engine's queue is full; else such a job is refused.
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
        self._running: dict[str, tuple[Job, Samples]] = {}  # by the id of each sample
        self._readers: dict[str, _Reader] = {}
        self.origin_s = engine.clock()
        for job in self._pending:
            for request in (job.request, *job.request.followers):
                request.arrival_s += self.origin_s

    def outcomes(self, observe: Callable[[Step], None] | None = None) -> Iterator[Outcome | Refused]:
        """Each when it is known. `observe` sees every step; until it returns, the slots stand as the step
        left them.
        """
        while self._pending or self._engine.has_work:
            yield from self._admit()
            step = self._step()
            if step is not None:
                if observe is not None:
                    observe(step)
                yield from self._follow(step)

    def abort(self) -> None:
        """End all that still runs."""
        for name in self._running:
            self._engine.abort(name)
        self._running.clear()

    def _admit(self) -> Iterator[Refused]:
        """Hand over the requests whose time has come."""
        now_s = self._engine.clock()
        while self._pending and self._pending[0].request.arrival_s <= now_s:
            job = self._pending[0]
            samples, params = Samples(job.request, job.num_answers), job.request.params
            try:
                self._engine.add(job.request)
            except QueueFull as error:
                if self._patient:
                    return
                yield Refused(self._pending.popleft(), str(error))
                continue
            except ValueError as error:
                yield Refused(self._pending.popleft(), str(error))
                continue
            self._pending.popleft()
            for request in samples.requests:
                self._running[request.id] = job, samples
                if params.stop:
                    assert self._text is not None, "stop strings without a tokenizer"
                    ends = ("stop",) if job.options.include_stop_str_in_output else ()
                    self._readers[request.id] = _Reader(
                        job.options.detokenizer(self._text, params), (None, "length", *ends)
                    )

    def _step(self) -> Step | None:
        """One step; None, after a rest, if there was nothing to compute."""
        step = self._engine.step() if self._engine.has_work else None
        if step is not None:
            return step
        rest_s = _IDLE_S
        if self._pending:
            until_next_s = self._pending[0].request.arrival_s - self._engine.clock()
            rest_s = min(rest_s, until_next_s) if self._engine.has_work else until_next_s
        self._sleep(max(rest_s, _LEAST_S))
        return None

    def _follow(self, step: Step) -> Iterator[Outcome]:
        """Read the new tokens of those with stop strings; the answers of the requests that ended."""
        for request in self._read(step) if self._readers else ():
            if request.finish_reason is None:
                self._engine.finish(request.id, reason="stop")
                yield from self._end(request)
        for request in step.finished:
            yield from self._end(request)

    def _end(self, request: Request) -> Iterator[Outcome]:
        """The answers that can be given now that a sample ended."""
        job, samples = self._running.pop(request.id)
        if request.hypotheses:
            found = request.hypotheses[: job.num_answers]
            ended = [(index, request, each) for index, each in enumerate(found)]
        else:
            ended = [(index, answer, None) for index, answer in samples.end(request)]
        is_over = not any(each.id in self._running for each in samples.requests)
        for at, (index, answer, hypothesis) in enumerate(ended, 1):
            yield self._outcome(job, index, is_over and at == len(ended), answer, hypothesis)

    def _read(self, step: Step) -> list[Request]:
        """The requests whose text has come to a stop string."""
        rows = step.owners
        stopped = []
        for row, token in zip(rows.tolist(), step.sampled.tokens.tolist()):
            request: Request = self._engine.slots.requests[row]
            reader = self._readers.get(request.id)
            if reader is None or request.finish_reason not in reader.reasons:
                continue  # the token that ends an answer is no part of its text, unless wanted
            reader.read(token)
            if reader.detokenizer.stopped is not None:
                stopped.append(request)
        return stopped

    def _outcome(
        self, job: Job, index: int, is_last: bool, request: Request, found: Hypothesis | None
    ) -> Outcome:
        reader, params = self._readers.pop(request.id, None), request.params
        reason, answer, text = request.finish_reason, request.answer.tolist(), None
        logprobs: Sequence[TokenLogprobs] = request.logprobs
        if found is not None:
            reason, answer, logprobs = found.finish_reason, found.tokens.tolist(), found.logprobs
        cause = answer[-1] if reason == "stop" and answer and answer[-1] in params.stop_token_ids else None
        if reader is not None:
            text = reader.close()
            if reader.detokenizer.stopped is not None:
                reason, cause = "stop", reader.detokenizer.stopped
        elif self._text is not None:
            options = job.options
            text = self._text.decode(
                options.without_end(answer, reason),
                skip_special_tokens=options.skip_special_tokens,
                start=options.start,
            )
        asked = job.show_logprobs and params.logprobs is not None
        shown = logprobs if asked else None
        return Outcome(job, index, is_last, request, answer, text, reason, cause, shown, found)
