"""Size prefill chunks to keep the time between tokens below a target.

The step's time (`continuous_batching.step_time`) is predicted for each possible chunk size, and multiplied by
a margin: the quantile of measured over predicted times of the last steps with chunks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch
from continuous_batching.policies.policy import Busy
from continuous_batching.policies.prefill_budget import Chunks, Limit
from continuous_batching.step_time import StepTime

QUANTILE = 0.99  # quantile of the times between tokens that is kept below the target
_WINDOW = 256  # steps whose errors are remembered
_EARLY_MARGIN = 1.5  # margin before there are enough of them
_ENOUGH = 32


class AdaptiveChunks(Chunks):
    """The largest number of prompt tokens that fits between two tokens of the running requests.

    The tokens of a step, decodes included, are a multiple of `tile_tokens`, because that is what a matrix
    unit computes. At least `min_tokens` are computed even if the target is missed, so that prompts make
    progress; and at most twice the largest number tried so far, so that little depends on a model that has
    seen little. `step_time` is the scheduler's own, which observes each step first.
    """

    def __init__(
        self, step_time: StepTime, target_itl_s: float, min_tokens: int, max_tokens: int, tile_tokens: int
    ) -> None:
        self.margin = _EARLY_MARGIN
        self._step_time = step_time
        self._target_itl_s = target_itl_s
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._tile_tokens = tile_tokens
        self._most_seen = 0
        self._ratios: NDArray[np.float64] = np.ones(_WINDOW)
        self._num_ratios = 0

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
        start, read = int(prompts[0]) if len(prompts) else 0, int(busy.computed[decodes].sum())
        costs = self._step_time.prompts
        times_s = costs.step_s + costs.token_s * (num_decodes + sizes) + costs.context_s * (read + start)
        times_s += costs.pair_s * (read + num_decodes / 2 + sizes * (start + sizes / 2))
        within = self.margin * times_s <= self._target_itl_s
        num_fitting = len(sizes) if within.all() else int(np.argmin(within))
        return Limit(int(sizes[num_fitting - 1]) if num_fitting else self._min_tokens)

    def observe(self, batch: Batch, took_s: float) -> None:
        """Remember how large a chunk was, and how far its step was from the prediction."""
        num_chunk_tokens = batch.num_tokens - batch.num_spans - batch.num_drafts
        self._most_seen = max(self._most_seen, num_chunk_tokens)
        ratio = self._step_time.prompt_ratio
        if not ratio:
            return
        self._ratios[self._num_ratios % _WINDOW] = ratio
        self._num_ratios += 1
        if self._num_ratios >= _ENOUGH and self._num_ratios % 8 == 0:
            self.margin = float(np.quantile(self._ratios[: self._num_ratios], QUANTILE))
