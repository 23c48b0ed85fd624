"""Audit each row of the published sources' tables, and say which laws it breaks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmark.gate.gate import Verdict, audit

PATH = Path(__file__).with_name("sources.json")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source, or a figure that it states in passing, with the verdict on it."""

    source: str
    name: str
    note: str
    verdict: Verdict


def rows() -> list[Row]:
    """Return all rows, in the order of the file."""
    stated = json.loads(PATH.read_text(encoding="utf-8"))
    return [Row(each["source"], each["row"], each["note"], audit(each["result"])) for each in stated]
