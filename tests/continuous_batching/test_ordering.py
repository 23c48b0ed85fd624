"""Each order admits requests by its own rule, and no request waits longer than that rule requires."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuous_batching.engine import Engine
from continuous_batching.policies.batching import Orca, PrefillFirst, StallFree
from continuous_batching.policies.policy import Policy
from continuous_batching.policies.prefill_budget import LongPrompts
from continuous_batching.queueing import (
    Aged,
    EarliestDeadline,
    FairShare,
    QueueOrder,
    WaitingQueue,
    shortest_first,
)
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from tests.continuous_batching import test_slot_lifecycle as small
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, alone
from tests.continuous_batching.recount import recount


def ask(name: str, num_prompt: int = 4, max_tokens: int = 4, **fields) -> Request:
    prompt = np.random.default_rng(sum(map(ord, name))).integers(0, VOCAB_SIZE, num_prompt)
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), **fields)


def make(
    num_slots: int = 1, weights: dict[str, float] | None = None, order: QueueOrder | None = None, **options
) -> Engine:
    ticks = itertools.count()
    waiting = WaitingQueue(order)
    engine = small.make(num_slots, budget=16, clock=lambda: float(next(ticks)), waiting=waiting, **options)
    waiting.shares = None if weights is None else FairShare(engine.slots, weights)
    return engine


def served(engine: Engine) -> list[str]:
    """Everybody, in the order of their first tokens."""
    seen: list[Request] = []
    while engine.has_work:
        step = engine.step()
        recount(engine.scheduler)
        seen += step.finished if step else []
    return [
        request.id for request in sorted(seen, key=lambda request: (request.first_token_s, request.number))
    ]


LOAD = {
    "long": {"num_prompt": 30, "arrival_s": 0.0},
    "short": {"num_prompt": 2, "arrival_s": 1.0},
    "urgent": {"num_prompt": 30, "arrival_s": 2.0, "priority": 1},
    "hasty": {"num_prompt": 30, "arrival_s": 3.0, "timeout_s": 999.0},
}


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (None, ["long", "short", "urgent", "hasty"]),
        (shortest_first, ["short", "long", "urgent", "hasty"]),
        (Aged(priority_s=10, length_s=0), ["urgent", "long", "short", "hasty"]),
        (Aged(priority_s=2.5, length_s=100), ["short", "urgent", "long", "hasty"]),
        (EarliestDeadline(deadline_s=2000.0), ["hasty", "long", "short", "urgent"]),
    ],
    ids=["fcfs", "sjf", "priority", "length", "deadline"],
)
def test_an_order_is_its_own(order: QueueOrder, expected: list[str]) -> None:
    engine = make(order=order)
    for name, fields in LOAD.items():
        engine.add(ask(name, **fields))
    assert served(engine) == expected


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 20), st.integers(-3, 3), st.integers(1, 40)), min_size=1, max_size=60
    ),
    priority_s=st.integers(0, 9),
    length_s=st.integers(0, 200),
)
def test_who_ages_is_overtaken_only_by_those_within_its_seconds(
    arrivals: list[tuple[int, int, int]], priority_s: int, length_s: int
) -> None:
    queue, order, now_s = WaitingQueue(Aged(priority_s, length_s)), [], 0.0
    for number, (gap_s, priority, num_prompt) in enumerate(arrivals):
        now_s += gap_s
        request = ask(str(number), num_prompt, priority=priority, arrival_s=now_s)
        request.number = number
        queue.push(request)
        if number % 3 == 2:
            order.append(queue.peek())
            queue.remove(order[-1])
    while len(queue):
        order.append(queue.peek())
        queue.remove(order[-1])
    for late, request in itertools.combinations(order, 2):  # the first went before the second
        behind_s = priority_s * (late.priority - request.priority)
        behind_s += length_s * (request.num_prompt_tokens - late.num_prompt_tokens) / 1000
        assert late.arrival_s <= request.arrival_s + max(0.0, behind_s) or late.number < request.number


def test_equal_ones_go_by_arrival_and_a_queue_finds_what_it_holds() -> None:
    queue = WaitingQueue(shortest_first, long_tokens=8)
    requests = [ask(str(number), 9 if number == 0 else 5) for number in range(6)]
    for number, request in enumerate(requests):
        request.number = number
    for request in reversed(requests):
        queue.push(request)
    assert queue.num_tokens == 9 + 5 * 5
    assert queue.is_long(requests[0])
    assert queue.peek() is requests[1]
    queue.remove(requests[1])
    queue.remove(requests[3])
    assert queue.peek() is requests[2]
    for number in (2, 4, 5):
        queue.remove(requests[number])
    assert queue.peek() is requests[0]
    assert queue.peek(short_only=True) is None
    assert (queue.num_removed, queue.num_removed_tokens, queue.num_tokens) == (5, 25, 9)


def test_a_short_prompt_overtakes_the_long_ones_that_may_not_be_computed_yet() -> None:
    slots = SlotPool(4, 200, 4)
    scheduler = Scheduler(
        slots,
        PagePool(200),
        StallFree(long_prompts=LongPrompts(max_long=1, long_tokens=20)),
        waiting=WaitingQueue(long_tokens=20),
        max_batch_tokens=16,
        vocab_size=VOCAB_SIZE,
    )
    ticks = itertools.count()
    engine = Engine(scheduler, ChecksumRunner(slots, scheduler.pool), clock=lambda: float(next(ticks)))
    for name, num_prompt in (("long a", 100), ("long b", 100), ("short", 6)):
        engine.add(ask(name, num_prompt))
    assert served(engine) == ["short", "long a", "long b"]


def test_a_short_prompt_waits_for_no_long_one_that_fills_the_step_of_its_own_admission() -> None:
    slots = SlotPool(4, 200, 4)
    scheduler = Scheduler(
        slots,
        PagePool(200),
        StallFree(long_prompts=LongPrompts(max_long=1, long_tokens=8)),
        waiting=WaitingQueue(long_tokens=8),
        max_batch_tokens=16,
        vocab_size=VOCAB_SIZE,
    )
    ticks = itertools.count()
    engine = Engine(scheduler, ChecksumRunner(slots, scheduler.pool), clock=lambda: float(next(ticks)))
    for name, num_prompt in (("long a", 16), ("long b", 16), ("long c", 16), ("short", 6)):
        engine.add(ask(name, num_prompt, 1))
    step = engine.step()
    assert step is not None
    assert (step.batch.stops - step.batch.starts).tolist() == [10, 6]
    assert [request.id for request in step.finished] == ["short"]
    assert served(engine) == ["long a", "long b", "long c"]


def test_who_comes_back_long_is_not_found_among_the_short_ones() -> None:
    """It was made room for and so admitted before another one of its tenant, then preempted."""
    queue = WaitingQueue(shares=FairShare(SlotPool(2, 64, 4), {}), long_tokens=8)
    ahead, grown, short = (ask(name, 6) for name in ("ahead", "grown", "short"))
    for number, request in enumerate((ahead, grown, short)):
        request.number = number
        queue.push(request)
    queue.remove(grown)
    grown.tokens = np.concatenate((grown.tokens, np.arange(4, dtype=np.int32)))
    queue.push(grown)
    queue.remove(ahead)
    assert queue.peek() is grown
    assert queue.peek(short_only=True) is short


def test_tenants_take_turns_by_the_tokens_they_were_served() -> None:
    engine = make(weights={})
    for name in ("a1", "a2", "a3", "b1", "b2"):
        engine.add(ask(name, 5, 5, tenant=name[0]))
    assert served(engine) == ["a1", "b1", "a2", "b2", "a3"]


def test_a_tenant_saves_up_no_turns() -> None:
    engine = make(weights={}, prefix_sharing=False)
    engine.add(ask("b0", 5, 5, tenant="b"))
    for number in range(12):
        engine.add(ask(f"a{number}", 5, 5, tenant="a"))
    while len(engine.scheduler.waiting) > 5:
        engine.step()
    for name in ("b1", "b2", "b3"):
        engine.add(ask(name, 5, 5, tenant="b"))
    order = served(engine)
    places = [order.index(name) for name in ("b1", "b2", "b3")]
    assert np.diff(places).tolist() == [2, 2], (
        "b goes on where a stands, and does not make up for its absence"
    )


def test_an_answer_that_goes_on_is_charged_for_what_it_computes_and_finds_no_more_than_its_prompt() -> None:
    engine = make(weights={})
    engine.add(first := ask("a", 10, 31, tenant="a"))
    served(engine)
    charged = engine.scheduler.waiting.shares.served("a")
    engine.add(ask("a", 10, 31, tenant="a", known=first.answer[:30]))
    served(engine)
    assert engine.scheduler.waiting.shares.served("a") == charged + (40 - 36) + 1
    assert engine.scheduler.counters.hit_tokens == 10
    assert engine.scheduler.counters.prompt_tokens == 20


def test_tenants_that_get_their_first_tokens_together_are_charged_each() -> None:
    slots = SlotPool(110, 16, 4)
    shares = FairShare(slots, {})
    for number in range(62):  # they ended long ago, and would be forgotten for new ones
        idle = ask(f"idle {number}", tenant=f"idle {number}")
        shares.join(idle, False)
        shares.leave(idle, False)
    for number in range(110):
        request = ask(str(number), tenant=f"tenant {number}")
        request.number = number
        slots.take(request)
    shares.charge_answers(slots.busy)
    shares.charge_answers(slots.busy)
    assert [shares.served(f"tenant {number}") for number in range(110)] == [2.0] * 110


def test_tenants_that_would_start_like_new_ones_are_forgotten() -> None:
    engine = make(num_slots=2, weights={})
    for number in range(400):
        engine.add(ask(f"{number}", 2, 1, tenant=str(number)))
        engine.step()
    shares = engine.scheduler.waiting.shares
    assert shares is not None
    assert len(shares._names) < 150


def test_tenants_that_are_new_each_time_do_not_starve_one_that_was_served() -> None:
    engine = make(weights={})
    engine.add(ask("old 0", 8, 8, tenant="old"))
    for number in range(5):
        engine.add(ask(f"{number}", 4, 4, tenant=str(number)))
    engine.add(old := ask("old 1", 8, 8, tenant="old"))
    for number in range(5, 200):
        while len(engine.scheduler.waiting) > 5:
            engine.step()
        engine.add(ask(f"{number}", 4, 4, tenant=str(number)))
    assert old.finish_reason == "length"
    assert len(engine.scheduler.waiting.shares._names) < 100, "who has paid is forgotten"


def test_what_others_get_while_long_prompts_have_no_place_gives_nothing_to_catch_up_on() -> None:
    """A new tenant's long prompt goes before the second one of a tenant that had many before it came."""
    shares = FairShare(SlotPool(1, 8, 4), {})
    numbers = itertools.count()

    def join(tenant: str, is_long: bool) -> Request:
        request = ask(str(next(numbers)), tenant=tenant)
        shares.join(request, is_long)
        return request

    def served_beside_short_ones(request: Request) -> None:
        shares.leave(request, True)
        shares.charge_prompt(request, 1000)
        shares.short_only = True
        for _ in range(100):
            short = join(f"new {next(numbers)}", False)
            assert shares.next(True) == short.tenant
            shares.leave(short, False)
            shares.charge_prompt(short, 50)
        shares.short_only = False

    old = [join("old", True) for _ in range(30)]
    for request in old[:20]:
        assert shares.next(False) == "old"
        served_beside_short_ones(request)
    join("newcomer", True)
    if shares.next(False) == "old":
        served_beside_short_ones(old[20])
    assert shares.next(False) == "newcomer"


@pytest.mark.parametrize("weights", [{}, {"heavy": 2.0}])
def test_two_backlogged_tenants_get_shares_by_weight_however_much_they_send(
    weights: dict[str, float],
) -> None:
    """Jain's index of tokens over weight, where one tenant sends ten times the requests of the other."""
    engine, random = make(num_slots=4, num_pages=100, weights=weights), np.random.default_rng(0)
    got = {"heavy": 0, "light": 0}
    for number in range(660):
        tenant = "light" if number % 11 == 0 else "heavy"
        lengths = random.integers(2, 20, 2)
        engine.add(ask(str(number), int(lengths[0]), int(lengths[1]), tenant=tenant))
    waiting = {request.tenant for request in engine.scheduler.waiting.requests}
    while waiting == {"heavy", "light"}:
        step = engine.step()
        assert step is not None
        for row, num in zip(step.batch.slots.tolist(), (step.batch.stops - step.batch.starts).tolist()):
            got[engine.slots.requests[row].tenant] += num
        waiting = {request.tenant for request in engine.scheduler.waiting.requests}
    shares = np.array([got[tenant] / weights.get(tenant, 1.0) for tenant in got])
    assert min(got.values()) > 500
    assert shares.sum() ** 2 / (len(shares) * (shares**2).sum()) >= 0.95


def test_who_outranks_takes_the_slot_of_the_lowest_and_nobody_loses_a_token() -> None:
    engine = make(num_slots=3, order=Aged(priority_s=100, length_s=0), outrank=True)
    requests = {name: ask(name, 6, 9, priority=level) for name, level in (("old", 0), ("low", 0), ("mid", 1))}
    for request in requests.values():
        engine.add(request)
    engine.step()
    requests["high"] = ask("high", 6, 9, priority=2, arrival_s=3.0)
    engine.add(requests["high"])
    engine.step()
    recount(engine.scheduler)
    assert engine.scheduler.waiting.find("low") is requests["low"], "the oldest is spared"
    served(engine)
    for request in requests.values():
        assert request.answer.tolist() == alone(request.prompt.tolist(), 9)
    assert [requests[name].num_preemptions for name in requests] == [0, 1, 0, 0]


def begun_behind_another_tenants(engine: Engine, num_tokens: int) -> Request:
    """A request of tenant c in a slot that tenant b has left, which has had more than its share."""
    engine.add(ask("more", 12, 8, tenant="b"))
    while engine.scheduler.slots.find("more") is not None or len(engine.scheduler.waiting):
        engine.step()
    engine.add(low := ask("low", 6, num_tokens, tenant="c"))
    engine.step()
    return low


def test_who_outranks_has_the_slot_also_where_the_tenant_that_gave_it_is_next() -> None:
    engine = make(num_slots=2, weights={}, order=Aged(priority_s=100, length_s=0), outrank=True)
    engine.add(ask("old", 6, 40, tenant="a"))
    low = begun_behind_another_tenants(engine, 20)
    engine.add(high := ask("high", 6, 4, tenant="b", priority=1))
    engine.step()
    assert [engine.slots.find(name) is not None for name in ("low", "high")] == [False, True]
    assert low.num_preemptions == 1
    served(engine)
    assert high.num_preemptions == 0


def test_who_outranks_keeps_the_pages_that_were_given_until_there_are_enough() -> None:
    """The tenant that gave them would be next in the steps between."""
    order = Aged(priority_s=100, length_s=0)
    engine = make(num_slots=2, num_pages=1 + 12, weights={}, order=order, outrank=True)
    engine.add(old := ask("old", 6, 30, tenant="a"))
    low = begun_behind_another_tenants(engine, 4)
    engine.add(high := ask("high", 38, 4, tenant="b", priority=1))
    engine.step()
    assert (engine.scheduler.held_back, low.num_preemptions) == ("pages", 1)
    while engine.scheduler.waiting.find("high") is high:
        assert engine.scheduler.waiting.find("low") is low
        engine.step()
    served(engine)
    assert (old.num_preemptions, low.num_preemptions) == (0, 1)
    for request in (old, low, high):
        assert request.answer.tolist() == alone(request.prompt.tolist(), request.params.max_tokens)


def test_who_outranks_and_is_aborted_leaves_the_turn_to_others() -> None:
    order = Aged(priority_s=100, length_s=0)
    engine = make(num_slots=2, num_pages=1 + 12, weights={}, order=order, outrank=True)
    engine.add(ask("old", 6, 30, tenant="a"))
    engine.add(low := ask("low", 6, 4, tenant="c"))
    engine.step()
    engine.add(ask("high", 38, 4, tenant="b", priority=1))
    engine.step()
    assert engine.scheduler.waiting.find("low") is low
    engine.abort("high")
    engine.step()
    assert engine.slots.find("low") is not None
    served(engine)


@pytest.mark.parametrize("policy", [Orca(), PrefillFirst()], ids=["orca", "prefill_first"])
def test_nobody_is_preempted_for_a_prompt_that_the_step_cannot_compute(policy: Policy) -> None:
    ticks, waiting = itertools.count(), WaitingQueue(Aged(priority_s=100, length_s=0))
    engine = small.make(
        3, 200, budget=140, clock=lambda: float(next(ticks)), waiting=waiting, outrank=True, policy=policy
    )
    waiting.shares = FairShare(engine.slots, {})
    engine.add(ask("old", 6, 20, tenant="a"))
    engine.add(low := ask("low", 6, 20, tenant="c"))
    engine.step()
    engine.add(ask("big", 100, 8, tenant="d", priority=1))
    engine.add(high := ask("high", 100, 4, tenant="b", priority=1))
    engine.step()
    assert (engine.scheduler.held_back, low.num_preemptions) == ("tokens", 0)
    served(engine)
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)


def test_who_outranks_takes_pages_too() -> None:
    engine = make(num_slots=4, num_pages=1 + 12, order=Aged(priority_s=100, length_s=0), outrank=True)
    for name in ("old", "low"):
        engine.add(ask(name, 16, 8))
    engine.step()
    engine.step()
    engine.add(high := ask("high", 20, 4, priority=1))
    engine.step()
    assert engine.scheduler.waiting.find("low") is not None
    assert engine.scheduler.waiting.find("high") is None
    served(engine)
    assert high.num_preemptions == 0


def test_who_has_aged_cannot_be_preempted_any_more() -> None:
    engine = make(num_slots=2, order=Aged(priority_s=10, length_s=0), outrank=True)
    engine.add(ask("old", 6, 20, arrival_s=0.0))
    engine.add(aged := ask("aged", 6, 20, arrival_s=0.0))
    engine.step()
    engine.add(ask("late", 6, 4, priority=1, arrival_s=11.0))
    engine.step()
    assert engine.scheduler.waiting.find("late") is not None, "it stands behind whom it would preempt"
    assert aged.num_preemptions == 0
    engine.add(ask("in time", 6, 4, priority=1, arrival_s=9.0))
    engine.step()
    assert engine.scheduler.waiting.find("aged") is not None


def test_who_has_aged_does_not_shield_others_from_preemption() -> None:
    engine = make(num_slots=3, order=Aged(priority_s=10, length_s=0), outrank=True)
    engine.add(ask("old", 6, 20, priority=5, arrival_s=0.0))
    engine.add(aged := ask("aged", 6, 20, arrival_s=0.1))
    engine.add(ask("mid", 6, 20, priority=1, arrival_s=100.0))
    engine.step()
    engine.add(ask("high", 6, 4, priority=2, arrival_s=101.0))
    engine.step()
    assert engine.scheduler.waiting.find("mid") is not None, "of those that stand behind it, it is the lowest"
    assert engine.scheduler.waiting.find("high") is None
    assert aged.num_preemptions == 0
