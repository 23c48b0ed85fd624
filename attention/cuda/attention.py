"""Implement attention over the paged cache for CUDA devices.

A mixed batch takes one launch a layer, by Triton kernels (triton_kernels.py), and a small second one that
combines partial results. The tables that they read are planned on the host and sent in one copy a step.

Legend: T tokens of the step, H/K query/kv heads, G = H/K, D head dim, P pages, B tokens a page, N slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from attention.cuda.query_tiles import JOIN_FIELDS, TILE_FIELDS, QueryTiles, TileSizes
from attention.cuda.triton_kernels import attend_tiles, join_parts, write_places
from attention.reference import Attention, AttentionMetadata, StaticDecodes, Windows
from continuous_batching.batch import Batch
from devices.present import FUSED_CAPABILITY
from devices.shapes import AttentionShape
from devices.triton_types import kernel_dtype, stored_dtype
from kv_cache.pages import Index

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_DIM, MOST_GROUP = 256, 128
FEW_ROWS = 16  # the fewest rows of a tile that a tensor core takes
PROGRAMS_PER_PROCESSOR = 4  # enough loads in flight, and few partial results to combine
WRITTEN = 4096  # numbers that one program writes into the cache
LEAST_SHARE = 128  # positions; smaller shares save less than combining them costs
CHUNK = 512  # positions that batch-invariant attention sums separately
ALIGNED = 4  # int32 elements: a kernel is recompiled for an address that is not a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """Compile-time sizes of a dtype's kernels: rows of a prompt's tile, bytes of keys per read, warps."""

    num_rows: int
    step_bytes: int
    num_warps: int


HALF = KernelSizes(64, 16 * 2**10, 4)
# No tensor core multiplies float32, and larger tiles would not fit into registers
SINGLE = KernelSizes(32, 8 * 2**10, 8)


@dataclass(frozen=True, slots=True)
class LaunchTables:
    """The tables that one window's launches read, and the number of rows of partial results between them."""

    tiles: Tensor  # int32 [n, 8]
    joins: Tensor  # int32 [m, 4]
    num_parts: int


@dataclass(frozen=True)
class CudaMetadata(AttentionMetadata):
    """What all layers of one step share, with the tables of each window in use."""

    page_table: Tensor  # int32 [S, pages], one row for each span
    num_rows: int  # rows of a tile
    tables: Tensor  # int32: the memory of which the launches' tables are views
    launches: dict[int | None, LaunchTables]


class CudaAttention(Attention):
    """Attention by Triton kernels.

    With `batch_invariant`, the result of a query depends, to the bit, on its request's tokens and its
    position alone, and not on other requests or on how its prompt was chunked. Tiles then have one size,
    positions are summed in chunks of `CHUNK`, and chunks are combined in order, wherever they were computed.
    """

    gives_sums = False

    def __init__(
        self, shape: AttentionShape, device: torch.device | str = "cpu", *, batch_invariant: bool = False
    ) -> None:
        super().__init__(shape, device)
        self.batch_invariant = batch_invariant
        self.group = max(1, shape.num_heads // shape.num_kv_heads)
        self.padded_dim = max(16, _power_of_two(shape.head_dim))
        self.tiling = SINGLE if shape.dtype == torch.float32 else HALF
        self.step = min(64, max(16, self.tiling.step_bytes // (self.padded_dim * shape.dtype.itemsize)))
        self.num_warps = max(self.tiling.num_warps, self.padded_dim // 32)
        self.windows = list(dict.fromkeys(shape.windows))
        self.num_processors = 4
        if self.device.type == "cuda":
            self.num_processors = torch.cuda.get_device_properties(self.device).multi_processor_count

    def check(self) -> None:
        """Raise ValueError for a shape that cannot be served, with the value, the limit and the fix."""
        super().check()
        shape = self.shape
        fix = "set device.attention to reference and device.graphs to 0"
        if shape.head_dim > MOST_DIM:
            raise ValueError(f"head_dim is {shape.head_dim}; fused attention takes up to {MOST_DIM}: {fix}")
        if self.group > MOST_GROUP:
            raise ValueError(
                f"{self.group} query heads share a kv head; fused attention takes up to {MOST_GROUP}: {fix}"
            )
        if shape.dtype not in DTYPES:
            raise ValueError(
                f"model.dtype is {shape.dtype}; fused attention takes float32, bfloat16 or float16: {fix}"
            )
        is_cuda = self.device.type == "cuda"
        if is_cuda and torch.cuda.get_device_capability(self.device) < FUSED_CAPABILITY:
            name = torch.cuda.get_device_name(self.device)
            raise ValueError(
                f"{name} is older than compute capability 8.0, which fused attention needs: {fix}"
            )

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> CudaMetadata:
        """Compute what all layers of this step share; see Attention.plan."""
        starts, stops = batch.starts, batch.stops
        num_rows = self._num_rows(int((stops - starts).max()))
        used = self.windows if windows is None else windows
        planned = self._planned(starts, stops, num_rows, used)
        width = -(-int(stops.max()) // self.shape.page_size)
        slots_pages = page_table[batch.slots, :width]
        arrays: list[NDArray[Any]] = [write_index, slots_pages, *_tables(planned)]
        sizes = [-(-each.nbytes // 4 // ALIGNED) * ALIGNED for each in arrays]
        sent = self._pinned(arrays, sizes).to(self.device, non_blocking=True)
        pieces = [piece[: a.nbytes // 4] for piece, a in zip(sent.split(sizes), arrays)]
        places, pages, *tables = pieces
        launches = self._launches(tables, [each.num_parts for each in planned], used)
        pages = pages.view(slots_pages.shape)
        return CudaMetadata(places.view(torch.int64), (), pages, num_rows, sent, launches)

    def graph_sizes(
        self,
        sizes: list[int],
        beside: int = 0,
        most_layers: int = 0,
        *,
        joins: bool = False,
        most_padding: int | None = None,
    ) -> list[int]:
        """Return all of these sizes, each of which can be captured."""
        return sizes

    def plan_static(self, decodes: StaticDecodes, windows: Windows = None) -> CudaMetadata:
        """Plan a step that is captured: allocate the tables, which `replay` fills."""
        used, num_spans = self.windows if windows is None else windows, len(decodes.kv_lens)
        num_tiles = 2 * num_spans + self.num_tiles  # a span has up to two further tiles, one at each end
        sizes = [num_tiles * TILE_FIELDS, num_spans * JOIN_FIELDS] * len(used)
        tables = torch.empty(sum(sizes), dtype=torch.int32, device=self.device)
        if self.device.type == "cpu" or not torch.cuda.is_current_stream_capturing():
            tables.zero_()  # all entries are padding; within a capture this would be repeated at each replay
        launches = self._launches(tables.split(sizes), [num_tiles] * len(used), used)
        return CudaMetadata(decodes.write_index, (), decodes.page_table, self._num_rows(1), tables, launches)

    def replay(self, graph: Any, metadata: Sequence[AttentionMetadata], kv_lens: list[int]) -> None:
        """Plan for these lengths [R], and run a captured step."""
        stops = np.array(kv_lens)
        for group in metadata:
            assert isinstance(group, CudaMetadata)
            launches = group.launches
            planned = self._planned(stops - 1, stops, group.num_rows, list(launches))
            sizes = [table.numel() for each in launches.values() for table in (each.tiles, each.joins)]
            group.tables.copy_(self._pinned(_tables(planned), sizes), non_blocking=True)
        graph.replay()

    def write(
        self,
        key: Tensor,
        value: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write the step's keys and values, both [T, K, D], to their places in the layer's [P, B, K, D]."""
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        places, width = metadata.write_index, _power_of_two(heads * dim)
        num_tokens = max(1, WRITTEN // width)
        write_places[(-(-len(places) // num_tokens),)](
            key, value, layer_keys, layer_values, places, *_strides(key), *_strides(value), len(places),
            NUM_KV=heads, HEAD_DIM=dim, TOKENS=num_tokens, WIDTH=width,
        )  # fmt: skip

    def attend(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        """Let each query [T, H, D] attend to its request's positions up to its own; see Attention.attend."""
        assert isinstance(metadata, CudaMetadata)
        shape, window = self.shape, self.shape.windows[layer]
        launch = metadata.launches[window]
        parts = self._parts(launch.num_parts)
        cap, sinks = shape.score_cap, self.sinks[layer] if shape.has_sinks else query
        scale = shape.scale * math.log2(math.e) if cap is None else shape.scale / cap
        options: dict[str, Any] = {"HAS_SINKS": shape.has_sinks, "enable_fp_fusion": not self.batch_invariant}
        output = torch.empty(query.shape, dtype=stored_dtype(query.dtype), device=query.device)
        attend_tiles[(len(launch.tiles) * shape.num_kv_heads,)](
            query, layer_keys, layer_values, output, sinks, launch.tiles, metadata.page_table, *parts,
            *_strides(query), metadata.page_table.stride(0), scale,
            NUM_KV=shape.num_kv_heads, GROUP=self.group, HEAD_DIM=shape.head_dim, PADDED_DIM=self.padded_dim,
            PAGE=shape.page_size, RUN=math.gcd(shape.page_size, self.step), ROWS=metadata.num_rows,
            STEP=self.step, WINDOW=window or 0, CAP=cap or 0.0,
            CHUNK=CHUNK if self.batch_invariant else 0, OPERAND=kernel_dtype(shape.dtype),
            num_warps=self.num_warps, num_stages=3, **options,
        )  # fmt: skip
        if len(launch.joins):
            join_parts[(len(launch.joins) * shape.num_heads,)](
                output, sinks, launch.joins, *parts, NUM_HEADS=shape.num_heads, HEAD_DIM=shape.head_dim,
                PADDED_DIM=self.padded_dim, **options,
            )  # fmt: skip
        return output.to(query.dtype)

    @property
    def num_tiles(self) -> int:
        """The approximate number of tiles that keeps the device busy.

        A tile is one program for every kv head.
        """
        return -(-PROGRAMS_PER_PROCESSOR * self.num_processors // self.shape.num_kv_heads)

    def _planned(
        self, starts: Index, stops: Index, num_rows: int, windows: Sequence[int | None]
    ) -> list[QueryTiles]:
        """Return the tables of packed spans, for each of these windows."""
        least = -(-LEAST_SHARE // self.step) * self.step
        chunk = CHUNK if self.batch_invariant else 0
        sizes = TileSizes(
            num_rows // self.group, self.step, self.num_tiles, least, chunk, self.shape.first_key
        )
        return [QueryTiles.of(starts, stops, window, sizes) for window in windows]

    def _launches(
        self, tables: Sequence[Tensor], num_parts: list[int], windows: Sequence[int | None]
    ) -> dict[int | None, LaunchTables]:
        """Pair the tiles and joins of each window, given one window after the other."""
        tiles = [each.view(-1, TILE_FIELDS) for each in tables[::2]]
        joins = [each.view(-1, JOIN_FIELDS) for each in tables[1::2]]
        return dict(zip(windows, map(LaunchTables, tiles, joins, num_parts)))

    def _num_rows(self, longest: int) -> int:
        """Return the rows of a tile: the fewest that hold the longest span, if it is short."""
        group = _power_of_two(self.group)
        few, many = max(FEW_ROWS, group), max(self.tiling.num_rows, group)
        return few if longest <= few // self.group and not self.batch_invariant else many

    def _parts(self, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
        heads, dim = self.shape.num_heads, self.shape.head_dim
        sizes = ((num_parts, heads, dim), (num_parts, heads), (num_parts, heads))
        sums, peaks, totals = (torch.empty(size, dtype=torch.float32, device=self.device) for size in sizes)
        return sums, peaks, totals

    def _pinned(self, arrays: Sequence[NDArray[Any]], sizes: Sequence[int]) -> Tensor:
        """Concatenate arrays of int32 or int64 in pinned memory, each padded to its number of int32.

        Torch does not reuse the memory before a queued copy from it has been made.
        """
        host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        for piece, array in zip(host.split(sizes), arrays):
            piece.numpy()[: array.nbytes // 4] = array.reshape(-1).view(np.int32)
        return host


def _tables(planned: Sequence[QueryTiles]) -> list[NDArray[Any]]:
    return [table for each in planned for table in (each.tiles, each.joins)]


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not smaller than `number`."""
    power: int = triton.next_power_of_2(number)
    return power


def _strides(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of rows and heads; the numbers of one head are contiguous."""
    assert tensor.stride(2) == 1, "heads must be contiguous"
    return tensor.stride(0), tensor.stride(1)
