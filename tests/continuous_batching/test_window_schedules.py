"""Pages of windows come back: random schedules in pools that hold little, and what a prefix hit needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.policies.prefill_budget import Chunks, FixedChunks
from continuous_batching.request import Request, SamplingParams
from continuous_batching.routing.routing import Routing
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.proposer import NGram
from continuous_batching.speculation.speculation import Speculation
from kv_cache.groups import WindowGroup, most_pages
from kv_cache.page_keys import TokenIds, short_key
from kv_cache.pages import Index, PagePool
from kv_cache.prefix_cache import PageListener
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, alone, serve_at_random, story
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_machine import SpoilingRunner
from tests.continuous_batching.test_slot_lifecycle import run_out
from tests.continuous_batching.windows import least_pages, window_groups
from tests.knowing import Knowing
from tests.thorough import cases, first_quick

LARGEST, NUM_REQUESTS = 60, 20
STORY = np.random.default_rng(5).integers(0, VOCAB_SIZE, LARGEST)
COUNTS = ("swapped_in_pages", "promoted_pages", "copied_pages", "compacted_pages", "evicted_pages")


def draw(random: np.random.Generator, number: int) -> Request:
    """A prompt that begins as others do, sometimes with samples beside it."""
    shared, own = int(random.integers(0, 36)), int(random.integers(1, 8))
    prompt = np.concatenate([STORY[:shared], random.integers(0, VOCAB_SIZE, own)])
    params = SamplingParams(max_tokens=int(random.integers(1, 16)), seed=0)
    request = Request(str(number), prompt, params)
    if number % 5 == 0:
        request.followers = [Request(f"{number}.{index}", prompt, params) for index in range(2)]
    return request


class Reporter(PageListener):
    """Tells a router of the pages of one engine, as events do."""

    def __init__(self) -> None:
        self.routing = Routing(1)

    def stored(self, keys: Sequence[bytes], tokens: TokenIds, before: bytes | None, salt: str) -> None:
        assert self.routing.stored(0, map(short_key, keys)) == len(keys)

    def removed(self, keys: Sequence[bytes]) -> None:
        assert self.routing.removed(0, map(short_key, keys)) == len(keys)

    def stored_beside(self, keys: Sequence[bytes], group: int, window: int) -> None:
        assert self.routing.stored_beside(0, map(short_key, keys), group, window) == len(keys)

    def removed_beside(self, keys: Sequence[bytes], group: int) -> None:
        assert self.routing.removed_beside(0, map(short_key, keys), group) == len(keys)

    def check(self, scheduler: Scheduler, request: Request) -> None:
        """Assert that a router expects of a prompt what an engine would resume from."""
        keys, tables = scheduler.page_keys(request), scheduler.tables
        found = tables.resumable(scheduler.prefix.find(keys, request.tokens, request.cache_salt))
        told = self.routing.num_found([*map(short_key, keys)], scheduler.slots.page_size)
        assert told.tolist() == [len(found)]


def storm(seed: int) -> list[WindowGroup]:
    """Serve requests while some are aborted and some fail; return the groups of windows."""
    random = np.random.default_rng(seed)
    size, windows = int(random.choice([1, 2, 4])), [(5,), (9,), (3, 14)][seed % 3]
    slots, longest = SlotPool(4, LARGEST, size), -(-(LARGEST - 1) // size)
    pool, host = PagePool(1 + longest + seed % 7), PagePool(2 + 2 * longest) if seed % 4 else None
    counts = [least_pages(window, size, LARGEST - 1) * int(random.integers(1, 4)) for window in windows]
    groups = window_groups(windows, slots, pool, host, counts, 12 if host else 0)
    scheduler = Scheduler(
        slots,
        pool,
        StallFree(),
        max_batch_tokens=int(random.choice([6, 20, 60])),
        vocab_size=VOCAB_SIZE,
        host_pool=host,
        compact_every_steps=seed % 3,
        speculation=Speculation(slots, NGram(slots), Fixed(), 3) if seed % 5 == 0 else None,
        groups=groups,
    )
    runner = SpoilingRunner(slots, pool, host, groups)
    engine = Engine(scheduler, runner, clock=lambda: 0.0, overlap=seed % 2 == 0)
    made = [draw(random, number) for number in range(NUM_REQUESTS)]
    runner.fail = {each.id for each in made if random.random() < 0.1}
    scheduler.prefix.listener = reporter = Reporter()
    asked = cycle(made)

    def check() -> None:
        recount(scheduler)
        reporter.check(scheduler, next(asked))

    serve_at_random(engine, made, random, check)
    assert all(each.num_available == each.pool.num_pages - 1 for each in groups), "pages leaked"
    return groups


@pytest.mark.parametrize("seeds", first_quick(1, [range(8), range(8, cases(20, 400))]), ids=str)
def test_requests_get_the_tokens_of_each_alone_whatever_happens_to_the_pages_of_windows(seeds: range) -> None:
    groups = [group for seed in seeds for group in storm(seed)]
    counted = {name: sum(getattr(group.counts, name) > 0 for group in groups) for name in COUNTS}
    print(counted)
    assert min(counted.values()) >= 3


def engine_of(
    num_pages: int,
    window_pages: int,
    window: int = 9,
    budget: int = 16,
    chunks: Chunks | None = None,
    **options: int,
) -> Engine:
    """Pages of 4 tokens, chunks of up to the `budget` of a step, or as `chunks` say."""
    slots, pool = SlotPool(3, LARGEST, 4), PagePool(1 + num_pages)
    groups = window_groups([window], slots, pool, None, [window_pages])
    scheduler = Scheduler(
        slots,
        pool,
        StallFree(chunks),
        max_batch_tokens=budget,
        vocab_size=VOCAB_SIZE,
        groups=groups,
        **options,
    )
    return Engine(scheduler, ChecksumRunner(slots, pool, None, groups), clock=lambda: 0.0)


def serve(engine: Engine, name: str, prompt: np.ndarray, max_tokens: int = 4) -> Request:
    request = Request(name, prompt, SamplingParams(max_tokens=max_tokens))
    engine.add(request)
    while engine.has_work:
        engine.step()
        recount(engine.scheduler)
    assert request.answer.tolist() == alone(prompt.tolist(), max_tokens)
    return request


def test_a_request_of_many_windows_needs_the_pages_of_one_and_one_less_is_refused() -> None:
    engine = engine_of(15, 3)
    serve(engine, "a", STORY[:50], max_tokens=10)
    assert engine.scheduler.counters.steps >= 10
    small = engine_of(15, 2)
    with pytest.raises(ValueError, match="needs 3 pages of the layers that see 9 tokens; the cache has 2"):
        small.add(Request("a", STORY[:50], SamplingParams(max_tokens=10)))
    serve(small, "b", STORY[:7], max_tokens=2)


def test_a_pool_of_a_window_shrinks_no_further_than_accepted_requests_allow() -> None:
    engine = engine_of(40, 9)
    _, group = engine.scheduler.tables.groups
    requests = [
        Request(name, STORY[:30], SamplingParams(max_tokens=20, seed=at)) for at, name in enumerate("abc")
    ]
    for request in requests:
        engine.add(request)
    for _ in range(12):
        engine.step()
    message = "3 pages of the layers that see 9 tokens cannot hold the longest accepted request, 50 tokens"
    with pytest.raises(ValueError, match=f"{message}; resize to at least 4"):
        engine.resize(41, "running", [3])
    with pytest.raises(ValueError, match="5 pages of the layers that see 9 tokens are fewer than"):
        engine.resize(41, "nothing", [5])
    assert (group.pool.num_pages, engine.scheduler.counters.preemptions) == (10, 0)
    engine.resize(41, "running", [4])
    recount(engine.scheduler)
    assert engine.scheduler.counters.preemptions == 2
    while engine.has_work:
        engine.step()
        recount(engine.scheduler)
    assert all(
        each.answer.tolist() == alone(STORY[:30].tolist(), 20, seed=at) for at, each in enumerate(requests)
    )


@pytest.mark.parametrize(("num_prompt", "window_pages", "window", "drafts"), [(20, 7, 9, 0), (19, 11, 13, 2)])
def test_a_long_chunk_preempts_nobody_for_pages_that_it_needs_for_one_step(
    num_prompt: int, window_pages: int, window: int, drafts: int
) -> None:
    """Nor do drafts beside it, for which it leaves none."""
    engine = engine_of(60, window_pages, window)
    if drafts:
        slots = engine.slots
        engine.scheduler.speculation = Speculation(slots, Knowing(slots, story, VOCAB_SIZE), Fixed(), drafts)
    first = Request("first", STORY[:num_prompt], SamplingParams(max_tokens=30))
    engine.add(first)
    for _ in range(4):
        engine.step()
    second = Request("second", STORY[::-1][:50].copy(), SamplingParams(max_tokens=5))
    engine.add(second)
    while engine.has_work:
        engine.step()
        recount(engine.scheduler)
    assert engine.scheduler.counters.preemptions == 0
    for each in (first, second):
        assert each.answer.tolist() == alone(each.prompt.tolist(), each.params.max_tokens)


def test_no_page_is_evicted_for_drafts_beside_a_chunk_that_takes_more_than_was_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(60, 23, budget=24, chunks=FixedChunks(8))
    slots, tables, has_free = engine.slots, engine.scheduler.tables, engine.scheduler.tables.has_free
    engine.scheduler.speculation = Speculation(slots, Knowing(slots, story, VOCAB_SIZE, 1), Fixed(), 2)
    window, short = tables.groups[1], list[int]()

    def asked(rows: Index, stops: Index, longer: Index) -> bool:
        short.append(int(window.missing(rows, stops).sum()) - window.pool.num_free)
        return has_free(rows, stops, longer)

    monkeypatch.setattr(tables, "has_free", asked)
    engine.add(Request("gone", STORY[:20], SamplingParams(max_tokens=2)))
    run_out(engine)
    engine.add(Request("decodes", STORY[::2][:20].copy(), SamplingParams(max_tokens=30)))
    for _ in range(4):
        engine.step()
    engine.add(Request("long", STORY[::-1][:50].copy(), SamplingParams(max_tokens=5)))
    num_drafts = 0
    while engine.has_work:
        before = window.counts.evicted_pages
        step = engine.step()
        assert step is not None
        if step.batch.num_drafts:
            assert window.counts.evicted_pages - before <= max(0, short[-1]), "more than the spans lack"
            num_drafts += 1
    assert num_drafts
    assert window.counts.evicted_pages


def test_a_row_in_flight_is_not_preempted_for_a_window_that_another_row_goes_on_from() -> None:
    """The second shares two pages that nobody has used since the first ended, and the third lacks them."""
    engine = engine_of(60, 11, budget=32)
    engine.overlap = True
    first = Request("first", STORY[:36], SamplingParams(max_tokens=1))
    second = Request("second", np.concatenate([STORY[:36], STORY[:4]]), SamplingParams(max_tokens=4))
    third = Request("third", STORY[::-1][:50].copy(), SamplingParams(max_tokens=4))
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.add(third)
    while engine.has_work:
        engine.step()
        recount(engine.scheduler)
    assert engine.scheduler.counters.preemptions == 0
    assert second.num_cached_tokens == 36
    for each in (first, second, third):
        assert each.answer.tolist() == alone(each.prompt.tolist(), each.params.max_tokens)


def test_no_step_is_begun_ahead_of_the_pages_that_a_row_alone_gives_back_behind_its_chunk() -> None:
    """Those of a chunk in flight are yet to be published, so that the row that holds all waits for them."""
    engine = engine_of(60, 8, budget=32)
    engine.overlap = True
    engine.add(request := Request("alone", STORY[:50], SamplingParams(max_tokens=4)))
    run_out(engine)
    assert request.answer.tolist() == alone(request.prompt.tolist(), 4)


@pytest.mark.parametrize(("window_pages", "found"), [(14, 40), (7, 40), (4, 0)])
def test_a_prefix_is_resumed_from_the_last_page_whose_window_is_still_here(
    window_pages: int, found: int
) -> None:
    """Another prompt in between takes what is idle: of few pages all, of more what lies behind."""
    engine = engine_of(40, window_pages)
    serve(engine, "a", STORY[:42])
    serve(engine, "between", STORY[::-1][:13].copy())
    again = serve(engine, "again", np.concatenate([STORY[:40], STORY[:5]]))
    assert again.num_cached_tokens == found
    lookups = engine.scheduler.prefix.lookups
    assert lookups["window_evicted"] == (found == 0)


def test_chunks_leave_a_shared_beginning_to_be_found_wherever_they_were_cut() -> None:
    """The beginning ends within the first chunk, which is longer than a window."""
    engine = engine_of(40, 20)
    serve(engine, "a", STORY[:45])
    other = np.concatenate([STORY[:8], STORY[30:50]])
    assert serve(engine, "b", other).num_cached_tokens == 8


def test_a_row_that_waited_for_pages_takes_none_for_copies_of_resting_ones() -> None:
    """Other rows hold all pages of the device by then, and nothing was promised for copies."""
    slots, pool, host = SlotPool(3, LARGEST, 4), PagePool(41), PagePool(41)
    groups = window_groups([9], slots, pool, host, [6], 20)
    scheduler = Scheduler(
        slots,
        pool,
        StallFree(FixedChunks(16)),
        max_batch_tokens=60,
        vocab_size=VOCAB_SIZE,
        host_pool=host,
        groups=groups,
    )
    engine = Engine(scheduler, ChecksumRunner(slots, pool, host, groups), clock=lambda: 0.0)
    follower = Request("follower", STORY[:42], SamplingParams(max_tokens=4))
    engine.add(Request("leader", STORY[:42], SamplingParams(max_tokens=4)))
    engine.add(follower)
    engine.step()
    assert scheduler.lifecycle.matching.blocked
    engine.abort("leader")
    copy = groups[0].evict(groups[0].num_idle)
    assert copy is not None
    scheduler.tables.copy(copy)
    holder = groups[0].pool.take(groups[0].pool.num_free - 1)
    engine.step()
    groups[0].pool.release(holder)
    while engine.has_work:
        engine.step()
        recount(scheduler)
    assert follower.answer.tolist() == alone(follower.prompt.tolist(), 4)


def test_pages_are_as_many_as_a_window_may_touch() -> None:
    for size in (1, 2, 3, 4, 16):
        for window in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33):
            groups = window_groups([window], SlotPool(1, 100, size), PagePool(2), None, [1])
            for num_tokens in (1, size, window, window + size, 90):
                assert groups[0].needed(num_tokens) == least_pages(window, size, num_tokens)
            assert most_pages(window, size) == least_pages(window, size, 90)
