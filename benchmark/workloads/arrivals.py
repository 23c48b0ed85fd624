"""Draw the arrival times of requests."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recipes.schema.numbers import MOST_COUNT, RATES_PER_S, real, whole

# Coefficient of variation of the gaps between arrivals: from a clock to rare, huge bursts.
VARIATIONS = (0.01, 100)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process of arrivals.

    `value`: a gamma's coefficient of variation, a ramp's last rate, a loop's clients.
    """

    kind: Literal["poisson", "gamma", "ramp", "closed"] = "poisson"
    value: float = 1.0

    def times_s(self, random: np.random.Generator, count: int, rate_per_s: float) -> NDArray[np.float64]:
        """Return `count` times in order; raises ValueError for a rate that the process cannot have."""
        if self.kind == "closed" or (self.kind == "poisson" and rate_per_s == math.inf):
            return np.zeros(count)
        if rate_per_s == math.inf:
            raise ValueError(f"--arrivals {self.kind} needs a --rate; with none, all requests come at once")
        if self.kind == "gamma":
            shape = self.value**-2
            return np.cumsum(random.gamma(shape, 1 / (shape * rate_per_s), count))
        due = np.cumsum(random.exponential(1.0, count))  # arrivals of a process of rate 1
        return due / rate_per_s if self.kind == "poisson" else _ramp(due, rate_per_s, self.value)


def _ramp(due: NDArray[np.float64], first_per_s: float, last_per_s: float) -> NDArray[np.float64]:
    """Return when the integral of a linear rate reaches each of `due`; after that the last rate stays."""
    end_s = 2 * len(due) / (first_per_s + last_per_s)
    slope = (last_per_s - first_per_s) / end_s
    within = np.minimum(due, len(due))
    # This form of the root of slope t^2 / 2 + first t = due also holds for a slope of 0.
    times_s = 2 * within / (first_per_s + np.sqrt(np.maximum(0, first_per_s**2 + 2 * slope * within)))
    return times_s + (due - within) / last_per_s


def arrivals(text: str) -> Arrivals:
    """Parse `poisson`, `gamma:CV`, `ramp:LAST_PER_S` or `closed:CLIENTS`."""
    kind, _, value = text.partition(":")
    try:
        if kind == "poisson" and not value:
            return Arrivals()
        if kind == "gamma":
            return Arrivals("gamma", real(*VARIATIONS)(value))
        if kind == "ramp":
            return Arrivals("ramp", real(*RATES_PER_S)(value))
        if kind == "closed":
            return Arrivals("closed", whole(1, MOST_COUNT)(value))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{kind}: {error}") from error
    raise argparse.ArgumentTypeError(
        f"{text!r} is no process of arrivals; write poisson, gamma:CV, ramp:LAST_PER_S or closed:CLIENTS"
    )
