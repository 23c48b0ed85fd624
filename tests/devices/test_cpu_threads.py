"""The number of threads and their wait at barriers follow measured steps, and change once beside others.

The change comes when other processes take the cores.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from devices import cpu_threads, host_limits
from devices.cpu_threads import Barriers, Measured, Threads, Watch, Way, beside_others, choose, measure, ways
from devices.host_limits import group_quotas, text_of, usable_cores

SPIN, SLEEP, ONE = Way(2), Way(2, sleeps=True), Way(1)


class Recorded(Barriers):
    """Barriers that can sleep, and write down what they were asked."""

    may_sleep = True

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def sleep(self, sleeps: bool) -> None:
        self.asked.append(sleeps)


class Machine:
    """A clock that goes on by what a step takes in the way in use."""

    def __init__(self, step_s: dict[Way, float], share: float = 1.0) -> None:
        self.step_s, self.share = step_s, share
        self.now_s = self.used_s = 0.0
        self.way = SPIN
        self.steps = dict.fromkeys(step_s, 0)

    def use(self, way: Way) -> None:
        self.way = way

    def step(self) -> None:
        self.steps[self.way] += 1
        self.now_s += self.step_s[self.way]
        self.used_s += self.step_s[self.way] * self.share * self.way.threads

    def measure(self) -> dict[Way, Measured]:
        found = measure(list(self.step_s), self.step, self.use, lambda: self.now_s, lambda: self.used_s)
        return {each.way: each for each in found}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """Two threads that may be one; torch keeps its own number."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu_threads, "USUAL_THREADS", 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    return Threads(None, Recorded())


def measured(*times_ms: float) -> list[Measured]:
    return [Measured(way, ms / 1e3, 1.0) for way, ms in zip((SPIN, SLEEP, ONE), times_ms)]


@pytest.mark.parametrize(
    ("times_ms", "chosen"),
    [
        ((1.6, 3.0, 2.0), SPIN),  # quiet
        ((155.0, 6.3, 4.4), ONE),  # a small model beside a process that spins on each core
        ((400.0, 60.0, 90.0), SLEEP),  # the same, a large one
        ((2.0, 1.9, 1.95), SPIN),  # the difference is chance: the usual way
    ],
)
def test_the_usual_way_is_kept_unless_another_is_clearly_faster(
    times_ms: tuple[float, ...], chosen: Way
) -> None:
    assert choose(measured(*times_ms)).way == chosen


@pytest.mark.parametrize(
    ("times_ms", "chosen"), [((5.2, 5.3, 6.2), ONE), ((100.0, 110.0, 190.0), SLEEP), ((450.0, 8.0, 7.0), ONE)]
)
def test_beside_others_threads_do_not_spin_however_fast_they_seemed(
    times_ms: tuple[float, float, float], chosen: Way
) -> None:
    crowded = [Measured(each.way, each.step_s, 0.5) for each in measured(*times_ms)]
    assert choose(crowded).way == chosen
    assert beside_others(crowded).way == chosen
    assert choose([Measured(SPIN, 0.005, 0.5)]).way == SPIN, "there is no other"


def test_a_number_that_was_said_stays() -> None:
    assert ways(4, may_be_fewer=False, may_sleep=True) == [Way(4), Way(4, sleeps=True)]
    assert ways(4, may_be_fewer=True, may_sleep=False) == [Way(4), Way(1)]
    assert ways(1, may_be_fewer=True, may_sleep=True) == [Way(1)]


def test_threads_of_the_recipe_and_of_the_environment_are_not_fewer(
    monkeypatch: pytest.MonkeyPatch, threads: Threads
) -> None:
    assert threads.candidates == [SPIN, SLEEP, ONE]
    assert Threads(3, Recorded()).candidates == [Way(3)]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert Threads(None, Recorded()).candidates == [SPIN, SLEEP]


@pytest.mark.parametrize(
    ("controller", "names", "quotas"),
    [
        (
            "",
            "0::/a.slice/b\n1:cpu:/other\n",
            {"cpu.max": ("max 100000", "250000 100000", "30000 50000", "1 1")},
        ),
        (
            "cpu",
            "4:cpu,cpuacct:/a.slice/b\n2:memory:/other\n0::/other\n",
            {
                "cpu.cfs_quota_us": ("-1", "250000", "30000", "1"),
                "cpu.cfs_period_us": ("100000", "100000", "50000", "1"),
            },
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_quota_of_a_control_group_around_a_process_is_some_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    controller: str,
    names: str,
    quotas: dict[str, tuple[str, ...]],
) -> None:
    for file, texts in quotas.items():
        for folder, text in zip((".", "a.slice", "a.slice/b", "other"), texts):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / file).write_text(f"{text}\n")
    assert sorted(group_quotas(names, tmp_path, controller)) == [1, 3]
    outer = names.replace("/a.slice/b", "/a.slice")
    assert group_quotas(outer, tmp_path, controller) == [3]
    assert group_quotas("", tmp_path, controller) == []

    monkeypatch.setattr(host_limits, "CPU_GROUPS", ((tmp_path, controller),))
    monkeypatch.setattr(
        host_limits, "text_of", lambda path: outer if path.name == "cgroup" else text_of(path)
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert usable_cores() == cpu_threads.usual_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert cpu_threads.usual_threads() == 8


def test_each_way_is_timed_by_the_mean_of_its_steps_and_its_share_of_the_cores() -> None:
    machine = Machine({SPIN: 0.002, SLEEP: 0.003, ONE: 0.0025}, share=0.9)
    found = machine.measure()
    assert {way: each.step_s for way, each in found.items()} == pytest.approx(machine.step_s)
    assert found[SPIN].share == pytest.approx(0.9)


def test_a_way_that_is_far_slower_is_measured_only_once() -> None:
    machine = Machine({SPIN: 0.3, SLEEP: 0.012, ONE: 0.01})
    machine.measure()
    assert machine.steps[SPIN] == 3  # two to prepare and one to time


def settle(threads: Threads, found: list[Measured], monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(cpu_threads, "measure", lambda *_: found)
    decoder = nn.Identity()
    threads.settle(lambda: None, decoder)
    return decoder


@pytest.mark.parametrize("way", [SLEEP, ONE])
def test_an_engine_in_the_place_of_another_begins_as_that_one_ended(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: Way
) -> None:
    """Beside busy processes a measurement takes seconds, for which clients would wait."""

    def fail() -> None:
        raise AssertionError("it is not measured again")

    assert threads.learned is None
    settle(
        threads,
        [Measured(each, 0.005 if each == way else 0.1, 0.5) for each in (SPIN, SLEEP, ONE)],
        monkeypatch,
    )
    assert threads.learned == way == Way.of(way.word)
    following = Threads(None, Recorded(), threads.learned)
    assert following.patient == following.learned == way
    with caplog.at_level(logging.INFO, "devices.cpu_threads"):
        following.settle(fail, nn.Identity())
    assert caplog.messages == [f"threads: {way}, as the engine before this one"]


def test_what_an_engine_learned_of_other_threads_is_not_taken(threads: Threads) -> None:
    for way in (Way(8, sleeps=True), SPIN):  # threads that spin are watched by what was measured of them
        assert Threads(None, Recorded(), way).candidates == threads.candidates
    assert Threads(3, Recorded(), ONE).candidates == [Way(3)]
    assert Threads(3, Recorded(), ONE).learned is None


class Watched:
    """A watch over threads whose share of their cores can be set."""

    def __init__(self, threads: Threads, fallback: Way = SLEEP) -> None:
        self.now_s = self.used_s = 0.0
        self.decoder = nn.Identity()
        watch = Watch(threads, Measured(SPIN, 0.002, 0.98), fallback, lambda: self.now_s, lambda: self.used_s)
        watch.attach(self.decoder)

    def run(self, seconds: float, share: float, step_s: float = 0.01) -> None:
        """Steps whose threads get this share of two cores."""

        def compute(*_: object) -> None:
            self.now_s += step_s
            self.used_s += 2 * share * step_s

        hook = self.decoder.register_forward_pre_hook(compute)
        for _ in range(round(seconds / step_s)):
            self.decoder(torch.zeros(1))
            self.now_s += 1.0  # nothing is computed between steps, which is nobody's fault
        hook.remove()


@pytest.fixture
def barriers(threads: Threads) -> Recorded:
    assert isinstance(threads.barriers, Recorded)
    return threads.barriers


def test_threads_that_lose_their_cores_go_over_to_sleeping_once_and_say_so(
    threads: Threads, barriers: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(threads)
    watched.run(3.0, share=0.97)
    assert not barriers.asked
    watched.run(2.0, share=0.4)
    watched.run(2.0, share=0.3)
    assert barriers.asked == [True]
    assert [line.partition(",")[0] for line in caplog.messages] == [
        "threads: 2 threads that spin at barriers got 40 % of their cores (98 % at start-up)"
    ]
    assert caplog.messages[0].endswith("from now on 2 threads that sleep at barriers")


def test_a_short_loss_changes_nothing(threads: Threads, barriers: Recorded) -> None:
    watched = Watched(threads)
    for _ in range(5):
        watched.run(0.1, share=0.3)
        watched.run(0.9, share=0.97)
    assert not barriers.asked


def test_a_decoder_is_watched_only_while_its_threads_spin(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:

    def hooks(decoder: nn.Module) -> int:
        return len(decoder._forward_hooks)

    assert hooks(settle(threads, measured(1.6, 3.0, 2.0), monkeypatch)) == 1
    assert hooks(settle(threads, measured(155.0, 6.3, 4.4), monkeypatch)) == 0
