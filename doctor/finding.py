"""How is a fault of an environment told?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from doctor.facts import MachineFacts


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, why it is one, what mends it, and who says so. One that is not fatal costs speed or peace."""

    problem: str
    cause: str
    mend: str
    source: str
    is_fatal: bool = True


Check = Callable[[MachineFacts], Finding | None]  # None: nothing is wrong here
