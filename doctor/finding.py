"""Define what a check reports about a fault in an environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from doctor.facts import MachineFacts


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, its cause, its fix, and the document that says so; one that is not fatal is advice."""

    problem: str
    cause: str
    fix: str
    source: str
    is_fatal: bool = True


Check = Callable[[MachineFacts], Finding | None]  # None: the check found no fault
