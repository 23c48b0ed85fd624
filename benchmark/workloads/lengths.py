"""Draw the lengths of prompts and answers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from borders.file_bounds import MOST_JSON_BYTES, read_bounded
from borders.system_error import in_one_line
from recipes.schema.numbers import MOST_TOKENS

Draw = Callable[[np.random.Generator, int], NDArray[np.int64]]


def lengths(text: str) -> Draw:
    """Parse how to draw lengths: `N`, `uniform:LEAST:MOST`, `lognormal:MEAN:SIGMA` or `file:PATH`."""
    if text.startswith("file:"):
        return _from_file(Path(text.removeprefix("file:")))
    kind, *values = text.split(":") if ":" in text else ("uniform", text, text)
    try:
        if not text.isascii():
            pass  # int() accepts the digits of any script
        elif kind == "uniform":
            least, most = (int(value) for value in values)
            if 1 <= least <= most <= MOST_TOKENS:
                return lambda random, count: random.integers(least, most, count, endpoint=True)
        elif kind == "lognormal":
            mean, sigma = (float(value) for value in values)
            if 1 <= mean <= MOST_TOKENS and 0 <= sigma < math.inf:
                return lambda random, count: _lognormal(random, count, mean, sigma)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is no length; write N, uniform:LEAST:MOST, lognormal:MEAN:SIGMA or file:PATH,"
        f" of 1 to {MOST_TOKENS} tokens"
    )


def _lognormal(random: np.random.Generator, count: int, mean: float, sigma: float) -> NDArray[np.int64]:
    # This distribution has the mean `mean`.
    drawn = random.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
    if (most := drawn.max(initial=0)) > MOST_TOKENS:
        raise ValueError(
            f"lognormal:{mean:g}:{sigma:g} drew {most:.3g} tokens; {MOST_TOKENS} are the most: lower sigma"
        )
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def _from_file(path: Path) -> Draw:
    """Return a draw of the lengths in a file, one a line, in proportion to how often each occurs."""
    found = []
    try:
        lines = read_bounded(path, MOST_JSON_BYTES).decode("utf-8").splitlines()
    except OSError as error:
        raise argparse.ArgumentTypeError(in_one_line(error)) from error
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{path} is not UTF-8: byte {error.start} is wrong") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    for number, line in enumerate(lines, 1):
        text = line.strip()
        # float reads it, because a whole number may have more digits than int reads.
        if not text.isdecimal() or not 1 <= float(text) <= MOST_TOKENS:
            raise argparse.ArgumentTypeError(
                f"{path}: line {number}: {line[:60]!r} is no length of 1 to {MOST_TOKENS}"
            )
        found.append(int(text))
    if not found:
        raise argparse.ArgumentTypeError(f"{path} holds no length")
    return lambda random, count: random.choice(np.array(found, np.int64), count)
