"""Pages that were evicted to the host come back from it instead of being computed again."""

from __future__ import annotations

import pytest

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from tests.continuous_batching.test_slot_lifecycle import ask, check, make, run_out

PAGE_SIZE = 4


def serve(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add(request)
    run_out(engine)


def again(request: Request, name: str, **params) -> Request:
    return Request(name, request.prompt, SamplingParams(**{"max_tokens": 3, **params}))


def crowded_out(engine: Engine, *requests: Request) -> None:
    """Serve requests, and then others until nothing of these is left on the device."""
    serve(engine, *requests)
    serve(engine, ask("crowd", 4 * (engine.scheduler.pool.num_pages - 1) - 2, 3))
    assert engine.scheduler.counters.evicted_pages


def test_what_is_still_on_the_device_is_shared_and_only_the_rest_comes_back() -> None:
    engine = make(num_pages=1 + 12, num_host_pages=30)
    first = ask("first", 30, 4)
    serve(engine, first)
    engine.scheduler.tables.evict(3)
    second = again(first, "second")
    serve(engine, second)
    counters = engine.scheduler.counters
    assert second.num_cached_tokens == counters.hit_tokens == 28
    assert counters.host_hit_tokens == counters.promoted_pages * PAGE_SIZE == 2 * PAGE_SIZE
    check(second)


def test_pages_come_back_while_as_many_others_take_their_place() -> None:
    engine = make(num_slots=1, num_pages=1 + 9, num_host_pages=1 + 9)
    turns = [ask(name, 30, 4) for name in ("one", "two")]
    serve(engine, *turns)
    for number in range(6):
        request = again(turns[number % 2], f"again {number}")
        serve(engine, request)
        check(request)
    counters = engine.scheduler.counters
    assert counters.hit_tokens > 4 * 28, "what is brought back does not yet make room for what goes"
    assert counters.host_hit_tokens > 3 * 28


@pytest.mark.parametrize(("num_pages", "num_running"), [(12, 1), (13, 2)])
def test_a_newcomer_waits_for_the_pages_that_its_resting_ones_need(num_pages: int, num_running: int) -> None:
    engine = make(num_slots=2, num_pages=1 + num_pages, num_host_pages=30)
    first = ask("first", 27, 1)
    crowded_out(engine, first)
    engine.add(ask("long", 22, 2))
    engine.step()
    second = again(first, "second", max_tokens=1)
    engine.add(second)
    batch = engine.scheduler.schedule(0.0)
    assert batch.num_spans == num_running, "6 pages are taken, and 7 wanted"
    engine.scheduler.commit(batch, engine.runner.run(batch), 0.0)
    run_out(engine)
    assert engine.scheduler.counters.preemptions == 0
    check(second)


def test_pages_of_a_waiting_request_have_right_of_way_in_the_host() -> None:
    engine = make(num_slots=2, num_pages=1 + 10, num_host_pages=1 + 6)
    crowded_out(engine, ask("first", 30, 4))
    prefix = engine.scheduler.prefix
    assert prefix.num_resting == 6
    old, young = ask("old", 6, 24), ask("young", 6, 24)
    engine.add(old)
    engine.add(young)
    while not engine.scheduler.counters.preemptions:
        engine.step()
    counters = engine.scheduler.counters
    assert counters.refused_swaps == 0
    assert prefix.num_resting + counters.swapped_out_pages <= 6
    run_out(engine)
    check(old, young)


def test_a_row_that_waited_for_a_page_takes_none_for_those_that_went_to_rest_meanwhile() -> None:
    engine = make(num_slots=3, num_pages=40, num_host_pages=40)
    long, first = ask("long", 34, 2), ask("first", 18, 1)
    second = again(first, "second")
    for request in (long, first, second):
        engine.add(request)
    step = engine.step()
    assert step is not None
    assert step.finished == [first], "and the second waits for what it published"
    pool, prefix = engine.scheduler.pool, engine.scheduler.prefix
    engine.resize(1 + pool.num_held - prefix.num_idle, "cached")
    assert pool.num_free + prefix.num_idle == 0
    run_out(engine)
    check(long, second)
