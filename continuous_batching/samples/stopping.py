"""Decide which rows end with the token that they get, and why.

A row ends at an end token of the model or a stop token of its request, at its longest length, or if it got no
token. Stop strings are found where text is made from tokens, outside this package.
"""

from __future__ import annotations

import numpy as np

from continuous_batching.batch import NONE_LEFT, SPOILT
from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index

FAILURES = {  # reasons that end a row which got no token, with their explanation
    "error": "the model's logits were not finite",
    "spoilt": "the logits were not finite behind the operator's logits processors",
    "blocked": "allowed_token_ids, bad_words and min_tokens together leave no token that could come next",
}


def failure(token: int) -> str:
    """Return the reason that ends a row, for a value below 0 that stands in the place of its token."""
    return {NONE_LEFT: "blocked", SPOILT: "spoilt"}.get(token, "error")


def complaint(reason: str, request: Request) -> str:
    """Explain why a request got no token, given the reason that ended its row."""
    constraint, processors = request.constraint, request.processors
    if processors is not None and reason != "error" and processors.error:
        return processors.error
    if processors is not None and reason == "spoilt":
        return f"the logits were not finite behind {processors.names}"
    if reason != "blocked" or constraint is None:
        return FAILURES[reason]
    if constraint.error:
        return f"the answer's grammar cannot be followed any further: {constraint.error}"
    return f"the answer's grammar, {FAILURES[reason]}"


class StopConditions:
    """Checks tokens against the model's end tokens and the requests' own stop tokens."""

    def __init__(self, slots: SlotPool, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._slots = slots
        self._stop_mask = np.zeros(vocab_size, dtype=np.bool_)
        self._stop_mask[list(eos_token_ids)] = True
        self._eos_token_ids = eos_token_ids

    def stop_tokens(self, params: SamplingParams) -> Index:
        """Return the tokens that end a request, each once."""
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos_token_ids))
        return np.array(sorted(stops), dtype=np.int64)

    def of(self, rows: Index, tokens: Index, positions: Index) -> dict[int, str]:
        """Return the indices of the tokens that end their row, with the reason; below 0 there is no token."""
        slots = self._slots
        failed = tokens < 0
        stopped = self._stop_mask[tokens] & ~slots.ignore_eos[rows]
        for index in slots.own_stops[rows].nonzero()[0].tolist():
            stopped[index] |= int(tokens[index]) in slots.requests[rows[index]].params.stop_token_ids
        over = failed | stopped | (positions + 1 >= slots.limit[rows])
        return {
            index: failure(int(tokens[index])) if failed[index] else "stop" if stopped[index] else "length"
            for index in over.nonzero()[0].tolist()
        }
