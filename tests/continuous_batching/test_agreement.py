"""Ranks answer what the leader asks; a rank that does not answer in time is a miss, and ends nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.recording.agreement import (
    ANSWER,
    LEADER,
    Agreement,
    PreparedWork,
    RankAnswer,
    RankQuestions,
    Settled,
)
from continuous_batching.recording.listeners import Heard, Listeners, RankLost
from continuous_batching.recording.recorder import Recorder
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from tests.continuous_batching.checksum import ChecksumRunner
from tests.continuous_batching.test_follower import FACTS, Following
from tests.continuous_batching.test_recorder import scheduler as plain_scheduler
from tests.patience import PATIENCE_S

RANKS = (LEADER, "rank 1", "rank 2")


def test_answers_that_are_late_lost_or_out_of_order_settle_within_the_bound() -> None:
    """Compared with what each question's own list of arrivals says."""
    random = np.random.default_rng(0)
    agreement = Agreement(RANKS)
    asked: dict[str, float] = {}
    to_come: list[tuple[float, str, RankAnswer]] = []
    came: dict[str, dict[str, RankAnswer]] = {}
    outcomes = {"whole": 0, "missed": 0}
    for now_s in range(400):
        if now_s < 300:
            name, until_s = f"question {now_s}", now_s + int(random.integers(1, 9))
            agreement.expect("pages", name, until_s)
            asked[name], came[name] = until_s, {}
            for rank in RANKS:
                for _ in range(int(random.choice([0, 1, 1, 1, 1, 1, 1, 2]))):
                    answer = RankAnswer("pages", name, int(random.integers(9)))
                    to_come.append((now_s + random.integers(0, 10), rank, answer))
        due = [each for each in to_come if each[0] <= now_s]
        to_come = [each for each in to_come if each[0] > now_s]
        for at in random.permutation(len(due)).tolist():
            _, rank, answer = due[at]
            agreement.answered(rank, answer)
            if answer.name in asked:
                came[answer.name].setdefault(rank, answer)
        settled = agreement.take(now_s)
        wanted = {name for name, until_s in asked.items() if len(came[name]) == 3 or now_s >= until_s}
        assert {each.name for each in settled} == wanted
        for each in settled:
            del asked[each.name]
            assert each.answers == came[each.name]
            assert {*each.missing} == {*RANKS} - {*each.answers}
            counts = [answer.count for answer in each.answers.values()]
            assert each.least == (0 if each.missing else min(counts))
            outcomes["missed" if each.missing else "whole"] += 1
    assert not asked
    assert min(outcomes.values()) > 50


def runner_of(made: Scheduler) -> ChecksumRunner:
    """A runner that knows which of the scheduler's own host pages are free, and poisons no other."""
    assert made.host_pool is not None
    return ChecksumRunner(made.slots, made.pool, made.host_pool)


class Only:
    """Work of which nothing is left to be decided."""

    def __init__(self, work: Callable[[str, bytes], int]) -> None:
        self.work = work

    def decide(self, name: str, is_agreed: bool) -> None:
        raise AssertionError(f"{name} is decided")


class Led:
    """An engine whose leader asks two followers, with an agreement as its listeners have one."""

    def __init__(self, *works: dict[str, Any]) -> None:
        self.following = []
        for each in works:
            made = plain_scheduler()
            runner = runner_of(made)
            self.following.append(Following(made, runner, works=each))
        names = [f"rank {number}" for number in range(1, len(works) + 1)]
        connections = {name: each.near for name, each in zip(names, self.following)}
        self.listeners = Listeners(connections, PATIENCE_S)
        self.is_whole = threading.Event()
        self.agreement = Agreement((LEADER, *self.listeners.names), self.is_whole.set)
        self.listeners.answered = self.agreement.answered
        self.recorder = Recorder(FACTS, self.listeners)
        self.made = plain_scheduler()
        self.runner = runner_of(self.made)
        self.engine = Engine(self.made, self.runner)
        self.engine.observer = self.recorder
        self.num_steps = 0

    def ask(self, name: str, own: int, until_s: float) -> None:
        self.agreement.expect("pages", name, until_s)
        self.recorder.asked("pages", name, b"7")
        self.agreement.answered(LEADER, RankAnswer("pages", name, own))

    def serve(self, name: str) -> None:
        self.engine.add(Request(name, np.arange(9), SamplingParams(max_tokens=5, temperature=0.0)))
        while self.engine.has_work:
            step = self.engine.step()
            self.num_steps += step is not None and step.batch.num_spans > 0

    def end(self) -> None:
        self.engine.close()
        assert [each.end() for each in self.following] == [None] * len(self.following)


@pytest.fixture
def gates() -> Iterator[tuple[threading.Event, threading.Event]]:
    """When a rank may answer, and when it has."""
    both = threading.Event(), threading.Event()
    yield both
    both[0].set()


def test_a_rank_that_does_not_answer_is_a_miss_and_stops_nothing(
    gates: tuple[threading.Event, threading.Event],
) -> None:
    may, has = gates

    def slow(name: str, body: bytes) -> int:
        if name == "a":
            may.wait(PATIENCE_S)
            has.set()
        return 9

    def fails(name: str, body: bytes) -> int:
        if name == "c":
            raise OSError("the disk is full")
        return int(body)

    led = Led({"pages": Only(slow)}, {"pages": Only(fails)})
    led.ask("a", 8, 10.0)
    led.serve("first")  # a rank still works on its answer meanwhile
    assert led.agreement.take(9.9) == ()
    (settled,) = led.agreement.take(10.0)
    assert settled.least == 0
    assert settled.missing[0] == "rank 1"  # the other may not have come to it yet
    assert settled.problem == "rank 1: it did not answer in time"
    may.set()
    assert has.wait(PATIENCE_S)
    for name, least, problem in (("b", 7, ""), ("c", 0, "rank 2: the disk is full")):
        led.is_whole.clear()
        led.ask(name, 8, 20.0)  # the same thread answers it, so what comes late to "a" comes before
        assert led.is_whole.wait(PATIENCE_S)
        (settled,) = led.agreement.take(10.0)
        assert (settled.name, settled.least, settled.problem) == (name, least, problem)
    led.serve("last")
    led.end()


def test_what_all_ranks_have_made_is_used_between_the_same_steps_and_the_rest_is_dropped(
    gates: tuple[threading.Event, threading.Event],
) -> None:
    may, has = gates
    used: list[list[tuple[str, int]]] = [[], [], []]
    num_steps: list[Callable[[], int]] = []

    def work_of(rank: int) -> PreparedWork[str]:
        def make(name: str, body: bytes) -> str:
            if name == "late" and rank == 2:
                has.set()
                may.wait(PATIENCE_S)
            if name == "broken" and rank == 1:
                raise OSError("the disk is full")
            return name

        return PreparedWork(make, lambda name: used[rank].append((name, num_steps[rank]())))

    own, *others = works = [work_of(rank) for rank in range(3)]
    led = Led(*({"file": each} for each in others))
    num_steps += [
        lambda: led.num_steps,
        *(lambda each=each: each.beats.num_steps for each in led.following),
    ]
    now_s, said = [0.0], dict[str, Settled]()
    questions = RankQuestions(led.agreement, {"file": own}, led.recorder, lambda: now_s[0])
    led.engine.questions = questions

    def decide(settled: Settled) -> None:
        said[settled.name] = settled
        questions.decide("file", settled.name, is_agreed=not settled.problem)

    for name in ("a", "broken", "b", "late"):
        led.serve(f"before {name}")
        led.is_whole.clear()
        questions.ask("file", name, b"", 5.0, decide)
        if name == "late":
            assert has.wait(PATIENCE_S)
            now_s[0] = 5.0
        else:
            assert led.is_whole.wait(PATIENCE_S)
        led.serve(f"after {name}")  # whose first step takes the answers before it
        assert len(questions) == 0
    may.set()
    led.is_whole.clear()
    questions.ask("file", "last", b"", 5.0, decide)  # answered by the same thread, behind the late one
    assert led.is_whole.wait(PATIENCE_S)
    questions.take()
    led.end()
    assert used[0] == used[1] == used[2]
    assert [name for name, _ in used[0]] == ["a", "b", "last"]
    assert said["broken"].problem == "rank 1: the disk is full"
    assert "rank 2" in said["late"].missing  # the other may not have come to it yet
    assert not any(each._ready or each._over for each in works), "a rank keeps what nobody uses"


def test_a_follower_takes_what_its_threads_finish_while_the_leader_says_nothing() -> None:
    taken = threading.Semaphore(0)
    made = plain_scheduler()
    runner = runner_of(made)
    following = Following(made, runner, between=taken.release)
    recorder = Recorder(FACTS, Listeners({"rank 1": following.near}, PATIENCE_S))
    for _ in range(3):
        following.follower.wake()
        assert taken.acquire(timeout=PATIENCE_S)
    recorder.close()
    assert following.end() is None
    following.follower.wake()  # a thread may finish behind the end


def test_a_rank_makes_the_copies_for_pages_that_are_expected() -> None:
    """Cached pages give way to the expected ones, and go to the host: on all ranks, or another rank finds
    there what it never wrote."""
    led = Led({})
    twin = led.following[0].follower._runner
    assert isinstance(twin, ChecksumRunner)
    led.serve("a")
    tokens = np.arange(50, 50 + 4 * (led.made.pool.num_free + 1) + 1)
    found = led.engine.expect_pages(Request("b", tokens, SamplingParams()))
    assert found is not None
    assert found[1], "a cached page goes to the host"
    led.runner.make(found[1])
    led.engine.pages_arrived("b", is_whole=False)
    led.end()
    assert np.array_equal(led.runner.host, twin.host)
    assert np.array_equal(led.runner.cache, twin.cache)


@pytest.mark.parametrize(
    "line", [b"=", b"={}", b'=["pages","a",-1]', b'=["pages","' + b"a" * 301 + b'",1]', b"=" + b"[" * 4000]
)
def test_what_is_no_answer_loses_its_rank(line: bytes) -> None:
    near, far = socket.socketpair()
    with closing(near), closing(far), pytest.raises(RankLost, match="rank 1 says what no rank says"):
        Heard("rank 1", near, 0.0).take(line + b"\n", 0.0)


def test_an_answer_fits_into_a_line() -> None:
    heard: list[tuple[str, RankAnswer]] = []
    longest = RankAnswer("\n" * 300, "\x00" * 300, 9, "€\n" * 250)
    near, far = socket.socketpair()
    with closing(near), closing(far):
        rank = Heard("rank 1", near, 0.0)
        rank.take(longest.line + b"\n0\t\t\n", 0.0, lambda *each: heard.append(each))
    assert longest.line.startswith(ANSWER)
    assert heard == [("rank 1", longest)]
