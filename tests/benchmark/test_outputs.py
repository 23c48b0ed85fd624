"""An output path that cannot be written is refused before the work whose figures would be lost."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from benchmark import options as outputs
from benchmark.run_record import Timeline
from benchmark.serve import measure
from borders.files import whole_file
from continuous_batching.counters import Counters
from recipes.schema.recipe import ROOT
from tests.lazy import LazyModule

URL, RECIPE = "http://127.0.0.1:1", "recipes/tiny/cpu.yaml"


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("trace", ["--output", "{}/none/a"], "make the folder .*/none first"),
        ("simulate", ["fit", "{}/none", "--output", "{}/none/a"], "make the folder .*/none first"),
        ("simulate", [RECIPE, "--trace", "{}/none", "--timeline", "{}"], "is a folder; name a file"),
        ("demo", ["--output", "{}/none/a.png"], "make the folder .*/none first"),
        ("reproduce", ["--output", "{}/file/a"], "cannot be a folder: .*/file is a file"),
        ("reproduce", ["--output", "{}/b", "--json", "{}/b"], "/b is a folder; name a file in it"),
        ("benchmark", ["serve", "--base-url", URL, "--result-dir", "{}/file"], "/file is a file"),
        ("benchmark", ["sweep", "--base-url", URL, "--result-dir", "{}/file/a"], "/file is a file"),
    ],
)
def test_it_is_told_before_the_work(tmp_path: Path, command: str, arguments: list[str], message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=message):
        import_module(f"scripts.{command}").main([each.format(tmp_path) for each in arguments])


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    there = tmp_path / "a"
    there.write_text("b")
    assert outputs.file(str(there)) == there
    assert outputs.file(str(tmp_path / "c")) == tmp_path / "c"
    assert outputs.folder(str(tmp_path / "d" / "e")) == tmp_path / "d" / "e"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert there.read_text() == "b"


def test_what_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    for look in (outputs.file, outputs.folder):
        with pytest.raises(PermissionError, match=rf"cannot be written: {tmp_path} may not be written to"):
            look(str(tmp_path / "a"))


def _fails_half_way(path: Path) -> None:
    with whole_file(path) as output:
        output.write("half")
        raise ValueError("half way")


def test_what_fails_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    with pytest.raises(ValueError, match="half way"):
        _fails_half_way(path)
    assert path.read_text() == "before"
    with whole_file(path) as output:
        output.write("after")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_to_directly() -> None:
    with whole_file("/dev/null") as output:
        output.write("anything")


def test_a_pipe_is_written_to_by_the_name_that_the_shell_gives_it() -> None:
    reading, writing = os.pipe()
    with whole_file(f"/dev/fd/{writing}") as output:
        output.write("anything")
    os.close(writing)
    with open(reading) as pipe:
        assert pipe.read() == "anything"


def test_a_time_line_of_a_bad_trace_is_not_begun(tmp_path: Path) -> None:
    trace, timeline = tmp_path / "trace.jsonl", tmp_path / "timeline.json"
    trace.write_text("no request\n")
    with pytest.raises(ValueError, match="line 1"):
        import_module("scripts.simulate").main([RECIPE, "--trace", str(trace), "--timeline", str(timeline)])
    assert list(tmp_path.iterdir()) == [trace]


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """What the system lets this process write into one file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_limit_that_is_reached_is_said_of_the_file_which_is_not_left_half(tmp_path: Path) -> None:
    with (
        files_of_at_most(1000),
        pytest.raises(OSError, match="File too large") as caught,
        whole_file(tmp_path / "a") as output,
    ):
        output.write("b" * 100_000)
    assert caught.value.filename == str(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


RESULT = {"request_rate": None, "model_id": "m", "date": "2026-01-01T00:00:00+00:00", "long": "b" * 5000}
REPORT, DEMO = LazyModule("benchmark.serve.report"), LazyModule("benchmark.demo")  # with matplotlib
WRITERS = {
    "a result": lambda path: measure.save(path, RESULT),
    "a picture": lambda path: DEMO.save_slots(path, [("a", Timeline(Counters()), 0.0)]),
    "a report": lambda path: REPORT.write([REPORT.Side("a", RESULT)], path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_there_stays_where_the_new_has_no_room(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = "benchmark.serve.report._parts"
    monkeypatch.setattr(drawn, lambda sides: iter(["b" * 5000]))
    path = tmp_path / "a.png"
    path.write_text("of before")
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large") as caught:
        WRITERS[name](path)
    assert caught.value.filename == str(path)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("of before", [path])


def test_all_that_a_benchmark_writes_is_whole_or_not_there() -> None:
    """But for logs of servers, which grow, and what `beside --vllm` hands over in a temporary folder."""
    direct = re.compile(r"\.(write_text|write_bytes)\(|\.open\(\"[wx]")
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "benchmark").rglob("*.py")
        if direct.search(path.read_text(encoding="utf-8"))
    }
    handed = {"benchmark/offline/beside_vllm.py", "benchmark/offline/in_vllm.py"}
    assert found == {"benchmark/processes.py", *handed}
