"""What may a way of batching decide?"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from continuous_batching.request import Request
from kv_cache.pages import Index


class Waiting(NamedTuple):
    """What a policy may know of the queue."""

    num_requests: int
    longest_s: float  # how long the first arrival has waited


class Room(NamedTuple):
    """What newcomers may bring into this step; the last one's prompt may exceed it and is chunked."""

    tokens: int
    requests: int


NO_ROOM = Room(0, 0)


class Policy(Protocol):
    """A way of batching. `todo` is the missing tokens of each busy slot, oldest first, never 0."""

    def room(self, todo: Index, budget: int, waiting: Waiting) -> Room:
        """How much newcomers may bring into a step of at most `budget` tokens."""
        ...

    def reserve(self, request: Request) -> int:
        """Tokens of a newcomer that must have pages, free or promised to nobody, at admission."""
        ...

    def share(self, todo: Index, budget: int) -> Index:
        """Tokens for each busy slot, at most its `todo`; asked only when not all fits the budget."""
        ...
