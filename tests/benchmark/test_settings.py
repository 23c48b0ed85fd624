"""A sweep over settings starts a server for each, once, and none that it need not or could not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark.options import values
from benchmark.serve import sweep as sweeps
from benchmark.serve.sweep import SweptServer, folder_name, most, settings_of
from scripts.benchmark import main
from tests.benchmark.openai_server import Stub, running
from tests.benchmark.test_report import checked
from tests.serving.server import TINY

TRIED = ("--try", "scheduler.num_slots=4,8", "--try", "cache.page_size=16,32")
NAMES = [f"scheduler.num_slots={slots},cache.page_size={size}" for slots in (4, 8) for size in (16, 32)]


def sweep(folder: Path, *options: str, count: int = 31) -> None:
    asked = [{"id": str(n), "prompt_token_ids": [n + 1, 2], "max_tokens": 3} for n in range(count)]
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    where = ["--trace", str(folder / "trace.jsonl"), "--result-dir", str(folder / "sweep")]
    main(["sweep", *options, *where, "--goodput", "ttft:9e5", "tpot:9e5"])


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The settings whose server was started, each with a stand-in in its place, and `end` as it ended."""
    found: list[str] = []
    with running(Stub()) as stub:

        @contextmanager
        def started(setting: SweptServer, log: Path, timeout_s: float) -> Iterator[SimpleNamespace]:
            log.parent.mkdir(parents=True, exist_ok=True)
            found.append(setting.name)
            yield SimpleNamespace(url=stub.url, check=lambda: None)
            found.append("end")

        monkeypatch.setattr(sweeps, "start_setting", started)
        monkeypatch.setattr("benchmark.gate.measurement.LATE_MS", 60_000.0)  # this machine may be busy
        yield found


@pytest.mark.slow
def test_each_setting_has_a_server_and_a_folder_and_goes_on_where_it_was(
    tmp_path: Path, starts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--recipe", TINY, "scheduler.max_batch_tokens=128", *TRIED, "--request-rates", "300,inf")
    sweep(tmp_path, *options)
    told = capsys.readouterr().out
    assert starts == [word for name in NAMES for word in (name, "end")]
    assert [line.split()[:2] for line in told.splitlines()[1:9]] == [
        [name, rate] for name in NAMES for rate in ("300", "inf")
    ]
    assert f"within the objectives for 99% of requests: inf requests/s at most, by {NAMES[0]} and" in told
    result = json.loads((tmp_path / "sweep" / NAMES[3] / "rate-inf.json").read_text())
    assert result["recipe"] == TINY
    assert result["overrides"] == ["scheduler.max_batch_tokens=128", *NAMES[3].split(",")]
    page = checked(tmp_path / "sweep" / "report.html")
    assert page.rows[0] == ["", *NAMES]

    starts.clear()
    (tmp_path / "sweep" / NAMES[1] / "rate-300.json").unlink()
    sweep(tmp_path, *options)
    assert starts == [NAMES[1], "end"], "the others are all there"
    with pytest.raises(ValueError, match=r"rate-300.json is of another sweep: its overrides, recipe_sha256 "):
        sweep(tmp_path, "--recipe", TINY, *TRIED, "--request-rates", "300,inf")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--recipe", TINY, "--try", "cache.page_size=16,x"), "command line: cache.page_size=x: .*integer"),
        (("--recipe", TINY, "--try", "cache.page_sise=16"), "cache.page_sise: unknown key; did you mean"),
        (("--recipe", TINY, "cache.page_sise=16", "--try", "cache.page_size=16"), "cache.page_sise: unknown"),
        (("--recipe", "none.yaml", "--try", "cache.page_size=16"), "^none.yaml: no such file"),
        (
            ("--recipe", TINY, "--try", "cache.page_size=16", "--try", "cache.page_size=32"),
            "--try cache.page_size is given twice",
        ),
        (("--recipe", TINY), "^--recipe and --try KEY=V1,V2 go together"),
        (("--base-url", "http://a", "--try", "cache.page_size=16"), "^--recipe and --try"),
        (("--base-url", "http://a", "--recipe", TINY, *TRIED), "^give one of --base-url"),
        ((), "^give one of --base-url"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, starts: list[str], options: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ValueError, match=told) as error:
        sweep(tmp_path, *options, "--request-rates", "300")
    assert "\n" not in str(error.value)
    assert not starts
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("text", ["cache.page_size", "a=", "a=1,,2", "a=1,1"])
def test_values_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sweep", "--try", text])
    assert f"argument --try: {text!r} " in capsys.readouterr().err


def test_a_folder_has_a_name_that_a_file_may_have_and_that_no_other_has() -> None:
    paths = ["a/b", "a_b", "ä b", "x" * 300]
    tried = [folder_name([f"model.path={path}"]) for path in paths]
    assert tried[1] == "model.path=a_b"
    assert tried[0].startswith("model.path=a_b-")
    assert len(set(tried)) == 4
    assert all(len(name) < 140 and not {*name} & {*"/ \\:*?"} for name in tried)


def test_the_most_that_is_borne() -> None:
    assert most({}) == "none of these rates"
    assert most({"": 4.0}) == "4 requests/s"
    assert most({"a=1": 4.0, "a=2": 8.0}) == "8 requests/s at most, by a=2"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("print('why\\n\\nShutting down'); exit(3)", "ended with status 3; it last said: why "),
        (
            "import time; print('listening at http://127.0.0.1:1, model x', flush=True); time.sleep(60)",
            "takes",
        ),
    ],
)
def test_a_server_that_does_not_come_up_is_told_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    monkeypatch.setattr(sweeps, "command", lambda setting: [sys.executable, "-c", script])
    (setting,) = settings_of(TINY, (), [values("cache.page_size=16")])
    timeout_s = 60.0 if "ended" in told else 0.2
    with (
        pytest.raises(ValueError, match=rf"^cache.page_size=16: the server {told}"),
        sweeps.start_setting(setting, tmp_path / "a" / "server.log", timeout_s),
    ):
        pytest.fail("it was never ready")


@pytest.mark.slow
def test_our_own_server_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--recipe", TINY, "cache.num_pages=64", "--try", "scheduler.num_slots=4")
    sweep(tmp_path, *options, "--request-rates", "50", "--ignore-eos", count=6)
    assert "within the objectives for 99% of requests: none of these rates" in capsys.readouterr().out
    folder = tmp_path / "sweep" / "scheduler.num_slots=4"
    result = json.loads((folder / "rate-50.json").read_text())
    assert (result["completed"], result["total_output_tokens"], result["good_share"]) == (6, 18, 1)
    assert "samples" in result["verdict"]["refused"], "six requests are few: no rate is said to be borne"
    assert result["server"]["num_slots"] == 4
    assert result["server"]["recipe"]["cache"]["num_pages"] == 64
    assert "Finished server process" in (folder / "server.log").read_text()
    checked(tmp_path / "sweep" / "report.html")
