"""A full batch starts together and runs to its longest request; nobody joins.

The batching of FasterTransformer and of the static rows in the sources' tables, as something to compare
with. It deviates for the better: no padding is computed, and a finished request's pages are free at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from continuous_batching.policies.policy import ALL, NO_ROOM, Busy, Policy, Room, Waiting, in_order
from continuous_batching.request import Request
from kv_cache.pages import Index


@dataclass(frozen=True, slots=True)
class Static(Policy):
    """Starts when `batch_size` requests wait, or when the first has waited `max_wait_s`."""

    batch_size: int
    max_wait_s: float

    def room(self, busy: Busy, budget: int, waiting: Waiting) -> Room:
        """A whole batch into an empty table, else nothing."""
        ready = waiting.num_requests >= self.batch_size or waiting.longest_s >= self.max_wait_s
        if len(busy.todo) or not ready:
            return NO_ROOM
        return Room(ALL, self.batch_size)  # prompts beyond the budget are chunked before the first decode

    def reserve(self, request: Request) -> int:
        """All that it may become: a static batch is never preempted."""
        return request.num_prompt_tokens + request.params.max_tokens - 1

    def share(self, busy: Busy, budget: int) -> Index:
        """Prompts first, oldest first; decodes start when all prompts are computed."""
        order = np.argsort(busy.decodes, kind="stable")
        granted = np.empty_like(busy.todo)
        granted[order] = in_order(busy.todo[order], budget)
        return granted
