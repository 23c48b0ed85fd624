"""Find the requests of a file that an interrupted run has not answered."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from borders.files import lines_of, whole_file
from serving.answers.jobs import Job

Record = dict[str, Any]


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
