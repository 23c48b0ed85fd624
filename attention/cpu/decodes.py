"""Attend from single queries in C++, which reads each byte of the cache once and widens it in registers.

`decodes.cpp` sums what a row reads in one order, whatever the row is batched with and on any number of
threads. It takes pages whose tiles and heads are whole vectors.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from attention.cpu.tiles import DecodeTiles
from devices.cpp_sources import KINDS, compiled_source
from devices.shapes import AttentionShape

SOURCE = Path(__file__).with_name("decodes.cpp")
MOST_LANES = 16  # float32 of the longest vectors


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


class CompiledDecodes:
    """The compiled source."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self._decode = library.decode
        self._decode.argtypes = [pointer] * 10 + [integer] * 8 + [ctypes.c_float] * 2 + [number] * 2
        self._decode.restype = ctypes.c_bool

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor,
        tiles: DecodeTiles,
        shape: AttentionShape,
        lying: TileShape,
    ) -> Tensor:
        """Return what float32 queries [R, H, D] read of the layer's pages, each of its row's tiles.

        `sinks` [H] is float32, and -inf where there is none.
        """
        query = query.contiguous()
        output = torch.empty_like(query)
        planes = (
            query,
            keys,
            values,
            sinks,
            tiles.address,
            tiles.of_row,
            tiles.low,
            tiles.high,
            tiles.is_tile,
        )
        has_memory = self._decode(
            *(each.data_ptr() for each in planes),
            output.data_ptr(),
            *(len(query), tiles.of_row.shape[1], shape.num_heads, shape.num_kv_heads, shape.head_dim),
            *(lying.tile, lying.key_lanes, lying.value_lanes),
            *(shape.scale, shape.score_cap or 0.0),
            *(KINDS[keys.dtype], torch.get_num_threads()),
        )
        if not has_memory:
            raise MemoryError("there is no memory for the parts of the attention of a step")
        return output


@cache
def decodes() -> CompiledDecodes | str:
    """Return the attention of this machine, compiled if it is not kept, or why there is none."""
    found = compiled_source(SOURCE)
    return found if isinstance(found, str) else CompiledDecodes(found)
