"""Schedule decodes first, then running chunks, then new prompts, against one token budget (Sarathi).

After "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024). It deviates in
three ways: pages are promised for what a request knows (its prompt), not taken up front, so a chunk's pages
are taken when it is computed; partly computed prompts may be preempted like any slot; and short prompts may
overtake long ones (`long_prompts`), where Sarathi's go strictly by arrival.
"""

from __future__ import annotations

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.policies.long_prompts import LongPrompts
from continuous_batching.policies.policy import ALL, NO_ROOM, Busy, Policy, Room, Waiting, in_order
from continuous_batching.policies.prefill_budget import Chunks, Limit
from continuous_batching.request import Request
from kv_cache.pages import Index


class StallFree(Policy):
    """No running request waits for the prompt of a new one.

    `chunks` bounds the prompt tokens of a step; with None, only the budget does.
    """

    def __init__(self, chunks: Chunks | None = None, long_prompts: LongPrompts | None = None) -> None:
        self._chunks = chunks
        self._long_prompts = long_prompts

    def room(self, busy: Busy, budget: int, waiting: Waiting) -> Room:
        """Return the prompt tokens that the busy slots leave of the step."""
        limit = self._limit(busy, budget)
        wanted = np.where(busy.decodes, 0, np.minimum(busy.todo, limit.each))
        if self._long_prompts is None:
            left, longs = limit.total - int(wanted.sum()), ALL
        else:
            left, longs = self._long_prompts.left(busy, wanted, limit.total)
        if left <= 0:
            return NO_ROOM
        return Room(left, waiting.num_requests, chunk=limit.newcomer, long_requests=longs)

    def reserve(self, request: Request) -> int:
        """Reserve the known tokens and the first token of the answer."""
        return len(request.tokens) + 1

    def share(self, busy: Busy, budget: int) -> Index:
        """Grant one token to each decode and the rest to the chunks, oldest first."""
        limit, decodes = self._limit(busy, budget), busy.decodes
        wanted = np.where(decodes, 0, np.minimum(busy.todo, limit.each))
        share = in_order if self._long_prompts is None else self._long_prompts.sharing(busy)
        granted: Index = decodes + share(wanted, limit.total)
        return granted

    def observe(self, batch: Batch, took_s: float) -> None:
        """Pass the step on to the control of the chunk size."""
        if self._chunks is not None:
            self._chunks.observe(batch, took_s)

    def _limit(self, busy: Busy, budget: int) -> Limit:
        return self._limit_of(busy, budget - int(np.count_nonzero(busy.decodes)))

    def _limit_of(self, busy: Busy, left: int) -> Limit:
        return Limit(left) if self._chunks is None else self._chunks.limit(busy, left)
