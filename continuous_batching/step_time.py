"""Predict the time of a step.

The adaptive prefill budget uses the prediction to size the chunks of prompts. Steps that only decode are
predicted more precisely by `speculation.decode_time`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch

Floats = NDArray[np.float64]
_SCALES = np.array([1.0, 1e2, 1e4, 1e6])  # scales that bring the features to similar magnitudes
_FORGETTING = 0.998  # share of the statistics that is kept at each step
_WINDOW = 256  # steps whose errors are remembered
_EARLY_MARGIN = 1.5  # margin before there are enough of them
_ENOUGH = 32


class StepTime:
    """`a + b·tokens + c·Σcontext + d·Σ chunk·context`, fitted online, times a margin.

    The fit is a recursive least squares of the relative error, with exponential forgetting. The margin is the
    `quantile` of measured over predicted times, over the last steps that computed a prompt.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._weights: Floats = np.zeros(4)
        self._spread: Floats = np.eye(4) * 1e4
        self._ratios: Floats = np.ones(_WINDOW)
        self._num_ratios = 0
        self.margin = _EARLY_MARGIN

    def predict(self, tokens: Floats, context: Floats, chunk_context: Floats) -> Floats:
        """Return a bound, in seconds, of steps of so many tokens, context tokens and chunk-token pairs."""
        features = np.stack([np.ones_like(tokens), tokens, context, chunk_context], axis=-1) / _SCALES
        seconds: Floats = features @ np.maximum(self._weights, 0) * self.margin
        return seconds

    def observe(self, batch: Batch, took_s: float) -> None:
        """Learn from one step."""
        if took_s <= 0:
            return
        lens, starts = batch.stops - batch.starts, batch.starts
        chunks = lens > 1
        if batch.num_drafts:  # a decode with drafts is no chunk
            chunks &= lens > np.bincount(batch.sampled, minlength=len(lens))
        reads = (lens[chunks] * (starts[chunks] + lens[chunks] / 2)).sum()
        row = np.array([1.0, lens.sum(), starts.sum(), reads]) / _SCALES
        predicted_s = float(row @ np.maximum(self._weights, 0))
        if predicted_s > 0 and chunks.any():
            self._remember(took_s / predicted_s)
        row /= took_s
        gain = self._spread @ row
        gain /= _FORGETTING + row @ gain
        self._weights += gain * (1.0 - row @ self._weights)
        self._spread = (self._spread - np.outer(gain, row @ self._spread)) / _FORGETTING

    def _remember(self, ratio: float) -> None:
        self._ratios[self._num_ratios % _WINDOW] = ratio
        self._num_ratios += 1
        if self._num_ratios >= _ENOUGH and self._num_ratios % 8 == 0:
            self.margin = float(np.quantile(self._ratios[: self._num_ratios], self._quantile))
