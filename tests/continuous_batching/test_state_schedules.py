"""Recurrent states in random schedules: each step goes on from the state of exactly its request's tokens.

The device here keeps of a state what it stands for, a position and the key of all tokens before it, and
asserts both wherever a span goes on from one. So a state that is dropped, copied late, shared while it is
written or found behind other tokens is noticed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.inspection import recount
from continuous_batching.paging import checkpoints
from continuous_batching.policies.batching import StallFree
from continuous_batching.policies.policy import Policy
from continuous_batching.policies.prefill_budget import FixedChunks
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.speculation import Speculation
from kv_cache.page_keys import page_keys
from kv_cache.pages import Index, PageCopy, PagePool
from kv_cache.prefix_index import PrefixIndex
from kv_cache.states import GRID, StateGroup
from tests.continuous_batching.checksum import (
    VOCAB_SIZE,
    ChecksumRunner,
    Free,
    alone,
    searched,
    serve_at_random,
    story,
)
from tests.continuous_batching.tier import attach
from tests.knowing import Knowing
from tests.thorough import cases

LARGEST, NUM_REQUESTS, NUM_SLOTS = 300, 14, 4
STORY = np.random.default_rng(5).integers(0, VOCAB_SIZE, LARGEST)
NOTHING = (-1, 0)  # what a free page holds


class StateRunner(ChecksumRunner):
    """Computes batches as its parent does, and advances what states stand for."""

    def __init__(self, slots: SlotPool, pool: PagePool, host: PagePool | None, group: StateGroup) -> None:
        super().__init__(slots, pool, host)
        self.group = group
        self.states = [NOTHING] * group.pool.num_pages  # a position, and the key of the token before it
        self.num_fetched = 0  # states that came from a tier
        self.on_host = [NOTHING] * (group.host.num_pages if group.host else 0)

    def run(self, batch: Batch, free: Free | None = None) -> Sampled:
        gone = self.group.pool.free_pages
        sampled = super().run(batch, free)
        slots, drafts = self.slots, batch.drafts_by_span
        spans = zip(batch.slots.tolist(), batch.starts.tolist(), (batch.stops - drafts).tolist())
        for at, (row, start, stop) in enumerate(spans):
            page, begin = int(self.group.table[row, 0]), start - int(slots.state_lag[row])
            assert page > 0, f"row {row} has no state"
            assert stop % GRID == 0 or stop == slots.num_tokens[row] or slots.beam_width[row]
            if begin:
                assert self.states[page] == (begin, self._key(row, begin)), f"row {row} at {begin}"
            for cut in batch.cuts:
                if cut.span == at:
                    assert begin < cut.position < stop
                    self.states[cut.page] = cut.position, self._key(row, cut.position)
            self.states[page] = stop, self._key(row, stop)
        for page in gone.tolist():
            self.states[page] = NOTHING
        return sampled

    def read(self, pages: Index, group: int) -> Callable[[], list[bytes]]:
        """Pages of the device, or what its states stand for."""
        if group != self.group.number:
            return super().read(pages, group)
        contents = [np.array(self.states[page], dtype=np.uint64).tobytes() for page in pages.tolist()]
        return lambda: contents

    def write_host(self, pages: Index, contents: Sequence[bytes], group: int) -> None:
        """Pages of the host's pool, or states there."""
        if group != self.group.number:
            super().write_host(pages, contents, group)
            return
        for page, content in zip(pages.tolist(), contents):
            position, key = np.frombuffer(content, dtype=np.uint64)
            self.on_host[page] = int(position), int(key)
            self.num_fetched += 1

    def _key(self, row: int, position: int) -> int:
        page, offset = divmod(position - 1, self.slots.page_size)
        return int(self.cache[int(self.slots.page_table[row, page]) * self.slots.page_size + offset])

    def _copy_state(self, copy: PageCopy) -> None:
        assert copy.group == self.group.number
        if copy.way.endswith("_tier"):
            assert self.tier is not None, "there is no tier"
            self.tier.apply(copy)
            return
        source, target = {
            "within": (self.states, self.states),
            "to_host": (self.states, self.on_host),
            "from_host": (self.on_host, self.states),
        }[copy.way]
        read = [source[page] for page in copy.sources.tolist()]
        for page, state in zip(copy.targets.tolist(), read):
            target[page] = state


def engine_of(
    num_pages: int,
    num_states: int,
    host_pages: int = 0,
    host_states: int = 0,
    size: int = 16,
    policy: Policy | None = None,
    **options: int,
) -> Engine:
    """Pages of `size` tokens, and steps of little more than a block of the grid by default."""
    slots, pool = SlotPool(NUM_SLOTS, LARGEST, size), PagePool(1 + num_pages)
    host = PagePool(1 + host_pages) if host_pages else None
    entries = pool.num_pages, 0 if host is None else host.num_pages
    state_host = PagePool(1 + host_states) if host_states else None
    group = StateGroup(1, size, NUM_SLOTS, PagePool(1 + num_states), state_host, *entries)
    drafts, overlap = options.pop("drafts", 0), bool(options.pop("overlap", 0))
    scheduler = Scheduler(
        slots,
        pool,
        policy or StallFree(),
        max_batch_tokens=options.pop("max_batch_tokens", GRID + NUM_SLOTS),
        vocab_size=VOCAB_SIZE,
        host_pool=host,
        speculation=Speculation(slots, Knowing(slots, story, VOCAB_SIZE), Fixed(), drafts)
        if drafts
        else None,
        groups=[group],
        **options,
    )
    return Engine(scheduler, StateRunner(slots, pool, host, group), clock=lambda: 0.0, overlap=overlap)


def states_of(engine: Engine) -> StateGroup:
    states = engine.scheduler.tables.states
    assert states is not None
    return states


def draw(random: np.random.Generator, number: int) -> Request:
    """A prompt that begins as others do, sometimes with samples or beams."""
    shared, own = int(random.choice([0, 64, 100, 128, 190, 200])), int(random.integers(1, 45))
    prompt = np.concatenate([STORY[:shared], random.integers(0, VOCAB_SIZE, own)])
    width = 2 if number % 5 == 3 else 0
    params = SamplingParams(
        max_tokens=int(random.integers(1, 38)), seed=None if width else 0, beam_width=width
    )
    request = Request(str(number), prompt, params)
    if number % 5 == 0:
        request.followers = [Request(f"{number}.{index}", prompt, params) for index in range(2)]
    return request


def next_turn(before: Request, drawn: Request) -> Request:
    """The next turn of another request's conversation in place of what was drawn, if it is not too long."""
    answer = alone(before.prompt.tolist(), before.params.max_tokens)
    prompt = np.concatenate([before.prompt, answer, STORY[:9]])
    if before.params.beam_width or len(prompt) > LARGEST - 40:
        return drawn
    return Request(drawn.id, prompt, SamplingParams(max_tokens=20, seed=0))


def storm(seed: int, pages: dict[bytes, bytes] | None = None) -> Engine:
    """Serve requests while some are aborted and some fail; a tier has these `pages`."""
    random = np.random.default_rng(seed)
    size = int(random.choice([16, 64, 48]))
    longest = -(-LARGEST // size)
    on_host = (2 * longest, int(random.integers(1, 9))) if seed % 3 or pages is not None else (0, 0)
    engine = engine_of(
        *(-(-430 // size) + seed % 3, NUM_SLOTS + int(random.choice([0, 1, 3, 12])), *on_host, size),
        max_batch_tokens=int(random.choice([GRID + NUM_SLOTS, 2 * GRID + 30, 400])),
        compact_every_steps=seed % 4,
        overlap=seed % 2,
        drafts=3 * (seed % 5 == 0),
        has_tier=pages is not None,
    )
    if pages is not None:
        options = np.random.default_rng(seed)
        attach(
            engine,
            pages,
            wait=lambda: int(options.choice([0, 0, 1, 5])),
            most=lambda: int(options.choice([1000, 1000, 1, 0])),
        )
    made = [draw(random, number) for number in range(NUM_REQUESTS)]
    for at in (6, 9, 12):
        made[at] = next_turn(made[at - 4], made[at])
    assert isinstance(engine.runner, StateRunner)
    engine.runner.fail = {each.id for each in made if random.random() < 0.1 and not each.params.beam_width}

    def check() -> None:
        assert not recount(engine.scheduler).wrong_pages

    serve_at_random(engine, made, random, check)
    states = states_of(engine)
    assert states.num_available == states.pool.num_pages - 1, "states leaked"
    assert not states._num_left.any(), "a row has left a state behind"
    assert not states._trial_page.any(), "a row has left a state on trial"
    return engine


def test_each_step_goes_on_from_the_state_of_its_tokens_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints, "LEAST_ON_THE_WAY", GRID)
    counts = {"hits": 0, "swapped": 0, "evicted": 0, "accepted": 0, "promoted": 0}
    for seed in range(cases(24, 400)):
        engine = storm(seed)
        states, counters = states_of(engine), engine.scheduler.counters
        counts["hits"] += states.num_hits > 0
        counts["swapped"] += states.counts.swapped_in_pages > 0
        counts["promoted"] += states.counts.promoted_pages > 0
        counts["evicted"] += states.counts.evicted_pages > 0
        counts["accepted"] += counters.accepted_tokens > 0
    print(counts)
    assert min(counts.values()) >= 3


@pytest.mark.slow
def test_so_it_does_from_states_that_a_tier_has_found() -> None:
    """Two engines, one after the other, share a tier whose lookups may end late, or early."""
    fetched = 0
    for seed in range(cases(6, 100)):
        pages: dict[bytes, bytes] = {}
        for _ in range(2):
            engine = storm(seed, pages)
            assert isinstance(engine.runner, StateRunner)
            fetched += engine.runner.num_fetched > 0
    assert fetched >= 3


def serve(engine: Engine, *prompts: np.ndarray, max_tokens: int = 4) -> list[int]:
    """Serve prompts that come together; how many tokens of each were found."""
    first = engine.scheduler.counters.prompt_tokens
    made = [
        Request(f"{first}.{at}", each, SamplingParams(max_tokens=max_tokens))
        for at, each in enumerate(prompts)
    ]
    for request in made:
        engine.add(request)
    while engine.has_work:
        engine.step()
        assert not recount(engine.scheduler).wrong_pages
    for request in made:
        assert request.answer.tolist() == alone(request.prompt.tolist(), max_tokens)
    return [request.num_cached_tokens for request in made]


def after(shared: int, own: int) -> np.ndarray:
    return np.concatenate([STORY[:shared], np.random.default_rng(own).integers(0, VOCAB_SIZE, own)])


def test_hits_go_as_far_as_states_lie() -> None:
    engine = engine_of(100, 12)
    assert serve(engine, after(200, 5)) == [0]
    assert serve(engine, after(200, 5)) == [192], "the same prompt goes on from its end"
    assert serve(engine, after(200, 60)) == [192], "so does a conversation"
    assert serve(engine, after(150, 9)) == [0], "prompts part where nobody left a state, and now one does"
    assert serve(engine, after(150, 31)) == [128]
    lookups = engine.scheduler.prefix.lookups
    assert (lookups["whole"], lookups["no_state"]) == (2, 1)


def test_a_long_prompt_that_begins_as_none_before_leaves_states_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second with its beginning goes on from one. They take free pages only, and give way first."""
    monkeypatch.setattr(checkpoints, "LEAST_ON_THE_WAY", GRID)
    engine = engine_of(100, NUM_SLOTS + 2)
    other = np.random.default_rng(1).integers(0, VOCAB_SIZE, 150)
    assert serve(engine, after(280, 5)) == [0], "which leaves states at 64, 128 and its end"
    states = states_of(engine)
    assert (states.num_taken, len(states._spent)) == (3, 2)
    assert serve(engine, after(190, 9)) == [128]
    assert len(states._spent) == 1, "what was found is kept as others are"
    assert serve(engine, other) == [0]
    for own in (1, 2):
        serve(engine, np.random.default_rng(own + 5).integers(0, VOCAB_SIZE, 100))
    assert not states._spent, "states at the ends of prompts take their places"
    assert serve(engine, np.concatenate([other, STORY[:9]])) == [128]
    assert engine.scheduler.counters.preemptions == 0


def test_rows_that_wait_for_a_state_are_not_looked_up_until_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(100, 12, policy=StallFree(FixedChunks(GRID)), max_batch_tokens=4 * GRID)
    made = [Request(str(own), after(280, own), SamplingParams(max_tokens=1)) for own in range(NUM_SLOTS)]
    for request in made:
        engine.add(request)
    engine.step()
    matching = engine.scheduler.lifecycle.matching
    assert len(matching.blocked) == NUM_SLOTS - 1
    looked_up: list[str] = []
    find = PrefixIndex.find

    def counted(index: PrefixIndex, *args: Any) -> Index:
        looked_up.append("")
        return find(index, *args)

    monkeypatch.setattr(PrefixIndex, "find", counted)
    while engine.scheduler.slots.num_computed[0] < 256:
        engine.step()
        assert not looked_up
    engine.step()
    assert len(looked_up) == NUM_SLOTS - 1
    assert not matching.blocked
    while engine.has_work:
        engine.step()
    assert [request.num_cached_tokens for request in made] == [0, 256, 256, 256]


def test_whoever_parts_from_a_prompt_that_has_just_passed_the_place_leaves_the_state() -> None:
    """The third with that beginning goes on from it: no page says yet that the first goes on otherwise."""
    engine = engine_of(100, 12, max_batch_tokens=2 * GRID + NUM_SLOTS)
    made = after(200, 5), after(130, 80), after(130, 31)
    first, second, third = (
        Request(str(at), each, SamplingParams(max_tokens=4)) for at, each in enumerate(made)
    )
    engine.add(first)
    while engine.scheduler.slots.num_computed[0] < 128:
        engine.step()
    assert engine.scheduler.slots.num_computed[0] == 128
    engine.add(second)
    while engine.has_work:
        engine.step()
    engine.add(third)
    while engine.has_work:
        engine.step()
    assert [each.num_cached_tokens for each in (first, second, third)] == [0, 0, 128]


def test_answers_that_do_not_return_take_the_place_of_no_prompt() -> None:
    """Their states cover none that questions about one document share, and nothing waits for their pages."""
    engine = engine_of(100, NUM_SLOTS)
    for own in (21, 22, 23):
        assert serve(engine, after(128, own), max_tokens=70) == [0 if own == 21 else 128]
        assert not states_of(engine)._spent
    engine, older = engine_of(22, 12), np.random.default_rng(1).integers(0, VOCAB_SIZE, 100)
    for prompt, max_tokens in ((older, 4), (after(128, 21), 70), (after(0, 100), 4)):
        assert serve(engine, prompt, max_tokens=max_tokens) == [0]
    assert engine.scheduler.counters.evicted_pages > 0
    assert serve(engine, np.concatenate([older, STORY[:9]])) == [64]


def test_prompts_that_come_together_wait_for_the_state_where_they_part() -> None:
    for num_states in (NUM_SLOTS, 12):
        engine = engine_of(100, num_states)
        assert serve(engine, after(200, 5), after(130, 9), after(200, 31)) == [0, 128, 192]
        assert engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize(("num_tokens", "found"), [(80, 128), (69, 128), (133, 192)])
def test_an_answer_leaves_a_state_for_the_next_turn(num_tokens: int, found: int) -> None:
    """At the last page end that it has computed, which may be where it ends."""
    engine = engine_of(100, 12)
    answer = alone(STORY[:60].tolist(), num_tokens)
    assert serve(engine, STORY[:60], max_tokens=num_tokens) == [0]
    turn = np.concatenate([STORY[:60], answer, STORY[:9]])
    assert serve(engine, turn) == [found]


def test_a_conversation_that_goes_on_lets_others_keep_their_states() -> None:
    """Its last state covers the one before, which gives way before older states of others."""
    engine = engine_of(100, NUM_SLOTS)
    other, turn = np.random.default_rng(1).integers(0, VOCAB_SIZE, 100), after(64, 40)
    assert serve(engine, other) == [0]
    assert serve(engine, turn) == [0]
    assert serve(engine, np.concatenate([turn, STORY[:90]])) == [64], "which is hit, and then covered"
    assert serve(engine, np.random.default_rng(2).integers(0, VOCAB_SIZE, 70)) == [0]
    assert states_of(engine).counts.evicted_pages == 1
    assert serve(engine, np.concatenate([other, STORY[:9]])) == [64]


def test_a_state_where_several_have_gone_on_is_not_covered() -> None:
    engine = engine_of(100, NUM_SLOTS)
    for own in (40, 90, 80):
        serve(engine, after(100, own))
    assert states_of(engine).beside[engine.scheduler.prefix.find(keys_of(STORY[:64]), STORY, "")[3]] > 0
    assert not states_of(engine)._spent


@pytest.mark.parametrize("strips", [False, True])
def test_answers_are_kept_in_place_of_prompts_where_they_return(strips: bool) -> None:
    """In turns of several conversations; a client that strips goes on from prompts, and those are kept."""
    engine, random = engine_of(200, NUM_SLOTS + 2), np.random.default_rng(3)
    prompts = [random.integers(0, VOCAB_SIZE, 70) for _ in range(3)]
    for _ in range(2):
        for at, prompt in enumerate(prompts):
            serve(engine, prompt, max_tokens=70)
            answer = [] if strips else alone(prompt.tolist(), 70)
            prompts[at] = np.concatenate([prompt, answer, random.integers(0, VOCAB_SIZE, 9)]).astype(np.int64)
    assert states_of(engine).answers_return is not strips
    assert [serve(engine, prompt)[0] for prompt in prompts] == [64 if strips else 192] * 3


def test_where_answers_return_the_state_of_a_running_one_is_evicted_last() -> None:
    """And that of its prompt first, which stays as others do if the answer ends before it leaves one."""
    engine = engine_of(100, NUM_SLOTS + 2)
    scheduler, states = engine.scheduler, states_of(engine)
    states.answers_return = True
    other = np.random.default_rng(1).integers(0, VOCAB_SIZE, 100)
    assert serve(engine, other) == [0]
    assert states.num_idle == 1
    assert not states._spent, "the answer has left no state"
    request = Request("running", after(64, 6), SamplingParams(max_tokens=70, ignore_eos=True))
    engine.add(request)
    while scheduler.slots.num_computed[0] <= 128:
        engine.step()
    assert (states.num_idle, len(states._spent)) == (2, 1)
    scheduler.tables.evict(1, states.number)
    assert (states.num_idle, len(states._spent)) == (1, 0), "the prompt's has gone"
    scheduler.tables.evict(1, states.number)
    assert states.num_idle == 0
    while engine.has_work:
        engine.step()
    assert serve(engine, np.concatenate([request.tokens, STORY[:9]])) == [128]
    assert serve(engine, np.concatenate([other, STORY[:9]])) == [0]


def test_pages_behind_the_last_state_are_evicted_first() -> None:
    """Nobody can go on from them, however recently they were written."""
    engine = engine_of(30, 12)
    for own in (10, 11):
        serve(engine, np.concatenate([[own], after(64, 5)]), max_tokens=50)
    scheduler = engine.scheduler
    scheduler.tables.evict(scheduler.prefix.num_idle - 2 * 4)
    for own in (10, 11):
        assert serve(engine, np.concatenate([[own], after(64, 9)])) == [64]


def keys_of(tokens: np.ndarray) -> list[bytes]:
    return page_keys(tokens.astype(np.int32), 16, "")


def test_as_many_states_as_slots_neither_block_nor_preempt() -> None:
    engine, most = engine_of(200, NUM_SLOTS), 0
    for number in range(12):
        engine.add(Request(str(number), after(64 * (number % 4), 20 + number), SamplingParams(max_tokens=30)))
    while engine.has_work:
        engine.step()
        assert engine.scheduler.held_back in (None, "slots", "tokens")
        most = max(most, len(engine.slots.busy))
    assert most == NUM_SLOTS
    assert engine.scheduler.counters.preemptions == 0
    with pytest.raises(AssertionError, match="3 states for 4 rows"):
        engine_of(200, NUM_SLOTS - 1)


def test_a_pool_of_states_that_grows_counts_each_state_once() -> None:
    group, rows, none = StateGroup(1, 64, 4, PagePool(9), None, 16, 0), np.arange(4), np.array([], np.int64)
    for row in rows.tolist():
        group.open(row)
    group.grow(rows, group.missing(rows, np.full(4, 129)))
    group.try_to_keep(rows[:2], np.full(2, 128))
    group.keep(3, 192)
    assert not group.num_wrong(rows, none)
    group.resize(27)
    assert not group.num_wrong(rows, none)
    assert group.pool.num_held == 6


def test_a_swap_that_is_refused_drops_nothing_that_rests() -> None:
    """The host has pages for a request that leaves, but no state, because others have left theirs."""
    engine = engine_of(20, NUM_SLOTS, host_pages=12, host_states=1)
    serve(engine, after(192, 5))
    engine.scheduler.tables.evict(12)
    assert engine.scheduler.prefix.num_resting == 12
    swap, request = engine.scheduler.lifecycle.swap, Request("a", STORY[:40], SamplingParams(max_tokens=1))
    one, two, left = np.array([1]), np.array([1, 2]), engine.scheduler.prefix.num_resting
    assert swap.leave(request, [(0, two), (0, two)], 40, (0, 0)) is None
    assert engine.scheduler.prefix.num_resting == left
    assert swap.leave(request, [(0, two), (0, one)], 40, (0, 0)) is not None
    swap.forget(request)


def test_beams_begin_from_the_state_of_their_own_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that comes back and waits for another prompt's page finds no more than its beams share."""
    monkeypatch.setattr("tests.continuous_batching.test_state_schedules.NUM_SLOTS", 6)
    assert sum(resumed_beside_its_own_answer(seed) for seed in range(40)) >= 3


def resumed_beside_its_own_answer(seed: int) -> bool:
    """Preempt a beam search, and compute a prompt that goes on from its leader's answer before it comes back.

    The device holds each row's state to the tokens before it. Returns False where the beams of this seed part
    too late, or not at all, for the two to meet.
    """
    random = np.random.default_rng(seed)
    prompt = random.integers(0, VOCAB_SIZE, int(random.integers(60, 64)))
    engine = engine_of(200, 20, max_batch_tokens=200)
    request = Request("S", prompt, SamplingParams(max_tokens=40, beam_width=4))
    engine.add(request)
    search = engine.scheduler._beam_searches.by_number[request.number]
    for _ in range(1 + int(random.integers(1, 16))):
        engine.step()
    engine.scheduler.preemption.preempt(search.all_rows[0])
    engine.scheduler.prefix.forget_all()
    leader = search.leader
    if search.num_shared(16) > 3 or len(leader.tokens) < 66:
        return False
    longer = np.concatenate([leader.tokens, random.integers(0, VOCAB_SIZE, 60)])
    engine.scheduler.waiting.remove(leader)
    engine.add(Request("R", longer, SamplingParams(max_tokens=3)))
    engine.scheduler._admission.admit(200, 0.0)
    engine.scheduler.waiting.push(leader)
    while engine.has_work:
        engine.step()
    expected = searched(prompt.tolist(), request.params, frozenset())
    assert [list(each.tokens) for each in request.hypotheses] == [each[0] for each in expected]
    return True


def test_states_come_back_from_a_host_that_holds_more_than_the_device() -> None:
    group, keys = StateGroup(1, 64, 2, PagePool(4), PagePool(10), 20, 20), np.arange(1, 9)
    assert group.take_in(keys, np.arange(8))[1].tolist() == [*range(1, 9)]
    (copy,) = group.resume(0, keys)
    assert (copy.way, copy.sources.tolist(), copy.targets.tolist()) == ("from_host", [8], [1])


def test_a_state_on_trial_makes_room_for_a_row() -> None:
    """So does one that is kept where a chunk ends, in an answer that goes on from its first."""
    group, first, second = StateGroup(1, 64, 2, PagePool(3), None, 16, 0), np.array([0]), np.array([1])
    group.open(0)
    group.grow(first, group.missing(first, np.array([129])))
    (copy,) = group.try_to_keep(first, np.array([128]))
    assert copy.sources.tolist() == group.live[first].tolist()
    group.keep(0, 192)
    group.grow(first, group.missing(first, np.array([193])))
    assert group.pool.num_free == 0
    group.open(1)
    group.grow(second, group.missing(second, np.array([64])))
    assert sorted(group.live.tolist()) == [1, 2]
    assert group.pool.holders[1:].tolist() == [1, 1], "both rows have a state of their own, and nothing else"
