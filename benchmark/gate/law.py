"""Define a law and the ruling that it makes on a result.

A law reads the figures that it needs by name, and its ruling keeps what it read. A figure that is absent is
never assumed: the law is then not checkable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Outcome = Literal["pass", "refused", "not checkable"]
Fields = Mapping[str, Any]
MALFORMED = (TypeError, AttributeError, KeyError, IndexError, ArithmeticError)


class NotCheckable(Exception):
    """A law does not apply; the text says why."""


class Figures:
    """The figures of one result; a dotted name reaches into nested objects, as in `ttft_ms.p50`."""

    def __init__(self, fields: Fields, stated: Fields | None = None) -> None:
        self.fields = fields
        self.stated = fields if stated is None else stated  # the file's own fields, under its own names
        self.used: dict[str, float] = {}

    def number(self, name: str) -> float:
        """Return a figure; raises NotCheckable if it is absent or null, ValueError unless it is finite."""
        value = self.given(name)
        if value is None:
            raise NotCheckable(f"{name} is absent")
        return value

    def given(self, name: str) -> float | None:
        """Return a figure, or None if it is absent."""
        value = self.raw(name)
        if value is None:
            return None
        self.used[name] = finite(name, value)
        return self.used[name]

    def positive(self, name: str) -> float:
        """Return a figure that others are divided by; raises ValueError unless it is above 0."""
        value = self.number(name)
        if value <= 0:
            raise ValueError(f"{name} is {value:g}; it must be above 0")
        return value

    def raw(self, name: str) -> Any:
        """Return the value under a name, of any type, or None."""
        value: Any = self.fields
        for part in name.split("."):
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} is looked for in {value!r}, which is no object")
            value = value.get(part)
            if value is None:
                return None
        return value

    def records(self) -> list[Fields]:
        """Return the requests' own records; raises NotCheckable if none were kept."""
        kept = self.raw("records")
        if kept is None:
            raise NotCheckable("records is absent")
        if not isinstance(kept, list) or not all(isinstance(each, Mapping) for each in kept):
            raise ValueError("records must be a list of objects, one for each request")
        return kept

    def column(self, name: str, series: str = "metrics") -> NDArray[np.float64]:
        """Return one column of the readings; raises NotCheckable if it is absent or has gaps."""
        columns, rows = self.raw(f"{series}.columns"), self.raw(f"{series}.readings")
        if not isinstance(columns, list) or not isinstance(rows, list) or name not in columns or not rows:
            raise NotCheckable(f"{series} has no readings of {name}")
        at = columns.index(name)
        if not all(isinstance(row, list) and len(row) == len(columns) for row in rows):
            raise ValueError(f"{series}.readings must be lists of {len(columns)} numbers, as its columns")
        if any(row[at] is None for row in rows):
            raise NotCheckable(f"{series} has readings without {name}")
        self.used[f"last {name}"] = finite(name, rows[-1][at])
        return np.array([finite(f"{name} of a reading", row[at]) for row in rows])


def finite(name: str, value: Any) -> float:
    """Return a finite number; raises ValueError for anything else."""
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:
        value = "an integer that no float holds"
    raise ValueError(f"{name} is {value!r}; it must be a finite number")


@dataclass(frozen=True, slots=True)
class Law:
    """A statement that must be true of every result; `check` says what is wrong with one, or None.

    A law `about` an object is applied only to results that have it.
    """

    name: str
    statement: str
    check: Callable[[Figures], str | None]
    about: str = ""


@dataclass(frozen=True, slots=True)
class Ruling:
    """The outcome of one law, and the figures that it read."""

    law: Law
    outcome: Outcome
    why: str
    used: dict[str, float] = field(default_factory=dict)


def rule(law: Law, fields: Fields, stated: Fields | None = None) -> Ruling:
    """Check one result against one law; `stated` is the result before other names were added.

    Raises ValueError for a figure that cannot be read.
    """
    figures = Figures(fields, stated)
    try:
        wrong = law.check(figures)
    except NotCheckable as reason:
        return Ruling(law, "not checkable", str(reason), figures.used)
    # A file may hold any value anywhere, and laws do not check the type of each entry.
    except MALFORMED as error:
        raise ValueError(f"law {law.name!r}: a field is not of the kind that it reads: {error}") from error
    return Ruling(law, "refused" if wrong else "pass", wrong or "", figures.used)


def exceeds(what: str, value: float, bound: str, most: float, slack: float) -> str | None:
    """Return what is wrong where `value` is above `most` by more than `slack`."""
    if value <= most + slack:
        return None
    times = f", {value / most:.3g} times" if most > 0 else ""
    return f"{what} is {value:.6g}, above {bound}, {most:.6g}{times}{_tolerance(slack)}"


def differs(what: str, value: float, other: str, expected: float, slack: float) -> str | None:
    """Return what is wrong where two figures of the same quantity differ by more than `slack`."""
    if abs(value - expected) <= slack:
        return None
    times = f", {value / expected:.3g} times" if expected > 0 else ""
    return f"{what} is {value:.6g}, but {other} is {expected:.6g}{times}{_tolerance(slack)}"


def _tolerance(slack: float) -> str:
    return f" (tolerance {slack:.3g})" if slack else ""


def first(wrongs: Sequence[str | None]) -> str | None:
    """Join all faults in one line; None where there are none."""
    return "; ".join(wrong for wrong in wrongs if wrong) or None
