"""Read the lines of a batch's file, and write the lines of its answers.

A line is a request: `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`. Its body is what a
client would send to that path, and is passed on exactly as it was written.
"""

from __future__ import annotations

import itertools
import re
import uuid
from typing import Any

import msgspec

from borders.field_table import MOST_SAMPLES
from borders.field_types import LONGEST_NAME
from borders.refusal import abbreviate_json

MOST_LINES = 50_000  # OpenAI's limit for a file
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|[\r\n]|\Z)")


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line that could be parsed."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    """The name of a line, whatever else it holds."""

    custom_id: str


class WrongLine(Exception):
    """A line cannot be run; `custom_id` is None if the line has no readable one."""

    def __init__(self, reason: str, custom_id: str | None = None) -> None:
        super().__init__(reason)
        self.custom_id = custom_id


class _Body(msgspec.Struct):
    """Fields of a body that would mean something else in a batch."""

    stream: Any = None
    priority: Any = None


class _Samples(msgspec.Struct):
    """Fields of a body that say how many slots its request asks for."""

    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class _Asked(msgspec.Struct):
    """The body of a line, whatever else it holds."""

    body: _Samples


def split_lines(content: bytes) -> list[tuple[int, bytes]]:
    """Return the numbered lines of a file with their line ends.

    A blank line is joined to the line before it, or to the first line if there is none before. Raises
    ValueError where there are no lines, or too many; blank ones are bounded, too, by ten times as many.
    """
    begins: list[tuple[int, int]] = []  # the number of each line and where it begins
    for number, line in enumerate(_LINE.finditer(content), 1):
        if line[0].strip():
            begins.append((number, line.start()))
        if len(begins) > MOST_LINES or number > 10 * MOST_LINES:
            raise ValueError(f"holds more than {MOST_LINES:,} lines")
    if not begins:
        raise ValueError("holds no line")
    bounds = [0, *(at for _, at in begins[1:]), len(content)]
    parts = (content[begin:end] for begin, end in itertools.pairwise(bounds))
    return [(number, part) for (number, _), part in zip(begins, parts)]


def name_of(text: bytes) -> str | None:
    """Return the custom_id of a line that may be wrong otherwise, or None if it has no readable one."""
    try:
        name = msgspec.json.decode(text, type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return name if 0 < len(name) <= LONGEST_NAME else None


def read_line(text: bytes, endpoint: str, most_bytes: int) -> BatchLine:
    """Return the request of a line; raises WrongLine."""
    if len(text) > most_bytes:
        problem = f"it is longer than {most_bytes} bytes (server.max_body_mib); shorten it"
        raise WrongLine(problem, name_of(text))
    try:
        line = msgspec.json.decode(text, type=BatchLine)
        name = line.custom_id
        body = msgspec.json.decode(line.body, type=_Body)
    except msgspec.ValidationError as error:
        raise WrongLine(f"it is no request of a batch: {error}", name_of(text)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WrongLine(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise WrongLine("its JSON is nested too deeply") from error
    if not 0 < len(name) <= LONGEST_NAME:
        raise WrongLine(f"custom_id has {len(name)} characters; it must have 1 to {LONGEST_NAME}")
    if line.method != "POST":
        raise WrongLine(f'method is {abbreviate_json(line.method)}; it must be "POST"', name)
    if line.url != endpoint:
        raise WrongLine(
            f"url is {abbreviate_json(line.url)}; it must be the batch's endpoint, {endpoint}", name
        )
    if body.stream not in (None, False):
        raise WrongLine("stream is set in body; a batch has no streams: leave it out", name)
    if body.priority is not None:
        raise WrongLine("priority is set in body; a batch goes behind all other requests: leave it out", name)
    return line


def num_samples(text: bytes) -> int:
    """Return how many slots the request of a line asks for; 1 for one that the server will refuse."""
    try:
        body = msgspec.json.decode(text, type=_Asked).body
        num_prompts = max(_num_prompts(bytes(body.prompt)), _num_prompts(bytes(body.input)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 1
    of_each = max(body.n or 1, body.best_of or 1, body.beam_width or 1)
    return num_prompts * of_each if of_each <= MOST_SAMPLES else 1


def _num_prompts(given: bytes) -> int:
    """Return how many prompts a field holds: a list of texts, or of lists of tokens, holds several."""
    if given[:1] != b"[" or given[1:].lstrip()[:1] not in (b'"', b"["):
        return 1
    return len(msgspec.json.decode(given, type=list[msgspec.Raw]))


def answered(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of an answer, whose body is JSON."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _record(custom_id, response, None)


def not_run(custom_id: str | None, code: str, message: str) -> bytes:
    """Return the answer line of a request that was not run."""
    return _record(custom_id, None, {"code": code, "message": message})


def _record(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    name = f"batch_req_{uuid.uuid4().hex}"
    record = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(record) + b"\n"


class LineCheck:
    """Checks the lines of one batch in order: each must be runnable and have a custom_id of its own."""

    def __init__(self, endpoint: str, most_bytes: int) -> None:
        self._endpoint = endpoint
        self._most_bytes = most_bytes
        self._number_of: dict[str, int] = {}

    def __call__(self, number: int, text: bytes) -> bytes | None:
        """Return the answer to a line that cannot be run, or None for one that can."""
        try:
            line = read_line(text, self._endpoint, self._most_bytes)
            first = self._number_of.setdefault(line.custom_id, number)
            if first != number:
                problem = (
                    f"custom_id {abbreviate_json(line.custom_id)} is that of line {first}; each needs its own"
                )
                raise WrongLine(problem, line.custom_id)
        except WrongLine as bad:
            return refused(number, bad)
        return None


def refused(number: int, bad: WrongLine) -> bytes:
    """Return the answer to a line that cannot be run."""
    return not_run(bad.custom_id, "invalid_request", f"line {number}: {bad}")


def expired(_: int, text: bytes) -> bytes:
    """Return the answer to a line that did not begin in time."""
    return not_run(name_of(text), "batch_expired", "the batch's 24 hours were over before this request began")
