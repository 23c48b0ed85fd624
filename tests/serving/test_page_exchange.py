"""Prompts and answers on two engines: the same tokens as on one, whatever becomes of a transfer."""

from __future__ import annotations

import gc
import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from borders.refusal import BadRequest
from continuous_batching.queueing import QueueLimits
from kv_cache.exchange import prompt_source
from kv_cache.exchange.connection import Connection, Wake
from kv_cache.exchange.messages import PageIdentity
from kv_cache.exchange.page_server import PageLink
from kv_cache.exchange.transports import Bytes, Tcp
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError
from serving.engine import page_exchange
from serving.engine.facts import facts_of
from serving.engine.messages import EngineFacts
from serving.engine.page_exchange import PageFetches, PageSends
from tests.kv_cache import device
from tests.patience import PATIENCE_S
from tests.serving.page_pair import HERE, Link, Pair, alone, cache_of, prompts
from tests.serving.server import TINY


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_pages_that_came_are_found_and_the_tokens_are_those_of_one_engine(transport: str) -> None:
    requests = prompts(6)
    pair = Pair(transport=transport)
    assert pair.serve(requests) == alone(requests)
    pair.settle()
    counters = pair.answers.scheduler.counters
    whole = {tuple(each.prompt[: at + 8]) for each in requests for at in range(0, len(each.prompt) - 8, 8)}
    assert counters.missed_pages == 0
    assert pair.prompts.scheduler.counters.sent_pages == counters.arrived_pages >= len(whole)
    for request in requests:
        assert request.num_cached_tokens == (len(request.prompt) - 1) // 8 * 8
    assert counters.computed_tokens == sum(len(r.prompt) - r.num_cached_tokens + 5 for r in requests)
    pair.close()


def test_what_wakes_an_engine_is_closed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def close(descriptor: int, close: Callable[[int], None] = os.close) -> None:
        closed.append(descriptor)
        close(descriptor)

    monkeypatch.setattr(os, "close", close)
    before = {*threading.enumerate()}  # those of a test that has ended may wait for ever
    pair = Pair()
    descriptors = [each.wake.fd for each in (pair.sending, pair.fetching)]
    pair.serve(prompts(1))
    pair.close()
    for thread in {*threading.enumerate()} - before:
        if thread.name.startswith("pages"):
            thread.join(PATIENCE_S)
    assert not {*descriptors} & {*closed}
    del pair
    gc.collect()
    assert {*descriptors} <= {*closed}


def test_what_is_in_the_pages_is_what_the_other_engine_has_in_them() -> None:
    (request,) = prompts(1, longest=50)
    pair = Pair()
    pair.prompts.scheduler.max_batch_tokens = 11  # a chunk ends within a page
    pair.serve([request])
    here, there = (each.scheduler.prefix.index for each in (pair.answers, pair.prompts))
    keys = request.page_keys[: (len(request.prompt) - 1) // 8]
    assert len(keys) > 3
    for layer in range(pair.num_layers):
        ours, theirs = (
            cache_of(engine).read_layer(layer, np.array([index.page_of(key) for key in keys]))()
            for engine, index in ((pair.answers, here), (pair.prompts, there))
        )
        assert len(ours) == len(keys) * cache_of(pair.answers).layer_bytes[layer]
        assert ours.any()
        assert np.array_equal(ours, theirs)
    pair.close()


class Counting(Tcp):
    """Counts the bytes that are put."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def reach(self, description: bytes, num_bytes: int) -> Counting:
        return self

    def put(self, offset: int, data: Bytes) -> Bytes | None:
        self.num_bytes += len(data)
        return data

    def close(self) -> None:
        """The bytes were counted."""


def test_the_bytes_that_move_are_those_of_the_pages_that_were_missing() -> None:
    way = Counting()
    first, second = prompts(2, shared=40)
    pair = Pair(transports={"tcp": way})
    pair.serve([first])
    assert way.num_bytes == (len(first.prompt) - 1) // 8 * pair.page_bytes
    pair.serve([second])
    moved = (len(first.prompt) - 1) // 8 + (len(second.prompt) - 1) // 8 - 40 // 8
    assert way.num_bytes == moved * pair.page_bytes
    assert pair.answers.scheduler.counters.arrived_pages == moved
    pair.close()


def test_a_layer_has_arrived_before_the_next_is_computed() -> None:
    (request,) = prompts(1)
    pair = Pair()
    pair.prompts.scheduler.max_batch_tokens = 16
    decoder = device.model("fused").decoder
    after, sent, num_waits = decoder.after_layer, [list[int]() for _ in range(pair.num_layers)], 0

    def told(layer: int) -> None:
        nonlocal num_waits
        after(layer)
        for each in pair.sends._sendings.values():
            sent[layer].append(each.next_page[layer])
        if layer == 0 and sent[0] and not num_waits:  # the second layer of this step is not computed yet
            until_s = time.monotonic() + PATIENCE_S
            while not pair.source.came.qsize():
                assert time.monotonic() < until_s
                time.sleep(0.001)
            num_waits += 1

    decoder.after_layer = told
    try:
        pair.serve([request])
    finally:
        decoder.after_layer = None
    assert num_waits == 1
    assert sent[0] == sent[1] == [2, 4, 5][: len(sent[0])], "each chunk's pages, when it was computed"
    assert len(sent[0]) >= 2
    pair.close()


@pytest.mark.parametrize("attention", ["reference", "int8"])
def test_other_kinds_of_pages(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device.exact(monkeypatch)
    requests = prompts(3)
    pair = Pair(attention)
    assert pair.serve(requests) == alone(requests, attention)
    pair.settle()
    assert pair.answers.scheduler.counters.arrived_pages
    pair.close()


def test_with_the_next_step_made_ahead() -> None:
    requests = prompts(8)
    pair = Pair()
    pair.answers.overlap = pair.prompts.overlap = True
    assert pair.serve(requests) == alone(requests)
    pair.settle()
    assert pair.answers.scheduler.counters.arrived_pages
    pair.close()


def frames() -> dict[str, int]:
    """How many messages each side sends for one prompt."""
    way = Link("none", 0, "pass")
    pair = Pair(between=way)
    pair.serve(prompts(1))
    pair.settle()
    assert pair.answers.scheduler.counters.arrived_pages
    pair.close()
    return way.counts


@pytest.mark.slow
def test_a_transfer_that_fails_at_any_message_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut before each message, within it, changed, lost or repeated: the same tokens, and no page is held."""
    monkeypatch.setattr(prompt_source, "LOST_S", 0.0)
    (request,) = prompts(1)
    want = alone([request])
    counts = frames()
    assert counts["prompts"] >= 2 + 2 * 2, "welcome, each layer in some parts, the end"
    num_missed = 0
    for of, count in counts.items():
        for how in ("cut", "torn", "damaged", "lost", "twice"):
            for number in range(count):
                way = Link(of, number, how)
                pair = Pair(between=way, most_wait_s=0.5)
                assert pair.serve(prompts(1)) == want, (of, number, how)
                counters = pair.answers.scheduler.counters
                assert counters.missed_pages in (0, (len(request.prompt) - 1) // 8)
                assert (counters.missed_pages == 0) == (counters.arrived_pages > 0)
                if of == "prompts" and number and how not in ("twice", "lost"):
                    assert counters.missed_pages, (of, number, how)
                num_missed += counters.missed_pages > 0
                pair.settle()
                pair.close()
    assert num_missed >= 3 * (counts["prompts"] - 1)


def test_after_a_cut_the_next_prompt_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_source, "LOST_S", 0.0)
    way = Link("prompts", 3, "torn")
    pair = Pair(between=way)
    first, second = prompts(2)
    assert pair.serve([first]) == alone([first])
    assert pair.answers.scheduler.counters.missed_pages
    assert pair.serve([second]) == alone([second])
    assert pair.answers.scheduler.counters.arrived_pages
    pair.close()


class Faulty(Tcp):
    """Puts bytes straight into another engine's memory, as hardware does, and not always well."""

    def __init__(self, fault: str, at: int) -> None:
        self.fault, self.at = fault, at
        self.windows: dict[bytes, Bytes] = {}
        self.num_put = 0

    def expose(self, num_bytes: int):
        window = super().expose(num_bytes)
        window.memory[:] = 0xAB
        window.description = str(len(self.windows)).encode()
        self.windows[window.description] = window.memory
        return window

    def reach(self, description: bytes, num_bytes: int) -> Reached:
        return Reached(self, self.windows[description])


class Reached:
    def __init__(self, way: Faulty, memory: Bytes) -> None:
        self._way, self._memory = way, memory

    def put(self, offset: int, data: Bytes) -> None:
        way = self._way
        is_faulty, way.num_put = way.num_put == way.at, way.num_put + 1
        if is_faulty and way.fault == "fails":
            raise OSError("the link is down")
        if is_faulty and way.fault == "lost":
            return
        if is_faulty and way.fault == "torn":
            data = data[: len(data) // 2]
        if is_faulty and way.fault == "misplaced":
            offset = 0 if offset else len(data)
        self._memory[offset : offset + len(data)] = data

    def close(self) -> None:
        self.is_closed = True


def test_bytes_that_are_put_straight_into_the_window_are_verified() -> None:
    want = alone(prompts(1))
    good = Faulty("none", -1)
    pair = Pair(transports={"tcp": good})
    assert pair.serve(prompts(1)) == want
    assert pair.answers.scheduler.counters.arrived_pages
    pair.close()
    assert good.num_put >= 4
    for fault in ("fails", "lost", "torn", "misplaced"):
        for at in range(good.num_put):
            pair = Pair(transports={"tcp": Faulty(fault, at)})
            assert pair.serve(prompts(1)) == want, (fault, at)
            assert pair.answers.scheduler.counters.missed_pages, (fault, at)
            assert not pair.answers.scheduler.counters.arrived_pages
            pair.settle()
            pair.close()


def test_an_id_whose_pages_are_on_their_way_is_refused_until_it_has_ended() -> None:
    pair, request, (twin, other) = Pair(), prompts(1)[0], prompts(2, seed=1)
    other.id, other.prompt_replica = request.id, ""
    pair.is_stopped = True
    pair.ask([request])
    for each in (twin, other):
        with pytest.raises(BadRequest, match="is being served already"):
            pair.fetching.begin(1, each)
    pair.is_stopped = False
    pair.until(lambda: len(pair.fetches) == 0 and not pair.answers.has_work)
    assert pair.serve([twin]) == alone([twin])
    pair.settle()
    pair.close()


def test_an_engine_of_prompts_that_stands_still_is_not_waited_for() -> None:
    requests = prompts(3)
    pair = Pair(most_wait_s=0.3)
    pair.is_stopped = True
    start_s = time.monotonic()
    assert pair.serve(requests) == alone(requests)
    assert time.monotonic() - start_s >= 0.3
    assert pair.answers.scheduler.counters.missed_pages
    # It hears of all at once, when nobody waits any more
    pair.until(lambda: pair.server.asked.qsize() == 2 * len(requests))
    pair.is_stopped = False
    pair.settle()
    assert pair.prompts.scheduler.counters.sent_pages == 0
    pair.close()


@pytest.mark.parametrize(
    ("most_queue_s", "timeout_s", "age_s", "wait_s"),
    [
        (math.inf, None, 3600.0, 10.0),
        (math.inf, 5.0, 4.0, 1.0),
        (math.inf, 5.0, 5.0, None),
        (8.0, None, 2.0, 4.0),
        (8.0, None, 5.0, 1.0),
        (8.0, None, 6.0, None),
        (8.0, 3.0, 2.0, 1.0),
        (60.0, None, 1.0, 10.0),
    ],
)
def test_a_prompt_is_waited_for_within_its_requests_own_time(
    most_queue_s: float,
    timeout_s: float | None,
    age_s: float,
    wait_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, (request,), leases = Pair(), prompts(1), list[float]()
    request.arrival_s, request.timeout_s = 1e4 - age_s, timeout_s
    pair.answers.clock = lambda: 1e4
    cache, sources = cache_of(pair.answers), {HERE: pair.source}
    fetches = PageFetches(pair.answers, cache, sources, 10.0, Wake(), most_queue_s)

    def want(tokens: bytes, cache_salt: str, first_page: int, lease_s: float, *_: object) -> None:
        leases.append(lease_s)

    monkeypatch.setattr(pair.source, "want", want)
    assert not fetches.begin(0, request)
    assert leases == ([] if wait_s is None else [wait_s])
    assert not len(pair.answers.scheduler.lifecycle.held.pages)
    pair.close()


@pytest.mark.parametrize("age_s", [0.0, 5.0])
def test_who_may_not_queue_for_long_is_served_after_a_miss(
    age_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source that a new request waited for in vain is left alone, as if `page_wait_s` were over."""
    pair, requests = Pair(limits=QueueLimits(max_queue_wait_s=8.0)), prompts(1)
    late: list[float] = []
    monkeypatch.setattr(pair.source, "was_late", late.append)
    asked = Connection(lambda _: None, lambda _: None), 1  # which brings nothing
    monkeypatch.setattr(pair.source, "want", lambda *_: asked)
    now_s, cache, sources = 100.0, cache_of(pair.answers), {HERE: pair.source}
    pair.answers.clock = lambda: now_s
    monkeypatch.setattr(page_exchange, "time", SimpleNamespace(monotonic=lambda: now_s))
    fetches = PageFetches(pair.answers, cache, sources, 10.0, Wake(), 8.0)
    requests[0].arrival_s = now_s - age_s
    assert fetches.begin(0, requests[0])
    now_s += 4.0 if age_s == 0.0 else 1.0
    fetches.take()
    for fetch in fetches.take_ready():
        pair.answers.add(fetch.leader)
    while pair.answers.has_work:
        pair.answers.step()
    assert requests[0].finish_reason == "length"
    assert pair.answers.scheduler.counters.missed_pages
    assert len(late) == (age_s == 0.0)
    pair.settle()
    pair.close()


def test_a_recipes_longest_wait_in_the_queue_bounds_the_one_for_pages() -> None:
    settings = ["server.prompt_replicas=[tcp://127.0.0.1:1]", "scheduler.max_queue_wait_s=3"]
    recipe = load(TINY, settings)
    built = build(recipe)
    exchange = page_exchange.exchange_of(recipe, built)
    assert exchange is not None
    assert exchange._fetches is not None
    assert exchange._fetches._most_wait_s == 1.5
    built.engine.close()


def test_of_a_link_that_takes_no_more_one_prompt_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, requests = Pair(), prompts(6)
    asked, counted = PageSends._may_read, list[str]()

    def may_read(sends: PageSends, link: PageLink) -> bool:
        counted.append("room")
        return is_free and asked(sends, link)

    def read(sends: PageSends, *args: Any, read: Callable[..., bool] = PageSends._read) -> bool:
        counted.append("layer")
        return read(sends, *args)

    is_free = False
    monkeypatch.setattr(PageSends, "_may_read", may_read)
    monkeypatch.setattr(PageSends, "_read", read)
    pair.ask(requests)
    sendings = pair.sends._sendings
    pair.until(lambda: len(sendings) == 6 and all(each.is_computed for each in sendings.values()))
    counted.clear()
    pair.sends.take()
    assert counted == ["room"]
    is_free = True
    pair.until(lambda: len(pair.fetches) == 0 and not pair.answers.has_work)
    assert [each.answer.tolist() for each in requests] == alone(requests)
    pair.settle()
    pair.close()


def test_an_engine_that_answers_and_goes_leaves_nothing_behind() -> None:
    pair = Pair()
    pair.ask(prompts(4))
    pair.until(lambda: len(pair.sends) > 0)
    pair.source.close()
    pair.settle()
    pair.close()


def test_nothing_is_computed_for_an_engine_that_is_gone() -> None:
    pair, (request,) = Pair(), prompts(1)
    pair.is_stopped = True
    pair.ask([request])
    pair.until(lambda: pair.server.asked.qsize() == 1)
    wanted = pair.server.asked.get()
    pair.source.close()
    pair.until(lambda: not wanted.link.connection.is_open and pair.server.asked.qsize() == 1)
    pair.server.asked.put(wanted)  # behind the word that its connection is lost
    pair.is_stopped = False
    pair.settle()
    assert pair.prompts.scheduler.counters.prompt_tokens == 0
    pair.close()


@pytest.mark.parametrize("ends", ["lease", "connection"])
def test_who_reads_nothing_holds_pages_no_longer_than_it_is_waited_for(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is full, and nothing is taken out of it: the pages are read no further, and then let go."""
    monkeypatch.setattr(page_exchange, "MOST_UNSENT_BYTES", 1)
    wait_s = 2.0 if ends == "lease" else 3600.0
    pair = Pair(most_wait_s=wait_s, window_bytes=1 << 12, most_part_bytes=1)
    requests = prompts(1, longest=61)
    pair.ask(requests)
    fetching, pair.fetching.take = pair.fetching.take, list
    pair.until(lambda: pair.sends._num_asked > 0 and not pair.prompts.has_work)
    if ends == "connection":
        assert pair.prompts.leased_pages("pages-1") is not None
        pair.source.close()
    pair.until(lambda: not len(pair.sends))
    assert pair.prompts.scheduler.counters.sent_pages == 0
    assert not len(pair.prompts.scheduler.lifecycle.held.pages)
    pair.fetching.take = fetching
    pair.until(lambda: not len(pair.fetches) and not pair.answers.has_work)
    assert [each.answer.tolist() for each in requests] == alone(requests)
    assert pair.answers.scheduler.counters.missed_pages
    pair.settle()
    pair.close()


def test_a_prompt_is_computed_here_where_there_is_no_thread_to_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "pages-dial":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    pair = Pair()
    requests = prompts(2)
    assert pair.serve(requests) == alone(requests)
    pair.settle()
    pair.close()


def test_other_models_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(answers_model="another")
    requests = prompts(2)
    assert pair.serve(requests) == alone(requests)
    assert "the model is the model at the engine of prompts and another at the one of answers" in caplog.text
    assert not pair.answers.scheduler.counters.arrived_pages
    assert pair.source.want(b"", "", 0, 1.0) is None, "it is not asked again at once"
    pair.close()


def test_other_layouts_and_small_windows_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    for options, words in (
        ({"window_bytes": 64}, "raise server.page_window_mib"),
        ({"transport": "shared_memory", "window_bytes": 1 << 11}, "raise server.page_window_mib"),
    ):
        caplog.clear()
        pair = Pair(most_part_bytes=1 << 12, **options)
        requests = prompts(1)
        assert pair.serve(requests) == alone(requests)
        assert words in caplog.text
        pair.close()


def test_nobody_is_asked_for_what_is_here_or_too_short() -> None:
    pair = Pair()
    long, short = prompts(2)
    short.prompt = short.prompt[:8]
    short.tokens = short.prompt
    assert not pair.fetching.begin(0, short)
    pair.serve([long])
    again = prompts(1)[0]
    assert not pair.fetching.begin(0, again)
    elsewhere = prompts(3)[2]
    elsewhere.prompt_replica = "tcp://127.0.0.1:1"
    assert elsewhere.prompt_replica != HERE
    assert not pair.fetching.begin(0, elsewhere)
    pair.close()


def test_engines_of_longer_requests_rotate_otherwise_and_exchange_no_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The factors of "longrope" follow from the longest request that an engine takes."""
    factors = dict.fromkeys(("short_factor", "long_factor"), [1.0] * 8)
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32, **factors}
    shape = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "rope_scaling": rope,
    }
    identities: list[PageIdentity] = []
    facts: list[EngineFacts] = []

    def note(endpoint: str, identity: PageIdentity, *args: object, **options: object) -> None:
        identities.append(identity)
        raise OSError("nobody listens")

    monkeypatch.setattr(page_exchange, "PageServer", note)
    for most in (33, 34):
        overrides = [f"model.config.{name}={json.dumps(value)}" for name, value in shape.items()]
        overrides += ["device.compile=false", f"scheduler.max_request_tokens={most}", "cache.num_pages=20"]
        recipe = load("recipes/bench/llama_125m.yaml", [*overrides, "server.pages_at=tcp://127.0.0.1:0"])
        built = build(recipe)
        with pytest.raises(RecipeError, match="nobody listens"):
            page_exchange.exchange_of(recipe, built)
        facts.append(facts_of(built, prefix_sharing=True))
        built.engine.close()
    assert [each.long_factors for each in identities] == [False, True]
    assert [each.long_factors for each in facts] == [False, True], "nor do their answers go on at the other"
    assert identities[0] == replace(identities[1], long_factors=False)
