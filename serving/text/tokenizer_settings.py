"""Read tokenizer_config.json, and check the form of what is used of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from borders.files import check_regular, is_there
from borders.numbers import integers
from borders.refusal import abbreviate

SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MORE_KEYS = ("additional_special_tokens", "extra_special_tokens")
MOST_TOKENS = 2**24  # ids are below this bound, as in a config.json


def read_settings(path: Path) -> dict[str, Any]:
    """Return the file's keys, none without a file; raises ValueError, by its key, for what cannot be used."""
    if not is_there(path):
        return {}
    check_regular(path)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold an object")
    for key, value, wanted in _problems(settings):
        raise ValueError(f"{path} has {key}: {abbreviate(value)}; it must be {wanted}: download it again")
    return settings


def _problems(settings: dict[str, Any]) -> Iterator[tuple[str, object, str]]:
    """Yield the keys that cannot be used, with their values and what they must be."""
    for key in SPECIAL_KEYS:
        if settings.get(key) and not _is_token(settings[key]):
            yield key, settings[key], "a token's text"
    for key in MORE_KEYS:
        more = settings.get(key) or []
        if not isinstance(more, (list, dict)):
            yield key, more, "a list of tokens"
        elif not all(map(_is_token, more.values() if isinstance(more, dict) else more)):
            yield key, more, "a list of tokens' texts"
    added = settings.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        yield "added_tokens_decoder", added, "an object of tokens by their ids"
        return
    for index, token in added.items():
        if integers(0, MOST_TOKENS - 1).parse(index) is None:
            yield "added_tokens_decoder", index, f"of ids from 0 to {MOST_TOKENS - 1}"
        elif not (isinstance(token, dict) and _is_token(token)):
            yield f"added_tokens_decoder.{index}", token, "an object with the token's text as content"
    template = settings.get("chat_template")
    if isinstance(template, list):
        for each in template:
            texts = [each.get(name) for name in ("name", "template")] if isinstance(each, dict) else [None]
            if not all(isinstance(text, str) for text in texts):
                yield "chat_template", each, "a list of objects with name and template"
    elif not isinstance(template, str | None):
        yield "chat_template", template, "a text"


def _is_token(token: object) -> bool:
    return isinstance(token.get("content") if isinstance(token, dict) else token, str)
