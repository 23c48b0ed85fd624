"""Single decisions of the scheduler; their sum is tested in test_schedules.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from continuous_batching.batch import NONE_LEFT, SPOILT, Sampled
from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree, Static
from continuous_batching.policies.prefill_budget import FixedChunks
from continuous_batching.recording.recorder import Recorder
from continuous_batching.recording.replay import Replayed, replay
from continuous_batching.request import Request, SamplingParams, TokenLogprobs
from continuous_batching.samples.mask_maker import MaskMaker
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index
from kv_cache.prefix_index import PrefixIndex
from tests.continuous_batching import test_slot_lifecycle as small
from tests.continuous_batching.checksum import VOCAB_SIZE, alone
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_recorder import Memory
from tests.continuous_batching.test_slot_lifecycle import run_out


def make(budget: int = 16, **options: Any) -> Engine:
    return small.make(budget=budget, **options)


def ask(name: str, num_prompt: int = 8, max_tokens: int = 4, **fields) -> Request:
    prompt = np.random.default_rng(sum(map(ord, name))).integers(0, VOCAB_SIZE, num_prompt)
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields))


def spans(engine: Engine) -> dict[str, tuple[int, int]]:
    """Run one step; who computed which positions."""
    step = engine.step()
    assert step is not None
    recount(engine.scheduler)
    batch = step.batch
    return {
        engine.slots.requests[row].id: (start, stop)
        for row, start, stop in zip(batch.slots.tolist(), batch.starts.tolist(), batch.stops.tolist())
    }


def test_a_long_prompt_is_chunked_around_running_decodes() -> None:
    engine = make()
    engine.add(ask("short", 8, 9))
    assert spans(engine) == {"short": (0, 8)}
    engine.add(ask("long", 40, 4))
    assert spans(engine) == {"short": (8, 9), "long": (0, 15)}
    engine.add(ask("late", 6, 4))
    assert spans(engine) == {"short": (9, 10), "long": (15, 30)}
    assert spans(engine) == {"short": (10, 11), "long": (30, 40), "late": (0, 5)}
    assert spans(engine) == {"short": (11, 12), "long": (40, 41), "late": (5, 6)}


def test_a_full_hit_computes_only_the_last_token() -> None:
    engine = make()
    engine.add(ask("a", 8, 4))
    run_out(engine)
    again = ask("a", 8, 4)
    engine.add(again)
    assert spans(engine) == {"a": (4, 8)}, "its last page is computed again, because its last token must be"
    assert again.num_cached_tokens == 4
    longer = Request("b", np.append(again.prompt, [1]), SamplingParams(max_tokens=1))
    engine.add(longer)
    assert spans(engine)["b"] == (8, 9)
    assert longer.num_cached_tokens == 8


def test_a_common_prompt_that_arrives_at_once_is_computed_once() -> None:
    engine = make(num_slots=8, num_pages=100, budget=16)
    common = np.arange(42)
    requests = [
        Request(f"r{i}", np.append(common, [i, i, i]), SamplingParams(max_tokens=3, temperature=0.0))
        for i in range(8)
    ]
    for request in requests:
        engine.add(request)
    computed = [spans(engine) for _ in range(3)]
    assert [list(each) for each in computed[:2]] == [["r0"], ["r0"]], "the others wait for its pages"
    assert computed[2]["r0"] == (32, 45)
    run_out(engine)
    assert engine.scheduler.counters.computed_tokens == 45 + 7 * 5 + 8 * 2
    for request in requests:
        assert request.answer.tolist() == alone(request.prompt.tolist(), 3)
        assert request.num_cached_tokens == (0 if request.id == "r0" else 40)


@pytest.mark.parametrize("num_followers", [8, 64])
def test_rows_that_wait_for_a_prefix_are_not_looked_up_until_it_is_there(
    num_followers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(num_slots=1 + num_followers, num_pages=3000, budget=100, policy=StallFree(FixedChunks(16)))
    looked_up: list[str] = []
    find = PrefixIndex.find

    def counted(index: PrefixIndex, *args: Any, **fields: Any) -> Index:
        looked_up.append("")
        return find(index, *args, **fields)

    monkeypatch.setattr(PrefixIndex, "find", counted)
    common = np.arange(96)
    requests = [
        Request(f"r{i}", np.append(common, [i, i]), SamplingParams(max_tokens=1, temperature=0.0))
        for i in range(1 + num_followers)
    ]
    for request in requests:
        engine.add(request)
    spans(engine)
    assert len(engine.scheduler.lifecycle.matching.blocked) == num_followers
    for stop in (32, 48, 64, 80, 96):
        looked_up.clear()
        assert spans(engine) == {"r0": (stop - 16, stop)}
        assert not looked_up
    assert len(spans(engine)) > 1, "the prefix is there"
    run_out(engine)
    for request in requests:
        assert request.answer.tolist() == alone(request.prompt.tolist(), 1)
        assert request.num_cached_tokens == (0 if request.id == "r0" else 96)


@pytest.mark.parametrize("windows", [(), (100,)])
def test_what_has_been_published_for_waiting_rows_is_promised_to_nobody(windows: tuple[int, ...]) -> None:
    """The pool has room for two prompts of 16 pages, and for a third once three of their pages are shared."""
    engine = make(num_pages=1 + 36, windows=windows, budget=100, policy=StallFree(FixedChunks(4)))
    common = np.arange(60)
    for number in range(2):
        engine.add(Request(f"r{number}", np.append(common, [number, 1]), SamplingParams(max_tokens=1)))
    spans(engine)
    engine.add(ask("newcomer", 24, 1))
    steps = [spans(engine) for _ in range(4)]
    assert ["newcomer" in step for step in steps] == [False, True, True, True]


def test_rows_that_wait_for_forgotten_pages_compute_them() -> None:
    def made() -> Engine:
        return make(num_pages=100, budget=100, policy=StallFree(FixedChunks(16)))

    engine, memory = made(), Memory()
    engine.observer = Recorder({}, memory)
    for number in range(3):
        prompt = np.append(np.arange(96), [number, 1])
        engine.add(Request(f"r{number}", prompt, SamplingParams(max_tokens=2, temperature=0.0)))
    assert spans(engine) == {"r0": (0, 16)}
    assert spans(engine) == {"r0": (16, 32)}
    engine.forget_prefixes()
    assert spans(engine) == {"r0": (32, 48), "r1": (0, 16)}, "the third waits for the second"
    finished = run_out(engine)
    assert {request.id: request.num_cached_tokens for request in finished} == {"r0": 0, "r1": 0, "r2": 96}
    engine.observer.close()
    steps = sum(isinstance(event, Replayed) for event in replay(memory.entries(), made().scheduler))
    assert steps == engine.scheduler.counters.steps


class LateMasks(MaskMaker):
    """Says that the masks of these requests are not made."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.names: set[str] = set()
        engine.masks = self

    def late_rows(self, slots: SlotPool, flying: Index) -> Index:
        busy = slots.busy.tolist()
        return np.array([row for row in busy if slots.requests[row].id in self.names], np.int64)

    def wait(self, rows: Index, slots: SlotPool, is_called: Callable[[], bool]) -> None:
        assert len(rows) == len(self.names)


def test_nobody_gives_way_where_the_oldest_waits_for_its_mask() -> None:
    """The other row waits where it is: in the pages that it gave up, nobody would compute."""
    engine = make(num_slots=2, num_pages=7)
    masks, counters = LateMasks(engine), engine.scheduler.counters
    old, young = ask("old", 8, 12), ask("young", 8, 12)
    for each in (old, young):
        engine.add(each)
    assert len(spans(engine)) == 2
    masks.names = {"old"}
    for at in range(8, 20 - 4):
        assert spans(engine) == {"young": (at, at + 1)}
    assert [engine.step() for _ in range(3)] == [None] * 3, "it holds four pages, and the other two"
    assert counters.preemptions == 0
    masks.names = set()
    assert len(spans(engine)) == 1
    assert counters.preemptions == 1, "what the oldest takes is another matter"
    run_out(engine)
    assert [each.answer.tolist() for each in (old, young)] == [
        alone(each.prompt.tolist(), 12) for each in (old, young)
    ]


def test_no_request_joins_a_static_batch_that_waits_for_its_masks() -> None:
    engine = make(num_slots=3, num_pages=30, policy=Static(1, 0.0))
    masks = LateMasks(engine)
    for name in ("first", "second"):
        engine.add(ask(name))
    assert list(spans(engine)) == ["first"]
    masks.names = {"first"}
    assert engine.step() is None
    assert list(engine.slots.running_ids) == ["first"]
    masks.names = set()
    run_out(engine)


def counts(engine: Engine) -> tuple[Index, Index]:
    slots = engine.slots
    return slots.num_computed[slots.busy], slots.num_tokens[slots.busy]


def test_a_late_mask_counts_once_a_step_or_wait_and_not_within_a_prompt() -> None:
    engine = make(num_slots=2, num_pages=30)
    masks, counters = LateMasks(engine), engine.scheduler.counters
    for name, num_prompt in (("a", 8), ("b", 40)):
        engine.add(ask(name, num_prompt, 12))
    spans(engine)
    while not engine.slots.decoding(engine.slots.busy, *counts(engine)).all():
        spans(engine)
    masks.names = {"a"}
    spans(engine)
    spans(engine)
    assert counters.late_masks == 2
    masks.names = {"a", "b"}
    assert [engine.step() for _ in range(5)] == [None] * 5
    assert counters.late_masks == 4, "one wait of two rows"
    masks.names = set()
    spans(engine)
    row = engine.slots.find("b")
    assert row is not None
    engine.scheduler.preemption.preempt(row)
    engine.scheduler.prefix.forget_all()
    masks.names = {"b"}
    assert len(spans(engine)) == 2, "it comes back"
    assert not engine.slots.decoding(engine.slots.busy, *counts(engine)).all(), "most of it is to be computed"
    assert list(spans(engine)) == ["a"]
    assert counters.late_masks == 4
    masks.names = set()
    run_out(engine)


def test_the_youngest_is_preempted_and_resumes_where_its_pages_are_found() -> None:
    engine = make(num_slots=2, num_pages=1 + 8)
    old, young = ask("old", 12, 12), ask("young", 12, 12)
    engine.add(old)
    engine.add(young)
    run_out(engine)
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert engine.scheduler.counters.preemptions == 1
    for request in (old, young):
        assert request.answer.tolist() == alone(request.prompt.tolist(), 12)
        assert request.num_cached_tokens == 0, "its own pages found again are no prefix hit"
    assert engine.scheduler.counters.refound_tokens > 0


def test_what_is_promised_to_a_running_prompt_is_not_given_to_a_newcomer() -> None:
    engine = make(num_slots=3, num_pages=1 + 12, budget=12)
    engine.add(ask("long", 40, 2))  # 10 pages, and one more with its first token
    spans(engine)
    engine.add(ask("second", 8, 2))
    while "second" not in (computed := spans(engine)):
        assert "long" in computed
    assert "long" not in computed
    assert engine.scheduler.counters.preemptions == 0


def test_a_request_that_can_never_fit_is_refused_at_the_door() -> None:
    engine = make(num_pages=11)
    with pytest.raises(
        ValueError, match=r"is 41 tokens. However, you requested 42 tokens \(30 in the prompt, 12 in the"
    ):
        engine.add(ask("a", 30, 12))
    engine.add(ask("a", 29, 12))
    with pytest.raises(
        ValueError, match=r"maximum context length is 41 tokens. However, you requested 140 tokens"
    ):
        engine.add(ask("b", 100, 40))
    run_out(engine)


def test_a_row_that_ends_between_schedule_and_commit_is_freed_by_the_commit() -> None:
    engine = make()
    scheduler = engine.scheduler
    requests = [ask("a", 6, 9), ask("b", 6, 9)]
    for request in requests:
        engine.add(request)
    spans(engine)
    batch = scheduler.schedule(0.0)
    assert scheduler.end("a", "abort") is requests[0]
    assert requests[0].finish_reason == "abort"
    recount(scheduler)
    assert len(engine.slots.busy) == 2, "the device still writes to its pages"
    assert scheduler.commit(batch, engine.runner.run(batch), 1.0).finished == []
    assert len(engine.slots.busy) == 1
    assert requests[0].answer.tolist() == alone(requests[0].prompt.tolist(), 1), "this step's came too late"
    recount(scheduler)
    run_out(engine)
    assert requests[1].answer.tolist() == alone(requests[1].prompt.tolist(), 9)


def test_a_failed_request_ends_alone_and_its_pages_are_never_found() -> None:
    engine = make()
    bad, good = ask("bad", 13, 4), ask("good", 8, 4)
    engine.runner.fail = {"bad"}
    engine.add(bad)
    engine.add(good)
    run_out(engine)
    assert (bad.finish_reason, bad.answer.tolist()) == ("error", [])
    assert bad.error == "the model's logits were not finite"
    assert good.answer.tolist() == alone(good.prompt.tolist(), 4)
    engine.runner.fail = set()
    again = Request("again", bad.prompt, SamplingParams(max_tokens=4, temperature=0.0))
    engine.add(again)
    run_out(engine)
    assert again.num_cached_tokens == 0
    assert again.answer.tolist() == alone(bad.prompt.tolist(), 4)


@pytest.mark.parametrize("failure", [NONE_LEFT, SPOILT])
def test_a_request_for_which_no_token_is_left_leaves_the_pages_of_its_prompt_to_others(failure: int) -> None:
    """It may come again and again, and must not keep the others from finding anything."""
    engine = make(budget=40)
    engine.runner.fail, engine.runner.failure = {"bad", "worse"}, failure
    first = ask("first", 13, 1)
    bad = Request("bad", np.concatenate((first.prompt, first.prompt)), SamplingParams(max_tokens=4))
    worse, again = (Request(name, bad.prompt, SamplingParams(max_tokens=4)) for name in ("worse", "again"))
    for request in (first, bad, worse, again):
        engine.add(request)
        run_out(engine)
    assert (bad.finish_reason, bad.answer.tolist()) == ("error", [])
    assert bad.is_at_fault == (failure == NONE_LEFT)
    assert [each.num_cached_tokens for each in (bad, worse, again)] == [12, 24, 24]
    assert again.answer.tolist() == alone(bad.prompt.tolist(), 4)


def test_logprobs_stay_aligned_with_the_answer_when_a_request_is_ended_in_flight() -> None:
    engine = make()
    request = ask("a", 6, 9, logprobs=0)
    engine.add(request)
    for number in range(3):
        batch = engine.scheduler.schedule(0.0)
        if number == 2:
            engine.scheduler.end("a", "abort")
        tokens = engine.runner.run(batch).tokens
        logprobs = {0: TokenLogprobs(int(tokens[0]), -1.0, ())}
        engine.scheduler.commit(batch, Sampled(tokens, logprobs), 0.0)
    assert [entry.token for entry in request.logprobs] == request.answer.tolist()
    assert len(request.answer) == 2


def test_the_same_inputs_and_seed_give_the_same_batches() -> None:
    def story(seed: int) -> list[object]:
        engine = make(num_slots=3, num_pages=14, seed=seed)
        requests = [ask(f"r{i}", 4 + 3 * i, 10) for i in range(6)]
        for request in requests:
            engine.add(request)
        told: list[object] = [request.seed for request in requests]
        while (step := engine.step()) is not None:
            told.append((step.batch.slots.tolist(), step.batch.starts.tolist(), step.batch.stops.tolist()))
        return told

    assert story(1) == story(1)
    assert story(1)[:6] != story(2)[:6], "requests without a seed draw theirs from the scheduler's"


def test_a_budget_below_the_number_of_slots_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens is 3; it must be at least num_slots \(4\)"):
        make(budget=3)


def test_the_slot_table_takes_and_frees_rows_oldest_first() -> None:
    slots = SlotPool(3, 16, 4)
    requests = [ask(str(number)) for number in range(3)]
    for number, request in enumerate(requests):
        request.number = number
    rows = [slots.take(requests[number]) for number in (2, 0, 1)]
    assert slots.requests[slots.busy].tolist() == requests
    before = slots.busy
    slots.release(rows[1])
    assert slots.requests[slots.busy].tolist() == requests[1:]
    assert slots.requests[before].tolist() == requests, "a batch may still refer to it"
    assert slots.num_free == 1
