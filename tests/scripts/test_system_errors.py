"""Every command reports what the operating system refuses in one line, with an exit status."""

from __future__ import annotations

import errno
import importlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from borders import files as user_files
from borders.files import in_one_line
from recipes.schema.recipe import ROOT
from serving import server
from tests.patience import PATIENCE_S
from tests.thorough import THOROUGH, first_quick

TINY = "recipes/tiny/cpu.yaml"
# Each command with a file that it reads in place of FILE
READERS = {
    "recipes": ("recipes.__main__", ["show", "FILE"]),
    "generate recipe": ("scripts.generate", ["FILE", "--prompt", "a"]),
    "generate input": ("scripts.generate", [TINY, "--input", "FILE", "--output", "-"]),
    "serve recipe": ("scripts.serve", ["FILE"]),
    "serve keys": ("scripts.serve", [TINY, "--port", "0", "--api-keys", "FILE"]),
    "audit": ("scripts.audit", ["FILE"]),
    "replay": ("scripts.replay", ["FILE"]),
    "fit": ("scripts.simulate", ["fit", "FILE", "--output", "OUT"]),
    "simulate": ("scripts.simulate", [TINY, "--trace", "FILE", "--device", "h200"]),
    "costs": ("scripts.simulate", [TINY, "--trace", "TRACE", "--costs", "FILE"]),
    "mooncake": (
        "scripts.trace",
        ["--from", "mooncake:FILE", "--vocab-size", "100", "--output", "OUT"],
    ),
    "offline": ("scripts.benchmark", ["offline", TINY, "--trace", "FILE"]),
    "serve benchmark": (
        "scripts.benchmark",
        ["serve", "--base-url", "http://127.0.0.1:9", "--trace", "FILE"],
    ),
    "report": ("scripts.benchmark", ["report", "FILE", "--output", "OUT"]),
    "place": ("scripts.place", ["FILE", "--ranks", "2"]),
    "quantize": ("scripts.quantize", ["FILE", "OUT"]),
    "evaluate": ("scripts.quantize", ["recipes/tiny/weights", "OUT", "--evaluate", "FILE"]),
    "model": ("scripts.generate", [TINY, "model.path=FILE", "--prompt", "a"]),
}


def socket_at(path: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.fsencode(path.name))
    finally:
        os.fchdir(here)
        os.close(here)


KINDS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "directory": lambda path: path.mkdir(),
    "empty": lambda path: path.touch(),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00\x80"),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe without a writer": os.mkfifo,
    "a socket": lambda path: socket_at(path),
}
# What an empty file may rightly be: a recipe lacks keys then, and there are no requests or texts to do
ALLOWED = {("generate input", "empty"), ("generate input", "not UTF-8")}
# All commands open files in the same way: each meets one that is missing and some others, which differ from
# those of the next command
READ = [
    (name, kind)
    for number, name in enumerate(READERS)
    for place, kind in enumerate(KINDS)
    if (name, kind) not in ALLOWED and (THOROUGH or kind == "missing" or (number + place) % 3 == 0)
]


@pytest.mark.parametrize(("name", "kind"), READ)
def test_a_file_that_cannot_be_read_is_one_line(
    name: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(server, "uvloop", None)  # nothing is served, should a file be taken
    # A name that is not UTF-8, but for overrides, which are YAML, and what argparse prints by itself
    path = tmp_path / ("file" if name in ("model", "lengths") else "f\udcff ile")
    KINDS[kind](path)
    monkeypatch.setattr(user_files, "PIPE_WAIT_S", 0.01)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"id": "a", "prompt_token_ids": [1], "max_tokens": 2}\n')
    module, arguments = READERS[name]
    for word, value in (("FILE", path), ("OUT", tmp_path / "out"), ("TRACE", trace)):
        arguments = [each.replace(word, str(value)) for each in arguments]
    with pytest.raises((ValueError, OSError, SystemExit)) as refusal:
        importlib.import_module(module).main(arguments)
    error = refusal.value  # argparse has printed its line, below the usage
    line = capsys.readouterr().err.splitlines()[-1] if isinstance(error, SystemExit) else in_one_line(error)
    assert "\n" not in line.strip()
    assert "[Errno" not in line
    assert len(line) < 600
    assert tmp_path.name in line, "it names the file"


def test_an_error_of_the_system_says_of_what_and_how_to_fix_it() -> None:
    for number in (errno.ENOENT, errno.EMFILE, errno.ENOSPC, errno.EACCES, errno.EISDIR, errno.ENOTDIR):
        line = in_one_line(OSError(number, os.strerror(number), "/a/b"))
        assert line.startswith(f"/a/b: {os.strerror(number).lower()}; ")
    assert in_one_line(OSError("words of our own")) == "words of our own"
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert in_one_line(unknown) == "reading or writing: name or service not known"


# Closed by the shell, as users do it
@pytest.mark.parametrize(
    ("redirection", "status"),
    first_quick(
        3,
        [
            (">&- 2>&- <&-", 0),
            (">/dev/full 2>/dev/full", 2),
            ("| true", 0),
            (">&-", 0),
            ("2>&-", 0),
            ("<&-", 0),
            (">/dev/full", 2),
        ],
    ),
)
def test_standard_streams_may_be_closed_or_full(redirection: str, status: int) -> None:
    done = _shell(f"{sys.executable} -m recipes keys {redirection}")
    assert done.returncode == status
    assert "Traceback" not in done.stderr + done.stdout
    assert "ignored" not in done.stderr
    assert len(done.stderr.splitlines()) == (redirection == ">/dev/full")


def test_what_is_refused_without_a_standard_error_is_a_status() -> None:
    for redirection in ("2>&-", "2>/dev/full", ">&- 2>&-"):
        done = _shell(f"{sys.executable} -m recipes show absent.yaml {redirection}")
        assert (done.returncode, done.stdout) == (2, "")


def test_what_the_terminal_s_encoding_lacks_is_escaped() -> None:
    script = "from recipes.schema import verb; verb.run(lambda _: print('caf\\xe9 \\u72d0'))"
    done = _shell(f'PYTHONIOENCODING=latin-1 {sys.executable} -c "{script}" | iconv -f latin1 -t utf8')
    assert (done.stdout, done.stderr) == ("café \\u72d0\n", "")


def test_a_server_with_too_few_descriptors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    with pytest.raises(ValueError, match=r"open 20 files and connections, and a server needs 128"):
        server.run_server(server.ServerOptions(TINY))


def test_a_recording_that_cannot_be_made_is_refused_before_the_model(tmp_path: Path) -> None:
    from recipes.assembly.engine import build
    from recipes.schema.reader import load

    (tmp_path / "there").touch()
    for name, words in (("none/a", "there is no directory"), ("there", "is there already; name a new file")):
        with pytest.raises(ValueError, match=words):
            build(load(TINY, [f"scheduler.record={tmp_path / name}"]))


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False, timeout=PATIENCE_S
    )
