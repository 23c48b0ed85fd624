"""How are the records of a file kept so that damage shows, with its place?

Each record stands behind a head of 12 bytes, little-endian: its length, a checksum of that length, and a
checksum of its bytes. Every checksum (CRC-32) goes on from the one before it, so that a record that is
missing, repeated, moved or taken from another file does not fit where it stands. The length has a checksum of
its own, so that a file that just ends, as after a crash or on a full disk, is told apart from damage.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import IO

HEAD = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
LONGEST_RECORD = 2**30  # a longer one was never written


class DamagedRecording(ValueError):
    """A recording that cannot be read from some byte on; all records before it were given out."""


class CutShort(DamagedRecording):
    """A recording whose end is missing. What there is of it is whole, but perhaps for its last record."""


def checks(body: bytes, before: int) -> tuple[int, int]:
    """The checksums of a record's length and of its bytes; `before` is the latter of the record before it."""
    of_length = zlib.crc32(_LENGTH.pack(len(body)), before)
    return of_length, zlib.crc32(body, of_length)


def framed(body: bytes, before: int) -> tuple[bytes, int]:
    """A record as it stands in a file, and the checksum that the next one goes on from."""
    of_length, of_body = checks(body, before)
    return HEAD.pack(len(body), of_length, of_body) + body, of_body


def read_frames(file: IO[bytes], before: int) -> Iterator[tuple[str, bytes]]:
    """The place of each record, in words, and its bytes. Raises DamagedRecording at the first that is not as
    it was written, CutShort where the file ends within one.
    """
    at, number = 0, 1
    while head := file.read(HEAD.size):
        place = f"record {number} at byte {at}"
        if len(head) < HEAD.size:
            raise CutShort(f"{place} is cut short: the file ends within it")
        length, of_length, of_body = HEAD.unpack(head)
        if zlib.crc32(_LENGTH.pack(length), before) != of_length or length > LONGEST_RECORD:
            raise DamagedRecording(f"{place} is damaged, or does not belong there")
        body = file.read(length)
        if len(body) < length:
            raise CutShort(f"{place} is cut short: the file ends within it")
        before = checks(body, before)[1]
        if before != of_body:
            raise DamagedRecording(f"{place} is damaged")
        yield place, body
        at, number = at + HEAD.size + length, number + 1
