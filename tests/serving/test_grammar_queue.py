"""Requests wait for their grammars without holding up the engine, and not longer than they may."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from borders.refusal import BadRequest
from continuous_batching.queueing import QueueFull
from continuous_batching.request import Request
from serving.engine.grammar_queue import GrammarQueue
from serving.grammars.matching import Grammars
from tests.patience import PATIENCE_S


class Slow(Grammars):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda: None, 10, (1,))
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.refusal: Exception | None = None

    def constrain(self, request: Request) -> None:
        self.begun.release()
        assert self.go.wait(PATIENCE_S)
        if self.refusal is not None:
            raise self.refusal


@pytest.fixture
def grammars() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.go.set()


def request(name: str, num_samples: int = 1) -> Request:
    leader, *followers = (Request(f"{name}{number}", np.array([1])) for number in range(num_samples))
    leader.followers = followers
    return leader


def ready(queue: GrammarQueue) -> list[tuple[int, dict[int, str], str]]:
    """All that wait, when they wait no longer."""
    until_s = time.monotonic() + PATIENCE_S
    found = []
    while len(queue):
        assert time.monotonic() < until_s
        found += [(each.stream, each.ends, str(bad or "")) for each, bad in queue.take_ready()]
    return found


def test_nothing_waits_that_nobody_compiles(grammars: Slow) -> None:
    queue = GrammarQueue(grammars)
    queue.add(7, request("a"))
    assert list(queue.take_ready()) == []
    assert len(queue) == 1
    grammars.go.set()
    assert ready(queue) == [(7, {}, "")]


def test_who_ends_meanwhile_ends_when_it_has_begun(grammars: Slow) -> None:
    queue = GrammarQueue(grammars)
    queue.add(7, request("a", num_samples=3))
    assert queue.end(9, "abort")
    assert not queue.end(10, "abort")
    grammars.go.set()
    assert ready(queue) == [(7, {9: "abort"}, "")]
    assert not queue.end(9, "abort")


def test_a_refusal_comes_with_its_reason(grammars: Slow) -> None:
    queue = GrammarQueue(grammars)
    grammars.refusal = BadRequest("guided_regex", "is no good")
    grammars.go.set()
    queue.add(1, request("a"))
    assert ready(queue) == [(1, {}, "guided_regex is no good")]


def test_a_defect_is_no_refusal(grammars: Slow) -> None:
    queue = GrammarQueue(grammars)
    grammars.refusal = RuntimeError("a defect")
    grammars.go.set()
    queue.add(1, request("a"))
    with pytest.raises(RuntimeError, match="a defect"):
        ready(queue)


def test_what_takes_too_long_is_refused(grammars: Slow) -> None:
    queue = GrammarQueue(grammars, most_s=0.0)
    queue.add(1, request("a"))
    assert grammars.begun.acquire(timeout=PATIENCE_S)
    ((compiling, refusal),) = queue.take_ready()
    assert compiling.stream == 1
    assert str(refusal).startswith("the answer's grammar takes longer to prepare than the limit of 0 s")


def test_who_waits_too_long_for_others_may_come_again(grammars: Slow) -> None:
    queue = GrammarQueue(grammars, most_wait_s=0.0)
    for stream in range(2):
        queue.add(stream, request(f"{stream}"))
        assert grammars.begun.acquire(timeout=PATIENCE_S)
    for stream in range(2, 4):
        queue.add(stream, request(f"{stream}"))
    found = list(queue.take_ready())
    assert [each.stream for each, _ in found] == [2, 3]
    assert all(isinstance(refusal, QueueFull) for _, refusal in found)
    assert len(queue) == 2
    grammars.go.set()
    assert [refusal for _, _, refusal in ready(queue)] == ["", ""]
