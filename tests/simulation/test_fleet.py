"""Engines side by side, one after the other, and in stages: what each adds up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from continuous_batching.batch import Batch
from continuous_batching.request import Request, SamplingParams
from continuous_batching.routing.routing import Route, Routing
from kv_cache.page_keys import short_key
from simulation.fleet import Fleet, serve_fleet
from simulation.pipeline import PipelineRunner, Stages
from simulation.replica import Replica
from simulation.run_totals import RunTotals
from tests.simulation.test_serve import Fixed, requests, scheduler
from tests.thorough import first_quick


def fleet(count: int, route: Route, trace: list[Request], *, records: bool = False) -> RunTotals:
    totals = RunTotals(records=[] if records else None)
    serve_fleet(trace, [Replica(scheduler(), Fixed(), totals) for _ in range(count)], route)
    return totals


def test_engines_in_turn_are_engines_alone() -> None:
    together = fleet(3, "round_robin", list(requests(60, 20.0)))
    alone = RunTotals()
    for number in range(3):
        one = [Replica(scheduler(), Fixed(), alone)]
        serve_fleet(list(requests(60, 20.0))[number::3], one, "round_robin")
    assert together.figures() == alone.figures()


def test_a_router_sees_when_an_answer_begins_and_when_it_has_ended() -> None:
    """By hand: a prompt of 30 tokens takes 40 ms; the engine tells its load after 10 ms, and not again."""
    routing = Routing(1, "prefix")
    fleet = Fleet([Replica(scheduler(), Fixed(), RunTotals())], routing)

    def ask(name: int, at_s: float, max_tokens: int) -> None:
        prompt = np.arange(30) + 100 * name
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        fleet.add(Request(str(name), prompt, params, arrival_s=at_s), at_s)

    ask(0, 0.0, 1)
    ask(1, 0.01, 5)  # while the first is computed
    assert (routing.queued_tokens.tolist(), routing.requests.tolist()) == ([60], [2])
    ask(2, 0.06, 20)  # while the second is computed
    assert (routing.queued_tokens.tolist(), routing.requests.tolist()) == ([60], [2])
    ask(3, 0.14, 20)  # when both of them are answered
    assert (routing.queued_tokens.tolist(), routing.requests.tolist()) == ([30], [3])
    ask(4, 0.2, 20)  # when the second has ended, after 187 ms
    assert (routing.queued_tokens.tolist(), routing.requests.tolist()) == ([30], [3])
    fleet.close()
    ask(5, 9.0, 1)
    assert len(routing.supposed) == 30 // 8, "of the last alone"


def stages(count: int) -> Stages:
    return Stages([Fixed()] * count, lambda tokens: 0.002)


def staged(trace: Iterable[Request], stages: Stages, **changes: object) -> RunTotals:
    totals, one = RunTotals(), scheduler(depth=len(stages.costs), **changes)
    runner = partial(PipelineRunner, stages=stages, slots=one.slots)
    serve_fleet(trace, [Replica(one, Fixed(), totals, runner=runner)])
    return totals


def test_a_request_alone_passes_all_stages() -> None:
    request = Request("a", np.arange(30), SamplingParams(max_tokens=3, ignore_eos=True))
    totals = staged([request], stages(2))
    assert totals.ttft.total_s == pytest.approx(2 * 0.040 + 0.002)
    assert totals.itl.total_s == pytest.approx(2 * (2 * 0.011 + 0.002))


def test_two_stages_are_never_at_one_thing_twice() -> None:
    seen: list[tuple[int, list[int], float, float]] = []

    def observe(stage: int, batch: Batch, begin_s: float, end_s: float) -> None:
        seen.append((stage, batch.slots.tolist(), begin_s, end_s))

    two = replace(stages(2), observe=observe)
    assert staged(requests(60, 20.0), two).completed == 60
    of_stages = [[each[2:] for each in seen if each[0] == stage] for stage in (0, 1)]
    of_rows = [[each[2:] for each in seen if row in each[1]] for row in range(4)]
    for spans in of_stages + of_rows:  # a stage has one batch at a time, and so has a row in any stage
        assert spans
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(sorted(spans)))
    assert any(begin_s < at_s < end_s for begin_s, end_s in of_stages[0] for at_s, _ in of_stages[1])
    assert two.busy_s == pytest.approx(sum(end_s - begin_s for *_, begin_s, end_s in seen))


def test_chunks_make_bubbles_small() -> None:
    shares = {}
    for budget in (8, 128):
        two = stages(2)
        staged(requests(60, 50.0), two, max_batch_tokens=budget)
        lost_s = sum(two.bubbles_s.values())
        shares[budget] = lost_s / (lost_s + two.busy_s)
        assert min(two.bubbles_s.values()) > 0
    assert shares[8] < 0.8 * shares[128]


def test_a_pipeline_knows_a_prompt_of_one_token() -> None:
    """Where all steps hold prompts, no bubble lies between decodes."""
    two = stages(2)
    alone = [
        Request(f"{each}", np.arange(1), SamplingParams(max_tokens=1), arrival_s=each) for each in range(4)
    ]
    staged(alone, two)
    assert two.bubbles_s["PB3"] == 0


def sessions(count: int, num_systems: int = 3) -> list[Request]:
    """Turns of sessions that go on from each other; half of them begin with one hot system prompt."""
    random = np.random.default_rng(5)
    systems = [random.integers(0, 1000, 96) for _ in range(num_systems)]
    shares = np.array([0.5] + [0.5 / (num_systems - 1)] * (num_systems - 1))
    trace: list[Request] = []
    for number in range(count):
        prompt, at_s = (
            systems[random.choice(num_systems, p=shares)],
            float(random.exponential(0.2) + 0.06 * number),
        )
        for turn in range(3):
            prompt = np.append(prompt, random.integers(0, 1000, 24))
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            trace.append(Request(f"{number}/{turn}", prompt.astype(np.int32), params, arrival_s=at_s))
            prompt, at_s = (
                np.append(prompt, random.integers(0, 1000, 8)),
                at_s + 1 + float(random.exponential(2)),
            )
    return sorted(trace, key=lambda each: each.arrival_s)


@pytest.mark.slow
def test_hits_are_those_of_an_oracle_and_loads_are_even() -> None:
    """What is told of pages is exact, so the best hit that is known is that of who knows all caches."""
    totals, figures = {}, {}
    for route in ("round_robin", "prefix"):
        totals[route] = RunTotals()
        replicas = [Replica(scheduler(num_pages=400), Fixed(), totals[route]) for _ in range(4)]
        figures[route] = serve_fleet(sessions(150), replicas, route).figures()
    assert figures["prefix"]["routed_hits_of_best"] >= 0.95
    assert figures["prefix"]["routed_most_of_mean"] <= 1.25
    rates = {route: each.figures()["prefix_hit_rate"] for route, each in totals.items()}
    assert 1 - rates["prefix"] < 0.75 * (1 - rates["round_robin"]), "of the tokens that are computed"


def test_a_router_knows_the_pages_that_engines_hold() -> None:
    """After evictions, too: what it was told is what the engines would find."""
    routing = Routing(3)
    replicas = [Replica(scheduler(num_pages=40), Fixed(), RunTotals()) for _ in range(3)]
    serve_fleet(sessions(40), replicas, lambda count: routing)
    held = [{short_key(key) for key in each.engine.scheduler.prefix.index._page_of} for each in replicas]
    assert sum(each.engine.scheduler.counters.evicted_pages for each in replicas) > 0
    for number, keys in enumerate(held):
        assert {key for key, mask in routing.held.masks.items() if mask >> number & 1} == keys


@pytest.mark.parametrize("route", first_quick(1, ["prefix", "text_prefix", "least_loaded", "round_robin"]))
def test_what_has_ended_counts_no_more(route: Route) -> None:
    """As with the proxy, nothing of a request is left in the router but what replicas are taken to hold."""
    routing = Routing(3, route)
    serve_fleet(
        sessions(30), [Replica(scheduler(), Fixed(), RunTotals()) for _ in range(3)], lambda _: routing
    )
    assert routing.requests.tolist() == routing.queued_tokens.tolist() == [0, 0, 0]
    assert not any(each.unreported for each in routing._known)
    assert bool(routing.supposed.masks) == (route == "text_prefix"), (
        "where nothing is told, it stays supposed"
    )


@pytest.mark.parametrize("tokens", [1, 90])
def test_an_engine_tells_nothing_of_what_is_to_come(tokens: int) -> None:
    """Amid a step of 40 ms its prompt waits and its request is there, also if that step ends it."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    fleet = Fleet([Replica(scheduler(), Fixed(), RunTotals())], Routing(1, "least_loaded"))
    for number, at_s in enumerate((0.0, 0.02)):
        fleet.add(Request(str(number), np.arange(30) + 50 * number, params, arrival_s=at_s), at_s)
    assert (fleet.routing.queued_tokens.tolist(), fleet.routing.requests.tolist()) == ([60], [2])
