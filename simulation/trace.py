"""Read the requests of a trace file one at a time.

The lines are those that `generate` reads. Sampling parameters are ignored, except for `max_tokens`, which is
the length of the answer. A prompt is given as token ids, or by `num_prompt_tokens` alone, which stands for
tokens that no other prompt has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from borders.field_table import FIELDS, default
from borders.numbers import integers
from continuous_batching.request import Request, SamplingParams, TokenIds

Parse = Callable[[dict[str, Any]], Request]
Tell = Callable[[str], None]
MOST_PROMPT_TOKENS = 2**20  # the longest contexts are of this size


class _Line(msgspec.Struct, frozen=True):
    id: str | None = None
    max_tokens: int | None = None
    arrival_s: float | None = None
    prompt_token_ids: list[int] | None = None
    num_prompt_tokens: int | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None


class BadLine(ValueError):
    """A line that is no request; its text starts with its number."""


def read(
    lines: Iterable[bytes],
    vocab_size: int,
    parse: Parse | None = None,
    bad: Tell | None = None,
) -> Iterator[Request]:
    """Yield the requests in the order of the file, without blank lines.

    `parse` makes a request of a line whose prompt is text, or which asks for more than one answer. Raises
    BadLine for a line that is no request, unless `bad` takes its reason instead.
    """
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(decoder.decode(line), line, number, vocab_size, parse)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            deep = isinstance(error, RecursionError)
            reason = f"line {number}: {'the JSON is nested too deeply' if deep else error}"
            if bad is None:
                raise BadLine(reason) from error
            bad(reason)
        else:
            yield request


def full_length(request: Request) -> Request:
    """Let a request's answer end at `max_tokens` and nowhere before."""
    for each in (request, *request.followers):
        each.params = _params(each.params.max_tokens)
    return request


def _request(line: _Line, raw: bytes, number: int, vocab_size: int, parse: Parse | None) -> Request:
    if line.beam_width:
        raise ValueError(f"beam_width is {line.beam_width}: a search is not simulated; leave it out")
    for name in ("arrival_s", "timeout_s", "priority"):
        if (value := getattr(line, name)) is not None:
            FIELDS[name].kind.check(name, value)
    several = max(line.n or 1, line.best_of or 1) > 1
    if line.prompt_token_ids is not None and not several:
        prompt = _given(line.prompt_token_ids, vocab_size)
    elif line.num_prompt_tokens is not None and not several:
        prompt = _unique(number, line.num_prompt_tokens, vocab_size)
    elif parse is not None:
        return full_length(parse(msgspec.json.decode(raw)))
    else:
        raise ValueError("give prompt_token_ids or num_prompt_tokens, and one answer: there is no tokenizer")
    if line.id is None:
        raise ValueError("id is missing; it must be a string of at least one character")
    return Request(
        line.id,
        prompt,
        _params(default("max_tokens") if line.max_tokens is None else line.max_tokens),
        tenant=line.tenant or "",
        cache_salt=line.cache_salt or "",
        priority=default("priority") if line.priority is None else line.priority,
        arrival_s=default("arrival_s") if line.arrival_s is None else line.arrival_s,
        timeout_s=line.timeout_s,
    )


def _given(tokens: list[int], vocab_size: int) -> TokenIds:
    try:
        return np.array(tokens, dtype=np.int32)
    except OverflowError as error:
        most = max(tokens, key=abs)
        raise ValueError(f"prompt_token_ids holds {most}; ids go from 0 to {vocab_size - 1}") from error


def _unique(number: int, count: int, vocab_size: int) -> TokenIds:
    lengths = integers(1, MOST_PROMPT_TOKENS)
    if count not in lengths:
        raise ValueError(f"num_prompt_tokens is {count}; it must be {lengths}")
    return np.random.default_rng(number).integers(0, vocab_size, count, dtype=np.int32)


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
