"""Beam searches beside other requests: every schedule gives each what it would get alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams, TokenLogprobs
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from tests.continuous_batching import test_schedules
from tests.continuous_batching import test_slot_lifecycle as small
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, searched
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_schedules import (
    EOS,
    FAMILIES,
    MAX_TOKENS,
    Arrival,
    Made,
    Resizes,
    arrivals,
    check_answers,
    over_schedules,
    serve,
)
from tests.continuous_batching.windows import window_groups


@dataclass(frozen=True)
class Hunt(Arrival):
    """A beam search of the schedule."""

    width: int
    penalty: float
    early: Any
    num_stops: int

    def _sample(self, name: str, number: int, index: int) -> Request:
        random = np.random.default_rng(1000 + number)
        own = random.integers(0, VOCAB_SIZE, self.num_own).tolist()
        stops = random.choice(VOCAB_SIZE, self.num_stops, replace=False).tolist()
        params = SamplingParams(
            max_tokens=self.max_tokens,
            stop_token_ids=tuple(stops),
            ignore_eos=number % 2 == 0,
            beam_width=self.width,
            length_penalty=self.penalty,
            early_stopping=self.early,
        )
        prompt = FAMILIES[self.family][: self.num_shared] + own
        return Request(name, np.array(prompt), params, cache_salt=self.salt, priority=number % 3 - 1)


hunts = st.builds(
    Hunt,
    family=st.integers(0, 2),
    num_shared=st.integers(0, 16),
    num_own=st.integers(1, 6),
    max_tokens=st.integers(1, 12),
    arrives_at=st.integers(0, 20),
    aborts_after=st.one_of(st.none(), st.none(), st.integers(0, 15)),
    fails=st.sampled_from([False] * 9 + [True]),
    stop=st.none(),
    salt=st.sampled_from(["", "", "", "tenant b"]),
    num_samples=st.just(1),
    width=st.integers(2, 6),
    penalty=st.sampled_from([1.0, 0.0, -1.0, 2.0]),
    early=st.sampled_from([False, True, "never"]),
    num_stops=st.sampled_from([0, 3, 12]),
)


@st.composite
def schedulers(draw: st.DrawFn, depths: Sequence[int] = (1,)) -> Made:
    """Some with pages of windows for one beam of the largest search alone, some for three."""
    return draw(test_schedules.schedulers(depths, least_slots=3, width=draw(st.sampled_from([1, 3]))))


def expected(request: Request) -> list[tuple[list[int], float, float]]:
    stops = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else {EOS})
    return searched(request.prompt.tolist(), request.params, frozenset(stops))


def check_search(request: Request, failing: set[str]) -> None:
    if request.finish_reason == "abort" or request.id in failing:
        assert request.finish_reason in ("abort", "error")
        assert (request.hypotheses, request.answer.tolist()) == ((), [])
        return
    want = expected(request)
    found = request.hypotheses
    assert [each.tokens.tolist() for each in found] == [tokens for tokens, _, _ in want]
    assert np.allclose([(each.cumulative_logprob, each.score) for each in found], [each[1:] for each in want])
    assert request.answer.tolist() == want[0][0]
    assert request.finish_reason == found[0].finish_reason
    assert request.first_token_s is not None


PLANS = st.tuples(st.lists(hunts, min_size=1, max_size=5), st.lists(arrivals, max_size=4)).map(
    lambda both: [*both[0], *both[1]]
)


@over_schedules(40, 4000, schedulers(), plan=PLANS, overlap=st.booleans())
def test_every_schedule_gives_each_search_what_it_finds_alone(
    made: Made, plan: list[Arrival], resizes: Resizes, overlap: bool
) -> None:
    scheduler, runner = made
    ended = serve(scheduler, runner, plan, resizes, overlap=overlap)
    hunted = {name: each for name, each in ended.items() if each.params.beam_width}
    for request in hunted.values():
        check_search(request, runner.fail)
    check_answers({name: each for name, each in ended.items() if name not in hunted}, runner.fail)
    assert not scheduler._beam_searches.by_number
    assert not len(scheduler.slots.busy)
    assert scheduler.pool.num_free + scheduler.prefix.num_idle == scheduler.pool.num_pages - 1


def make(num_slots: int = 8, num_pages: int = 60, **options: Any) -> Engine:
    return small.make(num_slots, num_pages, budget=num_slots + 40, **options)


def search(name: str, num_prompt: int, max_tokens: int, width: int, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, beam_width=width, ignore_eos=True, **fields)
    return Request(name, np.array(FAMILIES[0][:num_prompt]), params)


def run_out(engine: Engine) -> int:
    """Serve to the end; the most pages held at once."""
    most = 0
    while engine.has_work:
        engine.step()
        recount(engine.scheduler)
        most = max(most, engine.scheduler.pool.num_held - engine.scheduler.prefix.num_idle)
    return most


def test_beams_share_all_that_they_have_in_common() -> None:
    engine, request = make(), search("a", num_prompt=39, max_tokens=10, width=8)
    engine.add(request)
    most = run_out(engine)
    check_search(request, set())
    alone = -(-(39 + 9) // 4)
    assert most <= 9 + 8 * 3  # the prompt's full pages once, and three pages of its own for each beam
    assert most < 8 * alone / 2
    counters = engine.scheduler.counters
    assert 0 < counters.copied_pages <= 7 * counters.steps
    assert counters.preemptions == 0
    assert counters.computed_tokens == 39 + 8 * 9


def test_what_can_never_fit_is_refused() -> None:
    engine = make(num_slots=4, num_pages=1 + 2 + 4 * 3)
    with pytest.raises(ValueError, match="beam_width is 5; 4 requests run at once"):
        engine.add(search("a", num_prompt=10, max_tokens=4, width=5))
    with pytest.raises(ValueError, match=r"beam_width is 4, .* room for 72 tokens; there is room for 56"):
        engine.add(search("b", num_prompt=10, max_tokens=12, width=4))
    many = tuple(range(VOCAB_SIZE - 3))
    with pytest.raises(ValueError, match="beam_width is 4; there may be only 3 tokens that go on"):
        engine.add(search("c", num_prompt=10, max_tokens=4, width=4, stop_token_ids=many))
    assert not engine.has_work
    assert not engine.scheduler._beam_searches.by_number


def test_a_search_waits_for_all_its_rows_and_nobody_overtakes_it() -> None:
    engine = make(num_slots=4)
    short, late = Request("s", np.arange(5), SamplingParams(max_tokens=3)), Request("l", np.arange(6))
    request = search("a", num_prompt=9, max_tokens=4, width=4)
    for each in (short, request, late):
        engine.add(each)
    engine.step()
    assert engine.slots.num_free == 3
    assert engine.scheduler.held_back == "slots"
    assert len(engine.scheduler.waiting) == 2
    run_out(engine)
    check_search(request, set())
    assert short.finish_s is not None
    assert request.first_token_s is not None


def test_a_resumed_search_keeps_the_window_from_which_its_beams_start() -> None:
    """Its leader has computed what beams have in common, and far more, when the others begin."""
    slots, pool = SlotPool(4, MAX_TOKENS, 2), PagePool(120)
    groups = window_groups([3], slots, pool, None, [30])
    scheduler = Scheduler(slots, pool, StallFree(), max_batch_tokens=60, vocab_size=VOCAB_SIZE, groups=groups)
    engine = Engine(scheduler, ChecksumRunner(slots, pool, None, groups), clock=lambda: 0.0)
    request = search("a", num_prompt=9, max_tokens=16, width=3)
    engine.add(request)
    for _ in range(12):
        engine.step()
    scheduler.preemption.preempt(int(slots.busy[0]))
    scheduler.tables.evict(scheduler.prefix.num_idle)
    run_out(engine)
    check_search(request, set())


@pytest.mark.parametrize("is_found", [False, True])
def test_a_resumed_search_that_just_fits_finishes(is_found: bool) -> None:
    """Its leader computes, or finds, what beams have in common, and stops there until the others begin."""
    slots, pool = SlotPool(4, MAX_TOKENS, 2), PagePool(120)
    groups = window_groups([3], slots, pool, None, [4 * 2])
    scheduler = Scheduler(slots, pool, StallFree(), max_batch_tokens=60, vocab_size=VOCAB_SIZE, groups=groups)
    engine = Engine(scheduler, ChecksumRunner(slots, pool, None, groups), clock=lambda: 0.0)
    request = search("a", num_prompt=3, max_tokens=18, width=4, early_stopping="never")
    engine.add(request)
    for _ in range(12):
        engine.step()
    leader = int(slots.busy[0])
    own = set(groups[0].table[leader, groups[0].first[leader] : groups[0].stop[leader]].tolist())
    scheduler.preemption.preempt(leader)
    if is_found:  # the others lose what their windows would see
        (group,) = groups
        for page in [page for page in group._idle if page in own]:
            group._idle.move_to_end(page)
        group.evict(sum(page not in own for page in group._idle))
    else:
        scheduler.tables.evict(scheduler.prefix.num_idle)
    run_out(engine)
    check_search(request, set())


def test_a_search_preempted_again_finds_pages_by_the_tokens_that_it_has_by_then() -> None:
    """Its first beam may continue another one, and nothing else has changed what can be found."""
    for num_steps in range(4, 16):
        engine, request = make(), search("a", num_prompt=3, max_tokens=19, width=2, early_stopping="never")
        engine.add(request)
        for _ in range(num_steps):
            engine.step()
        for _ in range(2):
            engine.scheduler.preemption.preempt(int(engine.slots.busy[0]))
            engine.step()
        run_out(engine)
        check_search(request, set())


def test_a_search_is_promised_pages_for_all_its_beams() -> None:
    engine = make(num_pages=1 + 8)
    other = Request("o", np.arange(13), SamplingParams(max_tokens=2))
    request = search("a", num_prompt=9, max_tokens=3, width=4)
    engine.add(other)
    engine.add(request)
    engine.step()
    assert engine.slots.num_free == 7  # 4 of 8 pages are free; it needs 3, and one more for each other beam
    assert engine.scheduler.held_back == "pages"
    run_out(engine)
    check_search(request, set())
    assert engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("num_steps", range(6))
def test_a_search_that_is_aborted_under_its_batch_ends_with_it(num_steps: int) -> None:
    engine = make()
    engine.scheduler.max_batch_tokens = 8
    request, other = (search(name, num_prompt=11, max_tokens=5, width=3) for name in ("a", "b"))
    engine.add(request)
    engine.add(other)
    for _ in range(num_steps):
        engine.step()
    batch = engine.scheduler.schedule(0.0)
    sampled = engine.runner.run(batch)
    ended = engine.abort("a")
    recount(engine.scheduler)
    assert request not in engine.scheduler.commit(batch, sampled, 0.0).finished
    recount(engine.scheduler)
    assert ended is request
    assert (request.finish_reason, request.hypotheses, request.answer.tolist()) == ("abort", (), [])
    run_out(engine)
    check_search(other, set())


@pytest.mark.parametrize("num_steps", range(6))
def test_a_search_may_be_aborted_while_it_comes_back(num_steps: int) -> None:
    engine = make(num_slots=4)
    engine.scheduler.max_batch_tokens = 7
    request = search("a", num_prompt=2, max_tokens=30, width=4, length_penalty=0.0)
    engine.add(request)
    for _ in range(6):
        engine.step()
    engine.scheduler.preemption.preempt(int(engine.slots.busy[0]))
    engine.scheduler.tables.evict(engine.scheduler.prefix.num_idle)
    for _ in range(num_steps):  # the beams are computed again, some before the others
        engine.step()
        recount(engine.scheduler)
    batch = engine.scheduler.schedule(0.0)
    sampled = engine.runner.run(batch)
    is_ahead = (
        engine.scheduler.slots.find("a") not in batch.slots
    )  # the request's own row waits for the beams
    assert is_ahead == (1 <= num_steps <= 4)
    engine.abort("a")
    recount(engine.scheduler)
    assert engine.scheduler.commit(batch, sampled, 0.0).finished == []
    recount(engine.scheduler)
    assert request.finish_reason == "abort"
    assert engine.scheduler.pool.num_held == engine.scheduler.prefix.num_idle


def test_one_bad_beam_is_enough_to_fail() -> None:
    class Spoiling(ChecksumRunner):
        def run(self, batch: Batch) -> Sampled:
            sampled = super().run(batch)
            if len(batch.owners) == 3 and self.num_steps == 4:
                sampled.tokens[2] = -1
            return sampled

    engine, request = make(), search("a", num_prompt=7, max_tokens=6, width=3)
    engine.runner = Spoiling(engine.slots, engine.scheduler.pool)
    engine.add(request)
    run_out(engine)
    assert (request.finish_reason, request.hypotheses) == ("error", ())
    assert not len(engine.scheduler.prefix.pages)


@pytest.mark.parametrize(
    ("sharing", "every"), [(True, 1), (False, 3)]
)  # it needs a step more without shared pages
def test_a_search_that_loses_its_rows_again_and_again_finds_the_same(sharing: bool, every: int) -> None:
    engine = make(num_slots=3, prefix_sharing=sharing)
    request = search("a", num_prompt=9, max_tokens=9, width=3, early_stopping="never")
    engine.add(request)
    for step in range(1, 60):
        if len(engine.slots.busy) and step % every == 0:
            engine.scheduler.preemption.preempt(int(engine.slots.busy[step % 3]))
            recount(engine.scheduler)
        if engine.has_work:
            engine.step()
            recount(engine.scheduler)
    assert not engine.has_work
    check_search(request, set())
    assert request.num_preemptions >= 4
    counters = engine.scheduler.counters
    assert counters.preemptions == request.num_preemptions
    assert bool(counters.refound_tokens) == sharing


def test_log_probabilities_of_a_hypothesis_are_those_of_its_tokens() -> None:
    class Telling(ChecksumRunner):
        def run(self, batch: Batch) -> Sampled:
            sampled = super().run(batch)
            for index, each in sampled.candidates.items():
                best = tuple(zip(each.tokens[:2].tolist(), each.logprobs[:2].tolist()))
                sampled.logprobs[index] = TokenLogprobs(best[0][0], best[0][1], best)
            return sampled

    engine, request = make(), search("a", num_prompt=7, max_tokens=6, width=3, logprobs=2)
    engine.runner = Telling(engine.slots, engine.scheduler.pool)
    engine.add(request)
    run_out(engine)
    check_search(request, set())
    for each in request.hypotheses:
        assert [entry.token for entry in each.logprobs] == each.tokens.tolist()
        assert sum(entry.logprob for entry in each.logprobs) == pytest.approx(each.cumulative_logprob)
        assert all(entry.top[0][1] >= entry.logprob for entry in each.logprobs)
    assert request.logprobs == list(request.hypotheses[0].logprobs)
