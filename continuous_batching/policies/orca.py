"""Batch by iteration, first come first served, with whole prompts and reserved answers (Orca).

After Algorithm 1 of "Orca: A Distributed Serving System for Transformer-Based Generative Models" (OSDI 2022).
Its `n_slots` are the cache's tokens, its `max_bs` the slot table, its `n_workers` the scheduler's `depth`:
with 1, every admitted request is in every batch. It deviates in two ways. A request reserves its own prompt
and answer, where the paper's `max_tokens` is the same for all. And a step has a budget of tokens: a prompt
that does not fit beside the decodes and the prompts before it is computed in a later step, still as a whole.
"""

from __future__ import annotations

import numpy as np

from continuous_batching.policies.policy import NO_ROOM, Busy, Policy, Room, Waiting, whole_prompts
from continuous_batching.request import Request
from kv_cache.pages import Index


class Orca(Policy):
    """Prompts join the running decodes, which wait for them."""

    whole: bool = True

    def room(self, busy: Busy, budget: int, waiting: Waiting) -> Room:
        """Return the tokens that the busy slots leave of the step."""
        left = budget - int(busy.todo.sum())
        return Room(left, waiting.num_requests, whole=True) if left > 0 else NO_ROOM

    def reserve(self, request: Request) -> int:
        """Reserve the whole prompt and the longest answer.

        So no admitted request is preempted for pages.
        """
        return request.num_prompt_tokens + request.params.max_tokens - 1

    def share(self, busy: Busy, budget: int) -> Index:
        """Grant the decodes, and whole prompts up to the first that does not fit."""
        decodes = busy.decodes
        prompts = np.where(decodes, 0, busy.todo)
        granted: Index = decodes + whole_prompts(prompts, budget - int(np.count_nonzero(decodes)))
        return granted
