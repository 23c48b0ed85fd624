"""Estimate percentiles of millions of durations without keeping them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Figures = dict[str, float]

LEAST_S, MOST_S, WIDTH = 1e-7, 1e7, 1.002  # least, most, and the ratio between neighbouring bins


class Sketch:
    """A histogram over a logarithmic scale: percentiles are within 0.1 %, in 130 KB for any number of values.

    Mean, least and most are exact. Merging two sketches gives the sketch of all their values.
    """

    __slots__ = ("_counts", "count", "least_s", "most_s", "total_s")

    def __init__(self) -> None:
        self._counts = np.zeros(2 + math.ceil(math.log(MOST_S / LEAST_S) / _STEP), dtype=np.int64)
        self.count = 0
        self.total_s = 0.0
        self.least_s = math.inf
        self.most_s = -math.inf

    def add(self, value_s: float, times: int = 1) -> None:
        """Add a duration `times` times."""
        self._counts[_place(value_s)] += times
        self.count += times
        self.total_s += value_s * times
        self.least_s = min(self.least_s, value_s)
        self.most_s = max(self.most_s, value_s)

    def add_all(self, values_s: NDArray[np.float64]) -> None:
        """Add many durations."""
        least_s, most_s = float(values_s.min()), float(values_s.max())
        if least_s == most_s:  # the usual case: rows that got their tokens together
            self.add(least_s, len(values_s))
            return
        places = np.log(np.clip(values_s, LEAST_S, MOST_S) / LEAST_S) / _STEP
        np.add.at(self._counts, 1 + places.astype(np.int64), 1)
        self.count += len(values_s)
        self.total_s += float(values_s.sum())
        self.least_s = min(self.least_s, least_s)
        self.most_s = max(self.most_s, most_s)

    def merge(self, other: Sketch) -> None:
        """Add all durations of another sketch."""
        self._counts += other._counts
        self.count += other.count
        self.total_s += other.total_s
        self.least_s = min(self.least_s, other.least_s)
        self.most_s = max(self.most_s, other.most_s)

    def share_within(self, limit_s: float) -> float:
        """Return the share of durations that are at most `limit_s`; 1 if there are none."""
        return float(self._counts[: _place(limit_s) + 1].sum()) / self.count if self.count else 1.0

    def quantile_s(self, share: float) -> float:
        """Return a quantile, interpolated between the two values nearest in rank as numpy's percentile is."""
        at = share * (self.count - 1)
        ends = np.cumsum(self._counts)
        low, high = (self._value_s(int(np.searchsorted(ends, rank, side="right"))) for rank in _around(at))
        return low + (high - low) * (at - math.floor(at))

    def milliseconds(self) -> Figures:
        """Return mean and percentiles in milliseconds; empty if there are no durations."""
        if not self.count:
            return {}
        parts = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        found = {name: self.quantile_s(share) for name, share in parts.items()}
        return {
            name: round(1e3 * each, 3) for name, each in {"mean": self.total_s / self.count, **found}.items()
        }

    def _value_s(self, place: int) -> float:
        middle_s = LEAST_S * math.exp((place - 0.5) * _STEP) if place else 0.0
        return min(max(middle_s, self.least_s), self.most_s)


_STEP = math.log(WIDTH)


def _place(value_s: float) -> int:
    return 1 + int(math.log(min(value_s, MOST_S) / LEAST_S) / _STEP) if value_s > LEAST_S else 0


def _around(rank: float) -> tuple[int, int]:
    return math.floor(rank), math.ceil(rank)
