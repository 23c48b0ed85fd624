"""Which number of drafts does the chapter's formula name?

The speedup of k drafts is taken to be (1 + a + ... + a^k) / (1 + 0.1 k), a being the mean of the last shares
of drafts that were right. It knows neither how many rows there are, nor how long a step takes.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.speculation.lengths import Offers, Verdicts
from kv_cache.pages import Index

_DRAFT_COST = 0.1  # of a step of the target model
_LEAST_RATE = 0.001  # below it the base length is taken


class Source:
    """The same number for every row, from `least` to `most`; `base` before anything is known.

    `window` is the number of shares that are remembered.
    """

    asks = is_hopeful = True

    def __init__(self, base: int, least: int, most: int, window: int) -> None:
        assert 0 <= least <= base <= most, f"{base} drafts are not from {least} to {most}"
        assert window >= 1, "a window without a share"
        self._base, self._least, self._most = base, least, most
        self._shares = deque[float](maxlen=window)

    def choose(self, offers: Offers) -> Index:
        """How many guesses of each row become drafts."""
        return np.minimum(offers.counts, self.best())

    def best(self) -> int:
        """The length of the largest speedup, the shortest of equal ones."""
        rate = sum(self._shares) / len(self._shares) if self._shares else 0.0
        if rate < _LEAST_RATE:
            return self._base
        lengths = range(self._least, self._most + 1)
        return max(lengths, key=lambda k: sum(rate**i for i in range(k + 1)) / (1 + _DRAFT_COST * k))

    def learn(self, verdicts: Verdicts) -> None:
        """Guesses turned out right or wrong."""
        self._shares.extend((verdicts.right / verdicts.guessed).tolist())

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """Nothing is learnt: no time enters the formula."""
