"""How is a figure held to another source of it in the same file?

A tie says where the other source is and what it says; the laws of a source are all ties to it, so that who
adds a figure to the table adds its checks.
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
    """`value` computes the figure from `source`, and raises NotCheckable where that is absent.

    Two numbers may differ by `relative` times the other one plus `absolute`.
    """

    source: str
    says: str
    value: Callable[[Figures], float]
    kind: Kind = "is"
    relative: float = 0.0
    absolute: float = 0.0

    def wrong(self, name: str, stated: float, figures: Figures) -> str | None:
        """What is wrong with a figure, or None."""
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

    `aliases` are other names under which it may stand again. `laws` names the laws, other than ties, that
    hold it to something. Where there is neither, `alone` says why.
    """

    name: str
    unit: str
    aliases: tuple[str, ...] = ()
    ties: tuple[Tie, ...] = ()
    laws: tuple[str, ...] = ()
    alone: str = ""


def laws_of(table: Iterable[Figure], statements: dict[str, tuple[str, str]]) -> tuple[Law, ...]:
    """One law for each source: every figure that is tied to it. `statements` gives a source's law its words,
    and the field without which there is no such source."""
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
