"""How does a file of requests become a file of answers?

Requests join the engine when their `arrival_s` has come, as clients would, and each answer comes out when it
ends. A request that is refused yields its reason, and the others still run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from continuous_batching.engine import Engine, Step
from continuous_batching.request import TokenLogprobs
from serving.answers.finite import finite
from serving.answers.jobs import Job, Outcome, Refused, Run
from serving.text.request_fields import parse_request, text_options
from serving.text.tokenizer import Text

Record = dict[str, Any]


def read_jobs(lines: Iterable[str], text: Text | None) -> Iterator[Job | Record]:
    """For each line of JSON its job, or {"id", "error"}; blank lines are passed over."""
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = None
        try:
            line.encode()  # fails where a file held no UTF-8
            fields = json.loads(line, parse_constant=_refuse_constant)
            job = Job(
                parse_request(fields, text),
                text_options(fields),
                num_answers=fields.get("n") or 1,
                show_logprobs=fields.get("logprobs") is not None,
            )
            ids = [each.id for each in (job.request, *job.request.followers)]
            if taken := [each for each in ids if each in line_of]:
                raise ValueError(
                    f"the id {taken[0]} is taken by line {line_of[taken[0]]}; choose another"
                    " (the further samples of a request are ID#1, ID#2, ...)"
                )
        except (ValueError, RecursionError) as error:
            given = fields.get("id") if isinstance(fields, dict) else None
            yield {"id": given, "error": f"line {number}: {_reason(error)}"}
        else:
            line_of |= dict.fromkeys(ids, number)
            yield job


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeEncodeError):
        return f"not UTF-8 at column {error.start + 1}"
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

    All jobs are taken before the first step. The records' times count from then, in seconds. `observe` is as
    in `Run.outcomes`.
    """
    pending: list[Job] = []
    for job in jobs:
        if isinstance(job, Job):
            pending.append(job)
        else:
            yield job
    run = Run(engine, text, pending, sleep)
    for outcome in run.outcomes(observe):
        if isinstance(outcome, Refused):
            yield {"id": outcome.job.request.id, "error": outcome.reason}
        else:
            yield _record(outcome, run.origin_s)


def _record(outcome: Outcome, origin_s: float) -> Record:
    """What a request answered, or one hypothesis of its beam search."""
    job, request, found = outcome.job, outcome.request, outcome.found
    index = {"index": outcome.index} if job.num_answers > 1 else {}
    if request.finish_reason == "error":
        return {"id": job.request.id, "error": request.error} | index
    record: Record = {
        "id": job.request.id,
        "token_ids": outcome.tokens,
        "text": outcome.text,
        "finish_reason": outcome.finish_reason,
    }
    if outcome.logprobs is not None:
        record["logprobs"] = [_logprobs(entry) for entry in outcome.logprobs]
    if request.params.prompt_logprobs is not None:
        record["prompt_logprobs"] = [None, *(_logprobs(entry) for entry in request.prompt_logprobs)]
    if found is not None:
        record |= {"score": finite(found.score), "cumulative_logprob": finite(found.cumulative_logprob)}
    times = {"arrival_s": request.arrival_s, "first_token_s": request.first_token_s}
    times["finish_s"] = request.finish_s
    return (
        record
        | {"num_prompt_tokens": request.num_prompt_tokens, "num_cached_tokens": request.num_cached_tokens}
        | {name: None if at is None else round(at - origin_s, 6) for name, at in times.items()}
        | index
    )


def _logprobs(entry: TokenLogprobs) -> Record:
    top = [[token, finite(value)] for token, value in entry.top]
    return {"token": entry.token, "logprob": finite(entry.logprob), "top": top}
