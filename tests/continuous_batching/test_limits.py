"""The scheduler refuses what exceeds its limits and ends what waits too long.

A request that ends takes its followers along and frees its pages within two steps.
"""

from __future__ import annotations

import itertools

import pytest

from continuous_batching.engine import Engine
from continuous_batching.queueing import QueueFull, QueueGate, QueueLimits, WaitingQueue
from continuous_batching.request import Request, SamplingParams
from tests.continuous_batching import test_slot_lifecycle as small
from tests.continuous_batching.checksum import alone
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_slot_lifecycle import ask


def make(bounds: QueueLimits | None = None, num_slots: int = 2) -> Engine:
    ticks = itertools.count()
    return small.make(
        num_slots,
        num_host_pages=60,
        budget=16,
        clock=lambda: float(next(ticks)),
        limits=bounds,
        prefix_sharing=False,
    )


def run_out(engine: Engine) -> dict[str, Request]:
    """Everybody who ends, by id."""
    ended: dict[str, Request] = {}
    while engine.has_work:
        step = engine.step()
        recount(engine.scheduler)
        for request in step.finished if step else []:
            assert request.id not in ended
            ended[request.id] = request
    return ended


def test_a_queue_that_is_full_refuses_and_says_when_to_come_again() -> None:
    engine = make(QueueLimits(max_waiting_requests=3))
    for number in range(3):
        engine.add(ask(f"a{number}"))
    with pytest.raises(
        QueueFull, match=r"request b would be in a queue of 4 requests; it may hold 3"
    ) as caught:
        engine.add(ask("b"))
    assert caught.value.retry_after_s == 1.0, "nobody was admitted yet"
    while len(engine.scheduler.waiting) == 3:
        engine.step()
    for number in range(3, 5):
        engine.add(ask(f"a{number}"))
    for _ in range(8):
        engine.step()
    for number in range(5, 7):
        engine.add(ask(f"a{number}"))
    with pytest.raises(QueueFull) as caught:
        engine.add(ask("c", num_samples=2))
    seconds, removed, _ = map(sum, zip(*engine.scheduler._gate._pace))
    assert caught.value.retry_after_s == pytest.approx(2 * seconds / removed), "two samples are too many"
    ended = run_out(engine)
    assert set(ended) <= {f"a{number}" for number in range(7)}


@pytest.mark.parametrize(("tick_s", "hint_s"), [(1.0, 16 / 3), (1000.0, 60.0)])
def test_time_in_which_nobody_waited_says_nothing_of_when_to_come_again(tick_s: float, hint_s: float) -> None:
    gate = QueueGate(QueueLimits(max_waiting_requests=2), waiting := WaitingQueue())
    numbers, now_s = itertools.count(), 0.0

    def come() -> None:
        request = ask(str(number := next(numbers)))
        request.number, request.arrival_s = number, now_s
        gate.check(request, 0)
        waiting.push(request)

    def step() -> None:
        waiting.remove(waiting.requests[0])
        gate.measure(now_s)

    for _ in range(40):  # each is admitted at once, and the next comes an hour later
        come()
        step()
        now_s += 3600.0
    come()
    come()
    with pytest.raises(QueueFull, match=r"try again in 1.0 s"):
        come()
    step()
    come()
    now_s += 4 * tick_s
    step()
    come()
    now_s += 12 * tick_s
    step()
    come()
    with pytest.raises(QueueFull) as caught:
        come()
    assert caught.value.retry_after_s == hint_s, "three left within 16 s, one of them at once"


def test_a_queue_that_each_step_empties_says_when_to_come_again_too() -> None:
    """It fills while a step runs, of 5 s each; a request that is back in it has come long before."""
    gate = QueueGate(QueueLimits(max_waiting_requests=2), waiting := WaitingQueue())
    numbers = itertools.count()

    def come(now_s: float) -> None:
        request = ask(str(number := next(numbers)))
        request.number, request.arrival_s = number, now_s
        gate.check(request, 0)
        waiting.push(request)

    def step(now_s: float) -> None:
        for request in waiting.requests:
            waiting.remove(request)
        gate.measure(now_s)

    for now_s, hint_s in ((100.0, 1.0), (105.0, 2.5), (110.0, 2.5)):
        step(now_s)
        come(now_s if now_s < 110 else 0.0)
        come(now_s + 1)
        with pytest.raises(QueueFull) as caught:
            come(now_s + 2)
        assert caught.value.retry_after_s == hint_s
    step(115.0)
    come(116.0)
    come(117.0)
    with pytest.raises(QueueFull) as caught:
        come(118.0)
    assert caught.value.retry_after_s == 2.5


def test_a_queue_of_many_tokens_is_full_too_but_not_for_the_only_one() -> None:
    engine = make(QueueLimits(max_waiting_tokens=30))
    engine.add(ask("alone", 40))
    with pytest.raises(
        QueueFull, match=r"a queue of 44 tokens; it may hold 30 \(scheduler.max_waiting_tokens\)"
    ):
        engine.add(ask("b", 4))
    assert [request.id for request in engine.scheduler.waiting.requests] == ["alone"]
    assert run_out(engine)["alone"].finish_reason == "length"


def test_who_waits_too_long_ends_and_who_was_admitted_does_not() -> None:
    engine = make(QueueLimits(max_queue_wait_s=5.0), num_slots=1)
    engine.add(ask("runs", max_tokens=30))
    engine.add(ask("waits"))
    ended = run_out(engine)
    assert (ended["runs"].finish_reason, ended["waits"].finish_reason) == ("length", "timeout")
    assert ended["waits"].finish_s is not None
    assert 5.0 <= ended["waits"].finish_s <= 7.0


def test_a_sample_that_finds_no_row_beside_its_leader_has_waited_since_its_arrival() -> None:
    engine = make(QueueLimits(max_queue_wait_s=5.0), num_slots=1)
    engine.add(leader := ask("z", 100, 20, num_samples=2))
    (sample,) = leader.followers
    run_out(engine)
    assert (leader.finish_reason, sample.finish_reason) == ("length", "timeout")


def test_a_timeout_ends_a_request_wherever_it_is() -> None:
    engine = make(num_slots=1)
    engine.add(runs := ask("runs", max_tokens=30, timeout_s=10.0))
    engine.add(ask("waits", timeout_s=4.0))
    engine.add(ask("late", timeout_s=500.0))
    ended = run_out(engine)
    assert [ended[name].finish_reason for name in ("runs", "waits", "late")] == [
        "timeout",
        "timeout",
        "length",
    ]
    assert 3 <= len(runs.answer) < 10
    assert runs.answer.tolist() == alone(runs.prompt.tolist(), 30)[: len(runs.answer)]


def test_a_step_that_only_ends_requests_has_an_empty_batch() -> None:
    engine = make(num_slots=1)
    engine.add(ask("a", timeout_s=0.5))
    engine.clock()
    step = engine.step()
    assert step is not None
    assert (step.batch.num_spans, [request.id for request in step.finished]) == (0, ["a"])
    assert engine.step() is None


def test_what_has_ended_is_not_remembered() -> None:
    engine = make()
    for number in range(500):
        engine.add(ask(f"{number}", 2, 1, timeout_s=1e6))
        engine.step()
    assert len(engine.scheduler._gate._due) < 200


STATES = ["waiting", "chunking", "decoding", "swapped", "forked", "following", "searching", "in_flight"]


def bring(engine: Engine, state: str) -> str:
    """Bring a request into a state; returns its id."""
    scheduler = engine.scheduler
    if state == "waiting":
        for name in ("x", "y", "z"):
            engine.add(ask(name))
        engine.step()
        assert scheduler.waiting.find("z")
        return "z"
    engine.add(ask("old", 4, 20))
    num_samples = 3 if state in ("forked", "following") else 1
    z = ask("z", 40 if state == "chunking" else 14, num_samples=num_samples)
    if state == "searching":
        z.params = SamplingParams(max_tokens=8, beam_width=2)
    engine.add(z)
    engine.step()
    if state == "following":
        return "z2"
    if state == "in_flight":
        return "z"
    for _ in range(0 if state == "chunking" else 2):
        engine.step()
    row = scheduler.slots.find("z")
    if state == "chunking":
        assert 0 < engine.slots.num_computed[row] < 40
    if state == "searching":
        assert len(scheduler._beam_searches.rows_of(row)) == 2
    if state == "forked":
        assert "z1" in scheduler.slots.running_ids
        return "z1"
    if state == "swapped":
        scheduler.preemption.preempt(row)
        assert scheduler.lifecycle.swap.all_left
    return "z"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("by", ["abort", "timeout"])
def test_whoever_is_cancelled_frees_its_pages_within_two_steps(state: str, by: str) -> None:
    engine = make(num_slots=2 if state == "waiting" else 4)
    name = bring(engine, state)
    scheduler = engine.scheduler
    if state == "in_flight":
        batch = scheduler.schedule(0.0)
        scheduler.end(name, by)
        scheduler.commit(batch, engine.runner.run(batch), 0.0)
    elif by == "abort":
        assert engine.abort(name) is not None
    else:
        everybody = [*scheduler.waiting.requests, *engine.slots.requests[engine.slots.busy]]
        everybody += scheduler._parallel_samples.requests
        request = next(each for each in everybody if each.id == name)
        request.timeout_s = 0.0
        scheduler._gate.watch(request)
    for _ in range(2):
        engine.step()
    recount(scheduler)
    assert name not in scheduler.slots.running_ids
    assert scheduler.waiting.find(name) is None
    left = {request.id for request in engine.slots.requests[engine.slots.busy]}
    held = sum(len(engine.slots.pages(row)) for row in engine.slots.busy.tolist())
    assert name not in left
    assert scheduler.pool.num_held <= held
    assert not scheduler.lifecycle.swap.all_left
    assert name not in run_out(engine)
    assert scheduler.pool.num_held == 0
