"""The ledger, counted again from scratch: what must hold between any two operations."""

from __future__ import annotations

from collections import Counter

import numpy as np

from continuous_batching import inspection
from continuous_batching.scheduling.scheduler import Scheduler
from kv_cache.pages import NULL_PAGE
from tests.continuous_batching.windows import recount_windows


def recount(scheduler: Scheduler) -> None:
    """Assert every invariant of slots, pages, prefix cache and queue."""
    slots, pool, prefix = scheduler.slots, scheduler.pool, scheduler.prefix

    # holders are what slots and cache hold; free and held pages are all pages
    holders: Counter[int] = Counter({NULL_PAGE: 1})
    for row in slots.busy.tolist():
        pages = slots.pages(row).tolist()
        assert len(set(pages)) == len(pages), f"row {row} holds a page twice"
        holders.update(pages)
    holders.update(prefix.pages.tolist())
    holders.update(scheduler.lifecycle.held.pages.tolist())
    assert np.array_equal(pool.holders, [holders[page] for page in range(pool.num_pages)])
    free = pool.free_pages.tolist()
    assert len(set(free)) == len(free), "a page is free twice"
    assert set(free) == {page for page in range(pool.num_pages) if not holders[page]}

    # idle is exactly: held by the cache alone
    idle = {page for page in prefix.pages.tolist() if holders[page] == 1}
    assert set(prefix.idle_pages.tolist()) == idle

    # the host pool holds what waiting requests left there, evicted pages that rest, and nothing else
    swapped = scheduler.lifecycle.swap.all_left
    assert set(swapped) <= {request.number for request in scheduler.waiting.requests}
    host = scheduler.host_pool
    if host is not None:
        left = Counter(page for each in swapped.values() for page in each.pages.tolist())
        left.update(prefix.resting_pages.tolist())
        assert np.array_equal(host.holders[1:], [left[page] for page in range(1, host.num_pages)])

    recount_windows(scheduler)
    if scheduler.tables.states is not None:
        assert not inspection.recount(scheduler).wrong_pages

    # rows
    busy = slots.busy
    rows, in_flight = busy.tolist(), set(scheduler.in_flight.rows.tolist())
    assert len(set(rows)) == len(rows) == slots.num_slots - slots.num_free
    numbers = slots.number[busy].tolist()
    assert numbers == sorted(set(numbers)), "busy is not oldest first"
    counts = (slots.num_computed, slots.num_tokens, slots.limit, slots.num_pages, slots.num_published)
    for row, computed, known, limit, num_pages, published in zip(
        rows, *(each[busy].tolist() for each in counts)
    ):
        assert computed < known or row in in_flight  # a fork's first token is on its way
        assert known < limit
        assert published * slots.page_size <= computed <= num_pages * slots.page_size

    # who holds a cached page holds the page it continues, so that leaves are evicted before parents
    for row in rows:
        cached = prefix.is_cached(slots.pages(row)).tolist()
        assert cached == sorted(cached, reverse=True), f"row {row} holds a cached page after a private one"
    names = prefix.index.names
    assert sorted(names[names < 0].tolist()) == sorted((-prefix.resting_pages).tolist())
    order = {
        name: at for at, name in enumerate([*(-prefix.resting_pages).tolist(), *prefix.idle_pages.tolist()])
    }
    for page, parent in prefix.index.parents().items():
        assert page not in order or order.get(parent, len(order)) > order[page], (
            "a parent goes before its leaf"
        )
        assert parent > 0 or page < 0, "a page on the device continues one that rests"

    # a page that may be written (beyond what is computed) is nobody else's
    for row in rows:
        if row in scheduler.tables.forked or row in in_flight:
            continue  # it gets a copy before it writes; or what it writes may be forked already
        writable = slots.pages(row)[slots.num_computed[row] // slots.page_size :]
        assert (pool.holders[writable] == 1).all(), f"row {row} may write to a shared page"

    # a request is in one place
    running = {slots.requests[row].id for row in rows if row not in scheduler.in_flight.outrun}
    waiting = {request.id for request in scheduler.waiting.requests}
    assert not running & waiting
    assert slots.running_ids == running
