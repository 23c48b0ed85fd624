"""How does a file of requests become a file of answers?

Requests join the engine when their `arrival_s` has come, as clients would, and each answer comes out when it
ends. A request that is refused yields its reason, and the others still run.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from continuous_batching.engine import Engine, Step
from continuous_batching.request import Hypothesis, Request, TokenLogprobs
from serving.detokenizer import Detokenizer
from serving.requests import parse_request
from serving.samples import Samples
from serving.text import Text

Record = dict[str, Any]
_IDLE_S = 0.001  # between looks at an engine that waits for more requests
_LEAST_S = 1e-6  # a rest that no rounding can swallow
_NO_CHANCE = -9999.0  # stands for a log-probability of minus infinity, which JSON cannot say


@dataclass(frozen=True, slots=True)
class Job:
    """A request, with its other samples as followers, of which `num_answers` are wanted.

    `start`: an answer is a text of its own (a chat's turn), not the rest of its prompt. `show_logprobs`:
    they were asked for, not only needed to rank samples.
    """

    request: Request
    start: bool = False
    num_answers: int = 1
    show_logprobs: bool = True


def read_jobs(lines: Iterable[str], text: Text | None) -> Iterator[Job | Record]:
    """For each line of JSON its job, or {"id", "error"}; blank lines are passed over."""
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = None
        try:
            fields = json.loads(line, parse_constant=_refuse_constant)
            job = Job(
                parse_request(fields, text),
                start=fields.get("messages") is not None,
                num_answers=fields.get("n") or 1,
                show_logprobs=fields.get("logprobs") is not None,
            )
            if job.request.id in line_of:
                raise ValueError(f"the id is taken by line {line_of[job.request.id]}")
        except (ValueError, RecursionError) as error:
            given = fields.get("id") if isinstance(fields, dict) else None
            yield {"id": given, "error": f"line {number}: {_reason(error)}"}
        else:
            line_of[job.request.id] = number
            yield job


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    return "the JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)


def run_jobs(
    engine: Engine,
    text: Text | None,
    jobs: Iterable[Job | Record],
    *,
    observe: Callable[[Step], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Record]:
    """The records of all jobs, each when it ends; refusals among the jobs pass through.

    All jobs are taken before the first step. The records' times count from then, in seconds; those of the
    requests are brought onto the engine's clock, so a job serves once. `observe` sees every step; until it
    returns, the slots stand as the step left them.
    """
    pending: list[Job] = []
    for job in jobs:
        if isinstance(job, Job):
            pending.append(job)
        else:
            yield job
    run = _Run(engine, text, sorted(pending, key=lambda job: job.request.arrival_s), sleep)
    while run.has_work:
        yield from run.admit()
        step = run.step()
        if step is not None:
            if observe is not None:
                observe(step)
            yield from run.follow(step)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads along with a request that has stop strings."""

    detokenizer: Detokenizer
    pieces: list[str] = field(default_factory=list)

    def read(self, token: int) -> None:
        self.pieces.append(self.detokenizer.push([token]))

    def close(self) -> str:
        return "".join(self.pieces) + self.detokenizer.flush()


class _Run:
    """One pass over a list of jobs in order of arrival."""

    def __init__(
        self, engine: Engine, text: Text | None, jobs: list[Job], sleep: Callable[[float], None]
    ) -> None:
        self._engine = engine
        self._text = text
        self._sleep = sleep
        self._pending = deque(jobs)
        self._running: dict[str, tuple[Job, Samples]] = {}  # by the id of each sample
        self._readers: dict[str, _Reader] = {}
        self._origin_s = engine.clock()
        for job in jobs:
            for request in (job.request, *job.request.followers):
                request.arrival_s += self._origin_s

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or self._engine.has_work

    def admit(self) -> Iterator[Record]:
        """Hand over the requests whose time has come; a record for each that the engine refuses."""
        now_s = self._engine.clock()
        while self._pending and self._pending[0].request.arrival_s <= now_s:
            job = self._pending.popleft()
            samples, params = Samples(job.request, job.num_answers), job.request.params
            try:
                self._engine.add(job.request)
            except ValueError as error:
                yield {"id": job.request.id, "error": str(error)}
                continue
            for request in samples.requests:
                self._running[request.id] = job, samples
                if params.stop:
                    assert self._text is not None, "stop strings without a tokenizer"
                    detokenizer = Detokenizer(
                        self._text, params.stop, min_tokens=params.min_tokens, start=job.start
                    )
                    self._readers[request.id] = _Reader(detokenizer)

    def step(self) -> Step | None:
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

    def follow(self, step: Step) -> Iterator[Record]:
        """Read the new tokens of those with stop strings; the records of the requests that ended."""
        for request in self._read(step) if self._readers else ():
            if request.finish_reason is None:
                self._engine.finish(request.id, reason="stop")
                yield from self._end(request)
        for request in step.finished:
            yield from self._end(request)

    def _end(self, request: Request) -> Iterator[Record]:
        """The records that can be given now that a sample ended."""
        job, samples = self._running.pop(request.id)
        if request.hypotheses:
            records = [self._record(job, request, each) for each in request.hypotheses[: job.num_answers]]
            ended = list(enumerate(records))
        else:
            ended = [(index, self._record(job, answer)) for index, answer in samples.end(request)]
        for index, record in ended:
            yield record | ({"index": index} if job.num_answers > 1 else {})

    def _read(self, step: Step) -> list[Request]:
        """The requests whose text has come to a stop string."""
        rows = step.batch.owners
        stopped = []
        for row, token in zip(rows.tolist(), step.sampled.tokens.tolist()):
            request: Request = self._engine.slots.requests[row]
            reader = self._readers.get(request.id)
            if reader is None or request.finish_reason not in (None, "length"):
                continue  # the token that ends an answer is no part of its text
            reader.read(token)
            if reader.detokenizer.stopped is not None:
                stopped.append(request)
        return stopped

    def _record(self, job: Job, request: Request, found: Hypothesis | None = None) -> Record:
        """What a request answered, or one hypothesis of its beam search."""
        name, reader = job.request.id, self._readers.pop(request.id, None)
        if request.finish_reason == "error":
            return {"id": name, "error": request.error}
        reason, answer, text = request.finish_reason, request.answer.tolist(), None
        logprobs: Sequence[TokenLogprobs] = request.logprobs
        if found is not None:
            reason, answer, logprobs = found.finish_reason, found.tokens.tolist(), found.logprobs
        if reader is not None:
            text = reader.close()
            reason = reason if reader.detokenizer.stopped is None else "stop"
        elif self._text is not None:
            text = self._text.decode(answer[:-1] if reason == "stop" else answer, start=job.start)
        record: Record = {"id": name, "token_ids": answer, "text": text, "finish_reason": reason}
        if job.show_logprobs and request.params.logprobs is not None:
            record["logprobs"] = [_logprobs(entry) for entry in logprobs]
        if found is not None:
            record |= {
                "score": _finite(found.score),
                "cumulative_logprob": _finite(found.cumulative_logprob),
            }
        return record | {
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_cached_tokens": request.num_cached_tokens,
            "arrival_s": self._since_start(request.arrival_s),
            "first_token_s": self._since_start(request.first_token_s),
            "finish_s": self._since_start(request.finish_s),
        }

    def _since_start(self, time_s: float | None) -> float | None:
        return None if time_s is None else round(time_s - self._origin_s, 6)


def _finite(value: float) -> float:
    return _NO_CHANCE if value == -math.inf else value


def _logprobs(entry: TokenLogprobs) -> Record:
    top = [[token, _finite(value)] for token, value in entry.top]
    return {"token": entry.token, "logprob": _finite(entry.logprob), "top": top}
