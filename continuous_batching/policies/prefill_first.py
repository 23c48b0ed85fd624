"""Compute new prompts first and whole; the decodes stop while there are any.

This is the order of vLLM before it chunked prompts ("Efficient Memory Management for Large Language Model
Serving with PagedAttention", SOSP 2023), which fills the table fast and lets every running answer stall. It
deviates in two ways: a preempted request queues by its arrival and is computed as a prompt, where vLLM brings
swapped ones back before it looks at the queue; and no share of the pages is kept back as a watermark, because
pages are promised at admission.
"""

from __future__ import annotations

import numpy as np

from continuous_batching.policies.policy import NO_ROOM, Busy, Policy, Room, Waiting, whole_prompts
from continuous_batching.request import Request
from kv_cache.pages import Index


class PrefillFirst(Policy):
    """A step computes either prompts or decodes, never both."""

    whole: bool = True

    def room(self, busy: Busy, budget: int, waiting: Waiting) -> Room:
        """Return what the running prompts leave of the step; decodes do not count."""
        left = budget - int(busy.todo[~busy.decodes].sum())
        return Room(left, waiting.num_requests, whole=True) if left > 0 else NO_ROOM

    def reserve(self, request: Request) -> int:
        """Reserve the known tokens and the first token of the answer."""
        return len(request.tokens) + 1

    def share(self, busy: Busy, budget: int) -> Index:
        """Grant whole prompts up to the first that does not fit."""
        return whole_prompts(np.where(busy.decodes, 0, busy.todo), budget)
