"""Every absurd value in a tokenizer_config.json is refused in one line, or has no effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving.text.tokenizer_settings import MORE_KEYS, SPECIAL_KEYS
from serving.text.vocabulary import read_tokenizer_files

ABSURD: list[Any] = [0, -1, 10**9, 10**400, 1e300, True, "12", [], [[]], [None], {}, {"a": 1}, {"7": []}]
ABSURD += [None, {"content": 1}, {str(10**9): {"content": "a"}}, {"9" * 5000: {"content": "a"}}]
ABSURD += ["x" * 100_000]
KEYS = (*SPECIAL_KEYS, *MORE_KEYS, "added_tokens_decoder", "chat_template", "legacy", "add_bos_token")


@pytest.mark.parametrize("key", KEYS)
def test_every_key_with_every_absurd_value_is_refused_or_works(key: str, tmp_path: Path) -> None:
    lines = []
    for value in ABSURD:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: value}))
        try:
            read_tokenizer_files(tmp_path)
        except ValueError as error:
            lines.append(str(error))
    assert all(len(line) < 400 and str(tmp_path) in line and "\n" not in line for line in lines)
    assert len(lines) > 3 or key in ("legacy", "add_bos_token")


def test_a_token_far_beyond_the_vocabulary_is_refused_by_its_id(tmp_path: Path) -> None:
    added = {"1000000000": {"content": "<far>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(ValueError, match=r"added_tokens_decoder: '1000000000'; it must be of ids from 0 to"):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "\x00"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"tokenizer_config\.json (is not JSON|is nested too deeply|holds no JSON object)"
    ):
        read_tokenizer_files(tmp_path)


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(Path("recipes/tiny/weights/tokenizer.model").read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8: byte 0 is wrong"):
        read_tokenizer_files(tmp_path)
