"""How does text become token ids, and token ids text?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serving.text.chat_template import ChatTemplate, Message, check_messages
from serving.text.vocabulary import FastVocabulary, SentencePieceVocabulary, Vocabulary, any_of

_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Text:
    """The text side of a model: its tokenizer and its chat template.

    `decode` never cleans up spaces, and an answer's undecodable bytes become U+FFFD, one for each maximal
    wrong sequence (Unicode 15, section 3.9). `eos_token_ids` are the tokenizer's; the model's own
    configuration may name more. `longest_token` is in bytes: no token stands for more characters.
    """

    def __init__(self, vocabulary: Vocabulary, settings: dict[str, Any], template: str | None) -> None:
        self._vocabulary = vocabulary
        self._settings = settings
        self._source = template
        self._names = tokens = {key: _content(settings[key]) for key in _SPECIAL_KEYS if settings.get(key)}
        self._template = None if template is None else ChatTemplate(template, tokens)
        self._bos_token_id = vocabulary.find(tokens.get("bos_token", ""))
        eos = vocabulary.find(tokens.get("eos_token", ""))
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.vocab_size = vocabulary.size
        self.num_lead_spaces = vocabulary.num_lead_spaces
        self._add_bos: bool | None = settings.get("add_bos_token")
        if self._add_bos is None and isinstance(vocabulary, SentencePieceVocabulary):
            self._add_bos = self._bos_token_id is not None  # as Llama's first releases, which do not say so
        self._control_ids = frozenset(vocabulary.control.values())
        self._bytes: dict[int, bytes] = {}
        self.longest_token = max(len(vocabulary.token_bytes(token)) for token in range(vocabulary.size))

    @staticmethod
    def load(path: str | Path) -> Text | None:
        """The tokenizer in a Hugging Face directory: tokenizer.json, else tokenizer.model.

        None if it holds neither. Raises ValueError for files that cannot be used.
        """
        try:
            return Text._read(Path(path))
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:  # of what is not as it must be
            raise ValueError(
                f"the tokenizer in {path} cannot be used ({error}); download it again"
            ) from error

    @staticmethod
    def _read(folder: Path) -> Text | None:
        settings = _read_json(folder / "tokenizer_config.json")
        special = _special_names(settings)
        if (folder / "tokenizer.json").exists():
            vocabulary: Vocabulary = FastVocabulary(folder / "tokenizer.json", special)
        elif (folder / "tokenizer.model").exists():
            added = {index: _content(token) for index, token in _added_tokens(settings).items()}
            vocabulary = SentencePieceVocabulary(
                folder / "tokenizer.model", special, added, legacy=bool(settings.get("legacy"))
            )
        else:
            return None
        return Text(vocabulary, settings, _template_of(folder, settings))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def describe(self) -> dict[str, Any]:
        """What a tokenizer of the same kind elsewhere needs to know; its control tokens are plain strings."""
        return {**self._settings, **self._names, "chat_template": self._source, "vocab_size": self.vocab_size}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt, begun as the tokenizer's configuration says if `add_special_tokens`.

        Control tokens written in a prompt count as such: who writes a prompt writes all of it.
        """
        check_unicode("prompt", text)
        if not add_special_tokens:
            return self._vocabulary.encode(text)
        if self._add_bos is None:
            return self._vocabulary.encode(text, add_special_tokens=True)
        bos = [self._bos_token_id] if self._add_bos and self._bos_token_id is not None else []
        return bos + self._vocabulary.encode(text)

    def chat(self, messages: object) -> list[int]:
        """The ids of a conversation, up to where the assistant speaks next.

        Control tokens come from the template alone; those written in a message are spelt out as text.
        Raises ValueError for messages that are malformed or that the template refuses.
        """
        if self._template is None:
            raise ValueError("this model has no chat template; send prompt instead of messages")
        checked = check_messages(messages)
        for index, message in enumerate(checked):
            for key, value in message.items():
                check_unicode(f"messages[{index}].{key}", value)
        shielded, spelt = _shield(checked, self._vocabulary.control)
        parts = any_of(spelt).split(self._template.render(shielded))
        literally = {mark: self._vocabulary.encode_literally(name) for mark, name in spelt.items()}
        ids: list[int] = []
        for index, part in enumerate(parts):
            if part in literally:
                ids += literally[part]
            elif part:
                ids += self._vocabulary.encode(part, start=not index)
        return ids

    def decode(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool = True, start: bool = True
    ) -> str:
        """The text of some ids. `start`: a text begins with them; else they continue one, as an answer its
        prompt, and a space at their head is the text's own."""
        pieces = (self.token_bytes(token, skip_special_tokens=skip_special_tokens) for token in token_ids)
        data = b"".join(pieces)
        for _ in range(self.num_lead_spaces if start else 0):
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """What a token adds to a text."""
        if skip_special_tokens and token in self._control_ids:
            return b""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._vocabulary.token_bytes(token)
        return known


def _shield(messages: list[Message], control: Iterable[str]) -> tuple[list[Message], dict[str, str]]:
    """Puts a mark where a message holds the text of a control token; also what each mark stands for.

    A template then cannot confuse them with its own, and still sees all other text as it is.
    """
    written = "".join(value for message in messages for value in message.values())
    numbers = (number for number in itertools.count() if _mark(number) not in written)
    found = sorted(set(any_of(control).findall(written)))
    marks = {name: _mark(number) for name, number in zip(found, numbers)}
    pattern = any_of(marks)
    shielded = [
        {key: pattern.sub(lambda match: marks[match[0]], value) for key, value in message.items()}
        for message in messages
    ]
    return shielded, {mark: name for name, mark in marks.items()}


def _mark(number: int) -> str:
    return f"\ue000{number}\ue001"  # of the private use area


def check_unicode(name: str, text: str) -> None:
    """Raise ValueError for halves of surrogate pairs, which JSON can write and no encoding can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not Unicode text: character {error.start} is half a surrogate pair"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold an object")
    return settings


def _content(token: Any) -> str:
    """A token of tokenizer_config.json: its text, or an object around it."""
    return token["content"] if isinstance(token, dict) else str(token)


def _added_tokens(settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {int(index): token for index, token in (settings.get("added_tokens_decoder") or {}).items()}


def _special_names(settings: dict[str, Any]) -> set[str]:
    names = [settings[key] for key in _SPECIAL_KEYS if settings.get(key)]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key) or []
        names += more.values() if isinstance(more, dict) else more
    names += [token for token in _added_tokens(settings).values() if token.get("special")]
    return {_content(name) for name in names}


def _template_of(folder: Path, settings: dict[str, Any]) -> str | None:
    """The template's source: chat_template.jinja, else tokenizer_config.json's, the one named default."""
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if not isinstance(template, str | None):
        raise TypeError("chat_template is no text")
    return template
