"""Define a law, the checks of which it consists, and what it says of a result.

A check says what is wrong with a result, or nothing. Most checks are ties: a figure is a number that another
place in the same result has, or that number bounds it. A formula, such as "prompt_tokens / duration_s", has
the names of figures, numbers, and the four kinds of arithmetic.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmark.gate.result import Figures, NotCheckable

Value = Callable[[Figures], float]  # raises NotCheckable where what it reads is absent
Check = Callable[[Figures], str | None]
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MALFORMED = (TypeError, AttributeError, KeyError, IndexError, ArithmeticError)


def value_of(formula: str | float | Value, figures: Figures) -> float:
    """Return what a formula, a number or a function comes to; raises NotCheckable if a figure is absent."""
    if not isinstance(formula, str):
        return formula(figures) if callable(formula) else formula
    try:
        return _computed(ast.parse(formula, mode="eval").body, figures)
    except ZeroDivisionError as error:
        raise NotCheckable(f"{formula} divides by 0") from error


def _computed(node: ast.expr, figures: Figures) -> float:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_computed(node.left, figures), _computed(node.right, figures))
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, (int, float)), "formulas have numbers and the names of figures"
        return node.value
    return figures.number(ast.unparse(node))


@dataclass(frozen=True, slots=True)
class Tie:
    """A check that a figure is another number, or is at most or at least that.

    The other number is a formula, or else a constant or what a function finds, which `words` describe. Both
    may differ by `relative` times it, plus `absolute`.
    """

    figure: str
    kind: Literal["is", "at most", "at least"]
    other: str | float | Value
    relative: str | float | Value = 0.0
    absolute: str | float | Value = 0.0
    words: str = ""

    def __call__(self, figures: Figures) -> str | None:
        """Return what is wrong with the figure, or None."""
        expected, stated = value_of(self.other, figures), figures.number(self.figure)
        slack = value_of(self.relative, figures) * abs(expected) + value_of(self.absolute, figures)
        says = self.words or str(self.other)
        if self.kind == "is" and abs(stated - expected) <= slack:
            return None
        if self.kind == "is":
            return _unlike(self.figure, stated, f"but {says} is", expected, slack)
        if self.kind == "at most":
            return exceeds(self.figure, stated, says, expected, slack)
        return exceeds(says, expected, self.figure, stated, slack)


@dataclass(frozen=True, slots=True)
class Law:
    """A statement that must be true of every result; those of its checks that can be made must all pass.

    `when` raises NotCheckable for a result to which the law does not apply.
    """

    name: str
    statement: str
    checks: Sequence[Check]
    when: Callable[[Figures], object] = lambda figures: None


def rule(law: Law, figures: Figures) -> str:
    """Return what is wrong with a result by one law, "" where it passes.

    Raises NotCheckable where none of the law's checks can be made, ValueError for a figure that cannot be
    read.
    """
    wrongs, reasons = [], []
    for check in law.checks:
        try:
            law.when(figures)
            wrongs.append(check(figures))
        except NotCheckable as reason:
            reasons.append(reason)
        # A file may hold any value anywhere, and checks do not look at the type of each entry.
        except MALFORMED as error:
            raise ValueError(
                f"law {law.name!r}: a field is not of the kind that it reads: {error}"
            ) from error
    if not wrongs:
        raise reasons[0]
    return "; ".join(filter(None, wrongs))


def exceeds(what: str, value: float, bound: str, most: float, slack: float = 0.0) -> str | None:
    """Return what is wrong where `value` is above `most` by more than `slack`."""
    return None if value <= most + slack else _unlike(what, value, f"above {bound},", most, slack)


def _unlike(what: str, value: float, words: str, other: float, slack: float) -> str:
    times = f", {value / other:.3g} times" if other > 0 else ""
    tolerance = f" (tolerance {slack:.3g})" if slack else ""
    return f"{what} is {value:.6g}, {words} {other:.6g}{times}{tolerance}"
