"""What does each token id stand for, in bytes, and which ids spell a text?

Two kinds of tokenizer answer alike: a Hugging Face `tokenizer.json` and a sentencepiece `tokenizer.model`.
Both give every token's bytes, because bytes can be put together token by token and text cannot: a Chinese
character or an emoji may be spread over several tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(Protocol):
    """`control` maps the text of each control token to its id; `num_lead_spaces` is how many spaces at the
    start of a text are the tokenizer's own and not the text's."""

    size: int
    control: dict[str, int]
    num_lead_spaces: int

    def encode(self, text: str, *, start: bool = True, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text, or of its continuation if not `start`. Control tokens written in it count."""
        ...

    def encode_literally(self, text: str) -> list[int]:
        """The ids of a text in which control tokens are but text."""
        ...

    def find(self, token: str) -> int | None:
        """The id of a token by its name."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; none for an id that the tokenizer does not know."""
        ...


class FastVocabulary:
    """A `tokenizer.json`, as the `tokenizers` library reads it."""

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
        # `start` cannot be told to this library; it matters only behind a message's spelt-out control token
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_literally(self, text: str) -> list[int]:
        ids: list[int] = self._literal.encode(text, add_special_tokens=False).ids
        return ids

    def find(self, token: str) -> int | None:
        index: int | None = self._tokenizer.token_to_id(token)
        return index

    def token_bytes(self, token: int) -> bytes:
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._by_bytes:
            spelt = [_BYTE_OF_SIGN.get(sign) for sign in piece]
            known = [byte for byte in spelt if byte is not None]
            return bytes(known) if len(known) == len(spelt) else piece.encode()
        return _piece_bytes(piece, self._space)

    @cached_property
    def _literal(self) -> Tokenizer:
        # A second one, because the switch would also turn for whoever encodes at the same time
        tokenizer = _read_tokenizer(self._path)
        tokenizer.encode_special_tokens = True
        return tokenizer


class SentencePieceVocabulary:
    """A sentencepiece `tokenizer.model`; `added` are the tokens that its configuration puts behind it.

    `legacy`: the space that may stand before a text also stands after each control token.
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
        assert not add_special_tokens, "sentencepiece adds none"
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
        for sign in text.replace(" ", "▁"):
            index = self._id_of.get(sign)
            spelt = [self._id_of.get(f"<0x{byte:02X}>", self._model.unk_id()) for byte in sign.encode()]
            ids += spelt if index is None else [index]
        return ids

    def find(self, token: str) -> int | None:
        return self._id_of.get(token)

    def token_bytes(self, token: int) -> bytes:
        piece = self._names.get(token, "")
        return _piece_bytes(piece, "▁")


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches, as one group, the longest of the names; nothing if there is none."""
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
    """(whether pieces spell bytes by signs, leading spaces to strip, the sign that means a space)."""
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


def _signs_of_bytes() -> dict[str, int]:
    """The printable sign by which GPT-2's byte-level BPE writes each byte (Radford et al. 2019).

    Printable Latin-1 stands for itself; the others, in order, take the signs from U+0100 on.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_SIGN = _signs_of_bytes()
