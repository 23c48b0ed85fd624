"""Read a result, and print verdicts and the tables of published sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmark.gate.gate import Verdict
from benchmark.gate.sources import rows
from borders.file_bounds import read_bounded

MOST_BYTES = 2**27  # most bytes of a result: 100,000 records have some 50 MiB


def read_result(path: Path) -> dict[str, Any]:
    """Read the result in a file; raises ValueError or OSError for a file that holds none."""
    data = read_bounded(path, MOST_BYTES)
    try:
        fields = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits raises a plain ValueError
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no object; it must be one result of a benchmark")
    return fields


def print_verdict(verdict: Verdict) -> None:
    """Print one law a line, the refused ones first, with the numbers that each read."""
    for outcome in ("refused", "pass", "not checkable"):
        for ruling in verdict.of(outcome):
            used = ", ".join(f"{name} {number:g}" for name, number in ruling.used.items())
            why = ruling.why or ruling.law.statement
            print(f"{outcome:14} {ruling.law.name:18} {why}" + (f"  [{used}]" if used else ""))


def print_sources() -> None:
    """Print each row of the sources, with each law that it breaks."""
    source = ""
    for row in rows():
        if row.source != source:
            source = row.source
            print(source)
        for ruling in row.verdict.of("refused"):
            print(f"  {row.name:30} {ruling.law.name:18} {ruling.why}")
        if row.verdict.passed:
            print(f"  {row.name:30} {'pass':18}")
