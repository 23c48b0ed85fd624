"""Requests before an operator's order end as they began, and those that come after it wait."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.reader import load
from serving.engine.facts import facts_of
from serving.engine.messages import (
    Add,
    AddAccepted,
    Beat,
    Finish,
    FromEngine,
    Halt,
    OrderDone,
    Pause,
    PutWeights,
    ReadWeights,
    Sleep,
    Stepped,
    ToEngine,
    WakeUp,
    decode_from_engine,
)
from serving.engine.worker import Worker
from tests.models.test_live_memory import TINY_WEIGHTS, changed
from tests.patience import PATIENCE_S
from tests.serving.conftest import Sockets
from tests.serving.server import TINY

NUM_TOKENS = 12


class Driven:
    """A worker that is told each message, and makes each step, by hand."""

    def __init__(self, built: BuiltEngine, socket: zmq.Socket[bytes], other: zmq.Socket[bytes]) -> None:
        self.built, self.engine, self._other = built, built.engine, other
        facts, questions = facts_of(built, prefix_sharing=True), built.questions
        assert questions is not None
        self.questions = questions
        self.worker = Worker(built.engine, socket, facts, questions=questions, live=built.live)
        self.tokens: dict[int, list[int]] = {}

    def add(self, num_samples: int = 1, grammar: str | None = None) -> int:
        """Ask for answers to the same prompt each time, and return the first one's stream."""
        number = len(self.tokens)
        ignore_eos = grammar is None
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=ignore_eos, grammar=grammar)
        streams = range(number, number + num_samples)
        request, *followers = (
            Request(str(stream), np.arange(3, 60, dtype=np.int32), params) for stream in streams
        )
        request.followers = followers
        self.tell(Add.of(number, request, 0.0))
        self.tokens |= {stream: [] for stream in streams}
        return number

    def tell(self, message: ToEngine) -> None:
        self.worker._handle(message)

    def read(self, path: Path) -> None:
        self.tell(ReadWeights(str(path), "", ""))
        assert self.answer() == [OrderDone("")]

    def answer(self) -> list[FromEngine]:
        """What the worker says next, in as many turns as it takes."""
        until_s, found = time.monotonic() + PATIENCE_S, self.turn()
        while not found:
            assert time.monotonic() < until_s
            time.sleep(0.001)  # a thread reads weights
            found = self.turn()
        return found

    def turn(self) -> list[FromEngine]:
        """One turn of the worker, with a step if one may begin; returns what it sent but tokens and beats."""
        self.questions.take()
        self.worker._admit_compiled()
        for message in self.worker._fence.advance():
            self.tell(message)
        if self.worker._has_work and (step := self.engine.step()) is not None:
            self.worker._after(step)
        return self.heard()

    def heard(self) -> list[FromEngine]:
        found: list[FromEngine] = []
        while self._other.poll(0):
            message = decode_from_engine(self._other.recv())
            if isinstance(message, Stepped):
                for stream, token in zip(message.streams, message.tokens):
                    self.tokens[stream].append(token)
            elif not isinstance(message, (Beat, Pause, AddAccepted)):
                found.append(message)
        return found

    def until_idle(self) -> list[FromEngine]:
        found = self.turn()
        while self.worker._has_work or self.worker._fence.is_busy:
            found += self.turn()
        return found


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(TINY_WEIGHTS, tmp_path_factory.mktemp("checkpoints") / "new")


@pytest.fixture
def driven(sockets: Sockets) -> Driven:
    return Driven(build(load(TINY, ["device.threads=1", "scheduler.num_slots=2"])), *sockets)


def right(driven: Driven, new: Path) -> tuple[list[int], list[int]]:
    """The answers of the old weights and of the new ones, which are put."""
    first = driven.add()
    driven.until_idle()
    driven.read(new)
    driven.tell(PutWeights())
    driven.until_idle()
    second = driven.add()
    driven.until_idle()
    assert driven.tokens[first] != driven.tokens[second]
    return driven.tokens[first], driven.tokens[second]


def test_what_has_begun_ends_with_the_old_weights_and_the_rest_waits(driven: Driven, new: Path) -> None:
    before, after = right(driven, new)
    driven.read(TINY_WEIGHTS)
    driven.tell(PutWeights())
    driven.until_idle()
    early = [driven.add() for _ in range(3)]  # more than there are slots
    driven.read(new)
    driven.turn()
    driven.tell(PutWeights())
    late = driven.add()
    ended = driven.add()
    driven.tell(Finish(ended, "abort"))
    found: list[FromEngine] = []
    while not any(isinstance(each, OrderDone) for each in found):
        assert not driven.tokens[late], "it waits behind the fence"
        found += driven.turn()
    assert [len(driven.tokens[each]) for each in early] == [NUM_TOKENS] * 3
    driven.until_idle()
    assert all(driven.tokens[each] == before for each in early)
    assert driven.tokens[late] == after
    assert not driven.tokens[ended]


def test_an_engine_that_is_halted_is_given_weights_only_if_nothing_has_begun(
    driven: Driven, new: Path
) -> None:
    before, after = right(driven, new)
    driven.read(TINY_WEIGHTS)
    driven.tell(PutWeights())
    driven.until_idle()
    begun = driven.add()
    for _ in range(3):
        driven.turn()
    driven.tell(Halt(True))
    assert driven.heard() == [OrderDone("")]
    has = len(driven.tokens[begun])
    assert 0 < has < NUM_TOKENS
    waits = driven.add()
    driven.read(new)
    for order in (PutWeights(), Sleep()):
        driven.tell(order)
        (answer,) = driven.turn()
        assert isinstance(answer, OrderDone)
        assert answer.problem.startswith("1 requests have begun")
    assert len(driven.tokens[begun]) == has
    driven.tell(Halt(False))
    driven.until_idle()
    assert driven.tokens[begun] == driven.tokens[waits] == before
    driven.tell(Halt(True))
    assert driven.heard() == [OrderDone("")]
    waits = driven.add()
    driven.read(new)
    driven.tell(PutWeights())
    assert driven.answer() == [OrderDone("")]
    driven.tell(Halt(False))
    driven.until_idle()
    assert driven.tokens[waits] == after


def test_samples_of_a_request_have_begun_when_its_prompt_has(driven: Driven, new: Path) -> None:
    """Those that wait for the prompt are in no queue of their own."""
    before, after = right(driven, new)
    driven.read(TINY_WEIGHTS)
    driven.tell(PutWeights())
    driven.until_idle()
    driven.engine.scheduler.max_batch_tokens = 32  # the prompt takes two steps
    begun = driven.add(num_samples=3)
    driven.turn()
    driven.tell(Halt(True))
    assert driven.heard() == [OrderDone("")]
    waits = driven.add(num_samples=4)
    driven.read(new)
    for order in (PutWeights(), Sleep()):
        driven.tell(order)
        (answer,) = driven.turn()
        assert isinstance(answer, OrderDone)
        assert answer.problem.startswith("3 requests have begun")
    for stream in range(begun, begun + 3):
        driven.tell(Finish(stream, "abort"))
    driven.turn()
    driven.read(new)
    driven.tell(PutWeights())
    assert driven.answer() == [OrderDone("")]
    driven.tell(Sleep())
    (slept,) = driven.answer()
    assert isinstance(slept, OrderDone)
    assert not slept.problem
    driven.tell(WakeUp())
    assert driven.answer() == [slept]
    driven.tell(Halt(False))
    driven.until_idle()
    assert [driven.tokens[stream] for stream in range(waits, waits + 4)] == [after] * 4
    assert before != after


@pytest.mark.parametrize("order", [Sleep(), PutWeights()], ids=["sleep", "weights"])
def test_a_request_whose_grammar_is_compiled_ends_before_an_order(
    driven: Driven, new: Path, order: Sleep | PutWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait in an engine that sleeps, which ends nothing, for as long as that sleeps."""
    before, now = right(driven, new)
    driven.read(TINY_WEIGHTS)
    may_end = threading.Event()
    compiler = driven.worker._grammars.grammars
    monkeypatch.setattr(compiler, "constrain", lambda leader: may_end.wait(PATIENCE_S))
    waits = driven.add(grammar="held back below")
    driven.tell(order)
    for _ in range(3):
        assert not driven.turn()
    assert driven.worker._fence.may_step
    may_end.set()
    (done,) = driven.answer()
    assert isinstance(done, OrderDone)
    assert not done.problem
    has = len(driven.tokens[waits])  # up to the end that the model chooses
    assert driven.tokens[waits] == now[:has] != before[:has]


@pytest.mark.parametrize("what", ["halted", "aborted"])
def test_an_order_waits_for_no_grammar_whose_request_it_does_not_wait_for(
    driven: Driven, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    compiler = driven.worker._grammars.grammars
    monkeypatch.setattr(compiler, "constrain", lambda leader: may_end.wait(PATIENCE_S))
    waits = driven.add(num_samples=2, grammar="held back below")
    if what == "aborted":
        for stream in (waits, waits + 1):
            driven.tell(Finish(stream, "abort"))
    else:
        driven.tell(Halt(True))
        assert driven.heard() == [OrderDone("")]
    driven.tell(Sleep())
    (slept,) = driven.answer()
    assert isinstance(slept, OrderDone)
    assert not slept.problem
    may_end.set()
    until_s = time.monotonic() + PATIENCE_S
    while len(driven.worker._grammars):
        assert time.monotonic() < until_s
        assert not driven.turn()
    assert driven.engine.scheduler.num_waiting == (0 if what == "aborted" else 2)


@pytest.mark.parametrize("order", [Sleep(), PutWeights()], ids=["sleep", "weights"])
def test_an_order_to_a_halted_engine_waits_for_lookups_in_the_tier(
    sockets: Sockets, new: Path, tmp_path: Path, order: Sleep | PutWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = f"cache.tier={{kind: disk, gib: 0.1, path: {tmp_path}, wait_s: 60}}"
    small = "device.threads=1", "cache.page_size=8", "cache.host_gib=0.01"
    driven = Driven(build(load(TINY, [*small, tier])), *sockets)
    before, after = right(driven, new)
    driven.read(TINY_WEIGHTS)
    driven.tell(PutWeights())
    driven.until_idle()
    fetched: list[str] = []
    monkeypatch.setattr(driven.engine.observer, "fetched", lambda name, found: fetched.append(name))
    driven.tell(Halt(True))
    assert driven.heard() == [OrderDone("")]
    waits = driven.add()
    driven.read(new)
    assert driven.engine.tier is not None
    with monkeypatch.context() as slow:
        slow.setattr(driven.engine.tier, "is_over", lambda lookup: False)
        driven.tell(order)
        assert not driven.turn()
    (done,) = driven.answer()
    assert isinstance(done, OrderDone)
    assert not done.problem
    assert fetched == [str(waits)]
    if order == Sleep():
        driven.tell(WakeUp())
        driven.answer()
    driven.tell(Halt(False))
    driven.until_idle()
    assert driven.tokens[waits] == (before if order == Sleep() else after)
    driven.engine.close()


def test_no_step_begins_before_all_ranks_have_changed(driven: Driven, new: Path) -> None:
    """Here the one rank's own word that it has changed is late; one that never comes ends the engine."""
    before, after = right(driven, new)
    driven.read(TINY_WEIGHTS)
    waits = driven.add()
    driven.tell(Finish(waits, "abort"))
    driven.tell(PutWeights())
    take, driven.questions.take = driven.questions.take, lambda: None
    driven.turn()
    waits = driven.add()
    for _ in range(3):
        driven.turn()
    assert not driven.tokens[waits]
    assert not driven.worker._fence.may_step
    driven.questions.take = take
    assert driven.answer() == [OrderDone("")]
    driven.until_idle()
    assert driven.tokens[waits] == before != after


def test_weights_that_were_given_up_are_not_put(driven: Driven, new: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(new, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"")
    driven.tell(ReadWeights(str(broken), "", ""))
    (answer,) = driven.answer()
    assert isinstance(answer, OrderDone)
    assert "cannot be read as safetensors" in answer.problem
    driven.tell(PutWeights())
    assert driven.turn() == [OrderDone("there are no weights to put")]
    driven.tell(Sleep())
    (slept,) = driven.answer()
    driven.tell(Sleep())
    assert driven.turn() == [OrderDone("the engine sleeps already")]
    waits = driven.add()
    driven.read(new)
    driven.tell(PutWeights())
    assert driven.answer() == [OrderDone("")], "it waits for no step, of which none can be made"
    driven.tell(WakeUp())
    assert driven.answer() == [slept]
    driven.until_idle()
    assert len(driven.tokens[waits]) == NUM_TOKENS
    driven.tell(WakeUp())
    assert driven.heard() == [OrderDone("the engine does not sleep")]
    assert msgspec.structs.asdict(slept)["num_bytes"] > 0
