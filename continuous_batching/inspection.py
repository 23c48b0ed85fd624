"""Measure the use of the page pools and verify the holder counts of all pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from continuous_batching.paging.page_tables import EMPTY
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from kv_cache.prefix_index import Lookup


@dataclass(frozen=True, slots=True)
class Usage:
    """One reading of the pools and the queue. The null page of each pool is not counted.

    Pages are those of layers that keep all tokens; `window_..._pages` are those of layers with a window, and
    `state_..._pages` are recurrent states: held by rows and as checkpoints, and the totals of checkpoints
    that were taken, found and evicted.
    `fragmentation` is the share of the free pages that lie below the highest page in use: a smaller pool
    could not give back that many without compaction, while a paged operator is not affected. `lookups` counts
    how new requests fared in the prefix cache: "whole", or the reason why they found no more of their usable
    prefix; requests that wait for a page which another row computes are not counted. Bytes are totals since
    the start.
    """

    running_requests: int  # samples with a row
    waiting_requests: int  # samples without one, also those that wait for their leader's prompt
    # Tokens still to be computed for waiting requests and running prefills, after their prefix hits
    queued_tokens: int
    held_pages: int  # pages in use by rows
    idle_pages: int  # cached pages that no row uses
    free_pages: int
    fragmentation: float
    swapped_host_pages: int  # host pages of preempted requests that wait
    resting_host_pages: int  # evicted pages that can still be found in the host pool
    free_host_pages: int
    hit_rate: float  # share of prompt tokens found in the prefix cache
    host_hit_rate: float  # share of prompt tokens found in the host pool
    lookups: dict[Lookup, int]
    copied_on_write_bytes: int
    compacted_bytes: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    rested_bytes: int
    promoted_bytes: int
    window_held_pages: int = 0
    window_idle_pages: int = 0
    window_free_pages: int = 0
    state_held_pages: int = 0
    state_idle_pages: int = 0
    state_free_pages: int = 0
    state_taken_pages: int = 0
    state_hit_pages: int = 0
    state_evicted_pages: int = 0
    state_resting_pages: int = 0


def usage(scheduler: Scheduler, page_bytes: int, further_page_bytes: Sequence[int] = ()) -> Usage:
    """Read the usage between steps.

    `page_bytes` is the size of a page over all layers that keep all tokens, `further_page_bytes` that over
    the layers of each window, and that of a state.
    """
    pool, prefix, host = scheduler.pool, scheduler.prefix, scheduler.host_pool
    counters, groups = scheduler.counters, scheduler.tables.groups
    sizes, states = [page_bytes, *further_page_bytes], scheduler.tables.states
    windows = [group for group in groups[1:] if not group.is_of_rows]

    def moved(name: str) -> int:
        """Return the bytes of all pages of which a counter has this name."""
        return sum(getattr(each.counts, name) * size for each, size in zip(groups, sizes))

    holes = pool.highest_held - pool.num_held
    num_prompt = max(1, counters.prompt_tokens)
    return Usage(
        running_requests=len(scheduler.slots.busy),
        waiting_requests=scheduler.num_waiting,
        queued_tokens=queued_tokens(scheduler),
        held_pages=groups[0].num_used,
        idle_pages=prefix.num_idle,
        free_pages=pool.num_free,
        window_held_pages=sum(each.num_used for each in windows),
        window_idle_pages=sum(each.num_idle for each in windows),
        window_free_pages=sum(each.pool.num_free for each in windows),
        state_held_pages=0 if states is None else states.num_used,
        state_idle_pages=0 if states is None else states.num_idle,
        state_free_pages=0 if states is None else states.pool.num_free,
        state_taken_pages=0 if states is None else states.num_taken,
        state_hit_pages=0 if states is None else states.num_hits,
        state_evicted_pages=0 if states is None else states.counts.evicted_pages,
        state_resting_pages=0 if states is None else states.num_resting,
        fragmentation=holes / max(1, pool.num_free),
        swapped_host_pages=0 if host is None else host.num_held - prefix.num_resting,
        resting_host_pages=prefix.num_resting,
        free_host_pages=0 if host is None else host.num_free,
        hit_rate=counters.hit_tokens / num_prompt,
        host_hit_rate=counters.host_hit_tokens / num_prompt,
        lookups=dict(prefix.lookups),
        copied_on_write_bytes=moved("copied_pages"),
        compacted_bytes=moved("compacted_pages"),
        swapped_out_bytes=moved("swapped_out_pages"),
        swapped_in_bytes=moved("swapped_in_pages"),
        rested_bytes=moved("rested_pages"),
        promoted_bytes=moved("promoted_pages"),
    )


def queued_tokens(scheduler: Scheduler) -> int:
    """Count the tokens of prompts and preempted answers still to be computed, without prefix hits."""
    slots, busy = scheduler.slots, scheduler.slots.busy
    running = int(np.maximum(slots.num_prompt[busy] - slots.num_computed[busy], 0).sum())
    return running + tokens_not_found(scheduler, scheduler.waiting)


def tokens_not_found(scheduler: Scheduler, requests: Iterable[Request]) -> int:
    """Count the tokens of these requests that would not be prefix hits if the requests started now."""
    index, page_size = scheduler.prefix.index, scheduler.slots.page_size
    return sum(len(each.tokens) - index.num_known(each.page_keys) * page_size for each in requests)


@dataclass(frozen=True, slots=True)
class Recount:
    """The result of a recount of all holders.

    A page is wrong if it is both free and held, or neither, or if its holders are not the rows, the prefix
    cache and the holds for other engines.
    """

    shared_pages: int  # pages in use by more than one row
    wrong_pages: int


def recount(scheduler: Scheduler) -> Recount:
    """Recount the holders of all pages, between steps; the cost is one look at every page in use.

    A server runs this from time to time, and tests run it after each step.
    """
    busy, held = scheduler.slots.busy, scheduler.lifecycle.held
    first, *others = scheduler.tables.groups
    wrong = first.num_wrong(busy, held.pages)
    wrong += sum(group.num_wrong(busy, held.states if group.is_of_rows else EMPTY) for group in others)
    return Recount(int((first.users(busy)[1:] > 1).sum()), wrong)
