"""Read what a checkpoint says of its tokenizer beside the vocabulary, and check the form of what is used.

The rules are those of transformers 5. What older files say in special_tokens_map.json and added_tokens.json
counts where tokenizer_config.json has no `added_tokens_decoder`; a template in a file of its own replaces
that in tokenizer_config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from borders.files import check_regular, is_there, optional_json_object
from borders.numbers import integers
from borders.refusal import abbreviate

SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MORE_KEYS = ("additional_special_tokens", "extra_special_tokens")
MOST_TOKENS = 2**24  # ids are below this bound, as in a config.json
TEMPLATES = ("default", "tool_use")  # those that a conversation without tools and one with tools take


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the keys of tokenizer_config.json with what older files say beside it; none without these files.

    Raises ValueError, by its file and key, for what cannot be used.
    """
    path = folder / "tokenizer_config.json"
    settings = _checked(path)
    if "added_tokens_decoder" in settings:
        return settings
    older = _checked(folder / "special_tokens_map.json")
    # Each file names tokens of its own there; those of the newer one come first.
    for key in MORE_KEYS:
        both = settings.get(key), older.get(key)
        if all(isinstance(each, list) for each in both):
            older[key] = [*settings[key], *(each for each in older[key] if each not in settings[key])]
    settings |= older
    path = folder / "added_tokens.json"
    added = optional_json_object(path)
    special = {token_text(each) for each in special_tokens(settings).values()}
    special |= {token_text(each) for each in more_special_tokens(settings)}
    by_id: dict[str, dict[str, Any]] = {}
    for name, index in added.items():
        if integers(0, MOST_TOKENS - 1).read(index) is None:
            limit = f"an id from 0 to {MOST_TOKENS - 1}"
            raise ValueError(
                f"{path} has {abbreviate(name)}: {abbreviate(index)}; it must be {limit}: download it again"
            )
        by_id[str(index)] = {"content": name, "special": name in special, "normalized": name not in special}
    return settings | ({"added_tokens_decoder": by_id} if by_id else {})


def templates_in(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a checkpoint by their names, of which TEMPLATES are used."""
    said = settings.get("chat_template")
    found = {each["name"]: each["template"] for each in said} if isinstance(said, list) else {}
    if isinstance(said, str):
        found = {"default": said}
    elif isinstance(said, dict):
        found = said
    files = _template_files(folder)
    # A chat_template.jinja replaces all templates of tokenizer_config.json, whatever their names.
    if is_there(files[0][1]):
        found = {}
    for name, file in files:
        if is_there(file):
            check_regular(file)
            try:
                found[name] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8: byte {error.start} is wrong") from error
            if not found[name].strip():
                raise ValueError(f"{file} is empty, as each prompt would be; download it again or remove it")
    return found


def template_file(folder: Path, name: str) -> Path:
    """Return the file from which `templates_in` has the template of this name."""
    files = [file for each, file in _template_files(folder) if each == name and is_there(file)]
    return files[-1] if files else folder / "tokenizer_config.json"


def _template_files(folder: Path) -> list[tuple[str, Path]]:
    more = [(name, folder / "additional_chat_templates" / f"{name}.jinja") for name in TEMPLATES]
    return [("default", folder / "chat_template.jinja"), *more]


def end_tokens_of_model(folder: Path) -> list[Any] | None:
    """Return the ids that end an answer by generation_config.json, or else by config.json.

    Returns None if neither file mentions them; what ends an answer is then the family's default.
    """
    found: list[Any] | None = None
    for name in ("config.json", "generation_config.json"):
        said = optional_json_object(folder / name)
        text = said.get("text_config")
        if said.get("eos_token_id") is None and isinstance(text, dict) and "eos_token_id" in text:
            said = text
        if (ends := said.get("eos_token_id")) is not None:
            found = ends if isinstance(ends, list) else [ends]
        elif found is None and "eos_token_id" in said:
            found = []
    return found


def token_text(token: Any) -> str:
    """Return the text of a token, which is a string or an object that holds it."""
    return token["content"] if isinstance(token, dict) else str(token)


def special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the control tokens that have a name, such as `eos_token`, the names of all models first."""
    own = [key for key, value in settings.items() if key.endswith("_token") and _is_token(value)]
    named = {key: settings[key] for key in dict.fromkeys([*SPECIAL_KEYS, *own]) if settings.get(key)}
    more = settings.get("extra_special_tokens")
    return named | more if isinstance(more, dict) else named


def splits_control(settings: Mapping[str, Any]) -> bool:
    """Return whether control tokens that a text spells out are text, also those of a chat template."""
    return settings.get("split_special_tokens") is True


def more_special_tokens(settings: Mapping[str, Any]) -> list[Any]:
    """Return the control tokens that have no name."""
    listed = [settings.get(key) for key in MORE_KEYS]
    return [token for each in listed if isinstance(each, list) for token in each]


def _checked(path: Path) -> dict[str, Any]:
    settings = optional_json_object(path)
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
    if not isinstance(settings.get("split_special_tokens"), bool | None):
        yield "split_special_tokens", settings["split_special_tokens"], "true or false"
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
    elif isinstance(template, dict):
        if not all(isinstance(each, str) for each in template.values()):
            yield "chat_template", template, "a text, or texts by their names"
    elif not isinstance(template, str | None):
        yield "chat_template", template, "a text"


def _is_token(token: object) -> bool:
    return isinstance(token.get("content") if isinstance(token, dict) else token, str)
