"""Which requests does a file hold, read one at a time?

The lines are those that `generate` reads. How an answer is drawn is no matter here: it has `max_tokens`
tokens. A prompt is token ids, or `num_prompt_tokens` alone, which stands for tokens that nobody else has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from continuous_batching.request import Request, SamplingParams, TokenIds

Parse = Callable[[dict[str, Any]], Request]
Tell = Callable[[str], None]


class _Line(msgspec.Struct, frozen=True):
    id: str | None = None
    max_tokens: int = 16
    arrival_s: float = 0.0
    prompt_token_ids: list[int] | None = None
    num_prompt_tokens: int | None = None
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int = 0


class BadLine(ValueError):
    """A line that is no request; its text starts with its number."""


def read(
    lines: Iterable[bytes],
    vocab_size: int,
    parse: Parse | None = None,
    bad: Tell | None = None,
) -> Iterator[Request]:
    """The requests, in the order of the file; blank lines are passed over.

    `parse` makes a request of a line whose prompt is text, or which asks for more than one answer. Raises
    BadLine for a line that is no request, unless `bad` is told instead.
    """
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(decoder.decode(line), line, number, vocab_size, parse)
        except (ValueError, msgspec.MsgspecError) as error:
            reason = f"line {number}: {error}"
            if bad is None:
                raise BadLine(reason) from error
            bad(reason)
        else:
            yield request


def full_length(request: Request) -> Request:
    """The request, whose answer ends at `max_tokens` and nowhere before."""
    for each in (request, *request.followers):
        each.params = _params(each.params.max_tokens)
    return request


def _request(line: _Line, raw: bytes, number: int, vocab_size: int, parse: Parse | None) -> Request:
    if line.beam_width:
        raise ValueError(f"beam_width is {line.beam_width}: a search is not simulated; leave it out")
    several = max(line.n or 1, line.best_of or 1) > 1
    if line.prompt_token_ids is not None and not several:
        prompt = np.array(line.prompt_token_ids, dtype=np.int32)
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
        _params(line.max_tokens),
        tenant=line.tenant,
        cache_salt=line.cache_salt,
        priority=line.priority,
        arrival_s=line.arrival_s,
        timeout_s=line.timeout_s,
    )


def _unique(number: int, count: int, vocab_size: int) -> TokenIds:
    if count < 1:
        raise ValueError(f"num_prompt_tokens is {count}; it must be at least 1")
    return np.random.default_rng(number).integers(0, vocab_size, count, dtype=np.int32)


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
