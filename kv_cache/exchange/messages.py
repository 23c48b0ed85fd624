"""What do two engines say to each other about pages, and how does it lie on the wire?

The one that answers dials the one that computes prompts, and says hello; all else follows only where both are
the same model with pages of the same layout. A message is MessagePack behind a head of 12 bytes, which holds
its length, the length of the bytes of pages behind it, and a checksum of head and message; bytes of pages
have a checksum of their own in the message that tells of them.

The types below state the bounds of every field, and a message is decoded only if all its fields are within
them. Bounds that depend on this engine (its vocabulary, its page size, its window) are checked by whoever
receives the message.
"""

from __future__ import annotations

import struct
import zlib
from typing import Annotated

import msgspec
from msgspec import Meta

from kv_cache.request_bounds import LAST_ID, LONGEST_NAME, MOST_LEASE_S

VERSION = 1
HEAD = struct.Struct("<III")
_LENGTHS = struct.Struct("<II")
LONGEST_MESSAGE = 2**26  # a prompt of 16 M tokens
LONGEST_SHORT = 2**16  # every message but a prompt's, so all that an engine of prompts says
LONGEST_REASON = 1000  # characters

Index = Annotated[int, Meta(ge=0, le=LAST_ID)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # of a transfer, or of bytes
Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
Reason = Annotated[str, Meta(max_length=4 * LONGEST_REASON)]  # what `one_line` makes has fewer characters


class PageMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The base of all messages."""


class Hello(PageMessage, frozen=True):
    """From the one that answers: what it is, and where bytes of pages may be put."""

    version: Index
    model: Name  # a digest of what the content of a page depends on, beside its tokens
    page_size: Index
    layout: list[str]  # of a page in each layer
    transport: Name
    window: bytes  # how the other side reaches it
    window_bytes: Number


class Welcome(PageMessage, frozen=True):
    """Prompts may be asked for."""


class Unfit(PageMessage, frozen=True):
    """These two cannot exchange pages; the reason names what differs, and both values."""

    why: Reason


class PagesWanted(PageMessage, frozen=True):
    """Compute the pages of these tokens, and send those from `first_page` on."""

    number: Number  # of the transfer, on this connection
    tokens: bytes  # int32, of full pages
    cache_salt: Name
    first_page: Index
    # After this long they are not wanted any more
    lease_s: Annotated[float, Meta(gt=0, le=MOST_LEASE_S)]
    priority: Annotated[int, Meta(ge=-LAST_ID, le=LAST_ID)] = 0
    tenant: Name = ""


class PagePart(PageMessage, frozen=True):
    """Some pages of one layer lie in the window."""

    number: Number
    layer: Index
    first_page: Index
    num_pages: Annotated[int, Meta(ge=1, le=LAST_ID)]
    offset: Number  # in the window
    num_bytes: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    check: Annotated[int, Meta(ge=0, le=2**32 - 1)]  # CRC-32 of the bytes


class PartTaken(PageMessage, frozen=True):
    """The oldest part is not in the window any more."""


class AllSent(PageMessage, frozen=True):
    """All pages of a transfer are in the parts before this, and what was computed is right."""

    number: Number
    num_bytes: Number


class NotSent(PageMessage, frozen=True):
    """Nothing more will come of a transfer."""

    number: Number
    why: Reason


class Unwanted(PageMessage, frozen=True):
    """Nobody waits for a transfer any more."""

    number: Number


FromAnswers = Hello | PagesWanted | PartTaken | Unwanted
FromPrompts = Welcome | Unfit | PagePart | AllSent | NotSent
Said = FromAnswers | FromPrompts

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Said).decode


class Damaged(ConnectionError):
    """What came is not what was sent, or is no message."""


def framed(message: Said, num_bytes: int = 0) -> bytes:
    """A message as it lies on the wire, without the bytes of pages that follow it."""
    body = _encode(message)
    return HEAD.pack(len(body), num_bytes, _check(len(body), num_bytes, body)) + body


def lengths_of(head: bytes, longest: int = LONGEST_MESSAGE) -> tuple[int, int, int]:
    """The length of a message, of the bytes behind it, and its checksum; raises Damaged where the message is
    longer than `longest` bytes.
    """
    length, num_bytes, check = HEAD.unpack(head)
    if length > longest:
        raise Damaged(f"a message of {length} bytes was announced; it may have {longest}")
    return length, num_bytes, check


def unframed(body: bytes, num_bytes: int, check: int) -> Said:
    """The message of a frame; raises Damaged where it is none, or a field is out of bounds."""
    if _check(len(body), num_bytes, body) != check:
        raise Damaged("a message is not as it was sent")
    try:
        message: Said = _decode(body)
        return message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"what came is no message: {one_line(str(error))}") from error


def one_line(text: str) -> str:
    """What another engine said, or is told, as one line of bounded length."""
    shown = "".join(each if each.isprintable() else " " for each in text[: LONGEST_REASON + 1])
    return shown if len(shown) <= LONGEST_REASON else f"{shown[: LONGEST_REASON - 3]}..."


def _check(length: int, num_bytes: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(_LENGTHS.pack(length, num_bytes)))
