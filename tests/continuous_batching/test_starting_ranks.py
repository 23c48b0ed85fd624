"""The start of an engine over ranks has a limit of its own, and its messages say which rank does what."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from continuous_batching.recording.follower import Beats
from continuous_batching.recording.listeners import Listeners
from tests.patience import PATIENCE_S

NAME = "rank 1 (process 7 on node2)"


@contextmanager
def starting(
    start_limit_s: float, limit_s: float = 20.0
) -> Iterator[tuple[Listeners, Beats, threading.Event]]:
    """The leader's side and a rank's of an engine that is being built, and whether a rank was lost."""
    near, far = socket.socketpair()
    is_lost = threading.Event()
    listeners = Listeners({NAME: near}, limit_s, lambda _: is_lost.set(), start_limit_s)
    beats = Beats(far)
    try:
        yield listeners, beats, is_lost
    finally:
        beats.end()
        far.close()
        listeners.close()


def wait_for(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_the_limit_of_steps_begins_with_the_first_step() -> None:
    with starting(start_limit_s=1800.0, limit_s=30.0) as (listeners, beats, is_lost):
        listeners.busy_since_s = time.monotonic() - 60  # the leader has been building for a minute
        beats.doing = "loading its weights"
        wait_for(lambda: "loading its weights" in listeners.start_report())
        beats.doing = "capturing graphs"  # heard by a later look, which has lost nobody either
        wait_for(lambda: "capturing graphs" in listeners.start_report())
        assert listeners.lost is None
        listeners.begin()
        assert is_lost.wait(PATIENCE_S)
        assert re.match(r"a step has not ended for \d+\.\d s: ", str(listeners.lost))


def test_a_start_that_takes_too_long_says_what_each_rank_does() -> None:
    with starting(start_limit_s=1800.0) as (listeners, beats, is_lost):
        listeners.doing, listeners.inside = "loading its weights", lambda: "the meeting after loading"
        beats.doing = "compiling"
        wait_for(lambda: "compiling" in listeners.start_report())
        listeners._start_limit_s = 0.0
        assert is_lost.wait(PATIENCE_S)
        assert listeners.lost == (
            "the start of the engine has not progressed for 0 s (rank 0: waiting in the meeting after loading"
            f" while loading its weights; {NAME}: compiling); raise parallel.start_timeout_s if these ranks"
            " need longer"
        )


def test_a_start_takes_as_long_as_it_progresses() -> None:
    with starting(start_limit_s=1800.0) as (listeners, beats, is_lost):
        beats.doing = "loading its weights: 1%"
        wait_for(lambda: "1%" in str(listeners._reported))
        listeners._began_s -= 7200
        beats.doing = "loading its weights: 2%"
        wait_for(lambda: "2%" in str(listeners._reported))
        assert not is_lost.is_set()
        listeners._progressed_s -= 1800
        assert is_lost.wait(PATIENCE_S)
        assert "loading its weights: 2%" in str(listeners.lost)


def test_a_long_start_is_told_with_those_that_do_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with starting(start_limit_s=1800.0) as (listeners, beats, _):
        listeners.doing = beats.doing = "loading its weights"
        wait_for(lambda: listeners.start_report() == f"rank 0, {NAME}: loading its weights")
        listeners._news_s = 0.0
        wait_for(lambda: bool(caplog.messages))
    assert re.match(
        rf"the engine has been starting for \d+ s: rank 0, {re.escape(NAME)}: loading its weights",
        caplog.messages[0],
    )


def test_a_rank_that_says_nothing_while_the_engine_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with starting(start_limit_s=1800.0) as (listeners, beats, is_lost):
        beats.doing = "loading its weights"
        wait_for(lambda: "loading its weights" in listeners.start_report())
        beats._has_ended.set()  # it hangs: its connection stays
        monkeypatch.setattr("continuous_batching.recording.listeners.START_SILENCE_S", 1.2)
        assert is_lost.wait(PATIENCE_S)
        assert f"{NAME}: loading its weights, and has said nothing for " in str(listeners.lost)


def test_a_rank_whose_leader_is_gone_ends_though_it_waits_in_a_collective() -> None:
    near, far = socket.socketpair()
    has_lost = threading.Event()
    Beats(far, has_lost.set)
    near.close()
    assert has_lost.wait(PATIENCE_S)
    far.close()


def test_a_rank_that_ends_in_order_after_its_leader_has_lost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("continuous_batching.recording.follower._LAST_WORDS_S", PATIENCE_S)
    is_cut, has_lost = threading.Event(), threading.Event()

    class Cut(socket.socket):
        """A connection whose other end is gone."""

        def sendall(self, *data: Any) -> None:
            is_cut.set()
            raise BrokenPipeError

    with Cut() as connection:
        beats = Beats(connection, has_lost.set)
        assert is_cut.wait(PATIENCE_S)
        beats.end()
    assert not has_lost.is_set()


def test_the_slowest_rank_of_those_that_load_is_named() -> None:
    with starting(start_limit_s=1800.0) as (listeners, beats, _):
        listeners.doing, beats.doing = "loading its weights: 80%, 8 of 10 shards", "loading its weights: 9%"
        wait_for(lambda: listeners.start_report().endswith(f": 9%; {NAME} is the slowest"))
        assert listeners.start_progress() == (
            "loading its weights: rank 1 is the slowest, 9%; by rank: 80%, 9%"
        )
        listeners.doing = beats.doing
        wait_for(lambda: "slowest" not in listeners.start_report())
        assert listeners.start_progress() == "loading its weights: 9%; by rank: 9%, 9%"
        listeners.doing = ""  # it waits for the others
        assert listeners.start_progress() == (
            "loading its weights: rank 1 is the slowest, 9%; by rank: done, 9%"
        )
        beats.doing = ""
        wait_for(lambda: "loading" not in listeners.start_progress())
        assert listeners.start_progress() == listeners.start_report()
