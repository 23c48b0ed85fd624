"""Define the messages that two engines exchange about pages, and what must be equal in both.

The engine that answers connects to the one that computes prompts and sends a hello; everything else requires
the same model with pages of the same layout. A message is MessagePack behind a head of 12 bytes, which holds
its length, the length of the page bytes behind it, and a checksum of head and message; page bytes have a
checksum of their own in the message that announces them.

The types below state the bounds of every field, and a message is decoded only if all its fields are within
them. Bounds that depend on this engine (its vocabulary, its page size, its window) are checked by the
receiver of the message.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from borders.field_table import MOST_LEASE_S
from borders.field_types import LAST_ID, LONGEST_NAME
from borders.numbers import PORTS
from borders.refusal import LONGEST_LINE, one_line

VERSION = 2
HEAD = struct.Struct("<III")
_LENGTHS = struct.Struct("<II")
LONGEST_MESSAGE = 2**26  # enough for a prompt of 16 M tokens
# Bound of every message but a request for a prompt's pages, and so of all that an engine of prompts sends
LONGEST_SHORT = 2**16

NO_DRAFTS = "none"

Index = Annotated[int, Meta(ge=0, le=LAST_ID)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # number of a transfer, or of bytes
Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
Reason = Annotated[str, Meta(max_length=4 * LONGEST_LINE)]  # `one_line` makes fewer characters than this


class PageMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class of all messages."""


class Hello(PageMessage, frozen=True):
    """Introduces the engine that answers, and the window into which page bytes may be put."""

    version: Index
    model: Name  # digest of everything but the tokens that a page's content depends on
    page_size: Index
    layout: list[str]  # layout of a page in each layer
    transport: Name
    window: bytes  # description by which the peer reaches the window
    window_bytes: Number
    drafts: Name = NO_DRAFTS  # what it keeps of a prompt beside the model's own layers
    long_factors: bool = False


class Welcome(PageMessage, frozen=True):
    """Accepts a hello: prompts may be requested."""


class Unfit(PageMessage, frozen=True):
    """Refuses a hello, because the engines cannot exchange pages.

    The reason names the difference and both values.
    """

    why: Reason


class PagesWanted(PageMessage, frozen=True):
    """Requests the pages of these tokens, sent from `first_page` on."""

    number: Number  # number of the transfer on this connection
    tokens: bytes  # int32 ids of full pages
    cache_salt: Name
    first_page: Index
    # The pages are no longer wanted after this time
    lease_s: Annotated[float, Meta(gt=0, le=MOST_LEASE_S)]
    priority: Annotated[int, Meta(ge=-LAST_ID, le=LAST_ID)] = 0
    tenant: Name = ""


class PagePart(PageMessage, frozen=True):
    """Announces some pages of one layer in the window."""

    number: Number
    layer: Index
    first_page: Index
    num_pages: Annotated[int, Meta(ge=1, le=LAST_ID)]
    offset: Number  # offset in the window, in bytes
    num_bytes: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    check: Annotated[int, Meta(ge=0, le=2**32 - 1)]  # CRC-32 of the bytes


class PartTaken(PageMessage, frozen=True):
    """Frees the oldest part of the window."""


class AllSent(PageMessage, frozen=True):
    """Ends a transfer: the parts before it hold all its pages, and their content is valid."""

    number: Number
    num_bytes: Number


class NotSent(PageMessage, frozen=True):
    """Ends a transfer without its remaining pages."""

    number: Number
    why: Reason


class Unwanted(PageMessage, frozen=True):
    """Cancels a transfer."""

    number: Number


FromAnswers = Hello | PagesWanted | PartTaken | Unwanted
FromPrompts = Welcome | Unfit | PagePart | AllSent | NotSent
Said = FromAnswers | FromPrompts

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Said).decode


class Damaged(ConnectionError):
    """The received bytes differ from what was sent, or are no message."""


def framed(message: Said, num_bytes: int = 0) -> bytes:
    """Encode a message with its head, without the page bytes that follow it."""
    body = _encode(message)
    return HEAD.pack(len(body), num_bytes, _check(len(body), num_bytes, body)) + body


def lengths_of(head: bytes, longest: int = LONGEST_MESSAGE) -> tuple[int, int, int]:
    """Return the lengths of a message and of the bytes behind it, and its checksum.

    Raises Damaged if the message is longer than `longest` bytes.
    """
    length, num_bytes, check = HEAD.unpack(head)
    if length > longest:
        raise Damaged(f"a message of {length} bytes was announced; it may have {longest}")
    return length, num_bytes, check


def unframed(body: bytes, num_bytes: int, check: int) -> Said:
    """Decode the message of a frame; raises Damaged if it is none, or a field is out of bounds."""
    if _check(len(body), num_bytes, body) != check:
        raise Damaged("a message is not as it was sent")
    try:
        message: Said = _decode(body)
        return message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"what came is no message: {one_line(str(error))}") from error


def _check(length: int, num_bytes: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(_LENGTHS.pack(length, num_bytes)))


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What must be equal in two engines that exchange pages."""

    model: str  # digest of everything but the tokens that a page's content depends on
    page_size: int
    layout: list[str]  # layout of a page in each layer, those of a drafter last
    drafts: str = NO_DRAFTS  # digest of the draft model, or of the head, that has layers of its own
    long_factors: bool = False  # whether keys are rotated by the long factors of "longrope"

    def difference(self, hello: Hello) -> str | None:
        """Describe the first difference to another engine, with both values; None if there is none."""
        pairs = {
            "the version of the messages": (VERSION, hello.version),
            "the model": (self.model, hello.model),
            "speculation.kind, with its weights,": (self.drafts, hello.drafts),
            "whether requests may need long factors (scheduler.max_request_tokens)": (
                self.long_factors,
                hello.long_factors,
            ),
            "cache.page_size": (self.page_size, hello.page_size),
            "the number of layers": (len(self.layout), len(hello.layout)),
        }
        for layer, both in enumerate(zip(self.layout, hello.layout)):
            pairs[f"a page of layer {layer}"] = both
        for name, (here, there) in pairs.items():
            if here != there:
                return f"{name} is {here} at the engine of prompts and {there} at the one of answers"
        return None


def address_of_pages(endpoint: str) -> tuple[str, int]:
    """Return host and port of tcp://HOST:PORT; raises ValueError."""
    kind, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or PORTS.parse(port) is None:
        raise ValueError(f"{endpoint!r} is no tcp://HOST:PORT")
    return host.strip("[]"), int(port)
