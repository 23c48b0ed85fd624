"""Forks, copies on write, swaps, compaction and resizes, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.policies.policy import Policy
from continuous_batching.policies.prefill_budget import FixedChunks
from continuous_batching.queueing import Aged, WaitingQueue
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.preemption import fewest_lost, lowest_priority, youngest
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, alone
from tests.continuous_batching.recount import recount
from tests.continuous_batching.windows import window_groups


def make(
    num_slots: int = 4,
    num_pages: int = 40,
    num_host_pages: int | None = None,
    windows: Sequence[int] = (),
    *,
    policy: Policy | None = None,
    budget: int = 64,
    page_size: int = 4,
    clock: Callable[[], float] = lambda: 0.0,
    **options: Any,
) -> Engine:
    """A small engine over the checksum model; `options` are the scheduler's."""
    slots, pool = SlotPool(num_slots, 128, page_size), PagePool(num_pages)
    host = None if num_host_pages is None else PagePool(num_host_pages)
    groups = window_groups(windows, slots, pool, host, [num_pages] * len(windows), num_host_pages or 0)
    scheduler = Scheduler(
        slots,
        pool,
        policy or StallFree(),
        max_batch_tokens=budget,
        vocab_size=VOCAB_SIZE,
        host_pool=host,
        groups=groups,
        **options,
    )
    return Engine(scheduler, ChecksumRunner(slots, pool, host, groups), clock=clock)


def ask(name: str, num_prompt: int = 4, max_tokens: int = 8, num_samples: int = 1, **fields: Any) -> Request:
    prompt = np.random.default_rng(sum(map(ord, name))).integers(0, VOCAB_SIZE, num_prompt)
    samples = [
        Request(f"{name}{index or ''}", prompt, SamplingParams(max_tokens=max_tokens, seed=index), **fields)
        for index in range(num_samples)
    ]
    samples[0].followers = samples[1:]
    return samples[0]


def run_out(engine: Engine) -> list[Request]:
    finished = []
    while engine.has_work:
        step = engine.step()
        assert step is not None
        finished += step.finished
        recount(engine.scheduler)
    return finished


def check(*requests: Request) -> None:
    for request in requests:
        want = alone(request.prompt.tolist(), request.params.max_tokens, seed=request.params.seed or 0)
        assert request.answer.tolist() == want


def test_samples_of_a_prompt_share_its_pages_and_copy_the_last_on_write() -> None:
    engine = make()
    leader = ask("a", num_prompt=10, max_tokens=6, num_samples=3)
    followers = list(leader.followers)
    engine.add(leader)
    step = engine.step()
    assert step is not None
    assert step.batch.num_tokens == 10, "the prompt is computed once"
    assert step.batch.sampled.tolist() == [0, 0, 0]
    tables = [engine.slots.pages(row).tolist() for row in engine.slots.busy.tolist()]
    assert tables[0] == tables[1] == tables[2]
    run_out(engine)
    assert engine.scheduler.counters.copied_pages == 2, "the last holder writes in place"
    assert [each.admitted_s for each in followers] == [leader.admitted_s] * 2 == [0.0] * 2
    check(leader, *followers)


@pytest.mark.parametrize("when", ["waiting", "chunking"])
def test_when_a_leader_is_aborted_the_next_sample_leads(when: str) -> None:
    engine = make(num_slots=2)
    leader = ask("a", num_prompt=100, max_tokens=5, num_samples=3)
    followers = list(leader.followers)
    engine.add(leader)
    if when == "chunking":
        engine.step()
    assert engine.abort("a") is leader
    recount(engine.scheduler)
    assert engine.abort("a2") is followers[1]
    run_out(engine)
    check(followers[0])


def test_without_room_in_the_host_pool_a_victim_is_computed_again() -> None:
    engine = make(num_slots=2, num_pages=1 + 8, num_host_pages=2, prefix_sharing=False)
    old, young = ask("old", 12, 12), ask("young", 12, 12)
    engine.add(old)
    engine.add(young)
    run_out(engine)
    assert engine.scheduler.counters.refused_swaps == 1
    assert engine.scheduler.counters.swapped_out_pages == 0
    check(old, young)


def test_a_swapped_request_finds_its_shared_pages_at_rest_beside_its_own() -> None:
    engine = make(num_slots=2, num_pages=1 + 8, num_host_pages=9)
    old, young = ask("old", 12, 12), ask("young", 12, 12)
    engine.add(old)
    engine.add(young)
    run_out(engine)
    counters = engine.scheduler.counters
    assert counters.preemptions == 1
    assert counters.promoted_pages > 0
    assert counters.swapped_out_pages == counters.swapped_in_pages > 0
    assert counters.broken_swaps == 0
    assert counters.computed_tokens == 2 * (12 + 12 - 1), "nothing is computed twice"
    check(old, young)


def test_a_swapped_request_whose_shared_pages_are_gone_is_computed_again() -> None:
    engine = make(num_slots=2, num_pages=1 + 8, num_host_pages=1 + 1)
    old, young = ask("old", 12, 12), ask("young", 12, 12)
    engine.add(old)
    engine.add(young)
    run_out(engine)
    assert engine.scheduler.counters.broken_swaps == 1
    check(old, young)


def test_a_swapped_request_that_is_aborted_leaves_nothing_behind() -> None:
    engine = make(num_slots=2, num_pages=1 + 8, num_host_pages=9)
    engine.add(ask("old", 12, 12))
    engine.add(ask("young", 12, 12))
    while not engine.scheduler.counters.swapped_out_pages:
        engine.step()
    host = engine.scheduler.host_pool
    assert host is not None
    assert host.num_held > 0
    engine.abort("young")
    recount(engine.scheduler)
    assert host.num_held == 0


def test_a_swapped_request_waits_for_no_prompt_of_which_it_could_share_nothing() -> None:
    """Behind its own page, which nobody can find yet, it finds none of those that another row publishes."""
    policy, waiting = StallFree(FixedChunks(6)), WaitingQueue(Aged(priority_s=10, length_s=0))
    engine = make(num_host_pages=40, policy=policy, waiting=waiting)
    first = ask("first", 60, 4)
    engine.add(first)
    engine.step()
    engine.scheduler.preemption.preempt(0)
    urgent = Request("urgent", first.prompt, SamplingParams(max_tokens=4), priority=1)
    engine.add(urgent)
    step = engine.step()
    assert step is not None
    assert engine.scheduler.counters.swapped_in_pages == 1
    assert step.batch.starts.tolist() == [6, 4], "both go on"
    run_out(engine)
    check(first, urgent)


def test_compaction_brings_held_pages_to_the_low_end_a_few_at_a_time() -> None:
    engine = make(num_pages=40, compact_every_steps=1, compact_pages_per_step=2, prefix_sharing=False)
    first, second = ask("first", 60, 2), ask("second", 30, 20)
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.step()
    assert first.finish_reason == "length"
    pool = engine.scheduler.pool
    for _ in range(4):
        before = pool.highest_held
        engine.step()
        recount(engine.scheduler)
        assert pool.highest_held < before
    assert pool.highest_held == pool.num_held
    assert engine.scheduler.counters.compacted_pages == 8
    run_out(engine)
    check(second)


def test_pages_that_move_while_nothing_runs_are_copied_before_they_are_read() -> None:
    engine = make(num_pages=40)
    engine.add(ask("gone", 20, 1))
    kept = ask("kept", 40, 1)
    engine.add(kept)
    run_out(engine)
    prefix = engine.scheduler.prefix
    prefix.evict(5)
    assert engine.scheduler.tables.compact(engine.scheduler.pool.num_pages) > 0
    assert engine.step() is None
    assert engine.step() is None
    again = Request("again", kept.prompt, SamplingParams(max_tokens=3))
    engine.add(again)
    run_out(engine)
    assert again.num_cached_tokens == 36
    check(again)


def test_the_pool_shrinks_and_grows_while_serving() -> None:
    engine = make(num_pages=60)
    requests = [ask(f"r{number}", 20, 16) for number in range(3)]
    gone = ask("gone", 90, 1)
    for request in (gone, *requests):
        engine.add(request)
    while gone.finish_reason is None or not len(engine.slots.busy):
        engine.step()
    with pytest.raises(ValueError, match=r"20 pages are fewer than the \d+ held .* resize to at least \d+"):
        engine.resize(20)
    engine.resize(20, give_up="cached")
    assert (engine.scheduler.pool.num_pages, len(engine.runner.cache)) == (20, 20 * 4)
    recount(engine.scheduler)
    while engine.scheduler.pool.num_held - engine.scheduler.prefix.num_idle < 15:
        engine.step()
    with pytest.raises(ValueError, match="allow more to be given up than cached"):
        engine.resize(12, give_up="cached")
    engine.resize(12, give_up="running")
    recount(engine.scheduler)
    with pytest.raises(ValueError, match="9 pages cannot hold the longest accepted request, 36 tokens"):
        engine.resize(9, give_up="running")
    engine.resize(50)
    run_out(engine)
    check(*requests)


def test_victims() -> None:
    slots = SlotPool(3, 64, 4)
    for number, (computed, published, priority) in enumerate([(30, 7, 1), (9, 0, 0), (20, 4, 0)]):
        request = ask(f"r{number}", 40, 2, priority=priority)
        request.number = number
        row = slots.take(request)
        slots.num_computed[row], slots.num_published[row] = computed, published
    rows = slots.busy
    assert slots.requests[youngest(slots, rows)].id == "r2"
    assert slots.requests[fewest_lost(slots, rows)].id == "r0"
    assert slots.requests[lowest_priority(slots, rows)].id == "r2"


def test_samples_need_ids_of_their_own() -> None:
    engine = make()
    leader = ask("a", num_prompt=10, max_tokens=2, num_samples=3)
    leader.followers[1].id = "a1"
    with pytest.raises(ValueError, match="request a1 is sampled twice"):
        engine.add(leader)
    assert not engine.has_work
