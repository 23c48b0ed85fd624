"""Read numbers of a command line, each with a least and a most value."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from borders.numbers import Number, Range, integers

MOST_SEED = 2**32 - 1
MOST_COUNT = 10**6  # most requests, runs or steps of one measurement, all of which are kept
MOST_TOKENS = 2**20  # most tokens of an invented prompt, answer or chunk; the longest contexts have this size
MOST_WAIT_S = 1e6  # twelve days, approximately
RATES_PER_S = (1e-4, 1e9)  # one request in three hours, and more than any engine takes


def option(values: Range[Number]) -> Callable[[str], Number]:
    """Return a reader of a number of this range, for argparse's `type`."""

    def read(text: str) -> Number:
        if (found := values.parse(text)) is None:
            raise argparse.ArgumentTypeError(f"{_shown(text)} must be {values}")
        return found

    return read


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of an integer from `least` to `most`."""
    return option(integers(least, most))


def wholes(least: int, most: int) -> Callable[[str], list[int]]:
    """Return a reader of integers from `least` to `most`, separated by commas."""
    one = whole(least, most)
    return lambda text: [one(each) for each in text.split(",")]


def span(least: int, most: int) -> Callable[[str], tuple[int, int]]:
    """Return a reader of two integers with a colon between them, as 2:4, or of one that stands for both."""
    one = whole(least, most)
    return lambda text: (one(text.partition(":")[0]), one(text.partition(":")[2] if ":" in text else text))


def real(least: float, most: float, *, endless: bool = False) -> Callable[[str], float]:
    """Return a reader of a number from `least` to `most`, or of `inf` where that is allowed."""
    return option(Range(float, least, most, also=math.inf if endless else None))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
