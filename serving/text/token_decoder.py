"""Find the bytes that the decoder of a tokenizer.json gives to each token by itself.

The `tokenizers` library decodes all tokens at once. Its steps are followed here token by token: those that
change a token by itself, of which some leave no space before the first token of a text, and those of the
joined text, of which only the removal of leading spaces is decided before the text is complete. A decoder
with another step is refused by that step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Step = Callable[[str, bool], str]  # the text of a piece, and whether it is the first of a text


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How pieces of a vocabulary become bytes.

    `num_lead_spaces` are taken from the beginning of the whole text.
    """

    steps: tuple[Step, ...] = ()
    is_by_characters: bool = False  # pieces write bytes as characters (ByteLevel)
    is_by_names: bool = False  # pieces such as <0x0A> are bytes (ByteFallback)
    num_lead_spaces: int = 0

    @staticmethod
    def of(decoder: decoders.Decoder | None, path: Path) -> TokenDecoder:
        """Return the decoder of a file; raises ValueError for one that is not followed here."""
        if decoder is None:  # The library joins tokens by spaces
            return TokenDecoder((lambda piece, is_first: piece if is_first else f" {piece}",))
        said: dict[str, Any] = json.loads(decoder.__getstate__())
        steps: list[Step] = []
        is_by_characters = is_by_names = is_joined = False
        num_lead_spaces = 0
        for each in _flat(said):
            match each:
                case {"type": "Fuse"}:
                    is_joined = True
                case {"type": "ByteFallback"} if not is_joined and not is_by_names:
                    is_by_names = True
                case {"type": "ByteLevel"} if not is_joined and not is_by_names:
                    is_by_characters = is_joined = True
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if is_joined:
                    num_lead_spaces += start
                case _ if (step := _step(each, is_joined, is_by_names)) and not (
                    is_by_characters or num_lead_spaces
                ):
                    steps.append(step)
                case _:
                    raise _refused(each, path)
        return TokenDecoder(tuple(steps), is_by_characters, is_by_names, num_lead_spaces)

    def spell(self, piece: str, *, is_first: bool) -> bytes:
        """Return the bytes of a piece."""
        for step in self.steps:
            piece = step(piece, is_first)
        if self.is_by_characters:
            spelt = [_BYTE_OF_CHARACTER.get(character) for character in piece]
            known = [byte for byte in spelt if byte is not None]
            return bytes(known) if len(known) == len(spelt) else piece.encode()
        byte = BYTE_PIECE.fullmatch(piece) if self.is_by_names else None
        return bytes([int(byte[1], 16)]) if byte else piece.encode()


def _flat(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a decoder, which sequences may hold within each other."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for each in decoder["decoders"]:
        yield from _flat(each)


def _step(step: dict[str, Any], is_joined: bool, is_by_names: bool) -> Step | None:
    """Return what changes a piece by itself; None if the step's result depends on other pieces.

    A step on the joined text is the same for each piece only if it replaces a single character. A step behind
    ByteFallback sees neighbouring bytes as one piece, which it strips or spaces only once.
    """
    match step:
        case {"type": "Replace", "pattern": {"String": str(sign)}, "content": str(text)} if sign and (
            len(sign) == 1 or not is_joined
        ):
            return lambda piece, is_first: piece.replace(sign, text)
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(text)} if not is_joined:
            replacing = decoders.Replace(Regex(pattern), text)
            return lambda piece, is_first: replacing.decode([piece])
        case {"type": "Metaspace", "replacement": str(sign), "prepend_scheme": str(scheme)} if (
            not is_joined or scheme == "never"
        ):
            first = " " if scheme == "never" else ""
            return lambda piece, is_first: piece.replace(sign, first if is_first else " ")
        case {"type": "Strip", "content": str(sign), "start": int(start), "stop": int(stop)} if not (
            is_joined or is_by_names
        ):
            return lambda piece, is_first: _stripped(piece, sign, start, stop)
        case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)} if not (
            is_joined or is_by_names
        ):
            spacing = decoders.WordPiece(prefix, cleanup)
            return lambda piece, is_first: spacing.decode([piece] if is_first else ["", piece])
    return None


def _stripped(piece: str, sign: str, start: int, stop: int) -> str:
    """Return a piece without so many of these characters at its start and its end."""
    for _ in range(start):
        piece = piece.removeprefix(sign)
    for _ in range(stop):
        piece = piece.removesuffix(sign)
    return piece


def _refused(step: dict[str, Any], path: Path) -> ValueError:
    return ValueError(
        f"{path} decodes by {json.dumps(step, ensure_ascii=False)}, where a token's text would depend on"
        " those around it; supported are Replace, Metaspace, Strip and WordPiece of single tokens,"
        " ByteFallback, and, behind Fuse or ByteLevel, Strip of leading spaces"
    )


def _characters_of_bytes() -> dict[str, int]:
    """Return the byte of each printable character in GPT-2's byte-level BPE (Radford et al. 2019).

    Printable Latin-1 stands for itself; the other bytes, in order, take the characters from U+0100 on.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _characters_of_bytes()
