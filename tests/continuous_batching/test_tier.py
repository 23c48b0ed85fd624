"""Pages that another engine computed, or an earlier run, are found in the tier and not computed again."""

from __future__ import annotations

import threading

import pytest

from continuous_batching.batch import NONE_LEFT
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from kv_cache.page_keys import key_of_group
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_slot_lifecycle import ask, check, make
from tests.continuous_batching.tier import attach
from tests.patience import PATIENCE_S

PAGE_SIZE = 4
Pages = dict[bytes, bytes]


def engine_with(pages: Pages, wait: int = 0, most: int = 1000, num_host_pages: int = 40, **options) -> Engine:
    engine = make(num_host_pages=num_host_pages, has_tier=True, **options)
    attach(engine, pages, wait=lambda: wait, most=lambda: most)
    return engine


def serve(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add(request)
    run_out(engine)


def run_out(engine: Engine) -> None:
    """Also while nothing can be computed, because pages are looked up."""
    num_idle = 0
    while engine.has_work:
        num_idle += engine.step() is None
        recount(engine.scheduler)
        assert num_idle < 100, "nobody ends the wait"


def again(request: Request, name: str, **params) -> Request:
    return Request(name, request.prompt, SamplingParams(**{"max_tokens": 3, **params}))


def kept() -> tuple[Pages, Request]:
    """The pages that an engine has left in a tier, and whose they are."""
    pages: Pages = {}
    first = ask("first", 30, 4)
    serve(engine_with(pages), first)
    return pages, first


def test_a_restart_finds_the_pages_of_prompts_and_answers() -> None:
    pages: Pages = {}
    first = [ask(name, 30, 9) for name in ("one", "two", "three")]
    serve(engine_with(pages), *first)
    engine = engine_with(pages)
    turns = [Request(f"{each.id} again", each.tokens, SamplingParams(max_tokens=3)) for each in first]
    serve(engine, *turns)
    check(*first, *turns)
    found = sum(each.num_cached_tokens for each in turns)
    could = sum((len(each.tokens) - 1) // PAGE_SIZE * PAGE_SIZE for each in first)
    assert found == could, "0.9 of it would do"
    assert engine.scheduler.counters.fetched_pages == could // PAGE_SIZE
    assert engine.scheduler.counters.host_hit_tokens == could


def test_who_waits_for_pages_holds_back_those_behind_and_is_counted() -> None:
    pages, first = kept()
    engine = engine_with(pages, wait=3)
    second, third = again(first, "second"), ask("third", 10, 2)
    engine.add(second)
    engine.add(third)
    for _ in range(3):
        assert engine.step() is None
        assert engine.scheduler.held_back == "tier"
    step = engine.step()
    assert step is not None
    assert len(step.batch.slots) == 2
    assert second.num_cached_tokens == 28
    run_out(engine)
    check(second, third)


def test_who_runs_goes_on_while_others_wait_for_pages() -> None:
    pages, first = kept()
    engine = engine_with(pages, wait=4)
    running = ask("running", 5, 20)
    engine.add(running)
    while not len(engine.slots.busy):
        engine.step()
    engine.add(again(first, "second"))
    steps = [engine.step() for _ in range(4)]
    assert all(step is not None and step.batch.num_tokens == 1 for step in steps)
    run_out(engine)
    check(running)


def test_without_steps_lookups_find_no_more_than_fills_the_hosts_pool() -> None:
    pages, first = kept()
    engine = engine_with(pages, num_host_pages=15)
    requests = [again(first, str(number)) for number in range(6)]
    for each in requests:
        engine.add(each)
    assert [each.awaits_pages for each in requests] == [True, True, False, False, False, False]
    assert engine.tier.num_lookups == 2, "each has found seven of fourteen pages"
    run_out(engine)
    check(*requests)


@pytest.mark.parametrize("end", ["abort", "timeout"])
def test_who_gives_up_while_its_pages_are_looked_up_leaves_nothing(end: str) -> None:
    pages, first = kept()
    engine = engine_with(pages, wait=2)
    second = again(first, "second")
    second.timeout_s = -1.0 if end == "timeout" else None
    engine.add(second)
    if end == "abort":
        engine.abort("second")
    engine.step()
    assert second.finish_reason == end
    third = again(first, "second")  # it has the same id
    serve(engine, third)
    assert third.num_cached_tokens == 28
    assert engine.scheduler.counters.fetched_pages == 7
    check(third)


def test_only_what_is_lacking_is_looked_up() -> None:
    pages, first = kept()
    engine = engine_with(pages, most=3)
    short = Request("short", first.prompt[:13], SamplingParams(max_tokens=1))
    serve(engine, short)
    assert short.num_cached_tokens == 12
    second = again(first, "second")
    serve(engine, second)
    assert second.num_cached_tokens == 24, "three here, and three more"
    third = again(second, "third")
    serve(engine, third)
    tier = engine.tier
    assert tier.num_lookups == 2
    check(short, second, third)


def test_pages_whose_beginning_has_gone_meanwhile_are_not_taken_in() -> None:
    pages, first = kept()
    engine = engine_with(pages, wait=1)
    short = Request("short", first.prompt[:13], SamplingParams(max_tokens=1))
    serve(engine, short)
    num_arrived, prefix = engine.scheduler.counters.fetched_pages, engine.scheduler.prefix
    second = again(first, "second")
    engine.add(second)
    prefix.forget(engine.scheduler.lifecycle.find(second)[:1])
    run_out(engine)
    assert engine.scheduler.counters.fetched_pages == num_arrived
    assert second.num_cached_tokens == 0
    check(second)


@pytest.mark.parametrize(("missing", "found"), [(None, 28), (6, 24), (5, 20), (4, 28)])
def test_of_a_window_the_tier_has_what_a_prefix_is_resumed_from(missing: int | None, found: int) -> None:
    """Behind 28 tokens a query sees 8 of them; a page missing there cuts the prefix in front of it."""
    pages: Pages = {}
    first = ask("first", 30, 4)
    serve(engine_with(pages, windows=(9,)), first)
    assert len(pages) == 2 * 8
    if missing is not None:
        del pages[key_of_group(first.page_keys[missing], 1)]
    engine, second = engine_with(pages, windows=(9,)), again(first, "second")
    serve(engine, second)
    assert second.num_cached_tokens == found
    assert engine.scheduler.counters.fetched_pages == found // PAGE_SIZE + 2
    check(second)


def test_a_tier_that_is_not_asked_holds_nobody_back() -> None:
    engine = engine_with({})
    engine.tier.is_asked = False
    request = ask("first", 30, 4)
    engine.add(request)
    assert engine.step() is not None
    run_out(engine)
    check(request)


@pytest.mark.parametrize("windows", [(), (9,)])
def test_samples_of_a_prompt_have_its_pages_saved_once(windows: tuple[int, ...]) -> None:
    pages: Pages = {}
    engine = engine_with(pages, windows=windows)
    serve(engine, ask("first", 30, 4, num_samples=3))
    assert engine.scheduler.counters.saved_pages == len(pages)


@pytest.mark.parametrize("windows", [(), (9,)])
@pytest.mark.parametrize("found", [True, False])
def test_nothing_of_a_request_that_failed_stays_in_the_tier(found: bool, windows: tuple[int, ...]) -> None:
    pages: Pages = {}
    first = ask("first", 30, 4)
    if found:
        serve(engine_with(pages, windows=windows), first)
        assert len(pages) == 8 * (1 + len(windows))
    engine = engine_with(pages, windows=windows)
    bad = again(first, "bad")
    engine.runner.fail = {"bad"}
    serve(engine, bad)
    assert bad.finish_reason == "error"
    assert engine.scheduler.counters.fetched_pages == (7 + 2 * len(windows) if found else 0)
    wrong = {key_of_group(key, group) for key in bad.page_keys[:7] for group in range(1 + len(windows))}
    assert not wrong & pages.keys()


def test_what_a_request_found_for_which_no_token_is_left_stays_in_the_tier() -> None:
    pages, first = kept()
    engine, before = engine_with(pages), dict(pages)
    engine.runner.fail, engine.runner.failure = {"bad"}, NONE_LEFT
    serve(engine, bad := again(first, "bad"))
    assert (bad.finish_reason, bad.num_cached_tokens) == ("error", 28)
    assert pages == before


def test_a_tier_closes_while_the_observer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The observer may wait for slow ranks, and the tier for a slow store."""
    engine, both = make(num_host_pages=40, has_tier=True), threading.Barrier(2)
    attach(engine, {})
    monkeypatch.setattr(engine.tier, "close", lambda: both.wait(PATIENCE_S))
    monkeypatch.setattr(engine.observer, "close", lambda: both.wait(PATIENCE_S))
    engine.close()
