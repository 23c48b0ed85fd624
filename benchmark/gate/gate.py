"""Audit a result of a benchmark against all laws that concern it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmark.gate import (
    batches,
    claims,
    client,
    clocks,
    facts,
    machine,
    micro,
    names,
    readings,
    records,
    runs,
    served,
    server,
    settings,
    shape,
    summary,
    table,
)
from benchmark.gate.law import Fields, Law, Outcome, Ruling, rule
from benchmark.gate.names import under_ours

LAWS: tuple[Law, ...] = (
    *summary.LAWS,
    *records.LAWS,
    *served.LAWS,
    *client.LAWS,
    *server.LAWS,
    *batches.LAWS,
    *names.LAWS,
    *claims.LAWS,
    *table.LAWS,
    *readings.LAWS,
    *runs.LAWS,
)
ANYWHERE: tuple[Law, ...] = (
    *clocks.LAWS,
    *machine.LAWS,
    *settings.LAWS,
    *shape.LAWS,
    *facts.LAWS,
)  # apply to every verb's results


@dataclass(frozen=True, slots=True)
class Verdict:
    """The rulings of all laws on one result."""

    rulings: list[Ruling]

    @property
    def passed(self) -> bool:
        return not self.of("refused")

    def of(self, outcome: Outcome) -> list[Ruling]:
        """Return the rulings of one outcome."""
        return [ruling for ruling in self.rulings if ruling.outcome == outcome]

    def describe(self) -> dict[str, Any]:
        """Return the verdict as data: laws that pass by name, the others with their reasons."""
        return {
            "outcome": "pass" if self.passed else "refused",
            "refused": {each.law.name: each.why for each in self.of("refused")},
            "passed": [each.law.name for each in self.of("pass")],
            "not_checkable": {each.law.name: each.why for each in self.of("not checkable")},
        }


def laws_for(fields: Fields) -> tuple[Law, ...]:
    """Return the laws for a kind of benchmark; small benchmarks have figures and laws of their own."""
    return (*micro.LAWS.get(str(fields.get("benchmark")), LAWS), *ANYWHERE)


def audit(fields: Fields, laws: Iterable[Law] | None = None) -> Verdict:
    """Check a result against the laws, with figures under our names or vllm's.

    Raises ValueError if a figure cannot be read, or if there is no figure that a law could check.
    """
    laws = laws_for(fields) if laws is None else laws
    known = under_ours(fields)
    met = [law for law in laws if not law.about or known.get(law.about) is not None]
    verdict = Verdict([rule(law, known, fields) for law in met])
    if len(verdict.of("not checkable")) == len(verdict.rulings):
        raise ValueError("no law can be checked: the result has no figure that is known by its name")
    return verdict


def with_verdict(result: dict[str, object]) -> dict[str, object]:
    """Return the result with its facts' digests and its verdict; the records come last."""
    whole = {**result, "facts": facts.digests(result)}
    kept = whole.pop("records", None)
    verdict = audit(whole if kept is None else {**whole, "records": kept}).describe()
    return {**whole, "verdict": verdict, **({} if kept is None else {"records": kept})}
