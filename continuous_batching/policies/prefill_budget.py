"""Bound the prompt tokens that a step computes beside its decodes.

The chunk size is fixed, or shrinks as a prompt progresses; `adaptive_prefill_budget` chooses it by a target
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.policies.policy import ALL, Busy
from kv_cache.pages import Index


class Limit(NamedTuple):
    """The largest number of prompt tokens in a step."""

    total: int
    each: Index | int = ALL  # bound for each busy slot
    newcomer: int = ALL  # bound for each new request


class Chunks(Protocol):
    """A control of the chunk size."""

    def limit(self, busy: Busy, left: int) -> Limit:
        """Return the limit for a step whose decodes leave `left` tokens of its budget."""
        ...

    def observe(self, batch: Batch, took_s: float) -> None:
        """Learn from the time that a step took."""
        return


@dataclass(frozen=True, slots=True)
class FixedChunks(Chunks):
    """Chunks of at most `chunk_tokens` tokens, as many as fit into the budget."""

    chunk_tokens: int

    def limit(self, busy: Busy, left: int) -> Limit:
        """Return the same limit in every step."""
        return Limit(left, self.chunk_tokens, self.chunk_tokens)


class StagedChunks(Chunks):
    """Chunks that shrink as a prompt progresses, from `max_tokens` to `min_tokens` in equal stages.

    This is Sarathi's dynamic schedule, by which a long prompt takes less and less from the other requests. A
    stage covers `staged_tokens / num_stages` tokens of the prompt; the rest of a longer prompt stays in the
    last stage. It deviates from Sarathi in that the decodes of a step do not count against the size of a
    chunk, only against the budget.
    """

    def __init__(
        self, min_tokens: int, max_tokens: int, num_stages: int, staged_tokens: int, tile_tokens: int
    ) -> None:
        sizes = np.linspace(min_tokens, max_tokens, num_stages).astype(np.int64)[::-1]
        tile = min(tile_tokens, min_tokens)
        self.sizes: Index = (np.round(sizes / tile) * tile).astype(np.int64)
        self._stage_tokens = -(-staged_tokens // num_stages)

    def limit(self, busy: Busy, left: int) -> Limit:
        """Choose the size of each chunk by how many tokens of its prompt are computed."""
        stages = np.minimum(busy.computed // self._stage_tokens, len(self.sizes) - 1)
        return Limit(left, self.sizes[stages], int(self.sizes[0]))
