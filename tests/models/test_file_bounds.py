"""A checkpoint's file is refused where reading it would wait or would not end."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from benchmark.gate.result import read_result
from borders import files
from borders.files import MOST_JSON_BYTES, lines_of, read_bounded
from models.checkpoint.files import checkpoint_files
from recipes.assembly.families import config_in, read
from recipes.schema.recipe import ROOT
from serving.text.tokenizer import Text

TINY = ROOT / "recipes/tiny/weights"
READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read,
    "generation_config.json": read,
    "tokenizer_config.json": Text.load,
    "tokenizer.json": Text.load,
    "tokenizer.model": Text.load,
    "chat_template.jinja": Text.load,
    "model.safetensors.index.json": checkpoint_files,
}
KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a dangling link": lambda path: path.symlink_to("cleared"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a file of a gigabyte": lambda path: (path.touch(), os.truncate(path, 2**30)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_plain_file_is_refused_by_its_name(name: str, kind: str, tmp_path: Path) -> None:
    for file in TINY.iterdir():
        if file.name != name and not (file.suffix == ".safetensors" and "index" in name):
            (tmp_path / file.name).symlink_to(file)
    KINDS[kind](tmp_path / name)
    with pytest.raises((ValueError, OSError)) as caught:
        READERS[name](tmp_path)
    assert name in str(caught.value)


def test_nothing_is_read_of_a_device() -> None:
    with pytest.raises(ValueError, match="/dev/zero is a device, which has no end; name a file"):
        read_bounded(Path("/dev/zero"), MOST_JSON_BYTES)
    assert read_bounded(Path("/dev/null"), MOST_JSON_BYTES) == b""


def piped(path: Path, *parts: bytes, pause_s: float = 0.0) -> threading.Thread:
    """A pipe, and who writes to it."""

    def write() -> None:
        with suppress(BrokenPipeError), path.open("wb", buffering=0) as file:
            for part in parts:
                file.write(part)
                time.sleep(pause_s)

    os.mkfifo(path)
    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_a_pipe_is_read_to_its_end_however_slowly_it_is_written(tmp_path: Path) -> None:
    writer = piped(tmp_path / "pipe", b"a\nb", b"c", b"\n", pause_s=0.02)
    assert list(lines_of(tmp_path / "pipe")) == [b"a\n", b"bc\n"]
    writer.join()


def test_no_more_is_read_of_a_pipe_than_is_allowed(tmp_path: Path) -> None:
    writer = piped(tmp_path / "pipe", *[bytes(2**16)] * 64)
    with pytest.raises(ValueError, match=r"pipe has more than 100,000 bytes"):
        read_bounded(tmp_path / "pipe", 100_000)
    writer.join()


def test_a_line_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 10)
    (tmp_path / "file").write_bytes(b"123456789\n" + b"1" * 1000)
    found = lines_of(tmp_path / "file")
    assert next(found) == b"123456789\n"
    with pytest.raises(ValueError, match=r"file: line 2 has more than 10 bytes"):
        next(found)


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIPE_WAIT_S", 0.01)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: nothing came for 0.01 s; write to this pipe"):
        read_bounded(tmp_path / "pipe", MOST_JSON_BYTES)


def test_a_wrong_key_is_refused_with_the_folder_that_it_stands_in(tmp_path: Path) -> None:
    said = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"num_hidden_layers": -1}))
    with pytest.raises(ValueError, match="num_hidden_layers: -1") as caught:
        config_in(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 10**5, "\ufeff{}", "null"])
def test_a_result_that_is_none_is_refused_by_its_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"result\.json "):
        read_result(path)
