"""The number of cases: what has time between two edits, what CI has time for, and with THOROUGH=1 all."""

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

THOROUGH = os.environ.get("THOROUGH") == "1"


Cases = TypeVar("Cases")


def cases(few: Cases, many: Cases) -> Cases:
    """`many` where time does not matter; a number of cases, or the cases themselves."""
    return many if THOROUGH else few


def first_quick(count: int, table: Iterable[Any]) -> list[Any]:
    """Return parameters, all but the first `count` of which are marked slow.

    Those show in further cases what the first show. A tuple holds one value for each of several names.
    """
    rows = (each if isinstance(each, tuple) else (each,) for each in table)
    return [pytest.param(*row, marks=[pytest.mark.slow] * (at >= count)) for at, row in enumerate(rows)]
