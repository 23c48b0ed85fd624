"""Start a full batch together and run it to its longest request; no request joins it.

This is the batching of FasterTransformer and of the static rows in the sources' tables, kept for comparison.
It deviates for the better: no padding is computed, and a finished request's pages are free at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from continuous_batching.policies.policy import ALL, NO_ROOM, Busy, Policy, Room, Waiting, in_order
from continuous_batching.request import Request
from kv_cache.pages import Index


@dataclass(frozen=True, slots=True)
class Static(Policy):
    """Starts when `batch_size` requests wait, or when the first of them has waited `max_wait_s`."""

    batch_size: int
    max_wait_s: float

    def room(self, busy: Busy, budget: int, waiting: Waiting) -> Room:
        """Admit a whole batch into an empty table, and nothing otherwise."""
        ready = waiting.num_requests >= self.batch_size or waiting.longest_s >= self.max_wait_s
        if len(busy.todo) or not ready:
            return NO_ROOM
        return Room(ALL, self.batch_size)  # prompts beyond the budget are chunked, before the first decode

    def reserve(self, request: Request) -> int:
        """Reserve the whole prompt and the longest answer, because a static batch is never preempted."""
        return request.num_prompt_tokens + request.params.max_tokens - 1

    def share(self, busy: Busy, budget: int) -> Index:
        """Grant prompts first, oldest first; decodes start when all prompts are computed."""
        order = np.argsort(busy.decodes, kind="stable")
        granted = np.empty_like(busy.todo)
        granted[order] = in_order(busy.todo[order], budget)
        return granted
