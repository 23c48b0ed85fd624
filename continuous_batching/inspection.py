"""How full are the pools now, what was moved to keep them so, and do the holders of pages agree?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from kv_cache.pages import NULL_PAGE
from kv_cache.prefix_index import Lookup


@dataclass(frozen=True, slots=True)
class Usage:
    """One reading. The first pages of both pools, which stay empty, are not counted.

    `fragmentation` is the share of the free pages that lie below the highest page in use: so many of them
    a smaller pool could not give back without compaction, and a paged operator does not mind. `lookups`
    counts what newcomers found of the prefix that they could use, as "whole", or by the reason why no more;
    those that wait for a page which another computes are not among them. Bytes are sums since the start.
    """

    running_requests: int
    waiting_requests: int
    queued_tokens: int  # known of those that wait or are being prefilled, to be computed after their hits
    held_pages: int  # in use by rows
    idle_pages: int  # cached, and in use by nobody
    free_pages: int
    fragmentation: float
    swapped_host_pages: int  # of waiting requests that were preempted
    resting_host_pages: int  # evicted, and found there
    free_host_pages: int
    hit_rate: float  # of prompt tokens, found in the prefix cache
    host_hit_rate: float  # of prompt tokens, found at rest
    lookups: dict[Lookup, int]
    copied_on_write_bytes: int
    compacted_bytes: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    rested_bytes: int
    promoted_bytes: int


def usage(scheduler: Scheduler, page_bytes: int) -> Usage:
    """Read it between steps; `page_bytes` is what a page takes in all layers."""
    pool, prefix, host = scheduler.pool, scheduler.prefix, scheduler.host_pool
    counters = scheduler.counters
    holes = pool.highest_held - pool.num_held
    num_prompt = max(1, counters.prompt_tokens)
    return Usage(
        running_requests=len(scheduler.slots.busy),
        waiting_requests=len(scheduler.waiting),
        queued_tokens=queued_tokens(scheduler),
        held_pages=pool.num_held - prefix.num_idle,
        idle_pages=prefix.num_idle,
        free_pages=pool.num_free,
        fragmentation=holes / max(1, pool.num_free),
        swapped_host_pages=0 if host is None else host.num_held - prefix.num_resting,
        resting_host_pages=prefix.num_resting,
        free_host_pages=0 if host is None else host.num_free,
        hit_rate=counters.hit_tokens / num_prompt,
        host_hit_rate=counters.host_hit_tokens / num_prompt,
        lookups=dict(prefix.lookups),
        copied_on_write_bytes=counters.copied_pages * page_bytes,
        compacted_bytes=counters.compacted_pages * page_bytes,
        swapped_out_bytes=counters.swapped_out_pages * page_bytes,
        swapped_in_bytes=counters.swapped_in_pages * page_bytes,
        rested_bytes=counters.rested_pages * page_bytes,
        promoted_bytes=counters.promoted_pages * page_bytes,
    )


def queued_tokens(scheduler: Scheduler) -> int:
    """Tokens of prompts, and of preempted answers, to be computed: all but what would be found."""
    slots, busy = scheduler.slots, scheduler.slots.busy
    running = int(np.maximum(slots.num_prompt[busy] - slots.num_computed[busy], 0).sum())
    return running + tokens_not_found(scheduler, scheduler.waiting)


def tokens_not_found(scheduler: Scheduler, requests: Iterable[Request]) -> int:
    """The tokens of requests that would not be found, if these began now."""
    index, page_size = scheduler.prefix.index, scheduler.slots.page_size
    return sum(len(each.tokens) - index.num_known(each.page_keys) * page_size for each in requests)


@dataclass(frozen=True, slots=True)
class Recount:
    """What a recount found.

    A wrong page is both free and held, or neither, or has other holders than the slots, the cache and what is
    held for other engines.
    """

    shared_pages: int  # in use by more than one row
    wrong_pages: int


def recount(scheduler: Scheduler) -> Recount:
    """Count the holders of all pages again, between steps; it looks at every page in use once.

    A server asks for it now and then, and tests after each step.
    """
    slots, pool = scheduler.slots, scheduler.pool
    counts = slots.num_pages[slots.busy]
    columns = np.arange(int(counts.max(initial=0)))
    pages = slots.page_table[slots.busy, : len(columns)][columns < counts[:, None]]
    users = np.bincount(pages, minlength=pool.num_pages)
    holders = users.copy()
    holders[scheduler.prefix.pages] += 1
    holders += np.bincount(scheduler.lifecycle.held.pages, minlength=pool.num_pages)
    holders[NULL_PAGE] = 1
    is_free = np.zeros(pool.num_pages, dtype=np.bool_)
    is_free[pool.free_pages] = True
    wrong = (holders != pool.holders) | (is_free != (holders == 0))
    return Recount(int((users[1:] > 1).sum()), int(wrong.sum()))
