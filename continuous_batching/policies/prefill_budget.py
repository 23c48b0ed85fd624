"""How many tokens of prompts does a step compute beside its decodes?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.policies.policy import ALL, Busy
from kv_cache.pages import Index


class Limit(NamedTuple):
    """The most tokens of prompts in a step."""

    total: int
    each: Index | int = ALL  # of each busy slot
    newcomer: int = ALL  # of each that comes in


class Chunks(Protocol):
    """A control of the chunks' size."""

    def limit(self, busy: Busy, left: int) -> Limit:
        """For a step whose decodes leave `left` tokens of its budget."""
        ...

    def observe(self, batch: Batch, took_s: float) -> None:
        """Learn what a step cost."""
        return


@dataclass(frozen=True, slots=True)
class FixedChunks(Chunks):
    """Chunks of at most `chunk_tokens`, as many as fit into the budget."""

    chunk_tokens: int

    def limit(self, busy: Busy, left: int) -> Limit:
        """The same limit in every step."""
        return Limit(left, self.chunk_tokens, self.chunk_tokens)


class StagedChunks(Chunks):
    """A prompt's chunks get smaller as it gets on, from `max_tokens` to `min_tokens` in equal stages.

    Sarathi's dynamic schedule, so that a long prompt takes less and less from the others. A stage is
    `staged_tokens / num_stages` of the prompt; what is beyond the last stage stays there. It deviates from
    Sarathi in that the decodes of a step do not count against a chunk's size, only against the budget.
    """

    def __init__(
        self, min_tokens: int, max_tokens: int, num_stages: int, staged_tokens: int, tile_tokens: int
    ) -> None:
        sizes = np.linspace(min_tokens, max_tokens, num_stages).astype(np.int64)[::-1]
        tile = min(tile_tokens, min_tokens)
        self.sizes: Index = (np.round(sizes / tile) * tile).astype(np.int64)
        self._stage_tokens = -(-staged_tokens // num_stages)

    def limit(self, busy: Busy, left: int) -> Limit:
        """By how much of each prompt is computed."""
        stages = np.minimum(busy.computed // self._stage_tokens, len(self.sizes) - 1)
        return Limit(left, self.sizes[stages], int(self.sizes[0]))
