"""Options that are empty, garbled or endless are refused in one line, and never get another meaning."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from recipes.schema.recipe import ROOT
from recipes.schema.verb import refused
from scripts import benchmark, generate, replay, serve, simulate, trace
from serving import server
from tests.patience import PATIENCE_S

TINY = "recipes/tiny/cpu.yaml"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--api-keys", "--api-keys"),  # else the server would be open
        ("--host", "--host is empty"),  # else it would listen at every address
        ("--otlp-endpoint", "is no URL"),
        ("--served-model-name", "the model's name is ''"),
    ],
)
def test_an_empty_option_of_a_server_is_refused(
    option: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "uvloop", None)  # nothing is served, should it be taken
    monkeypatch.delenv("API_KEY", raising=False)
    if option == "--otlp-endpoint":
        pytest.importorskip("opentelemetry.sdk")
    with pytest.raises((ValueError, OSError), match=words):
        serve.main([TINY, "--port", "0", option, ""])


@pytest.mark.parametrize("name", ["\udcff", "a\nb", "\x1b[31m", " "])
def test_a_model_has_a_name_that_answers_can_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "uvloop", None)
    with pytest.raises(ValueError, match="printable text in UTF-8"):
        serve.main([TINY, "--port", "0", "--served-model-name", name])


def test_an_empty_output_is_no_standard_output() -> None:
    with pytest.raises(OSError, match="is a folder; name a file in it"):
        generate.main([TINY, "--prompt", "a", "--output", ""])


@pytest.mark.parametrize("value", ["a\nb", "\x1b[2J", "x" * 100_000, "\udcff"])
def test_what_is_refused_is_one_line_that_can_be_read(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(ValueError(f"--calls is {value}; it must be at least 1"))
    line = capsys.readouterr().err.removesuffix("\n")
    assert line.isprintable()
    assert len(line) < 2100
    assert line.startswith("--calls is ")
    assert line.endswith("; it must be at least 1")


@pytest.mark.slow
def test_a_server_whose_terminal_is_closed_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.serve", TINY, "--port", "0", "server.spare_engine=false"]
    environment = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    assert tempfile.gettempdir() != str(tmp_path)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # the tests may run under nohup
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "Started server process" in line:
                break
        process.send_signal(signal.SIGHUP)
        process.stderr.read()
        assert process.wait(timeout=PATIENCE_S) == 0
    assert not list(tmp_path.glob("engine-*"))


def test_no_command_writes_over_what_it_reads(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "link"
    text = '{"id": "a", "prompt_token_ids": [1], "max_tokens": 2}\n'
    file.write_text(text)
    other.symlink_to(file)
    here, there = str(file), str(other)
    for main, arguments in (
        (generate.main, [TINY, "--input", here, "--output", there]),
        (replay.main, [here, "--trace", there]),
        (simulate.main, ["fit", here, "--output", there]),
        (
            simulate.main,
            [TINY, "model.dtype=bfloat16", "--device=h200", "--trace", here, "--timeline", there],
        ),
        (trace.main, ["--from", f"mooncake:{here}", "--output", there]),
        (benchmark.main, ["report", here, "--output", there]),
    ):
        with pytest.raises(ValueError, match="read by this command, which would write over it"):
            main(arguments)
        assert file.read_text() == text


def test_help_is_there_without_docstrings() -> None:
    command = [sys.executable, "-OO", "-m", "scripts.trace", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert "None" not in done.stdout


def listens_to_ctrl_c() -> None:
    """In a child: its parent may have been started in the background, where ctrl-C is for others."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("package", ["scripts", "recipes"])
def test_an_interrupt_ends_a_command_that_still_imports(package: str, tmp_path: Path) -> None:
    for each in ("scripts", "recipes"):  # the first of these modules waits
        (tmp_path / each).symlink_to(ROOT / each)
    path = tmp_path / "argparse.py"
    path.write_text("import time\nprint('imports', flush=True)\ntime.sleep(120)\n")
    module = {"scripts": "scripts.generate", "recipes": "recipes"}[package]
    command = [sys.executable, "-m", module, "keys"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, preexec_fn=listens_to_ctrl_c, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "imports\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGINT
