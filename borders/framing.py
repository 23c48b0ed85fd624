"""Frame the records of a file with chained checksums, so that damage is found with its position.

Each record follows a head of 12 bytes, little-endian: its length, a checksum of that length, and a checksum
of its bytes. Every checksum (CRC-32) continues the one before it, so that a record that is missing, repeated,
moved or taken from another file does not fit where it stands. The length has a checksum of its own, so that a
file that merely ends early, as after a crash or on a full disk, is distinguished from damage.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import IO

HEAD = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
LONGEST_RECORD = 2**30  # no longer record is ever written


class DamagedRecording(ValueError):
    """A recording that cannot be read from some byte on; all records before it have been yielded."""


class CutShort(DamagedRecording):
    """A recording whose end is missing; what there is of it is whole, except perhaps its last record."""


def checks(body: bytes, before: int) -> tuple[int, int]:
    """Return the checksums of a record's length and of its bytes.

    `before` is the checksum of the previous record's bytes.
    """
    of_length = zlib.crc32(_LENGTH.pack(len(body)), before)
    return of_length, zlib.crc32(body, of_length)


def framed(body: bytes, before: int) -> tuple[bytes, int]:
    """Return a record as it stands in a file, and the checksum that the next one continues."""
    of_length, of_body = checks(body, before)
    return HEAD.pack(len(body), of_length, of_body) + body, of_body


def read_frames(file: IO[bytes], before: int) -> Iterator[tuple[str, bytes]]:
    """Yield the position of each record, in words, and its bytes.

    Raises DamagedRecording at the first record that differs from what was written, CutShort if the file ends
    within one.
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
