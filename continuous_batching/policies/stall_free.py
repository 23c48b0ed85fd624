"""Decodes first, then running chunks, then new prompts, against one token budget.

After "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024). It deviates
in two ways: pages are promised for what a request knows (its prompt), not taken up front, so a chunk's
pages are taken when it is computed; and partly computed prompts may be preempted like any slot.
"""

from __future__ import annotations

import numpy as np

from continuous_batching.policies.policy import NO_ROOM, Room, Waiting
from continuous_batching.request import Request
from kv_cache.pages import Index


class StallFree:
    """No running request waits for a new one's prompt."""

    def room(self, todo: Index, budget: int, waiting: Waiting) -> Room:
        """What the busy slots leave of the budget."""
        left = budget - int(todo.sum())
        return Room(left, waiting.num_requests) if left > 0 else NO_ROOM

    def reserve(self, request: Request) -> int:
        """Its known tokens and the first it will produce."""
        return len(request.tokens) + 1

    def share(self, todo: Index, budget: int) -> Index:
        """One token to each decode, the rest to the chunks, oldest first."""
        decodes = todo == 1
        chunks = np.where(decodes, 0, todo)
        before = np.cumsum(chunks) - chunks
        granted: Index = decodes + np.clip(budget - int(decodes.sum()) - before, 0, chunks)
        return granted
