"""How are many durations and sizes kept in little room?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

# Seconds, as vLLM's, with finer steps where a small model is
TO_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TO_FIRST_TOKEN += (20, 40, 80, 160, 640, 2560)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
PER_TOKEN += (7.5, 10, 20, 40, 80)
PER_REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
PER_REQUEST += (960, 1920, 7680)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))


class Histogram:
    """How many values lie at or below each of its bounds, which grow, and their sum."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """One more; some hundred nanoseconds."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Many more, for a tenth of it each."""
        found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self._counts)).tolist()
        self._counts = [count + more for count, more in zip(self._counts, found)]
        self.sum += sum(values)

    def copy(self) -> Histogram:
        """As it stands."""
        copy = Histogram(self.bounds)
        copy.sum, copy._counts = self.sum, self._counts.copy()
        return copy

    @property
    def num(self) -> int:
        return sum(self._counts)

    def buckets(self, scale: float = 1.0) -> list[tuple[str, int]]:
        """Each bound, times `scale`, in words, and how many lie there or below."""
        found, total = [], 0
        for bound, count in zip((*(f"{each * scale:.6g}" for each in self.bounds), "+Inf"), self._counts):
            total += count
            found.append((bound, total))
        return found
