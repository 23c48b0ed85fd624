"""How is a long JSON written in pieces, none of which takes long or fills the memory?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

Json = dict[str, Any]

LONGEST_LIST = 64  # entries that are written at once: of 21 log-probabilities each, in about 2 ms
PIECE_BYTES = 2**16
to_json = msgspec.json.Encoder().encode


class Items:
    """A list whose entries are made while it is written."""

    __slots__ = ("entries",)

    def __init__(self, entries: Iterable[Any]) -> None:
        self.entries = entries


class Parts(Items):
    """A list whose entries may hold `Items` themselves: each is written by itself."""

    __slots__ = ()


def parts(entries: list[Json]) -> Parts | list[Json]:
    """The entries, which may hold `Items`."""
    return entries if all(map(is_short, entries)) else Parts(entries)


def items(entries: Iterable[Any], length: int) -> Items | list[Any]:
    """The entries, made now if they are few; `length` says how many they are."""
    return list(entries) if length <= LONGEST_LIST else Items(entries)


def is_short(value: Json) -> bool:
    """Whether an object holds no list that is written in pieces."""
    return not any(
        isinstance(each, Items) or (type(each) is dict and not is_short(each)) for each in value.values()
    )


def pieces_of(value: Any) -> Iterator[bytes]:
    """The JSON of a value, of which objects and their fields may be `Items`."""
    if isinstance(value, Parts):
        for index, each in enumerate(value.entries):
            yield b"," if index else b"["
            yield from pieces_of(each)
        yield b"]"
    elif isinstance(value, Items):
        yield from _list(value)
    elif isinstance(value, dict) and not is_short(value):
        before = b"{"
        for name, field in value.items():
            yield before + to_json(name) + b":"
            yield from pieces_of(field)
            before = b","
        yield b"}"
    else:
        yield to_json(value)


def object_around(head: Json, choices: Iterator[Json], tail: Json) -> Iterator[bytes]:
    """The JSON of an object with the fields of `head`, a list of `choices` and the fields of `tail`.

    A choice is made when the one before it is written.
    """
    yield to_json(head)[:-1] + b',"choices":['
    for index, choice in enumerate(choices):
        yield b"," if index else b""
        yield from pieces_of(choice)
    yield b"]" + b"".join(b"," + to_json(name) + b":" + to_json(field) for name, field in tail.items()) + b"}"


def gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces that are worth sending by themselves."""
    ready: list[bytes] = []
    size = 0
    for piece in pieces:
        ready.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield b"".join(ready)
            ready, size = [], 0
    if ready:
        yield b"".join(ready)


def _list(value: Items) -> Iterator[bytes]:
    entries, before = iter(value.entries), b"["
    while batch := list(islice(entries, LONGEST_LIST)):
        yield before + to_json(batch)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"
