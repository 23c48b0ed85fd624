"""What is one metric?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from serving.metrics.histogram import Histogram
from serving.metrics.tally import Tally

Value = float | Histogram | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Metric:
    """How it is called, and how it is read; with `label`, a mapping from that label's values."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    read: Callable[[Tally], Value]
    label: str = ""
    scale: float = 1.0  # what a histogram's bounds and sum are multiplied with


def all_of(names: tuple[str, ...], counts: Mapping[str, float]) -> dict[str, float]:
    """Each of the names, so that a series begins at 0, and whatever else was counted."""
    return {**dict.fromkeys(names, 0), **counts}


def pages_part(tally: Tally) -> float:
    """The part of the pages that requests use."""
    gauges = tally.gauges
    return gauges.held_pages / max(1, gauges.held_pages + gauges.idle_pages + gauges.free_pages)
