"""Is a file of a checkpoint refused where reading it would wait, or would not end?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmark.gate.printing import read_result
from models.file_bounds import MOST_JSON_BYTES, read_bounded
from models.weights import checkpoint_files
from recipes.build.families import config_in, read
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


def test_no_more_is_read_of_a_device_than_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"/dev/zero has more than 16,777,216 bytes"):
        read_bounded(Path("/dev/zero"), MOST_JSON_BYTES)


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
