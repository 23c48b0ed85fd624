"""A reading and a server's own recount agree with what is there, and see what is wrong."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.inspection import Recount, Usage, recount, usage
from continuous_batching.request import Request, SamplingParams
from tests.continuous_batching.test_slot_lifecycle import ask, make

PAGE_BYTES = 1000


def gauges(engine: Engine) -> Usage:
    return usage(engine.scheduler, PAGE_BYTES)


def test_pools_are_parted_among_rows_cache_and_nobody() -> None:
    engine = make(num_slots=2, num_pages=1 + 8, num_host_pages=9)
    engine.add(ask("old", 12, 12))
    engine.add(ask("young", 12, 12))
    while engine.has_work:
        engine.step()
        seen, slots = gauges(engine), engine.slots
        rows = {page for row in slots.busy.tolist() for page in slots.pages(row).tolist()}
        left = engine.scheduler.lifecycle.swap.all_left.values()
        assert seen.held_pages == len(rows)
        assert seen.held_pages + seen.idle_pages + seen.free_pages == 8
        assert seen.swapped_host_pages == sum(len(each.pages) for each in left)
        assert seen.swapped_host_pages + seen.resting_host_pages + seen.free_host_pages == 8
        assert (seen.running_requests, seen.waiting_requests) == (
            len(slots.busy),
            len(engine.scheduler.waiting),
        )
    assert seen.swapped_out_bytes == seen.swapped_in_bytes > 0


def test_samples_without_a_row_wait_whatever_they_wait_for() -> None:
    """As the limit on the queue counts them."""
    engine = make(num_slots=2, num_pages=1 + 40)
    engine.add(ask("first", 12, 8, num_samples=3))
    engine.add(ask("second", 12, 8, num_samples=4))
    seen = [gauges(engine)]
    for _ in range(2):
        engine.step()
        seen.append(gauges(engine))
    assert [each.running_requests + each.waiting_requests for each in seen] == [7, 7, 7]
    assert seen[0].running_requests == 0
    while engine.has_work:
        engine.step()
    assert gauges(engine).waiting_requests == 0


def test_bytes_are_those_of_the_copies() -> None:
    engine = make(num_slots=3, num_pages=1 + 14, num_host_pages=12, compact_every_steps=3)
    for number in range(6):
        engine.add(ask(f"r{number}", 22, 9, num_samples=2))
        engine.add(Request(f"again {number}", ask("r0", 22, 1).prompt, SamplingParams(max_tokens=2)))
    copied: Counter[str] = Counter()
    while engine.has_work:
        step = engine.step()
        assert step is not None
        for copy in step.batch.copies:
            copied[copy.way] += PAGE_BYTES * len(copy.sources)
    seen = gauges(engine)
    assert min(copied.values()) > 0
    assert copied["to_host"] == seen.rested_bytes + seen.swapped_out_bytes
    assert copied["from_host"] == seen.promoted_bytes + seen.swapped_in_bytes
    assert copied["within"] == seen.compacted_bytes + seen.copied_on_write_bytes
    assert min(seen.compacted_bytes, seen.copied_on_write_bytes, seen.promoted_bytes) > 0


def test_free_pages_below_the_highest_held_one_are_fragmented() -> None:
    engine = make(num_pages=41, prefix_sharing=False)
    for name, max_tokens in (("short", 2), ("long", 20)):
        engine.add(ask(name, 20, max_tokens))
    engine.step()
    assert gauges(engine).fragmentation == 0.0
    engine.step()
    seen, pool = gauges(engine), engine.scheduler.pool
    below = np.flatnonzero(pool.holders[: pool.highest_held] == 0)
    assert seen.fragmentation == len(below) / pool.num_free > 0
    engine.scheduler.tables.compact(engine.scheduler.pool.num_pages)
    assert gauges(engine).fragmentation == 0.0


@pytest.mark.parametrize("what", ["nobody gives it back", "free and held"])
def test_a_recount_sees_a_page_that_is_nobodys_or_held_twice(what: str) -> None:
    engine = make()
    engine.add(ask("a", 20, 9))
    engine.step()
    assert recount(engine.scheduler) == Recount(wrong_pages=0, shared_pages=0)
    if what == "free and held":
        engine.scheduler.pool.release(engine.slots.pages(int(engine.slots.busy[0]))[-1:])
    else:
        engine.scheduler.pool.take(1)
    assert recount(engine.scheduler).wrong_pages == 1


def test_a_recount_counts_the_pages_that_several_hold() -> None:
    engine = make()
    engine.add(ask("a", 20, 9, num_samples=3))
    engine.step()
    assert recount(engine.scheduler) == Recount(wrong_pages=0, shared_pages=5)
