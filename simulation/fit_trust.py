"""Judge whether a fitted cost model can be trusted, and for which steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
FEWEST_STEPS = 300  # p99 of fewer steps is one of the three slowest
MOST_ERROR = 0.3  # median error: half of the steps are further from their modelled time
# Share of the variance between steps that must be explained, if many are far from their modelled times
LEAST_EXPLAINED = 0.2
SMALL_ERROR = 0.1  # median error below which no explanation of the variance is needed
MOST_DRIFT = 0.1  # drift between the halves of the recording, or of a fifth against the whole
MOST_TAIL_DRIFT = 0.25  # the same for p99, of which a recording has fewer cases
MOST_BEYOND = 0.05  # share of simulated steps that are larger than any recorded one


@dataclass(frozen=True, slots=True)
class FitTrust:
    """How well the modelled times of a recording's own steps agree with the real ones."""

    steps: int
    median_error: float  # error of a step, as a share of its modelled time
    explained: float  # share of the variance of log times
    drift: float  # how much longer the same work took in the second half of the recording, as a share
    tail_drift: float  # the same for the 99th percentile of steps
    unsteady: float  # the same for that fifth of the recording which differs most from the whole

    def describe(self, beyond: float | None = None) -> dict[str, Any]:
        """Return this as JSON data, with the doubts in words.

        `beyond` is the share of simulated steps that are larger than any recorded one.
        """
        said = {} if beyond is None else {"larger_than_recorded": round(beyond, 4)}
        return {**asdict(self), **said, "doubts": self.doubts(beyond or 0.0)}

    def doubts(self, beyond: float = 0.0) -> list[str]:
        """Return the reasons why predictions may be wrong; empty for a fit that can be trusted."""
        found = []
        if self.steps < FEWEST_STEPS:
            found.append(f"{self.steps} steps are few; record at least {FEWEST_STEPS}")
        if self.median_error > MOST_ERROR:
            found.append(f"half of the steps are more than {self.median_error:.0%} from their modelled time")
        elif self.explained < LEAST_EXPLAINED and self.median_error > SMALL_ERROR:
            found.append(f"what a step computes explains only {self.explained:.0%} of its time's variance")
        for drift, limit, what in (
            (self.drift, MOST_DRIFT, "steps"),
            (self.tail_drift, MOST_TAIL_DRIFT, "the slowest 1 % of steps"),
        ):
            if abs(drift) > limit:
                took = f"took {abs(drift):.0%} {'longer' if drift > 0 else 'less'} for the same work"
                found.append(f"{what} {took} in the second half of the recording")
        if abs(self.unsteady) > MOST_DRIFT and not found:
            found.append(
                f"a fifth of the recording took {abs(self.unsteady):.0%}"
                f" {'longer' if self.unsteady > 0 else 'less'} for the same work: the machine's load changed"
            )
        if beyond > MOST_BEYOND:
            found.append(f"{beyond:.0%} of the simulated steps are larger than any recorded one")
        return found


def trust(taken_s: Vector, modelled_s: Vector) -> FitTrust:
    """Judge the modelled times of a recording's steps, in their order."""
    ratios = taken_s / modelled_s
    middle = float(np.median(ratios))
    spread, left = np.log(taken_s), np.log(ratios)
    half = len(ratios) // 2
    # A single stall is no load
    bounded_s = np.clip(taken_s, modelled_s * middle / 3, modelled_s * middle * 3)
    whole = bounded_s.sum() / modelled_s.sum()
    fifths = [
        bounded_s[part].sum() / modelled_s[part].sum() / whole - 1
        for part in np.array_split(np.arange(len(ratios)), min(5, len(ratios)))
    ]
    first, second = (ratios[:half], ratios[half:]) if half else (ratios, ratios)
    return FitTrust(
        steps=len(ratios),
        median_error=round(float(np.median(np.abs(ratios / middle - 1))), 4),
        explained=round(1 - float(left.var() / spread.var()), 4) if spread.var() > 1e-12 else 1.0,
        drift=round(float(np.median(second) / np.median(first)) - 1, 4),
        tail_drift=round(float(np.quantile(second, 0.99) / np.quantile(first, 0.99)) - 1, 4),
        unsteady=round(float(max(fifths, key=abs)), 4),
    )


def in_words(trust: dict[str, Any]) -> str:
    """Summarise a judgement in one line."""
    doubts = "; ".join(trust["doubts"])
    fits = (
        f"{trust['steps']} steps, {trust['explained']:.0%} of the variance explained,"
        f" median error {trust['median_error']:.0%}, drift {trust['drift']:+.0%}"
    )
    return f"is not to be trusted: {doubts} ({fits})" if doubts else f"can be trusted ({fits})"
