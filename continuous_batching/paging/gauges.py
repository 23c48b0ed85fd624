"""How full are the pools now, and what was moved to keep them so?"""

from __future__ import annotations

from dataclasses import dataclass

from continuous_batching.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Gauges:
    """One reading. The first pages of both pools, which stay empty, are not counted.

    `fragmentation` is the share of the free pages that lie below the highest page in use: so many of them
    a smaller pool could not give back without compaction, and a paged operator does not mind. `lookups`
    counts what newcomers found of the prefix that they could use, as "whole", or by the reason why no more;
    those that wait for a page which another computes are not among them. Bytes are sums since the start.
    """

    running_requests: int
    waiting_requests: int
    held_pages: int  # in use by rows
    idle_pages: int  # cached, and in use by nobody
    free_pages: int
    fragmentation: float
    swapped_host_pages: int  # of waiting requests that were preempted
    resting_host_pages: int  # evicted, and found there
    free_host_pages: int
    hit_rate: float  # of prompt tokens, found in the prefix cache
    host_hit_rate: float  # of prompt tokens, found at rest
    lookups: dict[str, int]
    copied_on_write_bytes: int
    compacted_bytes: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    rested_bytes: int
    promoted_bytes: int


def read(scheduler: Scheduler, page_bytes: int) -> Gauges:
    """Read them between steps; `page_bytes` is what a page takes in all layers."""
    pool, prefix, host = scheduler.pool, scheduler.residency.prefix, scheduler.residency.swap.pool
    counters, history = scheduler.counters, prefix.history
    holes = pool.highest_held - pool.num_held
    num_prompt = max(1, counters.prompt_tokens)
    return Gauges(
        running_requests=len(scheduler.slots.busy),
        waiting_requests=len(scheduler.waiting),
        held_pages=pool.num_held - prefix.num_idle,
        idle_pages=prefix.num_idle,
        free_pages=pool.num_free,
        fragmentation=holes / max(1, pool.num_free),
        swapped_host_pages=0 if host is None else host.num_held - prefix.num_resting,
        resting_host_pages=prefix.num_resting,
        free_host_pages=0 if host is None else host.num_free,
        hit_rate=counters.hit_tokens / num_prompt,
        host_hit_rate=counters.host_hit_tokens / num_prompt,
        lookups={"whole": history.num_whole_hits, **{str(why): n for why, n in history.misses.items()}},
        copied_on_write_bytes=counters.copied_pages * page_bytes,
        compacted_bytes=counters.compacted_pages * page_bytes,
        swapped_out_bytes=counters.swapped_out_pages * page_bytes,
        swapped_in_bytes=counters.swapped_in_pages * page_bytes,
        rested_bytes=counters.rested_pages * page_bytes,
        promoted_bytes=counters.promoted_pages * page_bytes,
    )
