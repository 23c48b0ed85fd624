"""Whoever waits for a start sees what is going on, how far it is and since when."""

from __future__ import annotations

import io
import threading

import pytest

from borders.start_report import GIB, ReadingReport, StartReport, paced, repeated
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.patience import PATIENCE_S

TINY = ["device.compile=false", "device.threads=1"]


class Clock:
    """A time that the test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_shown_every_few_seconds_and_a_short_start_shows_none() -> None:
    clock, lines = Clock(), list[str]()
    report = StartReport(say=lines.append, clock=clock)
    told = {0: "planning", 1: "loading: 1%", 4: "loading: 9%", 7: "loading: 20%", 8: "x"}
    for clock.now_s, doing in told.items():
        report.tell(doing)
    assert lines == ["loading: 20%, 6 s"]
    clock.now_s = 50
    report.show()
    assert lines[1:] == ["x, 42 s"], "a stage that says nothing is shown, too"
    report.tell("")
    assert report.text == ""
    clock.now_s = 99
    report.show()
    assert len(lines) == 2


def test_a_terminal_has_one_line_which_is_gone_at_the_end() -> None:
    stream = Terminal()
    with StartReport(stream) as report:
        report.tell("loading: 1%")
    assert stream.getvalue().endswith("\r\033[K")
    assert "\n" not in stream.getvalue()


def test_a_checkpoint_is_read_in_shards_bytes_and_a_rate() -> None:
    clock, told = Clock(), list[str]()
    sizes, counts = {"a": 30 * GIB, "b": 10 * GIB}, {"a": 3, "b": 1}
    report = ReadingReport(told.append, sizes, counts, clock)
    for _ in range(3):
        clock.now_s += 5
        report.read("a")
    assert told[0] == "loading its weights: 25%, 0 of 2 shards, 10.00 of 40.00 GiB, 2.00 GiB/s"
    assert told[-1] == "loading its weights: 75%, 1 of 2 shards, 30.00 of 40.00 GiB, 2.00 GiB/s"


def test_only_some_of_what_is_told_is_sent() -> None:
    clock, sent = Clock(), list[str]()
    tell = paced(sent.append, every_s=1, clock=clock)
    for now_s, doing in [(0, "a: 1"), (0.5, "a: 2"), (1.5, "a: 3"), (1.6, "b"), (1.7, "")]:
        clock.now_s = now_s
        tell(doing)
    assert sent == ["a: 1", "a: 3", "b", ""]


def test_a_build_tells_its_stages() -> None:
    told = list[str]()
    build(load(ROOT / "recipes/tiny/cpu.yaml", TINY), tell=told.append)
    stages = list(dict.fromkeys(each.partition(":")[0] for each in told if each))
    assert stages == [
        "planning its memory",
        "loading its weights",
        "packing its weights",
        "compiling and running its first steps",
        "running its largest step",
    ]
    assert any("of 1 shards" in each for each in told)
    assert told[-1] == ""


def test_progress_is_repeated_until_the_end() -> None:
    said, is_second = list[int](), threading.Event()

    def say() -> None:
        said.append(1)
        if len(said) == 2:
            is_second.set()

    with repeated(say, every_s=0.001):
        assert is_second.wait(PATIENCE_S)
    count = len(said)
    assert not [each for each in threading.enumerate() if each.name == "start-progress"]
    assert len(said) == count


@pytest.mark.usefixtures("forked_ranks")
def test_a_leader_tells_how_far_every_rank_is() -> None:
    """While it waits for the others itself, too."""
    told = list[str]()
    more = ["parallel.tensor=2", "device.attention=reference"]
    built = build(load(ROOT / "recipes/tiny/cpu.yaml", [*TINY, *more]), tell=told.append)
    assert built.ranks is not None
    built.engine.close()
    assert any("rank 0" in each and "rank 1 (process" in each for each in told)
    assert told[-1] == ""


def test_how_long_each_stage_took_is_kept() -> None:
    clock = Clock()
    report = StartReport(clock=clock)
    told = {0.0: "reading: 0%", 2.0: "reading: 9%", 5.0: "", 6.0: "packing", 7.0: ""}
    for clock.now_s, doing in told.items():
        report.tell(doing)
    assert report.stages_s == {"reading": 5.0, "packing": 1.0}
