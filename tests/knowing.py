"""A proposer for tests, which knows what each request will say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.proposer import Guesses
from kv_cache.pages import Index


class Knowing:
    """Guesses some of a request's next tokens, of which a `share` is right; `story` has all its tokens."""

    def __init__(
        self,
        slots: SlotPool,
        story: Callable[[Request], Sequence[int]],
        vocabulary: int,
        share: float = 2 / 3,
        seed: int = 2,
    ) -> None:
        self._slots, self._story, self._vocabulary, self._share = slots, story, vocabulary, share
        self._random = np.random.default_rng(seed)

    def guess(self, rows: Index, most: int) -> Guesses:
        tokens, counts = np.zeros((len(rows), most), dtype=np.int32), np.zeros(len(rows), dtype=np.int64)
        for at, row in enumerate(rows.tolist()):
            first, count = int(self._slots.num_tokens[row]), int(self._random.integers(0, most + 1))
            story = self._story(self._slots.requests[row])[first : first + count]
            tokens[at, : len(story)] = story
            counts[at] = len(story)
        wrong = self._random.random(tokens.shape) >= self._share
        return Guesses(np.where(wrong, (tokens + 1) % self._vocabulary, tokens).astype(np.int32), counts)
