"""Draw cases from a table of options so that each pair of values occurs together in at least one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tests.thorough import cases


def pairs(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each option, such that every two values of two options meet in a row.

    A fault that needs a third value besides is left to `scripts/test.sh --thorough`, which takes the whole
    product. The rows are the same in every run: of all that could come next, the first of those with the most
    new pairs does.
    """
    return cases(_covering(options), list(itertools.product(*options)))


def _covering(options: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    rows = list(itertools.product(*map(range, map(len, options))))
    missing = {pair for row in rows for pair in _pairs_of(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: sum(pair in missing for pair in _pairs_of(row)))
        missing -= set(_pairs_of(best))
        chosen.append(tuple(values[at] for values, at in zip(options, best, strict=True)))
    return chosen


def _pairs_of(row: tuple[int, ...]) -> Iterable[tuple[tuple[int, int], ...]]:
    return itertools.combinations(enumerate(row), min(2, len(row)))
