"""The recount that a server makes agrees with the tests' own, and sees what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.inspection import Recount, recount
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner
from tests.continuous_batching.recount import recount as assert_all


@pytest.fixture
def engine() -> Engine:
    slots, pool = SlotPool(3, 64, 4), PagePool(24)
    scheduler = Scheduler(
        slots, pool, StallFree(), prefix_sharing=True, max_batch_tokens=16, vocab_size=VOCAB_SIZE
    )
    return Engine(scheduler, ChecksumRunner(slots, pool))


def ask(engine: Engine, count: int) -> None:
    prompt = np.arange(12) % VOCAB_SIZE
    for index in range(count):
        params = SamplingParams(max_tokens=20 + index, seed=index)
        engine.add(Request(f"{index}", np.append(prompt, index + 1), params))


def test_nothing_is_wrong_after_any_step_and_shared_pages_are_counted(engine: Engine) -> None:
    ask(engine, 6)
    most_shared = 0
    while engine.has_work:
        engine.step()
        assert_all(engine.scheduler)
        ledger = recount(engine.scheduler)
        assert ledger.wrong_pages == 0
        most_shared = max(most_shared, ledger.shared_pages)
    assert most_shared == 3  # the pages of the prompt that all begin with
    assert recount(engine.scheduler) == Recount(0, 0)


def test_a_page_that_nobody_gave_back_is_seen(engine: Engine) -> None:
    ask(engine, 1)
    engine.step()
    engine.scheduler.pool.take(2)
    assert recount(engine.scheduler).wrong_pages == 2


def test_a_page_that_is_free_and_held_is_seen(engine: Engine) -> None:
    ask(engine, 1)
    engine.step()
    engine.scheduler.pool.release(engine.slots.pages(int(engine.slots.busy[0]))[-1:])
    assert recount(engine.scheduler).wrong_pages == 1
