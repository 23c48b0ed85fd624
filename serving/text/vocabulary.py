"""Map token ids to bytes, and text to token ids.

Two kinds of tokenizer have one interface: a Hugging Face `tokenizer.json` and a sentencepiece
`tokenizer.model`. Both give every token's bytes, because bytes can be joined token by token and text cannot:
a Chinese character or an emoji may be split over several tokens.

The form of what is used of tokenizer_config.json is checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import Tokenizer

from borders.files import MOST_TOKENIZER_BYTES, check_regular, is_there
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


_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(Protocol):
    """The interface of a tokenizer.

    `control` maps the text of each control token to its id; `num_lead_spaces` is the number of spaces at the
    start of a text that belong to the tokenizer and not to the text.
    """

    size: int
    control: dict[str, int]
    num_lead_spaces: int

    def encode(self, text: str, *, start: bool = True, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text, or of a continuation if not `start`.

        Control tokens in the text are recognised.
        """
        ...

    def encode_literally(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens are ordinary text."""
        ...

    def find(self, token: str) -> int | None:
        """Return the id of a token by its name, or None."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id that the tokenizer does not know."""
        ...


class FastVocabulary:
    """A `tokenizer.json`, read by the `tokenizers` library."""

    def __init__(self, path: Path, special: Iterable[str]) -> None:
        self._path = path
        self._tokenizer = _read_tokenizer(path)
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.control = {token.content: index for index, token in added if token.special}
        ids = ((name, self._tokenizer.token_to_id(name)) for name in special)
        self.control |= {name: index for name, index in ids if index is not None}
        self._by_bytes, self.num_lead_spaces, self._space = _decoder_steps(self._tokenizer, path)

    def encode(self, text: str, *, start: bool = True, add_special_tokens: bool = False) -> list[int]:
        # The library has no option for `start`; it matters only after a control token that a message spells
        # out.
        return _ids(self._tokenizer, text, add_special_tokens=add_special_tokens)

    def encode_literally(self, text: str) -> list[int]:
        return _ids(self._literal, text, add_special_tokens=False)

    def find(self, token: str) -> int | None:
        index: int | None = self._tokenizer.token_to_id(token)
        return index

    def token_bytes(self, token: int) -> bytes:
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._by_bytes:
            spelt = [_BYTE_OF_CHARACTER.get(character) for character in piece]
            known = [byte for byte in spelt if byte is not None]
            return bytes(known) if len(known) == len(spelt) else piece.encode()
        return _piece_bytes(piece, self._space)

    @cached_property
    def _literal(self) -> Tokenizer:
        # This needs a second tokenizer, because the switch would also affect other threads that encode
        # meanwhile.
        tokenizer = _read_tokenizer(self._path)
        tokenizer.encode_special_tokens = True
        return tokenizer


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # `encode` would hold the interpreter's lock, and so block all other threads, until a long text is done.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


class SentencePieceVocabulary:
    """A sentencepiece `tokenizer.model`; `added` are the tokens that its configuration appends.

    With `legacy`, the space that may precede a text also follows each control token.
    """

    def __init__(self, path: Path, special: Iterable[str], added: Mapping[int, str], legacy: bool) -> None:
        try:
            proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
            self._model = SentencePieceProcessor(model_proto=proto.SerializeToString())
        except (DecodeError, RuntimeError) as error:
            raise ValueError(f"{path} is not a sentencepiece model: {_line(error)}") from error
        self.num_lead_spaces = int(proto.normalizer_spec.add_dummy_prefix)
        proto.normalizer_spec.add_dummy_prefix = False
        self._without_lead = SentencePieceProcessor(model_proto=proto.SerializeToString())
        self._legacy = legacy

        own = self._model.vocab_size()
        self._names = {index: self._model.id_to_piece(index) for index in range(own)}
        self._names |= {index: name for index, name in added.items() if index >= own}
        self._id_of = {name: index for index, name in self._names.items()}
        self.size = max(self._names) + 1
        self.control = {name: self._id_of[name] for name in special if name in self._id_of}
        for index in range(own):
            if self._model.is_control(index) or self._model.is_unknown(index):
                self.control[self._names[index]] = index
        self._markers = any_of(self.control)

    def encode(self, text: str, *, start: bool = True, add_special_tokens: bool = False) -> list[int]:
        assert not add_special_tokens, "sentencepiece adds no special tokens"
        ids: list[int] = []
        for index, part in enumerate(self._markers.split(text)):
            if index % 2:
                ids.append(self.control[part])
            elif part:
                has_lead = self._legacy if index else start
                ids += (self._model if has_lead else self._without_lead).encode(part)
        return ids

    def encode_literally(self, text: str) -> list[int]:
        ids: list[int] = []
        for character in text.replace(" ", "▁"):
            index = self._id_of.get(character)
            spelt = [self._id_of.get(f"<0x{byte:02X}>", self._model.unk_id()) for byte in character.encode()]
            ids += spelt if index is None else [index]
        return ids

    def find(self, token: str) -> int | None:
        return self._id_of.get(token)

    def token_bytes(self, token: int) -> bytes:
        piece = self._names.get(token, "")
        return _piece_bytes(piece, "▁")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of a model's tokenizer files; `template` is the chat template's source."""

    vocabulary: Vocabulary
    settings: dict[str, Any]
    template: str | None


def read_tokenizer_files(folder: Path) -> TokenizerFiles | None:
    """Read the files of a Hugging Face directory: tokenizer.json, else tokenizer.model.

    Returns None if there is neither.
    """
    settings = read_settings(folder / "tokenizer_config.json")
    special = _special_names(settings)
    if is_there(folder / "tokenizer.json"):
        check_regular(folder / "tokenizer.json", MOST_TOKENIZER_BYTES)
        vocabulary: Vocabulary = FastVocabulary(folder / "tokenizer.json", special)
    elif is_there(folder / "tokenizer.model"):
        check_regular(folder / "tokenizer.model", MOST_TOKENIZER_BYTES)
        added = {index: token_text(token) for index, token in _added_tokens(settings).items()}
        vocabulary = SentencePieceVocabulary(
            folder / "tokenizer.model", special, added, legacy=bool(settings.get("legacy"))
        )
    else:
        return None
    return TokenizerFiles(vocabulary, settings, _template_of(folder, settings))


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches, as one group, the longest of the names.

    Without names it never matches.
    """
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else r"((?!))")


def _piece_bytes(piece: str, space: str) -> bytes:
    spelt = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(spelt[1], 16)]) if spelt else piece.replace(space, " ").encode()


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _decoder_steps(tokenizer: Tokenizer, path: Path) -> tuple[bool, int, str]:
    """Return how the tokenizer's decoder turns pieces into text.

    The values are whether pieces write bytes as characters, the leading spaces to strip, and the character
    for a space.
    """
    decoder: dict[str, Any] = json.loads(tokenizer.to_str())["decoder"] or {"type": "Fuse"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    by_bytes, num_lead_spaces, space = False, 0, " "
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                by_bytes = True
            case {"type": "Metaspace", "replacement": str(sign), "prepend_scheme": str(scheme)}:
                space, num_lead_spaces = sign, int(scheme != "never")
            case {"type": "Replace", "pattern": {"String": str(sign)}, "content": " "}:
                space = sign
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                num_lead_spaces = start
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise ValueError(
                    f"{path} decodes by {json.dumps(step, ensure_ascii=False)}; supported are ByteLevel,"
                    " Metaspace, ByteFallback, Fuse, Replace by a space, and Strip of leading spaces"
                )
    return by_bytes, num_lead_spaces, space


def _characters_of_bytes() -> dict[str, int]:
    """Return the byte of each printable character in GPT-2's byte-level BPE (Radford et al. 2019).

    Printable Latin-1 stands for itself; the other bytes, in order, take the characters from U+0100 on.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _characters_of_bytes()


def token_text(token: Any) -> str:
    """Return the text of a token in tokenizer_config.json, which is a string or an object that holds it."""
    return token["content"] if isinstance(token, dict) else str(token)


def _added_tokens(settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {int(index): token for index, token in (settings.get("added_tokens_decoder") or {}).items()}


def _special_names(settings: dict[str, Any]) -> set[str]:
    names = [settings[key] for key in SPECIAL_KEYS if settings.get(key)]
    for key in MORE_KEYS:
        more = settings.get(key) or []
        names += more.values() if isinstance(more, dict) else more
    names += [token for token in _added_tokens(settings).values() if token.get("special")]
    return {token_text(name) for name in names}


def _template_of(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return chat_template.jinja, else the template in tokenizer_config.json.

    Of several templates in tokenizer_config.json, the one named default counts.
    """
    separate = folder / "chat_template.jinja"
    if is_there(separate):
        check_regular(separate)
        try:
            return separate.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{separate} is not UTF-8: byte {error.start} is wrong") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template
