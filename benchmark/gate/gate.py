"""Audit a result of a benchmark against all laws that concern it, and print what they say.

Each field of a result is kept with its digest, so that a file that was changed since is refused. This guards
against a changed file, not against someone who computes the digests again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.gate import table
from benchmark.gate.law import Law, rule
from benchmark.gate.measurement import MACHINE_LAWS, MEASURED_LAWS
from benchmark.gate.result import Fields, Figures, NotCheckable
from benchmark.gate.table import under_ours

LATER = ("digests", "verdict")  # fields that are added when the others are known
SHOWN = 16  # hexadecimal digits of a digest that are kept
PUBLISHED = Path(__file__).with_name("published.json")


def digests(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each field as JSON, whatever the order in its objects."""
    texts = {
        name: json.dumps(json.loads(json.dumps(value)), sort_keys=True)
        for name, value in sorted(fields.items())
        if name not in LATER
    }
    return {name: hashlib.sha256(text.encode()).hexdigest()[:SHOWN] for name, text in texts.items()}


def unchanged(figures: Figures) -> str | None:
    """Check that every field is there, and is as it was when the result was made."""
    stated = figures.needed("digests")
    found = digests(figures.stated)
    changed = [name for name in sorted({*stated, *found}) if stated.get(name) != found.get(name)]
    return "; ".join(f"{name} was changed" for name in changed) or None


LAWS: tuple[Law, ...] = (*table.LAWS, *MEASURED_LAWS)
ANYWHERE: tuple[Law, ...] = (
    *MACHINE_LAWS,
    Law("digests", "each field is as it was when the result was made", [unchanged]),
)


def audit(fields: Fields, laws: Iterable[Law] | None = None) -> dict[str, Any]:
    """Check a result against the laws, with figures under our names or vllm's.

    Returns the outcome, "pass" or "refused", with the laws that pass by name, and the others with their
    reasons. Benchmarks of parts, such as `host`, have tables of their own under the names of figures, so that
    only the laws of any result apply to them. Raises ValueError if a figure cannot be read, or if there is
    none that a law could check.
    """
    if laws is None:
        laws = (*(LAWS if fields.get("benchmark", "serve") == "serve" else ()), *ANYWHERE)
    figures, refused, passed, silent = Figures(under_ours(fields), fields), {}, [], {}
    for law in laws:
        try:
            why = rule(law, figures)
        except NotCheckable as reason:
            silent[law.name] = str(reason)
            continue
        if why:
            refused[law.name] = why
        else:
            passed.append(law.name)
    if not refused and not passed:
        raise ValueError("no law can be checked: the result has no figure that is known by its name")
    outcome = "refused" if refused else "pass"
    return {"outcome": outcome, "refused": refused, "passed": passed, "not_checkable": silent}


def with_verdict(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result with its fields' digests and its verdict; the records come last."""
    whole = {**result, "digests": digests(result)}
    verdict = audit(whole)
    kept = {"records": whole.pop("records")} if "records" in whole else {}
    return {**whole, "verdict": verdict, **kept}


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One row of a published table, or a figure that its author states in passing, with the verdict on it."""

    source: str
    name: str
    result: dict[str, Any]
    verdict: dict[str, Any]


def published() -> list[PublishedRow]:
    """Audit all published rows, in the order of their file."""
    stated = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return [
        PublishedRow(each["source"], each["row"], each["result"], audit(each["result"])) for each in stated
    ]
