"""Choose the row that is preempted when pages run short.

A victim choice takes the slot table and the rows that may be preempted, oldest first. The oldest of all is
never among them, so that it always makes progress. Of equal candidates the youngest is chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from continuous_batching.slots import SlotPool
from kv_cache.pages import Index

Victim = Callable[[SlotPool, Index], int]


def youngest(slots: SlotPool, rows: Index) -> int:
    """Choose the request that arrived last: first come, first served to the end."""
    return int(rows[-1])


def fewest_lost(slots: SlotPool, rows: Index) -> int:
    """Choose the request with the fewest computed tokens that the prefix cache does not hold."""
    rows = rows[::-1]
    lost = slots.num_computed[rows] - slots.num_published[rows] * slots.page_size
    return int(rows[np.argmin(lost)])


def lowest_priority(slots: SlotPool, rows: Index) -> int:
    """Choose the request of the lowest priority."""
    rows = rows[::-1]
    return int(rows[np.argmin(slots.priority[rows])])
