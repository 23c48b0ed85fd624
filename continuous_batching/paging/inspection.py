"""Do the pages' holders agree with a recount? Asked of a server now and then; tests ask after each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from continuous_batching.scheduling.scheduler import Scheduler
from kv_cache.pages import NULL_PAGE


@dataclass(frozen=True, slots=True)
class Ledger:
    """One recount. A wrong page is free and held, neither, or has other holders than slots and cache are."""

    shared_pages: int  # in use by more than one row
    wrong_pages: int


def recount(scheduler: Scheduler) -> Ledger:
    """Count again, between steps. It takes as long as looking at every page in use once."""
    slots, pool = scheduler.slots, scheduler.pool
    counts = slots.num_pages[slots.busy]
    columns = np.arange(int(counts.max(initial=0)))
    pages = slots.page_table[slots.busy, : len(columns)][columns < counts[:, None]]
    users = np.bincount(pages, minlength=pool.num_pages)
    holders = users.copy()
    holders[scheduler.residency.prefix.pages] += 1
    holders[NULL_PAGE] = 1
    is_free = np.zeros(pool.num_pages, dtype=np.bool_)
    is_free[pool.free_pages] = True
    wrong = (holders != pool.holders) | (is_free != (holders == 0))
    return Ledger(int((users[1:] > 1).sum()), int(wrong.sum()))
