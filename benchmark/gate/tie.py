"""Check a figure against another source of it in the same file.

A tie names the other source and says how to compute the figure from it. The law of a source consists of all
ties to it, so adding a figure to the table adds its checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, first

Kind = Literal["is", "at most", "at least"]


@dataclass(frozen=True, slots=True)
class Tie:
    """A second source of a figure.

    `value` computes the figure from `source`, and raises NotCheckable where that is absent. The two numbers
    may differ by `relative` times the second one plus `absolute`.
    """

    source: str
    says: str
    value: Callable[[Figures], float]
    kind: Kind = "is"
    relative: float = 0.0
    absolute: float = 0.0

    def wrong(self, name: str, stated: float, figures: Figures) -> str | None:
        """Return what is wrong with a figure, or None."""
        expected = self.value(figures)
        slack = self.relative * abs(expected) + self.absolute
        what = f"{self.says} ({self.source})"
        if self.kind == "is":
            return differs(name, stated, what, expected, slack)
        if self.kind == "at most":
            return exceeds(name, stated, what, expected, slack)
        return exceeds(what, expected, name, stated, slack)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a result: its name, its unit, and what ties it to the rest of the file.

    `aliases` are other names under which the file may state it again. `laws` names the laws, other than ties,
    that check it. Where there is neither, `alone` says why.
    """

    name: str
    unit: str
    aliases: tuple[str, ...] = ()
    ties: tuple[Tie, ...] = ()
    laws: tuple[str, ...] = ()
    alone: str = ""


def laws_of(table: Iterable[Figure], statements: dict[str, tuple[str, str]]) -> tuple[Law, ...]:
    """Return one law for each source, over every figure that is tied to it.

    `statements` gives the statement of a source's law, and the field without which there is no such source.
    """
    rows = tuple(table)
    unknown = {tie.source for row in rows for tie in row.ties} - set(statements)
    assert not unknown, f"no statement says what is held to {unknown}"
    return tuple(
        Law(source, statement, partial(_check, rows, source), about)
        for source, (statement, about) in statements.items()
    )


def _check(rows: tuple[Figure, ...], source: str, figures: Figures) -> str | None:
    wrongs: list[str | None] = []
    reasons: list[str] = []
    for row in rows:
        for tie in row.ties:
            if tie.source != source:
                continue
            try:
                wrongs.append(tie.wrong(row.name, figures.number(row.name), figures))
            except NotCheckable as reason:
                reasons.append(str(reason))
    if not wrongs:
        raise NotCheckable(reasons[0] if reasons else "no figure is tied to it")
    return first(wrongs)
