"""A rank that hears the leader's recording decides the same; one that does not is ended, and named."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from borders.framing import CutShort
from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine, Observer
from continuous_batching.recording.follower import Beats, Follower, LeaderLost
from continuous_batching.recording.format import Added, read_entries
from continuous_batching.recording.listeners import Listeners, RankLost
from continuous_batching.recording.recorder import Recorder, RecordingFile
from continuous_batching.recording.replay import Divergence, request_of
from continuous_batching.request import Request, SamplingParams, packed_ids
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.scheduling.validation import GiveUp
from kv_cache.pages import PageCopy, PagePool
from tests.continuous_batching import test_draft_schedules, test_schedules
from tests.continuous_batching.checksum import ChecksumRunner, Free
from tests.continuous_batching.test_recorder import scheduler as plain_scheduler
from tests.continuous_batching.test_schedules import DEPTHS, Arrival, Made, Resizes, over_schedules, serve
from tests.patience import PATIENCE_S

FACTS: dict[str, Any] = {"scheduler": {"num_slots": 4}}


class Following:
    """A follower in a thread, and how it ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ChecksumRunner,
        *,
        overlap: bool = False,
        facts: dict[str, Any] = FACTS,
        **work: Any,
    ) -> None:
        self.near, self.far = socket.socketpair()
        self.beats = Beats(self.far)
        self.follower = Follower(
            self.beats, scheduler, runner, facts, apply=runner.make, overlap=overlap, **work
        )
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def _follow(self) -> None:
        try:
            self.follower.follow()
        except (ValueError, LeaderLost) as error:
            self.error = error
        finally:
            self.far.close()

    def end(self) -> Exception | None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.near.close()
        return self.error


def listening(following: Following) -> Listeners:
    return Listeners({"rank 1": following.near}, PATIENCE_S)


either = st.one_of(*(each.schedulers(DEPTHS) for each in (test_schedules, test_draft_schedules)))


@over_schedules(12, 1000, either, overlap=st.booleans())
def test_a_rank_that_hears_decides_the_same(
    made: Made,
    plan: list[Arrival],
    resizes: Resizes,
    overlap: bool,
) -> None:
    twin, its_runner = copy.deepcopy(made)
    its_runner.defers = False
    scheduler, runner = made
    families = [arrival.request(number) for number, arrival in enumerate(plan)]
    failing = [each for each, arrival in zip(families, plan) if arrival.fails]
    its_runner.fail = {sample.id for each in failing for sample in (each, *each.followers)}
    following = Following(twin, its_runner, overlap=overlap or twin.depth > 1)
    recorder = Recorder(FACTS, listening(following))
    ended = serve(scheduler, runner, plan, resizes, overlap=overlap, observer=recorder)
    recorder.close()
    assert following.end() is None
    test_schedules.check_answers(ended, runner.fail)
    assert np.array_equal(twin.slots.page_table, scheduler.slots.page_table)
    assert np.array_equal(twin.pool.holders, scheduler.pool.holders)
    assert np.array_equal(its_runner.cache, runner.cache)
    assert np.array_equal(its_runner.host, runner.host)
    assert following.beats.num_steps == runner.num_steps


def requests(number: int) -> Iterator[Request]:
    for index in range(number):
        params = SamplingParams(max_tokens=9, temperature=0.0, beam_width=2 * (index % 4 == 3))
        yield Request(str(index), np.arange(index % 3, 9 + index % 2), params)


def run(observer: Recorder, *, overlap: bool = False) -> None:
    """Serve a few requests, beams among them, that share prefixes and preempt each other."""
    made = plain_scheduler()
    now = 0.0
    engine = Engine(
        made, ChecksumRunner(made.slots, made.pool, PagePool(5)), clock=lambda: now, overlap=overlap
    )
    engine.observer = observer
    for request in requests(9):
        engine.add(request)
    while engine.has_work:
        engine.step()
        now += 1.0
    observer.close()


def follower_of(change: Callable[[Scheduler], None] = lambda _: None, **options: Any) -> Following:
    made = plain_scheduler()
    change(made)
    return Following(made, ChecksumRunner(made.slots, made.pool, PagePool(5)), **options)


@pytest.mark.parametrize("overlap", [False, True])
def test_beams_are_followed(overlap: bool) -> None:
    following = follower_of(overlap=overlap)
    run(Recorder(FACTS, listening(following)), overlap=overlap)
    assert following.end() is None
    assert following.beats.num_steps > 9


class Noting(ChecksumRunner):
    """A runner that keeps what it is asked for."""

    def __init__(self, made: Scheduler, noted: list[str]) -> None:
        super().__init__(made.slots, made.pool, PagePool(5))
        self.noted = noted

    def run(self, batch: Batch, free: Free | None = None) -> Sampled:
        self.noted.append("run")
        return super().run(batch, free)

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        self.noted.append("start")
        sampled = super().run(batch)
        return lambda: sampled

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        self.noted.append("resize")
        super().resize(num_pages, copies)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_asks_its_runner_for_what_the_leader_asks_for(overlap: bool) -> None:
    """Where ranks wait for each other, another method is a deadlock."""
    noted: tuple[list[str], list[str]] = ([], [])
    made = [plain_scheduler(), plain_scheduler()]
    following = Following(made[1], Noting(made[1], noted[1]), overlap=overlap)
    engine = Engine(made[0], Noting(made[0], noted[0]), overlap=overlap)
    engine.observer = Recorder(FACTS, listening(following))
    engine.add(Request("0", np.arange(9), SamplingParams(max_tokens=5, temperature=0.0)))
    engine.step()
    engine.resize(made[0].pool.num_pages - 1, "running")
    while engine.has_work:
        engine.step()
    engine.observer.close()
    assert following.end() is None
    assert noted[0] == noted[1]
    assert {"resize", "start" if overlap else "run"} == {*noted[0]}


@pytest.mark.parametrize(
    "masks",
    [{"allowed_token_ids": packed_ids(range(5_000))}, {"grammar": "a" * 5_000}, {"bad_words": ((3,),)}],
)
def test_a_rank_hears_that_tokens_are_masked_and_not_how(masks: dict[str, Any], tmp_path: Path) -> None:
    file = RecordingFile(tmp_path / "recording")
    recorder = Recorder(FACTS, file)
    recorder.added(Request("a", np.arange(4), SamplingParams(temperature=0, **masks)))
    recorder.close()
    with open(file.path, "rb") as opened:
        (added,) = (each for each in read_entries(opened) if isinstance(each, Added))
    assert request_of(added).params.masks_tokens
    assert file.path.stat().st_size < 500


def test_a_beam_search_among_few_tokens_is_accepted_by_who_hears_of_it(tmp_path: Path) -> None:
    file = RecordingFile(tmp_path / "recording")
    recorder = Recorder(FACTS, file)
    allowed = packed_ids(range(3, 9))
    params = SamplingParams(max_tokens=2, temperature=0, beam_width=2, allowed_token_ids=allowed)
    plain_scheduler().add(request := Request("a", np.arange(4), params))
    recorder.added(request)
    recorder.close()
    with open(file.path, "rb") as opened:
        (added,) = (each for each in read_entries(opened) if isinstance(each, Added))
    plain_scheduler().add(heard := request_of(added))
    assert heard.params.allowed_token_ids == allowed


def test_a_resize_is_told_before_ranks_wait_for_each_other_in_it() -> None:
    noted: list[str] = []

    class Told(Observer):
        def resized(self, num_pages: Sequence[int], give_up: GiveUp) -> None:
            noted.append("told")

    made = plain_scheduler()
    engine = Engine(made, Noting(made, noted))
    engine.observer = Told()
    engine.resize(made.pool.num_pages - 1, "running")
    assert noted == ["told", "resize"]


def test_a_rank_that_takes_other_pages_is_named_in_the_step_where_it_does() -> None:
    def waste(made: Scheduler) -> None:
        made.pool.take(1)

    following = follower_of(waste)
    listeners = listening(following)
    with pytest.raises(RankLost, match=r"rank 1 has ended: step 1: its spans end on other pages than"):
        run_slowly(Recorder(FACTS, listeners))
    error = following.end()
    assert isinstance(error, Divergence)
    listeners.close()


def run_slowly(observer: Recorder) -> None:
    """Requests without an end, until the observer raises."""
    made = plain_scheduler()
    engine = Engine(made, ChecksumRunner(made.slots, made.pool, PagePool(5)))
    engine.observer = observer
    serve_without_end(engine)


def serve_without_end(engine: Engine, stops: tuple[int, ...] = ()) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    params = SamplingParams(max_tokens=5, temperature=0.0, stop_token_ids=stops)
    for number in range(10**9):
        assert time.monotonic() < deadline_s, "nothing was raised"
        if not engine.has_work:
            engine.add(Request(str(number), np.arange(9), params))
        engine.step()
        time.sleep(0.001)


def test_an_engine_made_of_something_else_is_refused() -> None:
    following = follower_of(facts={"scheduler": {"num_slots": 5}})
    with pytest.raises(
        RankLost, match=r"scheduler.num_slots is 5 here, and 4 on the leader; make them equal"
    ):
        run_slowly(Recorder(FACTS, listening(following)))
    assert isinstance(following.end(), ValueError)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_leader_that_is_gone_is_no_end_in_order(has_begun: bool) -> None:
    following = follower_of()
    if has_begun:
        engine = Engine(made := plain_scheduler(), ChecksumRunner(made.slots, made.pool, PagePool(5)))
        engine.observer = Recorder(FACTS, listeners := listening(following))
        engine.add(Request("0", np.arange(9), SamplingParams(max_tokens=5, temperature=0.0)))
        engine.step()
        while following.beats.num_steps < 1:
            time.sleep(0.01)
    following.near.shutdown(socket.SHUT_RDWR)
    if has_begun:
        while listeners.lost is None:  # they end before the test closes the socket that their thread waits at
            time.sleep(0.01)
        engine.observer.close()
    error = following.end()
    assert isinstance(error, LeaderLost)
    assert ("without closing its recording" in str(error)) == has_begun


def follow_in_process(address: tuple[str, int]) -> None:
    made = plain_scheduler()
    runner = ChecksumRunner(made.slots, made.pool, PagePool(5))
    with socket.create_connection(address) as connection:
        Follower(Beats(connection), made, runner, FACTS, apply=runner.make).follow()


@contextlib.contextmanager
def a_process() -> Iterator[tuple[Any, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=follow_in_process, args=(server.getsockname(),), daemon=True)
        process.start()
        server.settimeout(PATIENCE_S)
        connection, _ = server.accept()
        connection.setblocking(True)
        try:
            yield process, connection
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGKILL)
            process.join(PATIENCE_S)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_while_the_leader_is_idle() -> None:
    with a_process() as (process, connection):
        has_lost = threading.Event()
        listeners = Listeners({"rank 1": connection}, 2.0, lambda _: has_lost.set())
        os.kill(process.pid, signal.SIGSTOP)
        assert has_lost.wait(PATIENCE_S)
        assert listeners.lost is not None
        assert "rank 1 has said nothing for" in listeners.lost
        listeners.close()


@pytest.mark.parametrize(
    ("last", "named"),
    [
        ("", "rank 2 has ended; it had begun 3 steps"),
        ("!it is full\n", "rank 1 has ended: a read error"),
    ],
)
def test_a_rank_that_is_killed_is_named_though_another_speaks_first(last: str, named: str) -> None:
    """What the other one says then only follows from it; of two that speak, the first one is named."""
    (near, first), (other, second) = socket.socketpair(), socket.socketpair()
    with near, other, first, second:
        first.sendall(b"!a read error\n")
        second.sendall(f"3\t\t\n{last}".encode())
        second.shutdown(socket.SHUT_WR)
        has_lost = threading.Event()
        listeners = Listeners({"rank 1": near, "rank 2": other}, PATIENCE_S, lambda _: has_lost.set())
        assert has_lost.wait(PATIENCE_S)
        assert listeners.lost == named
        listeners.close()


def test_a_broken_recording_is_not_closed_in_order(tmp_path: Path) -> None:
    """What stands behind the loss of a rank is not in the file."""
    following = follower_of(facts={})
    file = RecordingFile(tmp_path / "file")
    recorder = Recorder(FACTS, file, listening(following))
    with pytest.raises(RankLost):
        run_slowly(recorder)
    recorder.close()
    assert isinstance(following.end(), ValueError)
    with open(file.path, "rb") as opened, pytest.raises(CutShort):
        list(read_entries(opened))


def test_a_rank_in_order_ends_in_order() -> None:
    with a_process() as (process, connection):
        run(Recorder(FACTS, Listeners({"rank 1": connection}, PATIENCE_S)))
        process.join(PATIENCE_S)
        assert process.exitcode == 0
