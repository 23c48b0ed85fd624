"""The host works ahead of the device: answers are the same, and what comes too late is dropped."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.policies.prefill_budget import LongPrompts
from continuous_batching.queueing import WaitingQueue
from continuous_batching.request import Request, SamplingParams
from kv_cache.pages import Index
from tests.continuous_batching.checksum import alone
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_slot_lifecycle import ask, check, make, run_out


class Device:
    """Tells when the host began a step and when it waited for it."""

    def __init__(self, engine: Engine) -> None:
        self.told: list[str] = []
        self._start, self._count = engine.runner.start, 0
        engine.runner.start = self.start
        engine.overlap = True

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        self._count += 1
        number, wait = self._count, self._start(batch)
        self.told.append(f"start {number}")

        def waited() -> Sampled:
            self.told.append(f"wait {number}")
            return wait()

        return waited


def stopping(name: str, num_tokens: int, **fields) -> Request:
    """A request that ends by a stop token after so many."""
    request = ask(name, 9, 30, **fields)
    answer = alone(request.prompt.tolist(), num_tokens)
    assert answer.index(answer[-1]) == num_tokens - 1, "its stop token comes earlier"
    request.params = SamplingParams(max_tokens=30, seed=0, stop_token_ids=(answer[-1],))
    return request


def test_the_next_step_begins_before_the_tokens_of_this_one_are_waited_for() -> None:
    engine = make()
    device = Device(engine)
    request = ask("a", 9, 4)
    engine.add(request)
    run_out(engine)
    check(request)
    # what ends by its length is known beforehand: there is no fifth step
    assert device.told == [
        "start 1", "start 2", "wait 1", "start 3", "wait 2", "start 4", "wait 3", "wait 4"
    ]  # fmt: skip


def test_a_stop_is_noticed_a_step_late_and_reported_at_once() -> None:
    engine = make()
    device = Device(engine)
    request, other = stopping("a", 3), ask("b", 9, 12)
    engine.add(request)
    engine.add(other)
    steps = [engine.step() for _ in range(3)]
    assert steps[2] is not None
    assert steps[2].finished == [request]
    assert request.answer.tolist() == alone(request.prompt.tolist(), 3)
    assert device.told[-2:] == ["start 4", "wait 3"]
    assert len(engine.slots.busy) == 2, "the device is at its fourth step"
    recount(engine.scheduler)
    step = engine.step()
    assert step is not None
    assert len(step.batch.slots) == 2
    assert len(engine.slots.busy) == 1
    run_out(engine)
    check(other)


def test_a_row_that_fails_after_it_was_outrun_keeps_its_answer_and_loses_its_pages() -> None:
    engine = make()
    Device(engine)
    request = stopping("a", 3)
    engine.add(request)
    engine.step()
    engine.step()
    engine.runner.fail = {"a"}  # it fails from its fourth step on
    engine.step()
    assert request.finish_reason == "stop"
    run_out(engine)
    assert request.answer.tolist() == alone(request.prompt.tolist(), 3)
    assert request.finish_reason == "stop"
    again = Request("again", request.tokens, SamplingParams(max_tokens=1))
    again.page_keys = engine.scheduler.lifecycle.matching.keys(again)
    assert not len(engine.scheduler.lifecycle.find(again))


def test_a_long_prompt_does_not_wait_for_an_answer_that_has_ended_in_flight() -> None:
    """It is longer than a long prompt, and the device is still at a token that it does not need."""
    engine = make(
        policy=StallFree(long_prompts=LongPrompts(max_long=1, long_tokens=10)),
        waiting=WaitingQueue(long_tokens=10),
    )
    Device(engine)
    request, long = stopping("a", 3), ask("b", 11, 3)
    engine.add(request)
    while request.finish_reason is None:
        engine.step()
    assert engine.scheduler.in_flight.outrun, "the device is at its fourth step"
    engine.add(long)
    engine.step()
    assert [*engine.slots.running_ids] == ["b"]
    run_out(engine)
    check(long)


def test_an_answer_ends_before_a_token_that_nobody_knows() -> None:
    engine = make()
    scheduler, runner = engine.scheduler, engine.runner
    request, other = ask("a", 9, 12), ask("b", 9, 12)
    engine.add(request)
    engine.add(other)
    first = scheduler.schedule(0.0)
    sampled = runner.start(first)
    second = scheduler.schedule(0.0)
    assert second.unknown.tolist() == [0, 1]
    assert scheduler.end("a", "abort") is request
    assert request.answer.tolist() == []
    waited = runner.start(second)
    for batch, wait in ((first, sampled), (second, waited)):
        assert scheduler.commit(batch, wait(), 0.0).finished == []
    recount(scheduler)
    assert request.answer.tolist() == []
    run_out(engine)
    check(other)


@pytest.mark.parametrize(
    "special",
    [
        {"repetition_penalty": 1.3},
        {"logprobs": 1},
        {"min_tokens": 2},
        {"logit_bias": {3: 1.0}},
        {"presence_penalty": 0.5},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_no_step_is_begun_ahead_of_what_it_depends_on(special: dict) -> None:
    engine = make()
    device = Device(engine)
    engine.add(Request("a", np.arange(9), SamplingParams(max_tokens=3, seed=0, **special)))
    run_out(engine)
    assert device.told == ["start 1", "wait 1", "start 2", "wait 2", "start 3", "wait 3"]


def test_no_step_is_begun_ahead_where_pages_may_run_short(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(num_slots=3, num_pages=12)
    device = Device(engine)
    requests = [ask(name, 10, 20) for name in "abc"]
    for request in requests:
        engine.add(request)
    scheduler, make_room = engine.scheduler, engine.scheduler.preemption.make_room
    num_ahead = list[int]()

    def made(rows: Index, starts: Index, stops: Index) -> tuple[Index, Index, Index]:
        num_ahead.append(len(scheduler.in_flight))
        return make_room(rows, starts, stops)

    monkeypatch.setattr(scheduler.preemption, "make_room", made)
    run_out(engine)
    check(*requests)
    assert scheduler.counters.preemptions
    assert not any(num_ahead), "a step lacks pages that was begun while another is in flight"
    pairs = list(pairwise(device.told[:-1]))
    assert any(one.startswith("wait") and other.startswith("wait") for one, other in pairs), "never waited"
    assert any(one.startswith("start") and other.startswith("wait") for one, other in pairs), "never ahead"


def test_a_resize_waits_for_the_device_and_loses_no_step() -> None:
    engine = make()
    device = Device(engine)
    request = ask("a", 9, 6)
    engine.add(request)
    engine.step()
    engine.resize(30)
    assert device.told[-1] == "wait 2"
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert len(steps) == 5
    check(request)
