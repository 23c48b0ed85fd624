"""Define the interface of a batching policy, and the data it may use.

A policy decides how many tokens each busy slot gets in a step, how many tokens and requests may newly enter
it, and for how many tokens a new request must find free pages. It may learn from the time of a step. Of the
queue it knows only the number of requests and the longest wait; pages and drafts it does not see.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch
from continuous_batching.request import Request
from kv_cache.pages import Index

ALL = 2**62  # no bound


class Busy(NamedTuple):
    """The busy slots that can run, oldest first."""

    todo: Index  # tokens that are not in the cache yet, never 0
    computed: Index  # tokens that are in the cache
    decodes: NDArray[np.bool_]  # whether the prompt and all tokens but the last are computed
    num_others: int = 0  # busy slots that cannot run now, as those in flight; only `room` is told of them


class Waiting(NamedTuple):
    """What a policy may know about the queue."""

    num_requests: int
    longest_s: float  # time since the arrival of the request that has waited longest


class Room(NamedTuple):
    """What new requests may bring into this step."""

    tokens: int
    requests: int
    # Each prompt must fit; otherwise the prompt of the last request may exceed the tokens and is chunked
    whole: bool = False
    chunk: int = ALL  # most tokens that one new request takes
    long_requests: int = ALL  # how many of the new requests may be long
    long_tokens: int = ALL  # most tokens that the long ones among them take from the short ones


NO_ROOM = Room(0, 0)


class Policy(Protocol):
    """A way of batching."""

    whole: bool = False  # the policy computes a prompt in one step, which the budget must allow

    def room(self, busy: Busy, budget: int, waiting: Waiting) -> Room:
        """Return how much new requests may bring into a step of at most `budget` tokens."""
        ...

    def reserve(self, request: Request) -> int:
        """Return for how many tokens there must be free and unpromised pages to admit a request."""
        ...

    def share(self, busy: Busy, budget: int) -> Index:
        """Return the tokens for each busy slot, at most its `todo`; not called if all slots decode."""
        ...

    def observe(self, batch: Batch, took_s: float) -> None:
        """Learn from the time that a step took."""
        return


def whole_prompts(todo: Index, budget: int) -> Index:
    """Grant whole prompts in their order, up to the first that does not fit."""
    granted: Index = np.where(np.cumsum(todo) <= budget, todo, 0)
    return granted


def in_order(todo: Index, budget: int) -> Index:
    """Grant to each slot what the budget leaves after those before it."""
    granted: Index = np.clip(budget - (np.cumsum(todo) - todo), 0, todo)
    return granted
