"""Read the requests of a trace for sending to a server."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from borders.abbreviate import abbreviate
from borders.file_bounds import check_rereadable, lines_of

PROMPTS = ("prompt_token_ids", "prompt", "messages")
OURS = {
    "id",
    "arrival_s",
    "tenant",
    "max_completion_tokens",
    *PROMPTS,
}  # fields that are sent in another form, or not at all
MANY = ("n", "best_of", "beam_width")  # fields that ask for several answers, which are not counted here
STREAM = {"include_usage": True, "continuous_usage_stats": True}
MOST_ARRIVAL_S = 1e9  # seconds, some thirty years
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it is due, in seconds from the start, and what is sent.

    `max_tokens` None stands for the server's own limit. `fields` are those of the line that servers know too;
    `content` is the prompt, whose number of tokens is known as `num_prompt` only where it holds ids.
    """

    id: str
    due_s: float
    max_tokens: int | None
    chat: bool
    content: Any
    num_prompt: int | None
    fields: Mapping[str, Any]

    def body(self, model: str, seed: int, extra: Mapping[str, Any]) -> bytes:
        """Return the JSON of its POST; `extra` fields win, and a null among them removes a field."""
        said = {
            "model": model,
            "messages" if self.chat else "prompt": self.content,
            self._limit: self.max_tokens,
            "seed": seed,
            "stream": True,
            "stream_options": STREAM,
            **self.fields,
            **extra,
        }
        return msgspec.json.encode({name: value for name, value in said.items() if value is not None})

    def limited(self, extra: Mapping[str, Any]) -> TraceRequest:
        """Return the request with the `max_tokens` that is sent beside these `extra` fields."""
        return replace(self, max_tokens=extra.get(self._limit, self.max_tokens))

    @property
    def _limit(self) -> str:
        return "max_completion_tokens" if self.chat else "max_tokens"


def read(path: Path, *, skip_bad: bool) -> tuple[list[TraceRequest], list[str]]:
    """Return the requests of a JSONL file in order of arrival, and the lines that were skipped.

    Raises ValueError for a line that is no request, unless bad lines are skipped, and where none is left.
    """
    asks: dict[str, TraceRequest] = {}
    skipped = []
    check_rereadable(path)  # the file is also read for its digest
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            ask = _ask(line)
            if ask.id in asks:
                raise ValueError(f"the id {ask.id} is taken by an earlier line")
        except (ValueError, RecursionError) as error:
            reason = f"{path}: line {number}: {_reason(error)}"
            if not skip_bad:
                raise ValueError(f"{reason}; --skip-bad leaves such lines out") from error
            skipped.append(reason)
        else:
            asks[ask.id] = ask
    if not asks:
        raise ValueError(f"{path} holds no request that can be read")
    return sorted(asks.values(), key=lambda ask: ask.due_s), skipped


def digest(path: Path) -> str:
    """Return the sha256 of a file, by which two runs can be seen to have served the same."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()


def clients(asks: Sequence[TraceRequest]) -> list[list[TraceRequest]] | None:
    """Return the requests of each client of a closed loop, in order; None where the trace is not one.

    A closed loop has no times, and its ids are `CLIENT/NUMBER`.
    """
    of_client: dict[str, list[TraceRequest]] = {}
    for ask in asks:
        client, slash, number = ask.id.rpartition("/")
        if ask.due_s or not slash or not number.isdecimal():
            return None
        of_client.setdefault(client, []).append(ask)
    for each in of_client.values():
        each.sort(key=lambda ask: int(ask.id.rpartition("/")[2]))
    return list(of_client.values())


def at_rate(asks: Sequence[TraceRequest], rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Return the same requests, arriving by a Poisson process; at rate inf, all at once."""
    gaps_s = np.zeros(len(asks))
    if rate_per_s < math.inf:
        gaps_s = np.random.default_rng(seed).exponential(1 / rate_per_s, len(asks))
    times_s = np.cumsum(gaps_s) - gaps_s[0]
    return [replace(ask, due_s=float(time_s)) for ask, time_s in zip(asks, times_s)]


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    return "the JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _ask(line: bytes) -> TraceRequest:
    """Parse a request; raises ValueError, in one line, for anything else."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("a request must be a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None}
    if not isinstance(fields.get("id"), str) or not fields["id"]:
        raise ValueError("id is missing; it must be a string of at least one character")
    forms = [name for name in PROMPTS if name in fields]
    if len(forms) != 1 or not fields[forms[0]]:
        raise ValueError(f"exactly one of {', '.join(PROMPTS)} must be given, and not be empty")
    due_s = fields.get("arrival_s", 0.0)
    if isinstance(due_s, bool) or not isinstance(due_s, (int, float)) or not 0 <= due_s <= MOST_ARRIVAL_S:
        raise ValueError(
            f"arrival_s is {abbreviate(due_s)}; it must be a number from 0 to {MOST_ARRIVAL_S:g}"
        )
    max_tokens = fields.pop("max_tokens", fields.get("max_completion_tokens", 16))
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or not 1 <= max_tokens <= MOST_TOKENS:
        raise ValueError(
            f"max_tokens is {abbreviate(max_tokens)}; it must be an integer from 1 to {MOST_TOKENS}"
        )
    for name in MANY:
        if fields.get(name, 1) not in (0, 1):
            raise ValueError(
                f"{name} is {abbreviate(fields[name])}; the benchmark counts one answer to a request"
            )
    content, num_prompt = fields[forms[0]], None
    if forms[0] == "prompt_token_ids":
        if not (isinstance(content, list) and all(type(each) is int for each in content)):
            raise ValueError("prompt_token_ids must be a list of integers")
        num_prompt = len(content)
    sent = {name: value for name, value in fields.items() if name not in OURS}
    if "tenant" in fields:
        sent["user"] = fields["tenant"]
    return TraceRequest(
        fields["id"], float(due_s), max_tokens, forms[0] == "messages", content, num_prompt, sent
    )
