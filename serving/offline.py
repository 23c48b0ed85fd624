"""Answer a file of requests, and write a file of answers.

Requests join the engine at their `arrival_s`, as those of clients would, and each answer is written when it
ends. For a refused request the reason is written instead, and the others still run.

A run that was interrupted is resumed with the requests of the file that it has not answered.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from borders.files import bounded_lines, lines_of, naming, whole_file
from borders.refusal import BadRequest
from continuous_batching.engine import Engine, Step
from continuous_batching.request import TokenLogprobs
from continuous_batching.scheduling.validation import longest_allowed
from recipes.schema.recipe import Recipe
from serving.adapters import NO_ADAPTERS, KnownAdapters
from serving.answers.answers import finite, unit
from serving.answers.jobs import Job, JobAnswer, JobRefused, JobRun
from serving.grammars.matching import Grammars
from serving.own_processors import KnownProcessors
from serving.text.request_fields import NO_DEFAULTS, fit, parse_request, text_options
from serving.text.sampling_defaults import sampling_defaults
from serving.text.tokenizer import Text

Record = dict[str, Any]
MOST_REQUESTS = 10**6  # most requests of a file, which are all in memory while they are served
_USUAL_TOKENS = 64  # most tokens of the answer to a request that is no line of a file


def read_jobs(
    lines: Iterable[str], text: Text | None, recipe: Recipe | None = None
) -> Iterator[Job | Record]:
    """Yield the job of each line of JSON, or {"id", "error"}; blank lines are skipped.

    `recipe` defines the adapters that requests may name, and the checkpoint whose defaults hold. Raises
    ValueError for more than MOST_REQUESTS lines.
    """
    adapters = NO_ADAPTERS if recipe is None else KnownAdapters(recipe.adapters)
    defaults = NO_DEFAULTS if recipe is None else sampling_defaults(recipe)
    line_of: dict[str, int] = {}
    num_requests = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        num_requests += 1
        if num_requests > MOST_REQUESTS:
            raise ValueError(f"there are more than {MOST_REQUESTS:,} requests in one file; split it")
        fields = None
        try:
            line.encode()  # fails where the file was not UTF-8
            fields = json.loads(line, parse_constant=_refuse_constant)
            _check_tools(fields)
            job = Job(
                parse_request(fields, text, adapters=adapters, defaults=defaults),
                text_options(fields, text),
                num_answers=fields.get("n") or 1,
                show_logprobs=fields.get("logprobs") is not None and fields["logprobs"] is not False,
                fits_prompt=fields.get("truncate_prompt_tokens") == -1,
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


def _check_tools(fields: object) -> None:
    """Raise BadRequest for tools that an answer might call, since it is written as the model's text."""
    if isinstance(fields, dict) and fields.get("tools") and fields.get("tool_choice") != "none":
        problem = "are not supported in a file of requests, in whose answers no calls are looked for"
        raise BadRequest("tools", problem, fix='send them to a server, or add tool_choice: "none"')


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
    recipe: Recipe | None = None,
) -> Iterator[Record]:
    """Yield the records of all jobs, each when it ends; refusals among the jobs pass through.

    All jobs are read before the first step, and the records' times count from then, in seconds. `observe` is
    that of `JobRun.answers`; `recipe` defines the logits processors that jobs may name.
    """
    pending: list[Job] = []
    grammars = Grammars(lambda: text, engine.scheduler.vocab_size, engine.scheduler.eos_token_ids)
    processors = KnownProcessors.of(recipe, engine.scheduler.vocab_size)
    for job in jobs:
        if not isinstance(job, Job):
            yield job
            continue
        if job.fits_prompt:
            fit(job.request, longest_allowed(engine.slots, engine.scheduler.pool), text)
        try:
            grammars.constrain(job.request)
            processors.give(job.request)
        except BadRequest as error:
            yield {"id": job.request.id, "error": str(error)}
        else:
            pending.append(job)
    run = JobRun(engine, text, pending, sleep)
    for found in run.answers(observe):
        if isinstance(found, JobRefused):
            yield {"id": found.job.request.id, "error": str(found.reason)}
        else:
            yield _record(found, run.origin_s, has_text=text is not None)


def _record(finished: JobAnswer, origin_s: float, *, has_text: bool) -> Record:
    """Return the record of one answer to a request, or of one hypothesis of its beam search."""
    job, request, answer = finished.job, finished.request, finished.answer
    index = {"index": answer.index} if job.num_answers > 1 else {}
    if answer.finish_reason == "error":
        return {"id": job.request.id, "error": request.error} | index
    record: Record = {
        "id": job.request.id,
        "token_ids": answer.tokens,
        "text": answer.text if has_text else None,
        "finish_reason": answer.finish_reason,
    }
    if (found := request.embedding) is not None:
        is_labelled = bool(request.params.label_token_ids)
        result = {"label_logprobs": found.tolist()} if is_labelled else {"embedding": unit(found).tolist()}
        record = {"id": job.request.id, **result}
    if job.show_logprobs and request.params.logprobs is not None:
        record["logprobs"] = [_logprobs(entry) for entry in answer.logprobs]
    if request.params.prompt_logprobs is not None:
        record["prompt_logprobs"] = [None, *(_logprobs(entry) for entry in request.prompt_logprobs)]
    if (hypothesis := answer.hypothesis) is not None:
        record["score"] = finite(hypothesis.score)
        record["cumulative_logprob"] = finite(hypothesis.cumulative_logprob)
    times = {"arrival_s": request.arrival_s, "first_token_s": request.first_token_s}
    times["finish_s"] = request.finish_s
    return (
        record
        | {"num_prompt_tokens": request.num_prompt_tokens, "num_cached_tokens": request.num_cached_tokens}
        | {"num_drafted": request.num_drafted, "num_accepted": request.num_accepted}
        | {name: None if at is None else round(at - origin_s, 6) for name, at in times.items()}
        | index
    )


def _logprobs(entry: TokenLogprobs) -> Record:
    top = [[token, finite(value)] for token, value in entry.top]
    return {"token": entry.token, "logprob": finite(entry.logprob), "top": top}


def lines_in(path: str) -> Iterator[str]:
    """Yield the lines of a file; `-` is standard input."""
    lines = bounded_lines(sys.stdin.buffer, "standard input") if path == "-" else lines_of(path)
    # Bytes that are not UTF-8 become lone surrogates, so that only their line is refused.
    return (line.decode("utf-8", "surrogateescape") for line in lines)


def asked_lines(
    path: str | None, prompt: str | None, said: str | None, max_tokens: int | None
) -> Iterable[str]:
    """Return the lines of a file, or that of one greedy request.

    It has a prompt, or a chat whose user has `said` this. Raises ValueError for `max_tokens` beside a file,
    whose lines have their own.
    """
    if path is not None and max_tokens is not None:
        raise ValueError("--max-tokens is for --prompt and --chat: write max_tokens in the lines of --input")
    if path is not None:
        return lines_in(path)
    what = {"prompt": prompt} if said is None else {"messages": [{"role": "user", "content": said}]}
    most = _USUAL_TOKENS if max_tokens is None else max_tokens
    return [json.dumps({"id": "one", "max_tokens": most, "temperature": 0, **what})]


def check_answers(path: str, *, goes_on: bool) -> None:
    """Raise ValueError for a file that would be written over and is not empty: its answers took long."""
    if not goes_on and os.path.isfile(path) and (num_bytes := os.path.getsize(path)):
        raise ValueError(
            f"--output {path} holds {num_bytes:,} bytes, which would be lost; add --resume to go on with it,"
            " remove it, or name another file"
        )


@contextlib.contextmanager
def opened(path: str | None, *, goes_on: bool = False) -> Iterator[TextIO | None]:
    """Open a file for writing, from its start or, with `goes_on`, from its end; `-` is standard output."""
    if path is None or path == "-":
        yield None if path is None else sys.stdout
        return
    with naming(path), open(path, "a" if goes_on else "w", encoding="utf-8") as output:
        yield output


def write_record(output: TextIO, record: Record) -> None:
    """Write one line and flush it, so that a reader of a pipe sees it at once."""
    # Another encoding of standard output lacks characters, which JSON can escape.
    text = json.dumps(record, ensure_ascii=codecs.lookup(output.encoding).name != "utf-8")
    # Lone surrogates are escaped as JSON escapes them.
    output.write(text.encode("utf-8", "backslashreplace").decode() + "\n")
    output.flush()


def unanswered(path: str, jobs: Iterable[Job | Record]) -> list[Job | Record]:
    """Return the jobs that a file of answers lacks, and rewrite that file with the answers to the others.

    A job counts as answered when each of its answers is in the file. Cut-off lines, errors, and answers of
    jobs that lack one are left out of the rewritten file, since they will come again. A file that does not
    exist has no answers. Raises ValueError for an answer to another prompt than the job's, or to no job: the
    file belongs to another run.
    """
    jobs = list(jobs)
    asked = {job.request.id: job for job in jobs if isinstance(job, Job)}
    found: dict[str, dict[int, str]] = defaultdict(dict)  # request id -> index of the answer -> line
    for number, line in enumerate(lines_of(path) if os.path.exists(path) else (), 1):
        record = _answer(line)
        if record is None:
            continue
        job = asked.get(record["id"])
        if job is None:
            raise ValueError(
                f"{path} line {number} answers the request {record['id']!r}, which the input does not hold:"
                " resume with the input of that run, or write to another file"
            )
        num_tokens, expected = record.get("num_prompt_tokens"), job.request.num_prompt_tokens
        if num_tokens != expected and not job.fits_prompt:
            raise ValueError(
                f"{path} line {number} answers a prompt of {num_tokens} tokens, and that of {record['id']}"
                f" has {expected}: resume with the input of that run, or write to another file"
            )
        found[job.request.id][record.get("index", 0)] = line.decode("utf-8").rstrip("\n")
    answered = {name for name, answers in found.items() if len(answers) == asked[name].num_answers}
    with whole_file(path) as file:
        file.writelines(f"{line}\n" for name in found if name in answered for line in found[name].values())
    return [job for job in jobs if not isinstance(job, Job) or job.request.id not in answered]


def _answer(line: bytes) -> Record | None:
    """Return the record of a line, or None for an error or a line that is cut off."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    is_answer = isinstance(found, dict) and isinstance(found.get("id"), str) and "error" not in found
    return found if is_answer else None
