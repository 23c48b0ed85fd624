"""What do two engines say to each other about pages, and how does it lie on the wire?

The one that answers dials the one that computes prompts, and says hello; all else follows only where both are
the same model with pages of the same layout. A message is MessagePack behind a head of 12 bytes, which holds
its length, the length of the bytes of pages behind it, and a checksum of head and message; bytes of pages
have a checksum of their own in the message that tells of them.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

VERSION = 1
HEAD = struct.Struct("<III")
_LENGTHS = struct.Struct("<II")
LONGEST_MESSAGE = 2**26  # a prompt of 16 M tokens


class PageMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The base of all messages."""


class Hello(PageMessage, frozen=True):
    """From the one that answers: what it is, and where bytes of pages may be put."""

    version: int
    model: str  # a digest of what the content of a page depends on, beside its tokens
    page_size: int
    layout: list[str]  # of a page in each layer
    transport: str
    window: bytes  # how the other side reaches it
    window_bytes: int


class Welcome(PageMessage, frozen=True):
    """Prompts may be asked for."""


class Unfit(PageMessage, frozen=True):
    """These two cannot exchange pages; the reason names what differs, and both values."""

    why: str


class PagesWanted(PageMessage, frozen=True):
    """Compute the pages of these tokens, and send those from `first_page` on."""

    number: int  # of the transfer, on this connection
    tokens: bytes  # int32, of full pages
    cache_salt: str
    first_page: int
    lease_s: float  # after this long they are not wanted any more
    priority: int = 0
    tenant: str = ""


class PagePart(PageMessage, frozen=True):
    """Some pages of one layer lie in the window."""

    number: int
    layer: int
    first_page: int
    num_pages: int
    offset: int  # in the window
    num_bytes: int
    check: int  # CRC-32 of the bytes


class PartTaken(PageMessage, frozen=True):
    """The oldest part is not in the window any more."""


class AllSent(PageMessage, frozen=True):
    """All pages of a transfer are in the parts before this, and what was computed is right."""

    number: int
    num_bytes: int


class NotSent(PageMessage, frozen=True):
    """Nothing more will come of a transfer."""

    number: int
    why: str


class Unwanted(PageMessage, frozen=True):
    """Nobody waits for a transfer any more."""

    number: int


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


def lengths_of(head: bytes) -> tuple[int, int, int]:
    """The length of a message, of the bytes behind it, and its checksum; raises Damaged."""
    length, num_bytes, check = HEAD.unpack(head)
    if length > LONGEST_MESSAGE:
        raise Damaged(f"a message of {length} bytes was announced")
    return length, num_bytes, check


def unframed(body: bytes, num_bytes: int, check: int) -> Said:
    """The message of a frame; raises Damaged."""
    if _check(len(body), num_bytes, body) != check:
        raise Damaged("a message is not as it was sent")
    try:
        message: Said = _decode(body)
        return message
    except msgspec.MsgspecError as error:
        raise Damaged(f"what came is no message: {error}") from error


def _check(length: int, num_bytes: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(_LENGTHS.pack(length, num_bytes)))
