"""Predict the time of a decode step, with drafts and without.

`continuous_batching/step_time.py` predicts steps with prompts, which are long; here the small difference that
drafts make is what counts. On a CPU the first draft of a step costs more than the next ones, because
attention then takes another path, as do steps outside a captured graph on a device.
"""

from __future__ import annotations

from operator import mul, truediv
from statistics import median

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch
from kv_cache.pages import Index

Floats = NDArray[np.float64]
_SCALES = 1.0, 1.0, 1e2, 1e4  # scales that bring the features to similar magnitudes
_KEPT = 0.99  # share of the statistics that is kept at each entry
# Ridge weight of the last fit, which decides where no kept entry does; in squared errors
_TRUST = 1e-3
_PLAIN_STEPS = 8  # steps without drafts of one size, whose median is one entry
# Limit of measured to predicted time; what exceeds it is a disturbance of the machine
_MOST_RATIO = 2.0
_ENOUGH = 4  # entries before which no ratio is limited
_MOST_UNFITTED = 32  # entries that the weights may lack if no prediction is asked for


class DecodeTime:
    """`a + b·[has drafts] + c·tokens + d·Σcontext`, fitted online, with no negative weight.

    The errors are relative and decay. What has never been observed is taken to cost nothing, so that it is
    tried. A weight that recent steps do not show, such as `b` while there are no drafts, keeps its value.
    """

    def __init__(self) -> None:
        # Mean time per token of steps that also compute prompts, a bound for one more token
        self.prompt_token_s = 0.0
        self._weights: Floats = np.zeros(4)
        self._products: Floats = np.zeros((4, 4))
        self._sums: Floats = np.zeros(4)
        self._num_entries = 0
        # Features of entries since the last fit, divided by their times
        self._unfitted: list[tuple[float, ...]] = []
        self._plain_s: list[float] = []
        # Starts of the latest plain steps' last batch; holding the batch itself would slow the next ones
        self._starts: Index | None = None

    def predict(self, num_tokens: int, context: int) -> tuple[float, float, float]:
        """Return the seconds of a step without drafts, what having any adds, and what each of them adds."""
        if self._unfitted:
            self._fit()
        base, drafted, token, read = map(truediv, self._weights.tolist(), _SCALES)
        return base + token * num_tokens + read * context, drafted, token

    def observe(self, batch: Batch, took_s: float) -> None:
        """Learn from one step."""
        if took_s <= 0:
            return
        if batch.num_tokens - batch.num_drafts > batch.num_spans:
            self.prompt_token_s += 0.1 * (took_s / batch.num_tokens - self.prompt_token_s)
        elif batch.num_drafts:
            self._close()
            self._enter(batch.num_tokens, batch.starts, took_s, has_drafts=True)
        else:
            if self._starts is not None and len(self._starts) != batch.num_spans:
                self._close()
            self._plain_s.append(took_s)
            self._starts = batch.starts
            if len(self._plain_s) == _PLAIN_STEPS:
                self._close()

    def _close(self) -> None:
        """Enter the median of the plain steps so far."""
        if self._starts is not None:
            self._enter(len(self._starts), self._starts, median(self._plain_s), has_drafts=False)
        self._plain_s, self._starts = [], None

    def _enter(self, num_tokens: int, starts: Index, took_s: float, *, has_drafts: bool) -> None:
        counts = 1.0, float(has_drafts), num_tokens, int(starts.sum())
        features = tuple(map(truediv, counts, _SCALES))
        if self._num_entries >= _ENOUGH:
            known_s = sum(map(mul, features, self._weights.tolist()))
            took_s = min(took_s, _MOST_RATIO * max(known_s, 1e-9))
        self._num_entries += 1
        self._unfitted.append(tuple(each / took_s for each in features))
        if self._num_entries == _ENOUGH or len(self._unfitted) == _MOST_UNFITTED:
            self._fit()

    def _fit(self) -> None:
        """Fit the weights to all entries since the last fit at once."""
        rows = np.array(self._unfitted)
        kept = _KEPT ** np.arange(len(rows) - 1, -1, -1)
        faded = _KEPT ** len(rows)
        self._products = self._products * faded + (rows.T * kept) @ rows
        self._sums = self._sums * faded + kept @ rows
        self._weights = self._fitted()
        self._unfitted.clear()

    def _fitted(self) -> Floats:
        """Solve least squares without negative weights, dropping the most negative one repeatedly."""
        # The features are in 1/s, and trust is scaled with them so that it means the same on any machine.
        trust = _TRUST * max(float(self._products[0, 0]), 1e-12)
        products = self._products + trust * np.eye(4)
        sums = self._sums + trust * self._weights
        kept = np.arange(4)
        weights: Floats = np.zeros(4)
        while len(kept):
            found = np.linalg.solve(products[np.ix_(kept, kept)], sums[kept])
            least = int(found.argmin())
            if found[least] >= 0:
                weights[kept] = found
                break
            kept = np.delete(kept, least)
        return weights
