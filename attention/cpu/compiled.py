"""Call `attention.cpp`, which attends over pages in their stored type and widens numbers in registers.

Where the processor multiplies bfloat16 itself, pages of bfloat16 are not widened: queries and weights are
rounded to bfloat16, and products are summed in float32.

The source sums what a query reads in one order, whatever it is batched with, on any number of threads, and
whether it is read alone or among the queries of a prompt. It is compiled for one type of numbers, and takes
pages whose tiles and heads are whole vectors. In int8 it quantises what is written, as
`attention/int8_pages.py` defines it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention.cpu.tiles import DecodeTiles, PromptTiles
from devices.cpp_sources import KINDS, compiled_source
from devices.shapes import AttentionShape

SOURCE = Path(__file__).with_name("attention.cpp")
MOST_LANES = 16  # float32 numbers in the longest vectors
PAGE_KINDS = KINDS | {torch.int8: 3}  # enum Kind of the source


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a page's tiles lie: tokens of a tile, and tokens of keys, or channels of values, side by side."""

    tile: int
    key_lanes: int
    value_lanes: int

    @property
    def is_whole(self) -> bool:
        """Whether all of these are whole vectors on every processor."""
        return not (self.key_lanes % MOST_LANES or self.value_lanes % MOST_LANES)


class Pages(ctypes.Structure):
    """`Pages` of devices/operators.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "sinks")),
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "dim", "tile", "key_lanes", "value_lanes")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    )


class CompiledAttention:
    """The compiled source, for layers of one shape whose pages lie in one way."""

    def __init__(self, library: ctypes.CDLL, shape: AttentionShape, lying: TileShape) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_long
        self._decode, self._extend, self._write = library.decode, library.extend, library.write_tokens
        self._decode.argtypes = [pointer] * 10 + [integer] * 2 + [ctypes.c_int]
        self._extend.argtypes = [pointer] * 5 + [integer] * 3 + [ctypes.c_int]
        self._write.argtypes = [pointer] * 4 + [integer] * 3 + [ctypes.c_bool, ctypes.c_int]
        self._decode.restype = self._extend.restype = ctypes.c_bool
        self._write.restype = None
        self.shape, self.lying = shape, lying
        self._no_sinks = torch.full((shape.num_heads,), -torch.inf)

    @property
    def functions(self) -> tuple[Any, ...]:
        """The source's functions that `layers.cpp` calls."""
        return self._write, self._decode, self._extend

    def pages(self, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Pages:
        """Return how a layer's pages lie, for the source."""
        shape, lying = self.shape, self.lying
        sinks = self._no_sinks if sinks is None else sinks
        return Pages(
            *(keys.data_ptr(), values.data_ptr(), sinks.data_ptr()),
            *(shape.num_heads, shape.num_kv_heads, shape.head_dim),
            *(lying.tile, lying.key_lanes, lying.value_lanes, shape.scale, shape.score_cap or 0.0),
        )

    def decode(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        tiles: DecodeTiles,
        output: Tensor,
        sums: Tensor | None = None,
    ) -> None:
        """Write to `output` [R, H, D] what queries [R, H, D] read of a layer's pages, each its row's tiles.

        Queries and outputs are of the pages' type, or float32 where that is int8. `sinks` [H] is float32,
        and None where there are none. The logarithms of the sums of exponents of their scores are written to
        `sums` [R, H], if it is given. Raises MemoryError.
        """
        planned = (tiles.address, tiles.of_row, tiles.low, tiles.high, tiles.is_tile, tiles.first_tile)
        has_memory = self._decode(
            ctypes.byref(self.pages(keys, values, sinks)),
            *(each.data_ptr() for each in (query, *planned, output)),
            None if sums is None else sums.data_ptr(),
            *(len(query), tiles.of_row.shape[1], torch.get_num_threads()),
        )
        if not has_memory:
            raise MemoryError("there is no memory for the parts of the attention of a step")

    def extend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        tiles: PromptTiles,
        output: Tensor,
    ) -> None:
        """Write what the queries [T, H, D] of spans read to their rows of `output` [T, H, D]; see `decode`.

        The spans' own keys and values are in the pages. Raises MemoryError.
        """
        has_memory = self._extend(
            ctypes.byref(self.pages(keys, values, sinks)),
            *(each.data_ptr() for each in (query, tiles.address, tiles.spans, output)),
            *(len(tiles.spans), tiles.window or 0, self.shape.first_key, torch.get_num_threads()),
        )
        if not has_memory:
            raise MemoryError("there is no memory for a block of the attention of a prompt")

    def write(
        self,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        places: Tensor,
        *,
        in_units: bool = False,
    ) -> None:
        """Write keys and values [T, K, D] to cache places [T], page * B + offset.

        They are of the pages' type, or float32 where that is int8, and then multiples of their channels'
        scales if they are `in_units`.
        """
        key, value = (_with_whole_rows(each) for each in (key, value))
        self._write(
            ctypes.byref(self.pages(keys, values)),
            *(each.data_ptr() for each in (key, value, places)),
            *(len(places), key.stride(0), value.stride(0), in_units, torch.get_num_threads()),
        )


def _with_whole_rows(x: Tensor) -> Tensor:
    """Return [T, K, D] with the numbers of a row behind one another."""
    inner: Sequence[int] = (x.shape[2], 1)
    return x if x.stride()[1:] == inner else x.contiguous()


def stored_dtype(shape: AttentionShape) -> torch.dtype:
    """Return the type of the numbers in a layer's pages."""
    return torch.int8 if shape.int8_pages else shape.dtype


@cache
def attention_source(pages: torch.dtype) -> ctypes.CDLL | str:
    """Return the source compiled for this machine and pages of a type, or why it is not."""
    return compiled_source(SOURCE, f"-DPAGES={PAGE_KINDS[pages]}")
