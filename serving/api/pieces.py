"""Keep long pieces of work from holding up the event loop: they take turns, and JSON is written in pieces.

Decoding a body of two megabytes, and writing thousands of log-probabilities, take some milliseconds each.
Such a piece of work waits for a turn first, and each round of the loop has one turn: however many pieces
wait, everything else runs between any two of them. No piece of JSON takes long to make or fills the memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import msgspec

_NUM_THREADS = 2


class Turns:
    """The turns of one event loop, and the threads for pieces that would hold it up."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        # Their own, so that nothing else that needs a thread, as metrics do, waits for long answers.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "answers")

    async def next(self) -> None:
        """Return in a round of the loop that no other waiter has.

        The turn lasts until the caller's next await.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._give)
        await turn

    async def next_of(self, pieces: Iterator[bytes], *, is_long: bool) -> bytes | None:
        """Return the next piece of whole answers, or None; it is made in a thread if they are long."""
        if not is_long:
            return next(pieces, None)
        return await asyncio.get_running_loop().run_in_executor(self._threads, next, pieces, None)

    def _give(self) -> None:
        """Wake the first waiter; it stays in the queue until the next round, so that no second one starts."""
        if not self._waiting[0].done():
            self._waiting[0].set_result(None)
        asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        self._waiting.popleft()
        if self._waiting:
            self._give()


Json = dict[str, Any]

LONGEST_LIST = 64  # entries written at once; with 21 log-probabilities each, they take about 2 ms
PIECE_BYTES = 2**16
to_json = msgspec.json.Encoder().encode


class Items:
    """A list whose entries are made while it is written."""

    __slots__ = ("entries",)

    def __init__(self, entries: Iterable[Any]) -> None:
        self.entries = entries


class Parts(Items):
    """A list whose entries may hold `Items` themselves, so that each entry is written on its own."""

    __slots__ = ()


def parts(entries: list[Json]) -> Parts | list[Json]:
    """Return the entries, as `Parts` if any of them holds `Items`."""
    return entries if all(map(is_short, entries)) else Parts(entries)


def items(entries: Iterable[Any], length: int) -> Items | list[Any]:
    """Return the entries, made now if they are few; `length` is their number."""
    return list(entries) if length <= LONGEST_LIST else Items(entries)


def is_short(value: Json) -> bool:
    """Return whether an object holds no list that is written in pieces."""
    for each in value.values():
        if isinstance(each, Items) or (type(each) is dict and not is_short(each)):
            return False
    return True


def pieces_of(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value that may be, or contain in its fields, `Items`."""
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
    """Yield the JSON of an object with the fields of `head`, a list of `choices` and the fields of `tail`.

    Each choice is made only after the one before it is written.
    """
    yield to_json(head)[:-1] + b',"choices":['
    for index, choice in enumerate(choices):
        yield b"," if index else b""
        yield from pieces_of(choice)
    yield b"]"
    for name, field in tail.items():
        yield b"," + to_json(name) + b":"
        yield from pieces_of(field)
    yield b"}"


def gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Join small pieces into pieces that are worth sending on their own."""
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
