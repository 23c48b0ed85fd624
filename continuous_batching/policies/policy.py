"""What may a way of batching decide?"""

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
    computed: Index  # tokens that are
    decodes: NDArray[np.bool_]  # the prompt is computed, and all but the last token


class Waiting(NamedTuple):
    """What a policy may know of the queue."""

    num_requests: int
    longest_s: float  # how long the first arrival has waited


class Room(NamedTuple):
    """What newcomers may bring into this step."""

    tokens: int
    requests: int
    whole: bool = False  # each prompt must fit; otherwise the last one's may exceed the tokens and is chunked
    chunk: int = ALL  # one newcomer takes no more of the tokens
    long_requests: int = ALL  # that may be among them


NO_ROOM = Room(0, 0)


class Policy(Protocol):
    """A way of batching."""

    whole: bool = False  # it computes a prompt in one step, which the budget must allow

    def room(self, busy: Busy, budget: int, waiting: Waiting) -> Room:
        """How much newcomers may bring into a step of at most `budget` tokens."""
        ...

    def reserve(self, request: Request) -> int:
        """For how many tokens of a newcomer there must be pages, free and not promised, at its admission."""
        ...

    def share(self, busy: Busy, budget: int) -> Index:
        """Tokens for each busy slot, at most its `todo`; not asked where all decode."""
        ...

    def observe(self, batch: Batch, took_s: float) -> None:
        """Learn what a step cost."""
        return


def whole_prompts(todo: Index, budget: int) -> Index:
    """All of each, in their order, up to the first that does not fit."""
    granted: Index = np.where(np.cumsum(todo) <= budget, todo, 0)
    return granted


def in_order(todo: Index, budget: int) -> Index:
    """As much of each as the budget leaves after those before it."""
    granted: Index = np.clip(budget - (np.cumsum(todo) - todo), 0, todo)
    return granted
