"""Read numbers of a command line, each with a least and a most value."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

MOST_SEED = 2**32 - 1
MOST_COUNT = 10**6  # most requests, runs or steps of one measurement, all of which are kept
MOST_TOKENS = 2**20  # most tokens of an invented prompt, answer or chunk; the longest contexts have this size
MOST_WAIT_S = 1e6  # twelve days, approximately
RATES_PER_S = (1e-4, 1e9)  # one request in three hours, and more than any engine takes


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of an integer from `least` to `most`."""

    def integer(text: str) -> int:
        digits = text.removeprefix("-")
        # The length is checked first: a number of many digits takes long to read, and int() refuses it in
        # other words.
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= 20 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(
                f"{_shown(text)} must be a whole number from {least:,} to {most:,}"
            )
        return int(text)

    return integer


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

    def value_of(text: str) -> float:
        try:
            value = float(text) if text.isascii() else math.nan  # float() accepts the digits of any script
        except ValueError:
            value = math.nan
        if not (least <= value <= most or (endless and text == "inf")):
            also = ", or inf" if endless else ""
            raise argparse.ArgumentTypeError(
                f"{_shown(text)} must be a number from {least:g} to {most:g}{also}"
            )
        return value

    return value_of


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
