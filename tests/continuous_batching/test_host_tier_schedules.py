"""Prompts that come again and again, through a small pool and the host's, give the answers of each alone."""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.counters import Counters
from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, alone
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_machine import SpoilingRunner
from tests.continuous_batching.test_schedules import try_add, try_resize
from tests.kv_cache.short_keys import shorten_keys
from tests.thorough import cases

NUM_REQUESTS, NUM_PROMPTS, LARGEST = 40, 6, 40
NUM_SEEDS = cases(20, 40)


def draw(random: np.random.Generator, number: int) -> Request:
    """A turn of one of few talks: the longer it gets, the more of it was heard before."""
    talk = np.random.default_rng(int(random.integers(NUM_PROMPTS))).integers(0, VOCAB_SIZE, LARGEST)
    params = SamplingParams(max_tokens=int(random.integers(1, 9)), seed=number)
    salt = "b" if random.random() < 0.1 else ""
    return Request(str(number), talk[: int(random.integers(4, LARGEST - 8))], params, cache_salt=salt)


def storm(seed: int) -> Counters:
    """Serve requests while some are aborted, some fail, pages are evicted and the pool changes."""
    random = np.random.default_rng(seed)
    size = int(random.choice([1, 2, 4]))
    slots = SlotPool(4, LARGEST, size)
    pool, host = (
        PagePool(2 + LARGEST // size + seed % 9),
        PagePool(int(random.integers(2, 3 * LARGEST // size))),
    )
    scheduler = Scheduler(
        slots,
        pool,
        StallFree(),
        max_batch_tokens=16,
        vocab_size=VOCAB_SIZE,
        host_pool=host,
        compact_every_steps=seed % 3,
    )
    runner = SpoilingRunner(slots, pool, host)
    engine = Engine(scheduler, runner, clock=lambda: 0.0)
    requests = [draw(random, number) for number in range(NUM_REQUESTS)]
    runner.fail = {each.id for each in requests if random.random() < 0.1}
    served = []
    for number in range(2 * NUM_REQUESTS):
        if number < NUM_REQUESTS and try_add(engine, [requests[number]]):
            served.append(requests[number])
        if random.random() < 0.1:
            engine.abort(str(random.integers(NUM_REQUESTS)))
        if random.random() < 0.1:
            try_resize(engine, int(random.integers(-5, 6)), "running")
        engine.step()
        recount(scheduler)
    while engine.has_work:
        engine.step()
        recount(scheduler)
    for request in served:
        want = alone(request.prompt.tolist(), request.params.max_tokens, seed=request.params.seed or 0)
        got = request.answer.tolist()
        assert got == (want if request.finish_reason == "length" else want[: len(got)])
        assert request.finish_reason != "error" or request.id in runner.fail
    return scheduler.counters


@pytest.mark.parametrize("has_weak_keys", [False, True])
def test_prompts_that_come_again_through_the_host_give_the_answers_of_each_alone(
    has_weak_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_weak_keys:
        shorten_keys(monkeypatch, bits=4)
    runs = [storm(seed) for seed in range(NUM_SEEDS)]
    print(f"{sum(each.promoted_pages for each in runs)} pages brought back in {len(runs)} schedules")
    assert sum(each.host_hit_tokens > 0 for each in runs) > NUM_SEEDS // 2
    assert sum(each.swapped_in_pages > 0 for each in runs) > 0
