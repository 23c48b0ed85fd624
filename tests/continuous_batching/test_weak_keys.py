"""Four bits in place of sha256 cost time and change no answer: keys are never believed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.scheduling.validation import GiveUp
from continuous_batching.slots import SlotPool
from kv_cache import page_keys
from kv_cache.pages import PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, alone
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_schedules import Arrival, arrivals, check_answers, schedulers, serve
from tests.kv_cache.short_keys import shorten_keys
from tests.thorough import cases


@pytest.fixture(scope="module", autouse=True)
def weak_keys() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shorten_keys(patch, bits=4)
        assert len(set(page_keys.page_keys(np.arange(400, dtype=np.int32), 4, ""))) <= 16
        yield


@given(
    made=schedulers(),
    plan=st.lists(arrivals, min_size=1, max_size=10),
    resizes=st.dictionaries(
        st.integers(0, 30),
        st.tuples(st.integers(-20, 20), st.sampled_from(["nothing", "cached", "running"])),
        max_size=3,
    ),
)
@settings(
    max_examples=cases(30, 5000), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
def test_colliding_keys_change_no_answer(
    made: tuple[Scheduler, ChecksumRunner], plan: list[Arrival], resizes: dict[int, tuple[int, GiveUp]]
) -> None:
    scheduler, runner = made
    check_answers(serve(scheduler, runner, plan, resizes), runner.fail)
    assert scheduler.pool.num_free + scheduler.prefix.num_idle == scheduler.pool.num_pages - 1


def test_pages_are_still_shared_under_colliding_keys() -> None:
    slots = SlotPool(2, 64, 16)
    scheduler = Scheduler(slots, PagePool(60), StallFree(), max_batch_tokens=64, vocab_size=VOCAB_SIZE)
    engine = Engine(scheduler, ChecksumRunner(slots, scheduler.pool), clock=lambda: 0.0)
    for number in range(12):
        prompt = np.random.default_rng(number % 3).integers(0, VOCAB_SIZE, 35)
        request = Request(str(number), prompt, SamplingParams(max_tokens=4))
        engine.add(request)
        while engine.has_work:
            engine.step()
            recount(scheduler)
        assert request.answer.tolist() == alone(prompt.tolist(), 4)
    assert 0 < scheduler.counters.hit_tokens < 9 * 32, "some are found, and some gave way to another"
