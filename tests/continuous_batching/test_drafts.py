"""Do drafts change how many tokens a step brings, and never which?"""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.batch import Batch
from continuous_batching.engine import Engine
from continuous_batching.policies.stall_free import StallFree
from continuous_batching.request import Request, SamplingParams
from continuous_batching.sampling.drafts import accepted
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, alone
from tests.continuous_batching.recount import recount

NO_SPANS = np.empty(0, dtype=np.int64)
EOS = 7


def engine_of(num_pages: int = 60, num_slots: int = 4) -> Engine:
    """One over pages of four tokens."""
    slots = SlotPool(num_slots, 80, 4)
    scheduler = Scheduler(
        slots,
        PagePool(num_pages),
        StallFree(),
        max_batch_tokens=24,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
    )
    return Engine(scheduler, ChecksumRunner(slots, scheduler.pool), clock=lambda: 0.0)


def draft(engine: Engine, stories: dict[str, list[int]], random: np.random.Generator) -> None:
    """Guess some next tokens of the rows that decode, each right more often than not."""
    slots = engine.slots
    for row in slots.busy.tolist():
        known, story = int(slots.num_tokens[row]), stories[slots.requests[row].id]
        room = int(slots.limit[row]) - known - 1
        count = min(int(random.integers(0, 6)), room)
        decodes = slots.num_computed[row] == known - 1 >= slots.num_prompt[row]
        if not decodes or count < 1:
            continue
        guesses = [(story[known : known + count] + [0] * count)[at] for at in range(count)]
        wrong = random.random(count) < 0.3
        slots.set_drafts(row, np.where(wrong, VOCAB_SIZE - 1, guesses))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_drafts_bring_the_same_tokens_in_fewer_steps(seed: int, overlap: bool) -> None:
    random = np.random.default_rng(seed)
    engine = engine_of(num_pages=60 if seed % 2 else 24)
    engine.overlap = overlap
    answers, stories = {}, {}
    for number in range(10):
        prompt = random.integers(0, VOCAB_SIZE, int(random.integers(1, 20))).tolist()
        name, max_tokens = str(number), int(random.integers(1, 30))
        answers[name] = alone(prompt, max_tokens, frozenset([EOS]))
        stories[name] = prompt + alone(prompt, max_tokens)
        engine.add(Request(name, np.array(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0)))
    told: dict[str, list[int]] = {name: [] for name in answers}
    ended, most = [], 0
    while engine.has_work:
        draft(engine, stories, random)
        step = engine.step()
        assert step is not None
        assert step.batch.num_tokens <= engine.scheduler.max_batch_tokens
        for row, token in zip(step.owners.tolist(), step.sampled.tokens.tolist()):
            told[engine.slots.requests[row].id].append(token)
        most = max(most, int(np.bincount(step.owners).max(initial=0)))
        ended += step.finished
        recount(engine.scheduler)
    assert {each.id: each.answer.tolist() for each in ended} == answers
    assert told == answers, "what a step brings is what is booked"
    assert overlap or most > 1, "no draft was right"
    assert engine.scheduler.counters.sampled_tokens == sum(map(len, answers.values()))


def test_a_row_without_room_for_its_drafts_decodes_without_them() -> None:
    engine = engine_of(num_pages=4, num_slots=1)
    engine.add(Request("a", np.arange(10), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))
    engine.step()
    taken = engine.scheduler.pool.take(engine.scheduler.pool.num_free)
    engine.slots.limit[0] = 20
    engine.slots.set_drafts(0, np.array([3, 3]))
    batch = engine.scheduler.schedule(0.0)
    assert (batch.stops.tolist(), batch.targets.tolist(), batch.num_drafts) == ([11], [11], 0)
    engine.scheduler.commit(batch, engine.runner.run(batch), 0.0)
    engine.scheduler.pool.release(taken)
    assert not engine.slots.has_drafts, "they stood for the tokens after another one"
    batch = engine.scheduler.schedule(0.0)
    assert (batch.stops.tolist(), batch.num_drafts) == ([12], 0)


def test_drafts_take_what_the_budget_leaves_the_oldest_first() -> None:
    engine = engine_of()
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    for number in range(3):
        engine.add(Request(str(number), np.arange(number, number + 6), params))
    engine.step()
    for row in engine.slots.busy.tolist():
        engine.slots.set_drafts(row, np.arange(9))
    batch = engine.scheduler.schedule(0.0)
    assert (batch.stops - batch.starts).tolist() == [10, 10, 4]  # of 24


def test_only_what_decodes_may_have_drafts() -> None:
    engine = engine_of()
    engine.add(Request("a", np.arange(40), SamplingParams(max_tokens=9, temperature=0.0)))
    engine.step()
    with pytest.raises(AssertionError, match="does not decode"):
        engine.slots.set_drafts(0, np.array([1]))


def test_nobody_looks_ahead_of_drafts() -> None:
    engine = engine_of()
    engine.add(Request("a", np.arange(10), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)))
    engine.step()
    engine.slots.set_drafts(0, np.array([5]))
    engine.scheduler.schedule(0.0)
    assert not engine.scheduler.can_look_ahead


def test_a_token_counts_after_right_drafts_alone() -> None:
    token_ids = np.zeros((3, 12), dtype=np.int32)
    token_ids[0, 5:8] = 1, 2, 3  # drafts at 5, 6 and 7
    token_ids[2, 9:11] = 4, 5
    batch = Batch(
        np.array([0, 1, 2]),
        np.array([4, 3, 8]),
        np.array([8, 4, 11]),
        np.array([0, 0, 0, 0, 1, 2, 2, 2]),
        np.array([0, 0, 0, 0, 1, 2, 2, 2]),
        np.array([5, 6, 7, 8, 4, 9, 10, 11]),
        num_drafts=5,
    )
    assert batch.yielding.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert accepted(batch, np.array([1, 9, 3, 6, 8, 4, 5, 6]), token_ids).tolist() == [0, 1, 4, 5, 6, 7]
    assert accepted(batch, np.array([9, 2, 3, 6, 8, 9, 5, 6]), token_ids).tolist() == [0, 4, 5]
