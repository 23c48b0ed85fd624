"""Estimate how likely a row's drafts are to be accepted.

The estimates are decaying averages of each request, with the average over all requests as their prior.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Verdicts
from kv_cache.pages import Index

Floats = NDArray[np.float64]
_KEPT = 0.9  # share of a row's counts that is kept at each of its verdicts
_PRIOR_KEPT = 0.995  # share of the counts over all rows that is kept at each verdict of any row
_PRIOR_WEIGHT = 4.0  # trials for which the rate of all rows counts in a row's own
_FIRST_RIGHT, _FIRST_TRIALS = 4.0, 8.0  # counts assumed before any verdict
FIRST, LATER = 0, 1


class Acceptance:
    """Decaying acceptance rates of each request: of its first draft, and of one behind an accepted draft.

    They are kept apart because a row without drafts still shows whether its first draft would have been
    right. A request with few trials is taken to be like the mean of all. Its counts follow it to another row;
    for requests without a row, as many are kept as there are rows.
    """

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        # Number of the request whose estimates a row holds
        self._number = np.full(slots.num_slots, -1, dtype=np.int64)
        self._right: Floats = np.zeros((2, slots.num_slots))
        self._trials: Floats = np.zeros((2, slots.num_slots))
        self._all_right: Floats = np.full(2, _FIRST_RIGHT)
        self._all_trials: Floats = np.full(2, _FIRST_TRIALS)
        self._away: dict[int, tuple[Floats, Floats]] = {}  # keyed by number, for requests that lost their row

    def rates(self, rows: Index) -> Floats:
        """Return acceptance rates of rows [N]: the first draft's, and that behind an accepted one. [2, N]"""
        self._follow(rows)
        prior = (self._all_right / self._all_trials)[:, None] * _PRIOR_WEIGHT
        rates: Floats = (self._right[:, rows] + prior) / (self._trials[:, rows] + _PRIOR_WEIGHT)
        return rates

    def learn(self, verdicts: Verdicts) -> None:
        """Update the rates by drafts that were right or wrong."""
        rows, guessed, right = verdicts.rows, verdicts.guessed, verdicts.right
        self._follow(rows)
        trials = np.stack([guessed > 0, np.minimum(right, guessed - 1)]).astype(np.float64)
        hits = np.stack([right > 0, np.maximum(right - 1, 0)]).astype(np.float64)
        # A verdict that says nothing about later drafts does not decay their counts
        kept = np.where(trials > 0, _KEPT, 1.0)
        self._right[:, rows] = self._right[:, rows] * kept + hits
        self._trials[:, rows] = self._trials[:, rows] * kept + trials
        all_kept = _PRIOR_KEPT ** (trials > 0).sum(axis=1)
        self._all_right = self._all_right * all_kept + hits.sum(axis=1)
        self._all_trials = self._all_trials * all_kept + trials.sum(axis=1)

    def _follow(self, rows: Index) -> None:
        """Load the estimates of the requests that are in these rows now."""
        numbers = self._slots.number[rows]
        changed = np.flatnonzero(numbers != self._number[rows])
        if not len(changed):
            return
        for row in rows[changed].tolist():
            if self._trials[FIRST, row]:
                self._away[int(self._number[row])] = self._right[:, row].copy(), self._trials[:, row].copy()
        for row, number in zip(rows[changed].tolist(), numbers[changed].tolist()):
            right, trials = self._away.pop(number, (0.0, 0.0))
            self._right[:, row], self._trials[:, row], self._number[row] = right, trials, number
        while len(self._away) > self._slots.num_slots:
            del self._away[next(iter(self._away))]
