"""Make hostile messages of valid ones: other values, lengths and nesting, cut short, repeated, spliced.

A message is a tree of dictionaries, lists and scalars, as MessagePack and JSON have them. A mutation keeps
the grammar of most of it, so that it reaches the code behind the parser.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

DEPTH = 30_000
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 7, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
    -(2**31), -(2**31) - 1, -(2**63), 0.5, -0.5, -0.0, 1e-320, 1e300, -1e308, 1e308, float("inf"),
    float("-inf"), float("nan"),
)  # fmt: skip
TEXTS: tuple[Any, ...] = (
    "", "x", "x" * 1025, "x" * 70_000, "\0", "a\nb", "a\r\nb: c", "\x1b[31m", "٣", "é" * 1024, "-1", "1e999",
    "../..", "9" * 5000, "tcp://*:1", "None",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    {"": {}},
    [1] * 70_000,
    b"",
    b"\xff\xfe",
    b"x" * 70_000,
)
PIECES = (b"\0", b"\xff" * 4, b"\n", b"\r\n\r\n", b"9" * 30, b"\xc3\x28", b"\t", b"{}", b"-")


class Mutator:
    """Mutations that follow from a seed; `deep` is a value that is nested deeply, in the message's format."""

    def __init__(self, seed: int, deep: bytes = b"\x91" * DEPTH + b"\x90") -> None:
        self.random = random.Random(seed)
        self._deep = deep

    def one_of(self, values: Sequence[Any]) -> Any:
        """One of some values."""
        return values[self.random.randrange(len(values))]

    def message(self, tree: Any) -> Any:
        """A copy in which one to three places are changed."""
        holder = [copy.deepcopy(tree)]
        for _ in range(self.random.randint(1, 3)):
            places = [*_places(holder)]
            self._change(*self.one_of(places))
            holder = holder[:1] or [None]
        return holder[0]

    def data(self, data: bytes) -> bytes:
        """Bytes that are cut, flipped, repeated, or mixed with others."""
        kept = bytearray(data)
        for _ in range(self.random.randint(1, 3)):
            at = self.random.randrange(len(kept) + 1)
            stop = min(len(kept), at + self.random.choice((1, 1, 2, 4, 8, 64)))
            way = self.random.randrange(6)
            if way == 0:
                del kept[at:]
            elif way == 1 and kept:
                kept[at % len(kept)] ^= 1 << self.random.randrange(8)
            elif way == 2:
                del kept[at:stop]
            elif way == 3:
                kept[at:at] = kept[at:stop] * self.random.choice((1, 2, 50))
            elif way == 4:
                kept[at:stop] = self.random.randbytes(stop - at + 1)
            else:
                kept[at:at] = self.random.choice(
                    (b"\0", b"\xff" * 4, b"\n", b"\r\n\r\n", b"9" * 30, b"\xc3\x28")
                )
        return bytes(kept)

    def _change(self, container: Any, at: Any) -> None:
        value, way = container[at], self.random.randrange(10)
        if way < 5 and not isinstance(value, (dict, list)):  # most values become another of their kind
            container[at] = self._like(value)
        elif way == 5 and isinstance(container, list):
            container[at:at] = [copy.deepcopy(value)] * self.random.choice((1, 1, 3, 300))
        elif way == 6 and isinstance(container, dict):
            del container[at]
        elif way == 6:
            del container[at:]
        elif way == 7:
            container[at] = msgspec.Raw(self._deep)
        elif way == 8 and isinstance(container, dict):
            container[self.one_of(TEXTS)] = value
        else:
            container[at] = copy.deepcopy(self.one_of((*NUMBERS, *TEXTS, *OTHERS)))

    def _like(self, value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            return copy.deepcopy(self.one_of((*OTHERS, *NUMBERS)))
        if isinstance(value, (int, float)):
            return self.one_of((*NUMBERS, value + 1, value - 1, -value, 2 * value))
        if isinstance(value, bytes):
            return self.one_of((self.data(value), value * 2, value[:-1], value + b"\0", b""))
        return self.one_of((*TEXTS, f"{value}x", str(value)[:-1]))


JSON_DEEP = b"[" * DEPTH + b"]" * DEPTH


def encoded(tree: Any, encode: Callable[[Any], bytes]) -> bytes:
    """A tree as bytes; what the format cannot say is left to the mutations of bytes."""
    try:
        return encode(tree)
    except (TypeError, OverflowError, ValueError, UnicodeEncodeError, RecursionError):
        return b""


def _places(tree: Any) -> Any:
    """Every place in a tree whose value may be changed, as its container and its index there."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for at, value in [*items]:
        yield tree, at
        if isinstance(value, (dict, list)) and value:
            yield from _places(value)
