"""Pages that come from another engine, and pages that are kept for one: tokens, holders and recordings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.policies.prefill_budget import FixedChunks
from continuous_batching.recording.recorder import Recorder
from continuous_batching.recording.replay import Divergence, Replayed, replay
from continuous_batching.request import Request, SamplingParams
from tests.continuous_batching.checksum import POISON, VOCAB_SIZE, ChecksumRunner, alone, keys_of
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_recorder import Memory
from tests.continuous_batching.test_slot_lifecycle import ask, check, make, run_out
from tests.continuous_batching.test_state_schedules import (
    NOTHING,
    NUM_SLOTS,
    StateRunner,
    engine_of,
    states_of,
)
from tests.thorough import cases, first_quick

SIZE = 4


def pages_of(engine: Engine) -> np.ndarray:
    runner = engine.runner
    assert isinstance(runner, ChecksumRunner)
    return runner.cache.reshape(-1, engine.slots.page_size)


def content(prompt: np.ndarray, num_pages: int, size: int = SIZE) -> np.ndarray:
    """What another engine computes for the first pages of a prompt."""
    keys = keys_of(prompt[: num_pages * size].tolist())
    return np.array(keys, dtype=np.uint64).reshape(num_pages, size)


def expect(engine: Engine, request: Request) -> bool:
    """Ask for the pages of a request, as who receives them does."""
    found = engine.expect_pages(request)
    if found is None:
        return False
    runner = engine.runner
    assert isinstance(runner, ChecksumRunner)
    runner._copy(found[1], [(np.empty(0, int), np.empty(0, int))])
    return True


def fill(engine: Engine, request: Request) -> None:
    arrival = engine.arriving_pages(request.id)
    assert arrival is not None
    pages = content(request.tokens, len(arrival.keys), engine.slots.page_size)
    pages_of(engine)[arrival.filled] = pages[arrival.num_found :]
    if isinstance(engine.runner, StateRunner):
        (state,) = arrival.state.tolist()
        engine.runner.states[state] = pages.size, int(pages[-1, -1])


def test_pages_that_came_whole_are_an_ordinary_hit() -> None:
    engine = make()
    request = ask("a", 30, 4)
    assert expect(engine, request)
    fill(engine, request)
    recount(engine.scheduler)
    assert not len(engine.scheduler.prefix.pages), "nothing is published before it is whole"
    engine.pages_arrived("a", is_whole=True)
    recount(engine.scheduler)
    assert engine.scheduler.prefix.num_idle == 7
    engine.add(request)
    run_out(engine)
    assert request.num_cached_tokens == 28
    assert engine.scheduler.counters.computed_tokens == 2 + 3
    check(request)


def test_pages_of_an_answer_that_goes_on_come_with_those_of_its_prompt() -> None:
    engine, prompt = make(), ask("a", 11).prompt
    answer = np.array(alone(prompt.tolist(), 14), dtype=np.int32)
    request = Request("a", prompt, SamplingParams(max_tokens=14, temperature=0.0), known=answer[:10])
    assert expect(engine, request)
    assert engine.arriving_pages("a").tokens.tolist() == [*prompt, *answer[:9]]
    fill(engine, request)
    engine.pages_arrived("a", is_whole=True)
    engine.add(request)
    run_out(engine)
    assert engine.scheduler.counters.computed_tokens == 1 + 3
    assert request.answer.tolist() == answer.tolist()


def test_of_a_cut_transfer_nothing_is_found_and_nothing_is_held() -> None:
    engine = make()
    request = ask("a", 30, 4)
    assert expect(engine, request)
    pages_of(engine)[engine.arriving_pages("a").filled[:3]] = POISON
    engine.pages_arrived("a", is_whole=False)
    recount(engine.scheduler)
    assert engine.scheduler.pool.num_free == 39
    engine.add(request)
    run_out(engine)
    assert request.num_cached_tokens == 0
    check(request)


def test_what_is_here_is_not_asked_for() -> None:
    engine = make()
    first, second = ask("a", 30, 2), ask("a", 30, 2)
    engine.add(first)
    run_out(engine)
    assert engine.expect_pages(second) is None, "all of it is here"
    longer = Request("b", np.concatenate([first.prompt, first.prompt]), SamplingParams(max_tokens=2))
    assert expect(engine, longer)
    arrival = engine.arriving_pages("b")
    assert (arrival.num_found, len(arrival.filled)) == (7, 14 - 7)
    engine.scheduler.tables.evict(engine.scheduler.prefix.num_idle)
    recount(engine.scheduler)
    fill(engine, longer)
    engine.pages_arrived("b", is_whole=True)
    engine.add(longer)
    run_out(engine)
    assert longer.num_cached_tokens == 56, "what was found is held until the rest is there"
    check(longer)


def test_nothing_is_expected_that_others_were_promised() -> None:
    engine = make(num_pages=1 + 12)
    running = ask("r", 20, 20)
    engine.add(running)
    engine.step()
    assert engine.expect_pages(ask("a", 30, 2)) is None
    assert expect(engine, ask("b", 9, 2))
    run_out(engine)
    check(running)


def waiting_rows() -> Engine:
    """A decoding row, and three that wait for a prefix of 24 pages; another computes one of these a step."""
    engine = make(num_slots=5, num_pages=110, budget=100, policy=StallFree(FixedChunks(4)))
    engine.add(Request("decoding", np.array([1, 2]), SamplingParams(max_tokens=60, temperature=0.0)))
    for number in range(4):
        prompt = np.append(np.arange(96), [number, 1])
        engine.add(Request(f"r{number}", prompt, SamplingParams(max_tokens=4, temperature=0.0)))
    return engine


def test_what_waiting_rows_will_share_is_spared_for_others() -> None:
    engine, memory = waiting_rows(), Memory()
    engine.observer = Recorder({}, memory)
    for _ in range(20):
        engine.step()
    scheduler = engine.scheduler
    assert len(scheduler.lifecycle.matching.blocked) == 3
    asked = [expect(engine, ask(name, 81, 2)) for name in ("first", "second", "third", "fourth")]
    assert asked == [True, True, True, False], "each is of 20 pages, and the rows need some of the others"
    assert len(scheduler.lifecycle.matching.blocked) == 3, "the rows still wait"
    recount(scheduler)
    run_out(engine)
    assert scheduler.counters.preemptions == 0
    assert engine.arriving_pages("third") is not None, "none had to give way"
    engine.observer.close()
    steps = sum(isinstance(event, Replayed) for event in replay(memory.entries(), waiting_rows().scheduler))
    assert steps == scheduler.counters.steps


def test_what_waiting_rows_will_share_is_not_spared_once_their_leader_has_gone() -> None:
    """Its pages could be evicted for others before the rows hold them."""
    engine = waiting_rows()
    for _ in range(20):
        engine.step()
    engine.abort("r0")
    assert not expect(engine, ask("first", 121, 2))
    recount(engine.scheduler)
    run_out(engine)
    assert engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("outrank", [False, True])
@pytest.mark.parametrize("kind", ["arriving", "leased"])
def test_held_pages_give_way_to_who_runs(kind: str, outrank: bool) -> None:
    engine = make(num_pages=1 + 12, outrank=outrank)
    if kind == "arriving":
        assert expect(engine, ask("a", 30, 2))
    else:
        engine.add(ask("a", 28, 1, leases_pages=True))
        run_out(engine)
        assert len(engine.leased_pages("a").pages) == 7
    running = ask("r", 20, 28)
    engine.add(running)
    run_out(engine)
    assert engine.scheduler.counters.preemptions == 0
    assert engine.arriving_pages("a") is None
    assert engine.leased_pages("a") is None
    engine.pages_arrived("a", is_whole=True)  # too late
    engine.release_pages("a")
    recount(engine.scheduler)
    check(running)


def test_a_lease_ends_an_earlier_one_of_the_same_id() -> None:
    engine = make()
    for _ in range(2):
        engine.add(ask("a", 28, 1, leases_pages=True))
        run_out(engine)
    engine.release_pages("a")
    recount(engine.scheduler)


@pytest.mark.parametrize("reason", ["abort", "failed"])
def test_no_lease_on_what_was_not_computed_in_order(reason: str) -> None:
    engine = make()
    engine.add(ask("a", 100, 1, leases_pages=True))
    if reason == "failed":
        engine.runner.fail.add("a")
    else:
        engine.step()
        engine.abort("a")
    run_out(engine)
    assert engine.leased_pages("a") is None
    recount(engine.scheduler)


def test_a_resize_ends_all_holds() -> None:
    engine = make()
    assert expect(engine, ask("a", 30, 4))
    engine.add(ask("b", 28, 1, leases_pages=True))
    run_out(engine)
    engine.resize(20, "cached")
    recount(engine.scheduler)
    assert engine.arriving_pages("a") is None
    assert engine.leased_pages("b") is None


def spoil(engine: Engine, request: Request, count: int) -> None:
    """Some pages of a request, and its state, hold what is nobody's."""
    arrival = engine.arriving_pages(request.id)
    assert arrival is not None
    pages_of(engine)[arrival.filled[:count]] = POISON
    if isinstance(engine.runner, StateRunner):
        engine.runner.states[int(arrival.state[0])] = NOTHING


def check_lease(engine: Engine, request: Request) -> None:
    """What is leased of a prompt is what another engine would go on from."""
    leased, size = engine.leased_pages(request.id), engine.slots.page_size
    assert leased is not None
    pages = content(request.prompt, len(leased.pages), size)
    assert np.array_equal(pages_of(engine)[leased.pages], pages)
    if isinstance(engine.runner, StateRunner):
        (state,) = leased.state.tolist()
        assert engine.runner.states[state] == (pages.size, int(pages[-1, -1]))


def crowd(seed: int, engine: Engine, length: int = 40) -> tuple[list[Request], int]:
    """Requests whose pages come whole, late, cut or not at all, with others that lease theirs; returns them,
    and how many prompt tokens were found."""
    random, size = np.random.default_rng(seed), engine.slots.page_size
    beginnings = [random.integers(0, VOCAB_SIZE, length) for _ in range(3)]
    todo, coming, leased, done = 24, list[Request](), list[str](), list[Request]()
    while todo or coming or engine.has_work:
        if todo and random.random() < 0.5:
            todo -= 1
            shared = beginnings[random.integers(3)][: random.integers(1, length)]
            prompt = np.concatenate([shared, random.integers(0, VOCAB_SIZE, random.integers(1, 30))])
            most = 1 if random.random() < 0.3 else int(random.integers(1, 12))
            if most == 1:  # other engines ask for whole pages
                prompt = np.resize(prompt, max(size, len(prompt) // size * size))
            request = Request(
                f"r{todo}", prompt, SamplingParams(max_tokens=most, seed=0), leases_pages=most == 1
            )
            done.append(request)
            if random.random() < 0.7 and expect(engine, request):
                coming.append(request)
            else:
                engine.add(request)
        for request in [each for each in coming if random.random() < 0.4]:
            coming.remove(request)
            arrival = engine.arriving_pages(request.id)
            is_whole = random.random() < 0.7
            if arrival is not None:
                fill(engine, request)
                if not is_whole:
                    spoil(engine, request, int(random.integers(1, 9)))
            engine.pages_arrived(request.id, is_whole=is_whole)
            engine.add(request)
        for each in [each for each in done if engine.leased_pages(each.id) is not None]:
            check_lease(engine, each)
            leased.append(each.id)
        for name in [each for each in leased if random.random() < 0.3]:
            engine.release_pages(name)
        recount(engine.scheduler)
        if engine.has_work:
            engine.step()
            recount(engine.scheduler)
    return done, engine.scheduler.counters.hit_tokens


@pytest.mark.parametrize("host", first_quick(1, [12, None]))
def test_random_schedules_with_arrivals_give_the_tokens_of_each_alone_and_replay(host: int | None) -> None:
    gave_way, hits = 0, 0
    for seed in range(cases(8, 1000)):
        options = {"num_slots": 4, "num_pages": 1 + 26, "num_host_pages": host}
        options["compact_every_steps"] = 3 * (seed % 2)
        engine, memory = make(**options), Memory()
        engine.overlap = seed % 3 == 0
        engine.observer = Recorder({}, memory)
        requests, found = crowd(seed, engine)
        hits += found
        check(*requests)
        engine.observer.close()
        again = make(**options)
        steps = sum(1 for _ in replay(memory.entries(), again.scheduler))
        assert steps
        assert np.array_equal(again.scheduler.pool.holders, engine.scheduler.pool.holders)
        recount(again.scheduler)
        gave_way += engine.scheduler.counters.preemptions
    assert hits
    assert gave_way


def test_states_come_and_are_leased_with_the_pages_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"arrived": 0, "missed": 0, "gave way": 0}
    for seed in range(cases(8, 300)):
        random = np.random.default_rng(seed)
        size = int(random.choice([16, 64, 48]))
        limits = -(-330 // size), NUM_SLOTS + int(random.choice([0, 1, 4])), 8 * (seed % 2), 3, size
        engine, memory = engine_of(*limits, compact_every_steps=seed % 3, overlap=seed % 2), Memory()
        engine.observer = Recorder({}, memory)
        gives_way = engine.scheduler.lifecycle.held.give_way

        def give_way(gives_way: Callable[[], bool] = gives_way) -> bool:
            counts["gave way"] += (gave := gives_way())
            return gave

        monkeypatch.setattr(engine.scheduler.lifecycle.held, "give_way", give_way)
        requests, _ = crowd(seed, engine, 200)
        for each in requests:
            engine.release_pages(each.id)
        check(*requests)
        counters, states = engine.scheduler.counters, states_of(engine)
        counts["arrived"] += counters.arrived_pages > 0
        counts["missed"] += counters.missed_pages > 0
        assert states.num_available == states.pool.num_pages - 1, "states leaked"
        engine.observer.close()
        again = engine_of(*limits, compact_every_steps=seed % 3)
        assert sum(1 for _ in replay(memory.entries(), again.scheduler))
        assert np.array_equal(states_of(again).pool.holders, states.pool.holders)
        recount(again.scheduler)
    assert min(counts.values()) >= 3, counts


def test_a_state_that_is_gone_comes_with_the_page_before_it() -> None:
    """It is found once it has come whole, and not before, though its pages are found all the while."""
    engine = engine_of(40, NUM_SLOTS + 2)
    prompt = np.random.default_rng(1).integers(0, VOCAB_SIZE, 70)
    first, again = (Request(name, prompt, SamplingParams(max_tokens=2, seed=0)) for name in "ab")
    engine.add(first)
    run_out(engine)
    states = states_of(engine)
    engine.scheduler.tables.evict(states.num_idle, states.number)
    for is_whole in (False, True):
        assert expect(engine, again)
        arrival = engine.arriving_pages("b")
        assert (arrival.num_found, len(arrival.filled), len(arrival.state)) == (3, 1, 1)
        if is_whole:
            fill(engine, again)
        engine.pages_arrived("b", is_whole=is_whole)
        recount(engine.scheduler)
        again.page_keys = engine.scheduler.page_keys(again)
        assert len(engine.scheduler.lifecycle.find(again)) == 4 * is_whole
    engine.add(again)
    run_out(engine)
    assert again.num_cached_tokens == 64
    check(first, again)


def test_a_replay_tells_where_pages_are_not_found_again() -> None:
    engine, memory = make(), Memory()
    engine.observer = Recorder({}, memory)
    assert expect(engine, ask("a", 30, 4))
    engine.observer.close()
    with pytest.raises(Divergence, match="no pages are found for a"):
        list(replay(memory.entries(), make(num_pages=5).scheduler))
