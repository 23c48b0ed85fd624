"""Several stages have as many batches in flight, of different requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine, Observer
from continuous_batching.policies.batching import StallFree, Static
from continuous_batching.policies.policy import Policy
from continuous_batching.policies.prefill_budget import FixedChunks, LongPrompts
from continuous_batching.queueing import WaitingQueue
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.admission import HeldBack
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index, PagePool
from tests.continuous_batching import test_beam_search as beams
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, alone
from tests.continuous_batching.test_draft_schedules import speculation
from tests.continuous_batching.test_schedules import (
    Arrival,
    Made,
    Resizes,
    arrivals,
    check_answers,
    over_schedules,
    serve,
)


class Stages(ChecksumRunner):
    """A runner that keeps which rows are in flight together."""

    def __init__(self, made: Scheduler) -> None:
        super().__init__(made.slots, made.pool)
        self.defers = True
        self.flying = deque[list[int]]()
        self.together: list[list[list[int]]] = []

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        self.flying.append(batch.slots.tolist())
        self.together.append(list(self.flying))
        wait = super().start(batch)

        def waited() -> Sampled:
            self.flying.popleft()
            return wait()

        return waited


def served(depth: int, num_requests: int) -> tuple[Stages, list[Request]]:
    made = Scheduler(
        SlotPool(8, 64, 4),
        PagePool(100),
        StallFree(),
        max_batch_tokens=100,
        vocab_size=VOCAB_SIZE,
        compact_every_steps=2,
        depth=depth,
    )
    runner = Stages(made)
    engine = Engine(made, runner)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    # Their prompts have nothing in common: a row that waits for another's pages is in no batch
    requests = [
        Request(str(number), np.arange(number, 2 * number + 5), params) for number in range(num_requests)
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return runner, requests


def test_batches_in_flight_share_no_row_and_each_has_its_part() -> None:
    """Three stages have three batches of a third of the rows each, as Orca's workers do."""
    runner, requests = served(3, 7)
    for request in requests:
        assert request.answer.tolist() == alone(request.prompt.tolist(), 12)
    for batches in runner.together:
        rows = [row for each in batches for row in each]
        assert len(rows) == len(set(rows)), "a row is in two batches"
    sizes = [[len(each) for each in batches] for batches in runner.together]
    assert sizes[2] == [3, 2, 2]
    assert max(map(len, sizes)) == 3
    assert sum(len(each) == 3 for each in sizes) > len(sizes) / 2, "the stages are not kept busy"


def test_verdicts_on_drafts_are_counted_for_every_batch() -> None:
    """A batch that is made while drafts are in flight does not forget them."""
    made = Scheduler(
        slots := SlotPool(4, 64, 4),
        PagePool(100),
        StallFree(),
        max_batch_tokens=100,
        vocab_size=VOCAB_SIZE,
        speculation=speculation(slots, "right", 3, 0),
        depth=2,
    )
    engine = Engine(made, ChecksumRunner(slots, made.pool))
    params = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
    for number in range(4):
        engine.add(Request(str(number), np.random.default_rng(number).integers(0, VOCAB_SIZE, 5), params))
    while engine.has_work:
        engine.step()
    assert made.counters.draft_tokens > 8
    assert made.counters.accepted_tokens == made.counters.draft_tokens


def engine_of(policy: Policy, depth: int, waiting: WaitingQueue | None = None) -> Engine:
    made = Scheduler(
        SlotPool(8, 64, 4),
        PagePool(100),
        policy,
        max_batch_tokens=64,
        vocab_size=VOCAB_SIZE,
        waiting=waiting,
        depth=depth,
    )
    return Engine(made, Stages(made) if depth > 1 else ChecksumRunner(made.slots, made.pool))


@pytest.mark.parametrize("depth", [1, 2], ids=["one is blocked", "one is in flight"])
def test_long_prompts_in_rows_that_cannot_run_are_computed_too(depth: int) -> None:
    long_prompts = LongPrompts(max_long=1, long_tokens=20)
    engine = engine_of(StallFree(FixedChunks(4), long_prompts), depth, WaitingQueue(long_tokens=20))
    slots, params = engine.slots, SamplingParams(max_tokens=3, temperature=0.0)
    # The second waits for the pages of the first, which is short
    prompts = [np.arange(18), np.r_[np.arange(16), np.arange(40, 74)], np.arange(9, 59), np.arange(20, 26)]
    requests = [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        known = slots.num_tokens[slots.busy]
        is_prompt = ~slots.decoding(slots.busy, slots.num_computed[slots.busy], known)
        assert np.count_nonzero(is_prompt & (known > 20)) <= 1
    for request in requests:
        assert request.answer.tolist() == alone(request.prompt.tolist(), 3)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_request_joins_a_static_batch_whose_rows_are_in_flight(depth: int) -> None:
    engine = engine_of(Static(3, 0.0), depth)
    params = SamplingParams(max_tokens=5, temperature=0.0)
    # The second of each batch waits for the pages of the first
    prompts = [np.arange(number // 3, number // 3 + 9 + number % 3) for number in range(6)]
    requests = [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        assert len({int(request_id) // 3 for request_id in engine.slots.running_ids}) <= 1
    for request in requests:
        assert request.answer.tolist() == alone(request.prompt.tolist(), 5)


class Disjoint(Observer):
    """Asserts that batches in flight share no row, and that there are no more of them than the depth."""

    def __init__(self, depth: int) -> None:
        self.depth, self.flying = depth, deque[set[int]]()

    def scheduled(
        self, batch: Batch, slots: SlotPool, now_s: float, held_back: HeldBack | None, late: Index
    ) -> None:
        rows = {*batch.slots.tolist(), *batch.owners.tolist()}
        assert not rows & set().union(*self.flying), "a row is in two batches"
        self.flying.append(rows)
        assert len(self.flying) <= self.depth

    def committed(self, sampled: Sampled, now_s: float) -> None:
        self.flying.popleft()


MIXED = st.lists(st.one_of(arrivals, arrivals, beams.hunts), min_size=2, max_size=9)


@pytest.mark.slow
@over_schedules(60, 1000, beams.schedulers((2, 3)), plan=MIXED)
def test_samples_searches_and_those_that_are_outranked_share_no_row_in_flight(
    made: Made, plan: list[Arrival], resizes: Resizes
) -> None:
    scheduler, runner = made
    ended = serve(scheduler, runner, plan, resizes, observer=Disjoint(scheduler.depth))
    searches = {name: each for name, each in ended.items() if each.params.beam_width}
    check_answers({name: each for name, each in ended.items() if name not in searches}, runner.fail)
    for request in searches.values():
        beams.check_search(request, runner.fail)
    assert not len(scheduler.slots.busy)
    assert scheduler.pool.num_free + scheduler.prefix.num_idle == scheduler.pool.num_pages - 1
