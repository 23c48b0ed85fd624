"""Drafts change how many tokens a step brings, and never which tokens."""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.batch import Batch
from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed, Offers, Verdicts
from continuous_batching.speculation.proposer import Guesses
from continuous_batching.speculation.speculation import Speculation, accepted
from kv_cache.pages import Index, PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, alone, searched
from tests.continuous_batching.recount import recount

EOS = 7


class Guesser:
    """Guesses what it was told about each request, some of it wrong."""

    def __init__(self, slots: SlotPool, seed: int | None = None) -> None:
        self.slots, self.stories = slots, dict[str, list[int]]()
        self.random = None if seed is None else np.random.default_rng(seed)

    def guess(self, rows: Index, most: int) -> Guesses:
        tokens, counts = np.zeros((len(rows), most), dtype=np.int32), np.zeros(len(rows), dtype=np.int64)
        for at, row in enumerate(rows.tolist()):
            known = int(self.slots.num_tokens[row])
            story = self.stories[self.slots.requests[row].id][known : known + most]
            tokens[at, : len(story)] = story
            counts[at] = len(story)
        if self.random is not None:  # each is right more often than not
            counts = np.minimum(counts, self.random.integers(0, most + 1, len(rows)))
            tokens[self.random.random(tokens.shape) < 0.3] = VOCAB_SIZE - 1
        return Guesses(tokens, counts)


def engine_of(
    num_pages: int = 60,
    num_slots: int = 4,
    most: int = 9,
    seed: int | None = None,
    max_batch_tokens: int = 24,
) -> tuple[Engine, Guesser]:
    """One over pages of four tokens, and who guesses for it."""
    slots = SlotPool(num_slots, 80, 4)
    guesser = Guesser(slots, seed)
    scheduler = Scheduler(
        slots,
        PagePool(num_pages),
        StallFree(),
        max_batch_tokens=max_batch_tokens,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        speculation=Speculation(slots, guesser, Fixed(), most),
    )
    return Engine(scheduler, ChecksumRunner(slots, scheduler.pool), clock=lambda: 0.0), guesser


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_drafts_bring_the_same_tokens_in_fewer_steps(seed: int, overlap: bool) -> None:
    random = np.random.default_rng(seed)
    engine, guesser = engine_of(num_pages=60 if seed % 2 else 24, most=5, seed=seed)
    engine.overlap = overlap
    answers, stories = {}, guesser.stories
    for number in range(10):
        prompt = random.integers(0, VOCAB_SIZE, int(random.integers(1, 20))).tolist()
        name, max_tokens = str(number), int(random.integers(1, 30))
        answers[name] = alone(prompt, max_tokens, frozenset([EOS]))
        stories[name] = prompt + alone(prompt, max_tokens)
        engine.add(Request(name, np.array(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0)))
    told: dict[str, list[int]] = {name: [] for name in answers}
    ended, most = [], 0
    while engine.has_work:
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
    assert most > 1, "no draft was right"
    counters = engine.scheduler.counters
    assert counters.sampled_tokens == sum(map(len, answers.values()))
    assert 0 < counters.drafts < counters.accepted_tokens < counters.draft_tokens
    by_position = engine.scheduler.speculation.accepted_by_position
    assert sum(by_position) == counters.accepted_tokens
    assert by_position == sorted(by_position, reverse=True)


def test_a_row_without_room_for_its_drafts_decodes_without_them() -> None:
    engine, guesser = engine_of(num_pages=4, num_slots=1, most=2)
    guesser.stories["a"] = [3] * 20
    engine.add(Request("a", np.arange(10), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))
    engine.step()
    taken = engine.scheduler.pool.take(engine.scheduler.pool.num_free)
    engine.slots.limit[0] = 20
    batch = engine.scheduler.schedule(0.0)
    assert (batch.stops.tolist(), batch.targets.tolist(), batch.num_drafts) == ([11], [11], 0)
    guesser.stories.clear()
    guesser.stories["a"] = []
    engine.scheduler.commit(batch, engine.runner.run(batch), 0.0)
    engine.scheduler.pool.release(taken)
    batch = engine.scheduler.schedule(0.0)
    assert (batch.stops.tolist(), batch.num_drafts) == ([12], 0), (
        "they stood for the tokens after another one"
    )


def test_drafts_take_what_the_budget_leaves_the_oldest_first() -> None:
    engine, guesser = engine_of()
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    for number in range(3):
        guesser.stories[str(number)] = list(range(30))
        engine.add(Request(str(number), np.arange(number, number + 6), params))
    engine.step()
    batch = engine.scheduler.schedule(0.0)
    assert (batch.stops - batch.starts).tolist() == [10, 10, 4]  # the budget is 24


def test_only_what_decodes_may_have_drafts() -> None:
    engine, guesser = engine_of()
    guesser.stories["a"] = [1] * 60
    engine.add(Request("a", np.arange(40), SamplingParams(max_tokens=9, temperature=0.0)))
    engine.step()
    with pytest.raises(AssertionError, match="row 0 does not decode"):
        engine.slots.set_drafts(np.array([0]), np.array([[1]], dtype=np.int32), np.array([1]))
    batch = engine.scheduler.schedule(0.0)
    assert (batch.num_drafts, batch.num_tokens) == (0, 16)


def test_nobody_looks_ahead_of_drafts() -> None:
    engine, guesser = engine_of()
    guesser.stories["a"] = [5] * 20
    engine.add(Request("a", np.arange(10), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)))
    engine.step()
    assert engine.scheduler.schedule(0.0).num_drafts
    assert not engine.scheduler.can_look_ahead


ALLOWED = [None, 0, 2, 0]  # drafts of four rows


def test_a_request_may_have_fewer_drafts_or_none() -> None:
    engine, guesser = engine_of(max_batch_tokens=60)
    answers = {}
    for number, allowed in enumerate(ALLOWED):
        prompt = list(range(number, number + 6))
        answers[str(number)] = alone(prompt, 12)
        guesser.stories[str(number)] = prompt + answers[str(number)]
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, max_draft_tokens=allowed)
        engine.add(Request(str(number), np.array(prompt), params))
    ended = [*engine.step().finished]
    batch = engine.scheduler.schedule(0.0)
    assert (batch.stops - batch.starts).tolist() == [10, 1, 3, 1]
    engine.scheduler.commit(batch, engine.runner.run(batch), 0.0)
    while engine.has_work:
        ended += engine.step().finished
    assert {each.id: each.answer.tolist() for each in ended} == answers
    drafted = {each.id: each.num_drafted for each in ended}
    assert [drafted[str(number)] > 0 for number in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("allowed", [None, 0, 3])
def test_beams_stay_as_they_are(allowed: int | None) -> None:
    """Beside a request with drafts, whatever they allow."""
    engine, guesser = engine_of(max_batch_tokens=60)
    params = SamplingParams(
        max_tokens=8, beam_width=2, temperature=0, ignore_eos=True, max_draft_tokens=allowed
    )
    prompt = list(range(6))
    for name in ("beams", "a"):
        guesser.stories[name] = prompt + alone(prompt, 12)
    search = Request("beams", np.array(prompt), params)
    engine.add(search)
    long = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    engine.add(Request("a", np.array(prompt), long))
    while engine.has_work:
        engine.step()
    found = [(each.tokens.tolist(), each.cumulative_logprob) for each in search.hypotheses]
    assert found == [(tokens, total) for tokens, total, _ in searched(prompt, params, frozenset())]
    assert search.num_drafted == 0
    assert engine.scheduler.counters.accepted_tokens > 0


@pytest.mark.parametrize("allowed", [None, 0])
def test_steps_are_made_ahead_where_no_request_may_have_drafts(allowed: int | None) -> None:
    engine, guesser = engine_of()
    guesser.stories["a"] = []
    params = SamplingParams(max_tokens=9, temperature=0.0, max_draft_tokens=allowed)
    engine.add(Request("a", np.arange(6), params))
    engine.step()
    engine.scheduler.schedule(0.0)
    assert engine.scheduler.can_look_ahead == (allowed == 0)


class Unsure(Fixed):
    """No guess is checked, for what the model says shows anyway whether the first is right."""

    asks = True
    is_hopeful = False

    def __init__(self) -> None:
        self.learnt: list[tuple[int, int]] = []

    def choose(self, offers: Offers) -> Index:
        return np.zeros_like(offers.counts)

    def learn(self, verdicts: Verdicts) -> None:
        self.learnt += zip(verdicts.guessed.tolist(), verdicts.right.tolist())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_guess_that_is_no_draft_is_compared_for_nothing(overlap: bool) -> None:
    engine, guesser = engine_of()
    engine.overlap = overlap
    lengths = engine.scheduler.speculation.lengths = Unsure()
    prompt = list(range(10))
    guesser.stories["a"] = prompt + alone(prompt, 20)
    guesser.stories["a"][15] = VOCAB_SIZE - 1
    engine.add(Request("a", np.array(prompt), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    # The first token is the prompt's, the last may be no draft, and who looks ahead cannot guess
    assert lengths.learnt == ([] if overlap else [(1, int(at != 15)) for at in range(11, 29)])
    assert engine.scheduler.counters.draft_tokens == 0


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


class Counting(Guesser):
    """Knows nothing, and counts how often it is asked."""

    num_asked = 0

    def guess(self, rows: Index, most: int) -> Guesses:
        self.num_asked += 1
        return super().guess(rows, most)


@pytest.mark.parametrize(("num_rows", "num_asked"), [(4, 11), (48, 4)])
def test_of_many_rows_without_a_guess_not_each_step_asks(num_rows: int, num_asked: int) -> None:
    engine, _ = engine_of(num_pages=400, num_slots=num_rows, max_batch_tokens=200)
    counting = Counting(engine.slots)
    engine.scheduler.speculation = Speculation(engine.slots, counting, Fixed(), 4)
    for number in range(num_rows):
        counting.stories[str(number)] = []
        engine.add(Request(str(number), np.arange(3), SamplingParams(max_tokens=13, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    assert counting.num_asked == num_asked
