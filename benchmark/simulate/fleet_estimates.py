"""Estimate the figures of a fleet from a sample of its engines.

Each sampled engine serves exactly its own share of the fleet's requests. Engines are drawn without
replacement, so that only the draw is left to chance; the spread between groups of them measures it. Intervals
of means and totals are those of ratio estimators (Cochran 1977, chapter 6); those of percentiles are
Woodruff's (1952), which bound the share below a value. They use Student's t and are narrowed by the share
that was drawn: a sample of all engines has intervals of no width. The 99th percentile of a few hundred
requests, with three or four beyond it, gets an interval that is too narrow. Figures that depend on the
fleet's last request, its duration and throughput, are not in a sample and are not estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from simulation.quantile_sketch import Sketch
from simulation.run_totals import RunTotals

MOST_GROUPS = 30
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NORMAL = 1.959964  # 95 % of a normal distribution lie within this bound on both sides

Estimate = dict[str, float]
Ends = tuple[float, float, float]  # a value, and the ends of its interval


def draw(num_engines: int, count: int, seed: int) -> list[list[int]]:
    """Draw the numbers of `count` engines, in groups of nearly equal size."""
    order = np.random.default_rng([seed, num_engines]).permutation(num_engines)[:count]
    return [group.tolist() for group in np.array_split(order, min(count, MOST_GROUPS))]


def estimates(groups: Sequence[RunTotals], num_drawn: int, num_engines: int) -> dict[str, Estimate]:
    """Return figures of the fleet, each with its 95 % interval; at least two groups are needed."""
    times = student(len(groups) - 1) * math.sqrt(1 - num_drawn / num_engines)
    ends = {}
    for name in ("completed", "output_tokens"):
        sums = num_engines / num_drawn * np.array([float(getattr(each, name)) for each in groups])
        half = times * math.sqrt(len(groups) * sums.var(ddof=1))
        ends[name] = float(sums.sum()), float(sums.sum() - half), float(sums.sum() + half)
    for name in ("ttft", "tpot", "itl", "e2e"):
        for part, each in _durations([getattr(group, name) for group in groups], times).items():
            ends[f"{name}_ms {part}"] = each
    steps = [group.steps for group in groups]
    ends["mean_batch"] = _ratio([group.spans for group in groups], steps, times)
    ends["mean_page_use"] = _ratio([group.held_share for group in groups], steps, times)
    return {
        f"fleet {name}": dict(zip(("value", "low", "high"), (round(each, 4) for each in found)))
        for name, found in ends.items()
    }


def student(freedom: int) -> float:
    """Return the bound that holds 95 % of Student's t on both sides (Abramowitz and Stegun, 26.7.5)."""
    z = NORMAL
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / freedom + second / freedom**2 + third / freedom**3 + fourth / freedom**4


def _durations(sketches: Sequence[Sketch], times: float) -> dict[str, Ends]:
    """Return milliseconds; empty where the sketches hold no value."""
    whole = Sketch()
    for each in sketches:
        whole.merge(each)
    if not whole.count:
        return {}
    counts = [each.count for each in sketches]
    found = {"mean": _ratio([1e3 * each.total_s for each in sketches], counts, times)}
    for part, share in SHARES.items():
        value_s = whole.quantile_s(share)
        within = [each.count * each.share_within(value_s) for each in sketches]
        value, low, _ = _ratio(within, counts, times)
        shares = share, max(0.0, share - (value - low)), min(1.0, share + (value - low))
        middle, least, most = (1e3 * whole.quantile_s(each) for each in shares)
        found[part] = middle, least, most
    return found


def _ratio(above: Sequence[float], below: Sequence[float], times: float) -> Ends:
    """Return a ratio of sums over groups, and its ends at `times` standard errors."""
    tops, bottoms = np.array(above, dtype=np.float64), np.array(below, dtype=np.float64)
    total = max(1.0, float(bottoms.sum()))
    value = float(tops.sum()) / total
    rest = tops - value * bottoms
    half = times * math.sqrt(len(rest) / (len(rest) - 1) * float((rest**2).sum())) / total
    return value, value - half, value + half
