"""Define a law, the ruling that it makes on a result, and the ties from which most laws are derived.

A law says what is wrong with a result, or nothing. A tie is what a law says of one figure: it is a reading, a
number that another place in the same result has, or that reading bounds it. The law that a tie names consists
of all ties of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Concatenate, Literal, ParamSpec

from benchmark.gate.result import Fields, Figures, NotCheckable

P = ParamSpec("P")
Outcome = Literal["pass", "refused", "not checkable"]
Tolerance = float | Callable[[Figures], float]
MALFORMED = (TypeError, AttributeError, KeyError, IndexError, ArithmeticError)


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


@dataclass(frozen=True, slots=True)
class SecondReading:
    """A number that another place in the result has; reading it raises NotCheckable where that is absent."""

    says: str
    value: Callable[[Figures], float]

    def __call__(self, figures: Figures) -> float:
        return self.value(figures)


def reading(value: Callable[Concatenate[Figures, P], float]) -> Callable[P, SecondReading]:
    """Make readings of a function, whose docstring says what it returns.

    The docstring may have `{0}` and so on for the other arguments, and `{all}` for all of them.
    """
    says = (value.__doc__ or "").partition("\n")[0].removeprefix("Return ").rstrip(".")

    def of(*args: P.args, **kwargs: P.kwargs) -> SecondReading:
        words = says.format(*args, all=" and ".join(map(str, args)))
        return SecondReading(words, lambda figures: value(figures, *args, **kwargs))

    return of


@dataclass(frozen=True, slots=True)
class Tie:
    """What one law says of one figure: that it is a reading, or is at most or at least that.

    Both numbers may differ by `relative` times the reading, plus `absolute`. Either may depend on the result.
    """

    law: str
    figure: str
    kind: Literal["is", "at most", "at least"]
    other: SecondReading
    relative: Tolerance = 0.0
    absolute: Tolerance = 0.0

    def wrong(self, figures: Figures) -> str | None:
        """Return what is wrong with the figure, or None."""
        expected, stated = self.other(figures), figures.number(self.figure)
        slack = _number(self.relative, figures) * abs(expected) + _number(self.absolute, figures)
        if self.kind == "is":
            return differs(self.figure, stated, self.other.says, expected, slack)
        if self.kind == "at most":
            return exceeds(self.figure, stated, self.other.says, expected, slack)
        return exceeds(self.other.says, expected, self.figure, stated, slack)


def _number(tolerance: Tolerance, figures: Figures) -> float:
    return tolerance(figures) if callable(tolerance) else tolerance


def laws_of(ties: Iterable[Tie], statements: dict[str, tuple[str, str]]) -> tuple[Law, ...]:
    """Return the laws that ties name.

    `statements` gives a law's statement, and the field without which it does not apply.
    """
    of: dict[str, list[Tie]] = {name: [] for name in statements}
    for tie in ties:
        of[tie.law].append(tie)
    return tuple(
        Law(name, statement, partial(_hold, of[name]), about)
        for name, (statement, about) in statements.items()
    )


def _hold(ties: Sequence[Tie], figures: Figures) -> str | None:
    wrongs, reasons = [], []
    for tie in ties:
        try:
            wrongs.append(tie.wrong(figures))
        except NotCheckable as reason:
            reasons.append(str(reason))
    if not wrongs:
        raise NotCheckable(reasons[0])
    return first(wrongs)


def exceeds(what: str, value: float, bound: str, most: float, slack: float = 0.0) -> str | None:
    """Return what is wrong where `value` is above `most` by more than `slack`."""
    if value <= most + slack:
        return None
    times = f", {value / most:.3g} times" if most > 0 else ""
    return f"{what} is {value:.6g}, above {bound}, {most:.6g}{times}{_tolerance(slack)}"


def differs(what: str, value: float, other: str, expected: float, slack: float = 0.0) -> str | None:
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
