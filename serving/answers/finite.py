"""How is a number written that JSON cannot say?"""

from __future__ import annotations

import math

_NO_CHANCE = -9999.0  # stands for a log-probability of minus infinity, or for none at all


def finite(value: float) -> float:
    """A log-probability or a score as JSON can say it."""
    return value if math.isfinite(value) else _NO_CHANCE
