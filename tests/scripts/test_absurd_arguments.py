"""Do options that are empty, garbled or endless end in one line, and never in another meaning?"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from recipes.schema.recipe import ROOT
from recipes.schema.verb import refused
from scripts import generate, serve
from serving import server

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
    with pytest.raises(OSError, match="No such file"):
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
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "Started server process" in line:
                break
        process.send_signal(signal.SIGHUP)
        process.stderr.read()
        assert process.wait(timeout=120) == 0
    assert not list(tmp_path.glob("engine-*"))
