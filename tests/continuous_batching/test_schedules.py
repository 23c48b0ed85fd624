"""Every schedule of any policy and queue gives each request the tokens that it would get alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from continuous_batching.engine import Engine, Observer, Step, Tier
from continuous_batching.policies.batching import Orca, PrefillFirst, Split, StallFree, Static
from continuous_batching.policies.policy import ALL, Policy
from continuous_batching.policies.prefill_budget import (
    AdaptiveChunks,
    FixedChunks,
    LongPrompts,
    StagedChunks,
)
from continuous_batching.queueing import (
    Aged,
    EarliestDeadline,
    FairShare,
    QueueOrder,
    WaitingQueue,
    shortest_first,
)
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.preemption import fewest_lost, lowest_priority, youngest
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.scheduling.validation import GiveUp
from continuous_batching.slots import SlotPool
from continuous_batching.step_time import StepTime
from kv_cache.pages import PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, alone
from tests.continuous_batching.recount import recount
from tests.continuous_batching.windows import drawn_groups, least_pages
from tests.thorough import cases

MAX_TOKENS = 64
EOS = 5
DEPTHS = (1, 1, 2, 3)  # batches in flight at once
LONGEST = 30 + 12 + 20 - 1  # tokens of the largest arrival that are computed
BY_PRIORITY = Aged(priority_s=7.0, length_s=100.0)
ORDERS: list[QueueOrder | None] = [None, None, shortest_first, BY_PRIORITY, EarliestDeadline(40.0)]
FAMILIES = [np.random.default_rng(family).integers(0, VOCAB_SIZE, 40).tolist() for family in range(3)]


@dataclass(frozen=True)
class Arrival:
    """A request of the schedule: a prefix of a family that others may share, then its own tail."""

    family: int
    num_shared: int
    num_own: int
    max_tokens: int
    arrives_at: int  # step
    aborts_after: int | None  # steps after its arrival
    fails: bool
    stop: int | None
    salt: str
    num_samples: int

    def request(self, number: int) -> Request:
        """The request, with its followers."""
        leader, *followers = (
            self._sample(f"r{number}.{index}", number, index) for index in range(self.num_samples)
        )
        leader.followers = followers
        return leader

    def _sample(self, name: str, number: int, index: int) -> Request:
        own = np.random.default_rng(1000 + number).integers(0, VOCAB_SIZE, self.num_own).tolist()
        params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0,
            stop_token_ids=() if self.stop is None else (self.stop,),
            ignore_eos=number % 2 == 0,
            seed=index,
            max_draft_tokens=(None, 0, None, 2)[number % 4],  # read where there is speculation
        )
        prompt = FAMILIES[self.family][: self.num_shared] + own
        tenant, priority = f"t{number % 3}", number % 3 - 1
        return Request(name, np.array(prompt), params, cache_salt=self.salt, tenant=tenant, priority=priority)


arrivals = st.builds(
    Arrival,
    family=st.integers(0, 2),
    num_shared=st.integers(0, 30),
    num_own=st.integers(1, 12),
    max_tokens=st.integers(1, 20),
    arrives_at=st.integers(0, 20),
    aborts_after=st.one_of(st.none(), st.none(), st.integers(0, 15)),
    fails=st.sampled_from([False] * 9 + [True]),
    stop=st.one_of(st.none(), st.integers(0, VOCAB_SIZE - 1)),
    salt=st.sampled_from(["", "", "", "tenant b"]),
    num_samples=st.sampled_from([1, 1, 1, 2, 5]),
)


resizes = st.dictionaries(
    st.integers(0, 30),
    st.tuples(st.integers(-20, 20), st.sampled_from(["nothing", "cached", "running"])),
    max_size=3,
)
plans = st.lists(arrivals, min_size=1, max_size=10)
Made = tuple[Scheduler, ChecksumRunner]
Resizes = dict[int, tuple[int, GiveUp]]
Test = Callable[..., None]


@st.composite
def policies(draw: st.DrawFn, num_slots: int, step_time: StepTime) -> tuple[Policy, int]:
    """A policy with any way to cut prompts, and from how many tokens on its queue calls a prompt long."""
    chunks = draw(
        st.sampled_from(
            [
                None,
                None,
                FixedChunks(5),
                StagedChunks(2, 8, 3, 24, 2),
                AdaptiveChunks(step_time, 0.5, 1, 30, 1),
            ]
        )
    )
    long_prompts = draw(st.sampled_from([None, None, LongPrompts(1, 10)]))
    made: list[Policy] = [
        StallFree(chunks, long_prompts),
        StallFree(chunks, long_prompts),
        Split(4, chunks, long_prompts),
        PrefillFirst(),
        Orca(),
        Static(draw(st.integers(1, num_slots)), 3.0),
    ]
    at = draw(st.integers(0, len(made) - 1))
    return made[at], long_prompts.long_tokens if long_prompts is not None and at < 3 else ALL


@st.composite
def schedulers(
    draw: st.DrawFn,
    depths: Sequence[int] = (1,),
    *,
    least_slots: int = 1,
    width: int = 1,
    has_tier: bool = False,
) -> Made:
    """Any scheduler whose pools hold the largest request, in `width` beams, once or twice."""
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_slots = draw(st.integers(least_slots, least_slots + 5))
    slots, step_time = SlotPool(num_slots, MAX_TOKENS, page_size), StepTime()
    longest_pages = -(-LONGEST // page_size)
    num_host_pages = draw(st.sampled_from([60, 5 if has_tier else None, 3, 12]))
    host_pool = None if num_host_pages is None else PagePool(num_host_pages)
    pool = PagePool(1 + longest_pages + draw(st.integers(0, longest_pages)))
    groups = draw(drawn_groups(slots, pool, host_pool, LONGEST, width))
    policy, long_tokens = draw(policies(num_slots, step_time))
    least_budget = MAX_TOKENS if policy.whole else num_slots
    order = draw(st.sampled_from(ORDERS))
    shares = FairShare(slots, {"t0": 2.0}) if draw(st.sampled_from([False, False, True])) else None
    scheduler = Scheduler(
        slots,
        pool,
        policy,
        step_time=step_time,
        max_batch_tokens=least_budget + draw(st.sampled_from([0, 1, 3, 7, 30])),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        waiting=WaitingQueue(order, shares, long_tokens),
        outrank=order is BY_PRIORITY and draw(st.booleans()),
        prefix_sharing=draw(st.sampled_from([True, True, True, False])),
        max_shared_tokens=draw(st.sampled_from([None, None, 20])),
        victim=draw(st.sampled_from([youngest, fewest_lost, lowest_priority])),
        host_pool=host_pool,
        has_tier=has_tier,
        compact_every_steps=draw(st.sampled_from([0, 0, 1, 5])),
        compact_pages_per_step=draw(st.sampled_from([0, 1, 3])),
        depth=draw(st.sampled_from(depths)),
        groups=groups,
    )
    runner = ChecksumRunner(slots, scheduler.pool, host_pool, groups)
    runner.defers = scheduler.depth > 1 and draw(st.booleans())
    runner.late = draw(st.sampled_from([0.0, 0.3, 0.8]))
    return scheduler, runner


def over_schedules(
    few: int,
    many: int,
    made: st.SearchStrategy[Made],
    plan: st.SearchStrategy[list[Arrival]] = plans,
    **drawn: st.SearchStrategy[Any],
) -> Callable[[Test], Test]:
    """Give a test so many schedulers with a plan and resizes, and in a thorough run `many`."""
    limits = settings(
        max_examples=cases(few, many),
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: limits(given(made=made, plan=plan, resizes=resizes, **drawn)(test))


def expected(request: Request) -> list[int]:
    stops = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else {EOS})
    return alone(
        request.prompt.tolist(), request.params.max_tokens, frozenset(stops), request.params.seed or 0
    )


def try_resize(engine: Engine, change: int, give_up: GiveUp) -> None:
    """Resize if it is allowed, every other time the pools of windows, too; a refusal changes nothing."""
    engine.drain()
    first, *others = (group.pool for group in engine.scheduler.tables.groups)

    def state() -> list[int]:
        return [len(engine.slots.busy), *(count for pool in (first, *others) for count in sizes(pool))]

    def sizes(pool: PagePool) -> tuple[int, int]:
        return pool.num_pages, pool.num_held

    before, refusal = state(), ""
    window_pages = [max(2, pool.num_pages + change) for pool in others] if change % 2 else []
    try:
        engine.resize(max(2, first.num_pages + change), give_up, window_pages)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "resize to at least" in refusal
        assert state() == before
    else:
        assert [pool.num_pages for pool in others] == (window_pages or before[3::2])
    recount(engine.scheduler)


def could_fit(engine: Engine, request: Request) -> bool:
    """Whether an empty engine has rows and pages for it, the prompt's shared by all beams."""
    size, width = engine.slots.page_size, max(1, request.params.beam_width)
    each = -(-(request.num_prompt_tokens + request.params.max_tokens - 1) // size)
    shared = request.num_prompt_tokens // size
    enough = shared + width * (each - shared) <= engine.scheduler.pool.num_pages - 1
    tokens = request.num_prompt_tokens + request.params.max_tokens - 1
    # Every beam may have a window of its own behind the prompt
    for group in engine.scheduler.tables.groups[1:]:
        of_a_row = least_pages(group.window, size, tokens)
        needed = of_a_row + (width - 1) * min(of_a_row, each - shared)
        enough &= needed <= group.pool.num_pages - 1
    return enough and width <= engine.slots.num_slots


def try_add(engine: Engine, family: list[Request]) -> bool:
    """Add requests; only what rows and pool, which may have shrunk, can never hold may be refused."""
    fits = could_fit(engine, family[0])
    try:
        engine.add(family[0])
    except ValueError:
        assert not fits
    return fits


def serve(
    scheduler: Scheduler,
    runner: ChecksumRunner,
    plan: list[Arrival],
    resizes: Resizes,
    *,
    overlap: bool = False,
    observer: Observer | None = None,
    tier: Tier | None = None,
) -> dict[str, Request]:
    """Run a schedule to its end; the ledger is recounted after what comes from outside, and now and then."""
    now = 0.0
    engine = Engine(scheduler, runner, clock=lambda: now, overlap=overlap)
    engine.observer, engine.tier = observer or engine.observer, tier
    leaders = [arrival.request(number) for number, arrival in enumerate(plan)]
    families = [[leader, *leader.followers] for leader in leaders]
    runner.fail = {each.id for family, arrival in zip(families, plan) if arrival.fails for each in family}
    ended: dict[str, Request] = {}
    refused: set[str] = set()
    step = 0
    while step <= 36 or engine.has_work:
        for arrival, family in zip(plan, families):
            if arrival.arrives_at == step:
                for each in family:
                    each.arrival_s = now
                if not try_add(engine, family):
                    refused |= {each.id for each in family}
                recount(scheduler)
            if arrival.aborts_after is not None and arrival.arrives_at + arrival.aborts_after == step:
                for each in family[: 1 + step % len(family)]:
                    aborted = engine.abort(each.id)
                    assert (aborted is None) == (each.id in ended or each.id in refused), (
                        "abort found what had ended, or missed it"
                    )
                    if aborted is not None:
                        ended[aborted.id] = aborted
                    recount(scheduler)
        if step in resizes:
            try_resize(engine, *resizes[step])
        waiting = {request.id: request for request in scheduler.waiting.requests}
        done = engine.step()
        if step % 3 == 0:
            recount(scheduler)
        if done is not None:
            check_step(scheduler, done, waiting)
        for request in done.finished if done else []:
            assert request.id not in ended, "ended twice"
            ended[request.id] = request
        step += 1
        now += 1.0
        assert step < 5000, "no progress"
    assert ended.keys() == {each.id for family in families for each in family} - refused
    return ended


def check_step(scheduler: Scheduler, step: Step, waiting: dict[str, Request]) -> None:
    """The budget holds, and where nothing else decides, who was left waiting stands behind who was not."""
    assert step.batch.num_tokens <= scheduler.max_batch_tokens
    queue = scheduler.waiting
    if (
        scheduler._outrank
        or isinstance(scheduler._policy, Static)
        or queue.shares is not None
        or queue.long_tokens != ALL
    ):
        return
    still = {request.id for request in queue.requests if request.num_preemptions == 0}
    left = [queue.place(waiting[name]) for name in still & waiting.keys()]
    came = [
        queue.place(waiting[name])
        for name in waiting.keys() - still
        if waiting[name].num_preemptions == 0 and waiting[name].finish_reason != "timeout"
    ]
    assert max(came, default=(-math.inf, 0)) < min(left, default=(math.inf, 0)), "somebody was overtaken"


def check_answers(ended: dict[str, Request], failing: set[str]) -> None:
    for request in ended.values():
        want, got = expected(request), request.answer.tolist()
        if request.finish_reason == "abort":
            assert got == want[: len(got)]
        elif request.id in failing:
            assert (request.finish_reason, got) == ("error", [])
        else:
            assert got == want
            assert request.finish_reason == (
                "length" if len(got) == request.params.max_tokens else "stop"
            ) or (len(got) == request.params.max_tokens and request.finish_reason == "stop")
            assert request.first_token_s is not None
            assert request.finish_s is not None
            assert request.arrival_s <= request.first_token_s <= request.finish_s


@over_schedules(50, 3000, schedulers(DEPTHS), overlap=st.booleans())
def test_every_schedule_gives_the_tokens_of_each_request_alone(
    made: Made, plan: list[Arrival], resizes: Resizes, overlap: bool
) -> None:
    scheduler, runner = made
    ended = serve(scheduler, runner, plan, resizes, overlap=overlap)
    check_answers(ended, runner.fail)
    assert not len(scheduler.slots.busy)
    assert scheduler.pool.num_free + scheduler.prefix.num_idle == scheduler.pool.num_pages - 1
    assert all(each.num_available == each.pool.num_pages - 1 for each in scheduler.tables.groups)


def serve_to_nothing(
    scheduler: Scheduler, observer: Observer | None = None
) -> tuple[dict[str, Request], ChecksumRunner]:
    """Serve a schedule in which all rows of a step are preempted, found at random and cut down by hand."""
    late = Arrival(
        0, 0, 1, 1, arrives_at=30, aborts_after=None, fails=False, stop=None, salt="z", num_samples=1
    )
    plan = [late] * 5 + [
        replace(late, num_shared=5, num_own=12, max_tokens=5, arrives_at=3, salt=""),
        replace(late, family=1, num_shared=13, num_own=7, max_tokens=2, arrives_at=1, salt="tenant b"),
        replace(late, num_shared=5, num_own=5, max_tokens=5, arrives_at=3, stop=78, salt="", num_samples=2),
    ]
    runner = ChecksumRunner(scheduler.slots, scheduler.pool, scheduler.host_pool)
    resizes: Resizes = {1: (-16, "cached"), 4: (-18, "cached"), 16: (-11, "cached")}
    return serve(scheduler, runner, plan, resizes, observer=observer), runner


def preempting_all() -> Scheduler:
    """Return the scheduler for `serve_to_nothing`."""
    return Scheduler(
        SlotPool(4, MAX_TOKENS, 2),
        PagePool(46),
        Static(3, 3.0),
        max_batch_tokens=7,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        victim=fewest_lost,
        host_pool=PagePool(12),
        compact_every_steps=5,
        compact_pages_per_step=1,
    )


def test_copies_asked_for_in_a_step_that_comes_to_nothing_are_made_in_the_next() -> None:
    """All rows of a step may be preempted, one for another."""
    ended, runner = serve_to_nothing(preempting_all())
    check_answers(ended, runner.fail)
