"""An engine's process keeps what it has loaded, and frees what its requests held."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from borders.refusal import BadRequest
from continuous_batching.engine import Engine
from continuous_batching.inspection import Recount
from continuous_batching.recording.agreement import LEADER, Agreement, RankAnswer, RankQuestions, Settled
from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.reader import load
from serving.adapters import PutAdapter
from serving.engine.facts import facts_of
from serving.engine.messages import (
    BEGIN,
    Add,
    AddAccepted,
    AddRefused,
    Beat,
    Begun,
    Finish,
    SampleEnd,
    Stepped,
    StepTimes,
    decode_from_engine,
    encode,
    encode_whole,
)
from serving.engine.worker import Worker
from tests.patience import PATIENCE_S
from tests.serving import page_pair
from tests.serving.conftest import Sockets
from tests.serving.server import TINY
from tests.serving.warm import CODE, start_speaking

ENGINE = """
import gc, sys
gc.unfreeze()  # what the process froze that this one is a fork of
from serving.engine import main, worker

def tell(self):
    print(gc.get_freeze_count(), len(gc.get_objects()))
    sys.exit()

worker.Worker.serve = tell
main.main(sys.argv[1:])
"""
SERVER = """
import gc, sys
gc.unfreeze()  # what the process froze that this one is a fork of
from scripts import serve
from serving import server

def tell(work):
    print(gc.get_freeze_count(), len(gc.get_objects()))
    work.close()

server.uvloop.run = tell
serve.main([sys.argv[2], "--port", "0"])
"""


@pytest.mark.parametrize("process", [ENGINE, SERVER], ids=["engine", "server"])
def test_what_is_loaded_is_not_looked_through_again(process: str, tmp_path: Path) -> None:
    """Garbage is looked for while clients wait: among what came since, not among all that stays."""
    command = [process, f"ipc://{tmp_path}/socket", TINY]
    run = start_speaking(CODE, command, os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.stdin is not None
    assert run.stdout is not None
    with run.stdin, run.stdout:  # an engine begins when it reads a byte, and ends with its parent
        run.stdin.write(BEGIN + b"\n")
        run.stdin.flush()
        frozen, others = map(int, run.stdout.readline().split())
        assert run.wait(PATIENCE_S) == 0
    assert frozen > 50_000
    assert others < frozen / 20


def worker_of(built: BuiltEngine, sockets: Sockets) -> Worker:
    return Worker(built.engine, sockets[0], facts_of(built, prefix_sharing=True))


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_pages_are_free_within_two_steps(overlap: str, sockets: Sockets) -> None:
    """Of requests that wait, that are in their prompt, and that have tokens."""
    settings = ["scheduler.num_slots=2", "scheduler.max_batch_tokens=32", f"scheduler.overlap={overlap}"]
    built = build(load(TINY, settings))
    engine, worker, theirs = built.engine, worker_of(built, sockets), sockets[1]
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    for stream, num_tokens in enumerate((8, 300, 8)):
        prompt = np.arange(300, 300 + num_tokens, dtype=np.int32).tobytes()
        theirs.send(encode(Add(stream, [str(stream)], prompt, b"", params, [None], "", "", 0, None, 0.0)))
    worker._take(1000)
    for _ in range(4):
        engine.step()
    slots, pool, prefix = engine.slots, engine.scheduler.pool, engine.scheduler.prefix
    running = {slots.requests[row].id: slots.num_computed[row] for row in slots.busy.tolist()}
    assert running["0"] > 8
    assert 0 < running["1"] < 300
    assert len(engine.scheduler.waiting) == 1
    assert not engine.is_called()
    for stream in range(3):
        theirs.send(encode(Finish(stream, "abort")))
    assert engine.is_called(), "where all rows wait for masks, this ends the wait"
    worker._take(1000)
    assert not engine.is_called()
    for _ in range(2):
        engine.step()
    assert not len(slots.busy)
    assert not engine.has_work
    assert pool.num_held == prefix.num_idle


def test_no_more_pages_are_shared_than_are_in_use(monkeypatch: pytest.MonkeyPatch, sockets: Sockets) -> None:
    """Pages are recounted now and then, and read in each beat."""
    told: list[Beat] = []
    built = build(load(TINY, ["scheduler.num_slots=2"]))
    worker = worker_of(built, sockets)
    monkeypatch.setattr(worker, "_send", told.append)
    monkeypatch.setattr(worker, "_recount", lambda now_s: Recount(shared_pages=5, wrong_pages=0))
    worker._beat()
    assert [(each.gauges.held_pages, each.shared_pages) for each in told] == [(0, 0)]


def test_a_refusal_comes_over_the_socket_as_it_was() -> None:
    bad = BadRequest("stop", value="x", limit=3, fix="shorten it", place="[1]", subject="")
    sent = decode_from_engine(encode(AddRefused.of(7, bad)))
    assert isinstance(sent, AddRefused)
    assert sent.stream == 7
    assert vars(sent.error()) == vars(bad)
    assert str(sent.error()) == str(bad)


def test_half_a_pair_in_what_an_engine_says_is_replaced() -> None:
    """All else of the message stays, bytes too."""
    ends = [SampleEnd(1, "error", text, 3, 2, 1, 0.5, None, None, []) for text in ("a \ud800", "a ?")]
    times, begun = StepTimes(1.0, 0.5, 1, 2, 3), [Begun(1, 2, [], b"\xff")]
    said, meant = (Stepped([1], [2], [None], begun, [end], times) for end in ends)
    assert decode_from_engine(encode_whole(said)) == meant
    assert encode_whole(meant) == encode(meant)
    bad = BadRequest("stop", "is \udc00", place="[1]")
    refused = decode_from_engine(encode_whole(AddRefused.of(7, bad)))
    assert isinstance(refused, AddRefused)
    assert str(refused.error()) == "stop[1] is ?"


def test_an_id_that_is_being_served_is_refused_and_the_engine_goes_on(sockets: Sockets) -> None:
    built = build(load(TINY, ["scheduler.num_slots=2"]))
    worker, theirs = worker_of(built, sockets), sockets[1]
    prompt = np.arange(300, 308, dtype=np.int32).tobytes()
    for stream in range(2):
        params = SamplingParams(max_tokens=4)
        theirs.send(encode(Add(stream, ["same"], prompt, b"", params, [None], "", "", 0, None, 0.0)))
    worker._take(1000)
    accepted, refused = (decode_from_engine(theirs.recv()) for _ in range(2))
    assert accepted == AddAccepted(0)
    assert isinstance(refused, AddRefused)
    assert (refused.stream, refused.field) == (1, "id")
    assert built.engine.step() is not None


def test_what_waits_for_another_engines_pages_is_told(
    monkeypatch: pytest.MonkeyPatch, sockets: Sockets
) -> None:
    """A router that polls would forget it, and send more there. Tokens by hand: what is behind full pages."""
    told: list[Beat] = []  # and of no request that it is accepted, since none is in the queue
    pair, requests = page_pair.Pair(num_slots=4), page_pair.prompts(3)
    requests[0].followers = [replace(requests[0], id=f"sample {number}") for number in range(3)]
    facts = facts_of(build(load(TINY)), prefix_sharing=True)
    worker = Worker(pair.answers, sockets[0], facts, pages=pair.fetching)
    monkeypatch.setattr(worker, "_send", told.append)
    for stream, request in enumerate(requests):
        worker._enqueue(stream, request)
    assert len(pair.fetches) == 3
    assert not len(pair.answers.scheduler.waiting)
    worker._beat()
    pair.until(lambda: len(pair.fetches) == 0 and not pair.answers.has_work)
    worker._beat_s = -np.inf
    worker._beat()
    pair.close()
    waiting, after = (each.gauges for each in told)
    assert waiting.waiting_requests == 6
    assert waiting.queued_tokens == sum((len(each.prompt) - 1) % 8 + 1 for each in requests)
    assert (after.waiting_requests, after.queued_tokens) == (0, 0)


def test_what_waits_for_its_grammar_is_told(monkeypatch: pytest.MonkeyPatch, sockets: Sockets) -> None:
    told: list[Beat] = []
    built = build(load(TINY, ["scheduler.num_slots=2"]))
    worker, theirs = worker_of(built, sockets), sockets[1]
    may_end = threading.Event()
    monkeypatch.setattr(worker._grammars.grammars, "constrain", lambda leader: may_end.wait(PATIENCE_S))
    monkeypatch.setattr(worker, "_send", told.append)
    params = SamplingParams(max_tokens=4, grammar="held back below")
    prompt = np.arange(300, 320, dtype=np.int32).tobytes()
    theirs.send(encode(Add(0, ["0", "1"], prompt, b"", params, [None, None], "", "", 0, None, 0.0)))
    worker._take(1000)
    worker._beat()
    may_end.set()
    (found,) = (each.gauges for each in told)
    assert (found.waiting_requests, found.queued_tokens) == (2, 20)


class Settling(RankQuestions):
    """Settles each question before the next step, and notes what is in flight when it is decided."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(Agreement([LEADER]), {}, engine.observer)
        self._engine = engine
        self.in_flight: list[int] = []

    def ask(self, topic: str, name: str, body: bytes, wait_s: float, then: Callable[[Settled], None]) -> None:
        self.expect(topic, name, wait_s, then)
        self.answer(RankAnswer(topic, name, 1))

    def decide(self, topic: str, name: str, *, is_agreed: bool) -> None:
        self.in_flight.append(len(self._engine.scheduler.in_flight))


def test_what_is_in_flight_is_computed_with_the_adapter_that_goes(sockets: Sockets) -> None:
    """The last of several stages computes a step when its result is asked for; no token is lost by it."""
    built = build(load(TINY, ["scheduler.num_slots=2", "scheduler.overlap=true"]))
    engine, (ours, theirs) = built.engine, sockets
    engine.questions = questions = Settling(engine)
    worker = Worker(engine, ours, facts_of(built, prefix_sharing=True), questions=questions)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    prompt = np.arange(300, 308, dtype=np.int32).tobytes()
    worker._handle(Add(0, ["one"], prompt, b"", params, [None], "", "", 0, None, 0.0))
    for number in range(20):
        if number == 3:
            assert len(engine.scheduler.in_flight)
            worker._handle(PutAdapter(1, "folder", "digest"))
        step = engine.step()
        if step is not None:
            worker._after(step)
    assert questions.in_flight == [0]
    told = []
    while theirs.poll(0):
        told.append(decode_from_engine(theirs.recv()))
    assert sum(len(each.tokens) for each in told if isinstance(each, Stepped)) == 9
    assert not worker._has_work


def num_kept() -> int:
    """How many objects there are, and how many entries all containers have together."""
    gc.collect()
    sizes = (len(each) for each in gc.get_objects() if type(each) in (dict, list, set, deque))
    return len(gc.get_objects()) + sum(sizes)


def test_an_engine_keeps_nothing_of_requests_that_have_ended(sockets: Sockets) -> None:
    """With samples, ends from outside, refusals and log-probabilities; one entry a request would show."""
    settings = ["scheduler.num_slots=8", "cache.num_pages=64", "device.threads=1"]
    built = build(load(TINY, settings))
    engine, worker, theirs = built.engine, worker_of(built, sockets), sockets[1]
    random, streams = np.random.default_rng(1), itertools.count()

    def serve(count: int) -> None:
        for number in range(count):
            length = 4000 if number % 20 == 7 else int(random.integers(1, 60))  # one that does not fit
            params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=2 if number % 3 == 0 else None)
            prompt = random.integers(3, 300, length).astype(np.int32)
            samples = [next(streams) for _ in range(1 + (number % 4 == 0))]
            leader = Request(f"request {samples[0]}", prompt, params, cache_salt=str(number))
            leader.followers = [Request(f"request {each}", prompt, params) for each in samples[1:]]
            worker._handle(Add.of(samples[0], leader, 0.0))
            if number % 5 == 0:
                worker._handle(Finish(samples[0], "abort"))
        while worker._has_work:
            step = engine.step()
            if step is not None:
                worker._after(step)
        while theirs.poll(0):
            theirs.recv()

    serve(60)  # the prefix cache and all pools are full
    before = num_kept()
    serve(120)
    assert num_kept() - before < 60
