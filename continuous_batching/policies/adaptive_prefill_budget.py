"""Size prefill chunks to keep the time between tokens below a target.

A model of the step's time, fitted to the steps so far, predicts the time of each possible chunk size.
"""

from __future__ import annotations

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.policies.policy import Busy
from continuous_batching.policies.prefill_budget import Chunks, Limit
from continuous_batching.step_time import StepTime

QUANTILE = 0.99  # quantile of the times between tokens that is kept below the target


class AdaptiveChunks(Chunks):
    """The largest number of prompt tokens that fits between two tokens of the running requests.

    The tokens of a step, decodes included, are a multiple of `tile_tokens`, because that is what a matrix
    unit computes. At least `min_tokens` are computed even if the target is missed, so that prompts make
    progress; and at most twice the largest number tried so far, so that little depends on a model that has
    seen little.
    """

    def __init__(self, target_itl_s: float, min_tokens: int, max_tokens: int, tile_tokens: int) -> None:
        self._target_itl_s = target_itl_s
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._tile_tokens = tile_tokens
        self._most_seen = 0
        self._num_plain = 0  # steps that computed no prompt tokens
        self.step_time = StepTime(QUANTILE)

    def limit(self, busy: Busy, left: int) -> Limit:
        """Choose the largest step whose predicted time is within the target."""
        decodes = busy.decodes
        num_decodes = int(np.count_nonzero(decodes))
        most = min(left, self._max_tokens)
        if not num_decodes:
            return Limit(most)  # no decode waits for a token
        most = min(most, max(self._min_tokens, 2 * self._most_seen))
        first = self._min_tokens + -(num_decodes + self._min_tokens) % self._tile_tokens
        sizes = np.arange(first, most + 1, self._tile_tokens)
        if not len(sizes):
            return Limit(min(most, self._min_tokens))
        prompts = busy.computed[~decodes]
        start = int(prompts[0]) if len(prompts) else 0
        context = np.full(len(sizes), float(busy.computed[decodes].sum() + start))
        times_s = self.step_time.predict(
            (num_decodes + sizes).astype(np.float64), context, sizes * (start + sizes / 2)
        )
        within = times_s <= self._target_itl_s
        num_fitting = len(sizes) if within.all() else int(np.argmin(within))
        return Limit(int(sizes[num_fitting - 1]) if num_fitting else self._min_tokens)

    def observe(self, batch: Batch, took_s: float) -> None:
        """Fit the model to a step; of steps without chunks, which are much alike, to one in eight.

        The shape of the step decides: a prompt of one token costs the same as a decode.
        """
        num_chunk_tokens = batch.num_tokens - batch.num_spans - batch.num_drafts
        if not num_chunk_tokens:
            self._num_plain += 1
            if self._num_plain % 8:
                return
        self._most_seen = max(self._most_seen, num_chunk_tokens)
        self.step_time.observe(batch, took_s)
