"""Choose the number of drafts by the formula of the sources' chapter on speculation.

The speedup of k drafts is taken to be (1 + a + ... + a^k) / (1 + 0.1 k), a being the mean of the latest
shares of drafts that were accepted. The formula knows neither the number of rows nor the time of a step.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.speculation.lengths import Offers, Verdicts
from kv_cache.pages import Index

_DRAFT_COST = 0.1  # cost of a draft, as a share of a step of the target model
_LEAST_RATE = 0.001  # acceptance rate below which the base length is used


class Source:
    """The same number of drafts for every row, from `least` to `most`; `base` before anything is known.

    `window` is the number of shares that are remembered.
    """

    asks = is_hopeful = True

    def __init__(self, base: int, least: int, most: int, window: int) -> None:
        assert 0 <= least <= base <= most, f"{base} drafts are not from {least} to {most}"
        assert window >= 1, "a window without a share"
        self._base, self._least, self._most = base, least, most
        self._shares = deque[float](maxlen=window)

    def choose(self, offers: Offers) -> Index:
        """Return how many drafts of each row are verified."""
        return np.minimum(offers.counts, self.best())

    def best(self) -> int:
        """Return the length with the largest speedup, the shortest of equal ones."""
        rate = sum(self._shares) / len(self._shares) if self._shares else 0.0
        if rate < _LEAST_RATE:
            return self._base
        lengths = range(self._least, self._most + 1)
        return max(lengths, key=lambda k: sum(rate**i for i in range(k + 1)) / (1 + _DRAFT_COST * k))

    def learn(self, verdicts: Verdicts) -> None:
        """Remember the shares of drafts that were right."""
        self._shares.extend((verdicts.right / verdicts.guessed).tolist())

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """Learn nothing, because no time enters the formula."""
