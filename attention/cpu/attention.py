"""Implement attention over the paged cache for CPUs.

Decodes are limited by memory bandwidth, so this class arranges a page in its own order, in which a decode
reads every byte once, in sequence, into whole vectors. A page is B/W tiles; in a tile, keys lie as [K, W/S,
D, S] and values as [K, D/E, W, E]. For all other code a page is only a unit to copy, move and count. Tile
addresses are planned in `tiles`. `compiled` reads all spans in C++; where there is no compiler, or a page has
part vectors, this file does it in plain torch: decodes tile by tile, longer spans by matrix products. In
int8, the numbers of each head of a tile are followed by the scales of its tokens, and only C++ reads them.

Legend: T tokens of the step, H/K query/kv heads, G = H/K, D head dim, P pages, B tokens a page, N slots,
  W tokens in a tile, S of them in a vector, E dimensions in a vector, R decoding rows, J tiles of all rows,
  M tiles of the longest row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from attention.cpu.compiled import PAGE_KINDS, CompiledAttention, TileShape, stored_dtype
from attention.cpu.tiles import DecodeTiles, PromptSpan, PromptTiles, QueryChunk, TileOrder
from attention.int8_pages import SCALE, row_bytes
from attention.reference import Attention, AttentionMetadata, ChannelScales, Windows
from continuous_batching.batch import Batch, ragged_ranges
from devices.onednn import product_dtype
from devices.shapes import AttentionShape

SHORT = 4  # most tokens of a span that is read like decodes, by one row for each token
# Tiles computed at a time without the compiler, whose float32 copies fit into the processor's cache
SLAB = 64


@dataclass(frozen=True)
class CpuMetadata(AttentionMetadata):
    """What all layers of one step share, for each window in use."""

    decodes: slice | Tensor  # rows of the query that are decodes: a slice of the first ones, or int64 [R]
    num_decodes: int
    tiles: dict[int | None, DecodeTiles]
    # The other spans, as this file reads them, or as `compiled` does: one of both is empty
    prompts: dict[int | None, tuple[PromptSpan, ...]]
    compiled_prompts: dict[int | None, PromptTiles]
    fresh: list[Tensor] = field(default_factory=list)  # key and value of the layer being computed


class CpuAttention(Attention):
    """Attention on a CPU.

    `library` is `attention.cpp`, compiled for this machine. It reads all spans whose pages are whole vectors;
    without it decodes are slow. `batch_invariant` needs it, because it sums what a query reads in the same
    order whatever else is read.
    """

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device | str = "cpu",
        *,
        library: ctypes.CDLL | None = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(shape, device)
        self.order = TileOrder(shape.page_size, shape.num_kv_heads, shape.head_dim, stored_dtype(shape))
        self.tile, lanes, value_lanes = self.order.tile, self.order.key_lanes, self.order.value_lanes
        self.key_view, self.value_view = self.order.views
        lying = TileShape(self.tile, lanes, value_lanes)
        is_read = library is not None and lying.is_whole and stored_dtype(shape) in PAGE_KINDS
        self.compiled = CompiledAttention(library, shape, lying) if is_read and library else None
        self.gives_sums = self.compiled is not None
        self.batch_invariant = batch_invariant
        self._is_plain = shape.score_cap is None and not shape.has_sinks
        self._product_dtype = product_dtype(shape.dtype)

    def check(self) -> None:
        """Refuse what `compiled` does not read where it must; see Attention.check."""
        super().check()
        shape = self.shape
        if shape.int8_pages and self.compiled is None:
            raise ValueError(
                f"cache.dtype: int8 pages of {shape.page_size} tokens with heads of {shape.head_dim} are not"
                " read in C++, which takes a compiler and multiples of 16; set device.attention to reference,"
                " or cache.dtype to auto"
            )
        if self.batch_invariant and self.compiled is None:
            raise ValueError(
                f"device.batch_invariant: heads of {shape.head_dim} in {shape.dtype} and pages of"
                f" {shape.page_size} are not read in C++; set cache.page_size to a multiple of 16, or"
                " device.batch_invariant to false"
            )

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> CpuMetadata:
        """Compute what all layers of this step share; see Attention.plan."""
        shape, tile = self.shape, self.tile
        lens = batch.stops - batch.starts
        first_rows = np.cumsum(lens) - lens
        used = dict.fromkeys(shape.windows if windows is None else windows)

        is_short = lens <= SHORT
        counts, starts = lens[is_short], batch.starts[is_short]
        tokens = ragged_ranges(first_rows[is_short], first_rows[is_short] + counts)
        num_decodes, tiles = len(tokens), {}
        in_front = not num_decodes or int(tokens[-1]) == num_decodes - 1
        sizes = page_table, shape.page_size, tile
        if num_decodes:
            slots = np.repeat(batch.slots[is_short], counts)
            ends = ragged_ranges(starts + 1, starts + counts + 1)
            tiles = {w: DecodeTiles.of(slots, ends, *sizes, w, shape.first_key) for w in used}
        longer = np.flatnonzero(~is_short)
        prompts: dict[int | None, tuple[PromptSpan, ...]] = {}
        compiled_prompts = {}
        if self.compiled is not None and len(longer):
            planned = first_rows[longer], batch.starts[longer], batch.stops[longer], batch.slots[longer]
            compiled_prompts = {window: PromptTiles.of(*planned, *sizes, window) for window in used}
        elif len(longer):
            prompts = {
                window: self._prompts(batch, first_rows, longer, page_table, window) for window in used
            }
        return CpuMetadata(
            torch.from_numpy(write_index),
            (),
            slice(0, num_decodes) if in_front else torch.from_numpy(tokens),
            num_decodes,
            tiles,
            prompts,
            compiled_prompts,
        )

    def _prompts(
        self,
        batch: Batch,
        first_rows: NDArray[np.int64],
        longer: NDArray[np.int64],
        page_table: NDArray[np.int32],
        window: int | None,
    ) -> tuple[PromptSpan, ...]:
        """Plan the longer spans as this file reads them."""
        return tuple(
            PromptSpan.of(
                int(first_rows[span]),
                int(batch.starts[span]),
                int(batch.stops[span]),
                page_table[batch.slots[span]],
                self.shape.page_size,
                self.tile,
                window,
                self.shape.first_key,
            )
            for span in longer
        )

    @property
    def num_runs(self) -> int:
        """See Attention.num_runs: the tiles of a page."""
        return self.shape.page_size // self.tile

    def write(
        self,
        key: Tensor,
        value: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write the step's keys and values, both [T, K, D], to their places in the layer's [P, B, K, D]."""
        places = metadata.write_index
        if self.shape.int8_pages:
            self._write_int8(key.float(), value.float(), layer_keys, layer_values, places)
            return
        if self.compiled is not None and key.dtype == value.dtype == layer_keys.dtype:
            self.compiled.write(key, value, layer_keys, layer_values, places)
            return
        assert isinstance(metadata, CpuMetadata)
        metadata.fresh[:] = key, value
        tile, offset = places // self.tile, places % self.tile
        lanes = self.key_view[-1]
        layer_keys.view(self.key_view)[tile, :, offset // lanes, :, offset % lanes] = key[: len(places)]
        values = value[: len(places)].unflatten(2, (-1, self.value_view[-1]))
        layer_values.view(self.value_view)[tile, :, :, offset] = values

    def write_by_channel(
        self,
        key: Tensor,
        value: Tensor,
        scales: ChannelScales,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write multiples of the channels' scales; see Attention.write_by_channel."""
        units = key.float() / scales.keys, value.float() / scales.values
        self._write_int8(*units, layer_keys, layer_values, metadata.write_index, in_units=True)

    def _write_int8(
        self,
        key: Tensor,
        value: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        places: Tensor,
        *,
        in_units: bool = False,
    ) -> None:
        assert self.compiled is not None, "`check` refuses pages of int8 that are not read in C++"
        self.compiled.write(key, value, layer_keys, layer_values, places, in_units=in_units)

    def read(self, layer_keys: Tensor, layer_values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [n, K, D] at cache places `index` [n], page * B + offset."""
        if self.shape.int8_pages:
            layer_keys = self._dequantised(layer_keys)
            layer_values = self._dequantised(layer_values, of_values=True)
        address, offset = index // self.tile, index % self.tile
        lanes = self.key_view[-1]
        keys = layer_keys.view(self.key_view)[address, :, offset // lanes, :, offset % lanes]
        values = layer_values.view(self.value_view)[address, :, :, offset]
        return keys, values.flatten(2)

    def _dequantised(self, plane: Tensor, *, of_values: bool = False) -> Tensor:
        """Return the pages of int8 [P, B, K, D + 4] in float32, in the order of a tile's numbers."""
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        tiles = plane.view(-1, heads, self.tile * row_bytes(dim))
        numbers, scales = tiles.split((self.tile * dim, self.tile * SCALE.itemsize), dim=-1)
        scales = scales.contiguous().view(SCALE)
        if of_values:
            view, scales = self.value_view[2:], scales[:, :, None, :, None]
        else:
            view, scales = self.key_view[2:], scales.unflatten(2, (-1, 1, self.key_view[-1]))
        dequantised: Tensor = numbers.unflatten(2, view).float() * scales
        return dequantised.contiguous()

    def attend(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        """Let each query [T, H, D] attend to its request's positions up to its own; see Attention.attend."""
        assert isinstance(metadata, CpuMetadata)
        window = self.shape.windows[layer]
        sinks = self.sinks[layer].float() if self.shape.has_sinks else None
        if self.compiled is not None:
            return self._read(self.compiled, query, layer_keys, layer_values, sinks, metadata, window)
        if sinks is None:
            sinks = torch.full((self.shape.num_heads,), -torch.inf)
        output = torch.zeros_like(query)
        if metadata.num_decodes:
            rows = query[metadata.decodes].float()
            decoded = self._decode(rows, layer_keys, layer_values, sinks, metadata.tiles[window])
            output[metadata.decodes] = decoded
        for prompt in metadata.prompts.get(window, ()):
            if prompt.whole is not None and self._is_plain and self._product_dtype == torch.float32:
                output[prompt.whole] = self._attend_whole(query, metadata.fresh, prompt.whole)
                continue
            keys, values = self._matrices(prompt, layer_keys, layer_values, metadata)
            for chunk in prompt.chunks:
                self._attend_chunk(query, keys, values, chunk, sinks, output)
        return output

    def attend_with_sums(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> tuple[Tensor, Tensor]:
        """See Attention.attend_with_sums; every span is a single query."""
        assert isinstance(metadata, CpuMetadata)
        assert self.compiled is not None, "what is not read in C++ gives no sums"
        assert metadata.num_decodes == len(query), "a row that is joined from parts is a span of its own"
        sums = torch.empty(query.shape[:2])
        tiles = metadata.tiles[self.shape.windows[layer]]
        rows = self._as_read(query)
        output = torch.empty_like(rows)
        self.compiled.decode(rows, layer_keys, layer_values, None, tiles, output, sums)
        return output.to(query.dtype), sums

    def _read(
        self,
        compiled: CompiledAttention,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        metadata: CpuMetadata,
        window: int | None,
    ) -> Tensor:
        """Compute `attend` in C++."""
        rows, prompts = self._as_read(query), metadata.compiled_prompts.get(window)
        output = torch.zeros_like(rows)
        if metadata.num_decodes:
            of_decodes, tiles = metadata.decodes, metadata.tiles[window]
            if isinstance(of_decodes, slice):
                compiled.decode(rows[of_decodes], keys, values, sinks, tiles, output[of_decodes])
            else:
                decoded = torch.empty_like(output[of_decodes])
                compiled.decode(rows[of_decodes], keys, values, sinks, tiles, decoded)
                output[of_decodes] = decoded
        if prompts is not None:
            compiled.extend(rows, keys, values, sinks, prompts, output)
        return output.to(query.dtype)

    def _as_read(self, query: Tensor) -> Tensor:
        """Return queries [T, H, D] in the type of the pages, or in float32 where that is int8."""
        return (query.float() if self.shape.int8_pages else query.to(self.shape.dtype)).contiguous()

    def _attend_whole(self, query: Tensor, fresh: Sequence[Tensor], tokens: slice) -> Tensor:
        """Attend within a prompt whose queries [T, H, D] see all `fresh` keys and values up to their own.

        torch's flash attention reads them in place and skips blocks that no query sees: it takes 0.6 times
        the chunks' time in float32. In bfloat16 it takes up to 2.3 times as long as they do.
        """
        queries, keys, values = (each[tokens].float().transpose(0, 1)[None] for each in (query, *fresh))
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=self.shape.scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)

    def _matrices(
        self, prompt: PromptSpan, layer_keys: Tensor, layer_values: Tensor, metadata: CpuMetadata
    ) -> tuple[Tensor, Tensor]:
        """Return a span's keys [K, D, tokens] and values [K, tokens, D].

        A mask hides scores but not values, since 0 x NaN is NaN: values past the span's end are set to zero.
        """
        if prompt.fresh is not None:  # all keys belong to this step, so nothing is gathered from the cache
            key, value = metadata.fresh
            keys, values = (each[prompt.fresh].transpose(0, 1) for each in (key, value))
            return keys.transpose(1, 2), values
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        keys = layer_keys.view(self.key_view)[prompt.tiles].permute(1, 3, 0, 2, 4)
        values = layer_values.view(self.value_view)[prompt.tiles].permute(1, 0, 3, 2, 4)
        values = values.reshape(heads, -1, dim)
        values[:, prompt.known :] = 0
        return keys.reshape(heads, dim, -1), values

    def _attend_chunk(
        self, query: Tensor, keys: Tensor, values: Tensor, chunk: QueryChunk, sinks: Tensor, output: Tensor
    ) -> None:
        """Compute a chunk by two products for each kv head, whose query heads are the rows of one matrix."""
        rows = self._rows(query, chunk.rows)
        scores = self._product(rows.flatten(1, 2), keys[:, :, chunk.keys])
        weights, totals = self._weigh(scores.view(*rows.shape[:3], -1), chunk.first, chunk.last, sinks)
        sums = self._product(weights.flatten(1, 2), values[:, chunk.keys])
        self._scatter(output, sums.view(rows.shape), totals, chunk.tokens)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply two tensors of one type by torch.bmm, in the type that is fastest on this processor."""
        return torch.bmm(left.to(self._product_dtype), right.to(self._product_dtype)).to(left.dtype)

    def _rows(self, query: Tensor, tokens: Tensor) -> Tensor:
        """Return some of the queries [T, H, D] as [K, tokens, G, D]."""
        grouped: Tensor = query.unflatten(1, (self.shape.num_kv_heads, -1))
        return grouped[tokens].transpose(0, 1).contiguous()

    def _weigh(self, scores: Tensor, first: Tensor, last: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        """Return exp(score - peak) of scores [K, rows, G, keys] from `first` to `last` of each row, and sums.

        The sinks [H] count in the sums. The result is divided by the sums later, in place of the larger
        scores, which saves two of four passes over these.
        """
        key = torch.arange(scores.shape[-1], dtype=torch.int32)
        seen = (key >= first[:, None]) & (key <= last[:, None])
        scores = torch.where(seen[:, None], self._capped(scores.float() * self.shape.scale), -torch.inf)
        peak = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - peak)
        sunk = torch.exp(sinks.view(scores.shape[0], 1, -1) - peak[..., 0])
        return weights.to(self.shape.dtype), weights.sum(-1) + sunk

    def _scatter(self, output: Tensor, sums: Tensor, totals: Tensor, tokens: Tensor) -> None:
        """Write sums [K, rows, G, D] / totals [K, rows, G] to rows `tokens` of [T, H, D], without the
        padding."""
        result = (sums.float() / totals[..., None])[:, : tokens.shape[0]]
        output[tokens] = result.transpose(0, 1).flatten(1, 2).to(output.dtype)

    def _decode(
        self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, tiles: DecodeTiles
    ) -> Tensor:
        """Attend without the compiled source, `SLAB` tiles at a time; returns [R, H, D]."""
        keys, values = keys.view(self.key_view), values.view(self.value_view)
        query = query.unflatten(1, (self.shape.num_kv_heads, -1)) * self.shape.scale
        place = torch.arange(self.tile, dtype=torch.int32)
        parts = []
        planned = tiles.address, tiles.row, tiles.low, tiles.high
        for slab in zip(*(each.split(SLAB) for each in planned)):
            at, rows, begin, end = slab
            exists = place < end[:, None]
            seen = exists & (place >= begin[:, None])
            key = keys[at].float().transpose(2, 3).flatten(3)  # [J, K, D, W]
            scores = torch.where(seen[:, None, None], self._capped(query[rows] @ key), -torch.inf)
            peak = scores.amax(-1)
            weights = torch.exp(scores - peak[..., None])
            value = values[at].float().transpose(2, 3).flatten(3)  # [J, K, W, D]
            value = torch.where(exists[:, None, :, None], value, 0.0)
            parts.append((peak, weights.sum(-1), weights @ value))
        peak, weight, output = (torch.cat(each).flatten(1, 2) for each in zip(*parts))
        return _combine(peak, weight, output, sinks, tiles.of_row, tiles.is_tile).to(self.shape.dtype)


def _combine(
    peak: Tensor, weight: Tensor, output: Tensor, sinks: Tensor, of_row: Tensor, is_tile: Tensor
) -> Tensor:
    """Join the softmaxes of each row's tiles (Milakov and Gimelshein, "Online normalizer calculation", 2018).

    `peak` [J, heads] is the largest score of a tile, `weight` [J, heads] the sum of exp(score - peak), and
    `output` [J, heads, D] the sum of values weighted by it; `sinks` [heads]. Returns [R, heads, D].
    """
    peaks = torch.where(is_tile[:, :, None], peak[of_row], -torch.inf)
    top = peaks.amax(1, keepdim=True)
    scale = torch.exp(peaks - top)
    total = (scale * weight[of_row]).sum(1) + torch.exp(sinks - top[:, 0])
    return (scale[..., None] * output[of_row]).sum(1) / total[..., None]
