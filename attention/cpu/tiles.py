"""Plan which tokens of the cache a CPU reads in one step, and in which order.

A tile is W neighbouring tokens of one page. Decodes are read tile by tile, prompts as matrices.

Legend: B tokens a page, N slots, W tokens in a tile, R decoding rows, J tiles of all rows, M tiles of the
  longest row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.int8_pages import SCALE
from attention.reference import QUERY_ROWS
from continuous_batching.batch import ragged_ranges
from kv_cache.pages import Index

TILE = 64  # tokens; smaller tiles cost more to combine, larger ones waste half a tile a row
LANES = 32  # two vectors of float32 in AVX-512: enough parallel sums to hide a multiply-add's latency
STEP = 32  # prompts are padded to multiples, because oneDNN compiles its code (0.6 ms) for each new shape


@dataclass(frozen=True, slots=True)
class TileOrder:
    """The order of a page's numbers: tiles, as attention/cpu/attention.py describes them."""

    page_size: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype  # the type of the stored numbers

    @property
    def tile(self) -> int:
        """The tokens of a tile."""
        return max(1, math.gcd(self.page_size, TILE))

    @property
    def key_lanes(self) -> int:
        """The tokens whose keys lie side by side."""
        return math.gcd(self.tile, LANES)

    @property
    def value_lanes(self) -> int:
        """The channels of a value that lie side by side."""
        return next((n for n in (LANES, LANES // 2) if self.head_dim % n == 0), self.head_dim)

    @property
    def views(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of tiles of keys, [J, K, W/S, D, S], and of values, [J, K, D/E, W, E]."""
        heads, dim, of_value = self.num_heads, self.head_dim, self.value_lanes
        of_keys = -1, heads, self.tile // self.key_lanes, dim, self.key_lanes
        return of_keys, (-1, heads, dim // of_value, self.tile, of_value)

    @property
    def name(self) -> str:
        """What tells pages in this order from others of the same size."""
        return f"in tiles of {self.tile} by {self.key_lanes} and {self.value_lanes}"

    def resized(self, page_size: int, num_heads: int) -> TileOrder:
        """Return the order of other pages of the same attention."""
        return replace(self, page_size=page_size, num_heads=num_heads)

    def by_token(self, pages: Tensor, plane: int) -> Tensor:
        """Return pages of keys (plane 0) or values (1) with the numbers of a token behind one another.

        They are [P, B, K, D], or [P, B, K, D + 4] in int8, as those of `Attention`.
        """
        numbers, scales = self._split(pages)
        order = (0, 2, 4, 1, 3) if plane == 0 else (0, 3, 1, 2, 4)
        page = -1, self.page_size, self.num_heads
        of_tokens = numbers.view(self.views[plane]).permute(order).reshape(*page, self.head_dim)
        if scales is None:
            return of_tokens
        of_scales = scales.unflatten(2, (self.tile, -1)).transpose(1, 2).reshape(*page, SCALE.itemsize)
        return torch.cat((of_tokens, of_scales), -1)

    def from_tokens(self, pages: Tensor, plane: int) -> Tensor:
        """Return what `by_token` has returned in the order of tiles, in its shape."""
        by_tile = pages.view(-1, self.tile, self.num_heads, pages.shape[-1])
        numbers, scales = by_tile[..., : self.head_dim], by_tile[..., self.head_dim :]
        if plane == 0:
            lying = numbers.unflatten(1, (-1, self.key_lanes)).permute(0, 3, 1, 4, 2)
        else:
            lying = numbers.unflatten(3, (-1, self.value_lanes)).permute(0, 2, 3, 1, 4)
        tiles = lying.flatten(2)
        if scales.shape[-1]:
            tiles = torch.cat((tiles, scales.transpose(1, 2).flatten(2)), -1)
        lain: Tensor = tiles.reshape(pages.shape)
        return lain

    def _split(self, pages: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the numbers of tiles [J, K, W * D], and their scales [J, K, W * 4] in int8."""
        if self.dtype != torch.int8:
            return pages.contiguous(), None
        sizes = self.tile * self.head_dim, self.tile * SCALE.itemsize
        numbers, scales = pages.reshape(-1, self.num_heads, sum(sizes)).split(sizes, dim=-1)
        return numbers.contiguous(), scales


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """The tiles that decodes read, for all rows, in the order of their addresses.

    Reading neighbours in memory one after the other takes half the time of a random order.
    """

    address: Tensor  # int64 [J]
    row: Tensor  # int64 [J]: the row that reads the tile
    low: Tensor  # int32 [J]: the first of its tokens that is seen
    high: Tensor  # int32 [J]: one past the last
    of_row: Tensor  # int64 [R, M]: each row's tiles, padded with its first
    is_tile: Tensor  # bool [R, M]: False where of_row is padding
    first_tile: Tensor  # int64 [R]: the number, in its request, of a row's first tile

    @staticmethod
    def of(
        slots: Index,
        lens: Index,
        page_table: NDArray[np.int32],
        page_size: int,
        tile: int,
        window: int | None,
        first_key: int = 0,
    ) -> DecodeTiles:
        """Return the tiles that rows `slots` [R] of the page table read.

        Each row sees the last `window` of its first `lens` tokens. Tokens before `first_key` are left out.
        """
        lows = np.minimum(first_key, lens - 1)
        if window:
            lows = np.maximum(lows, lens - window)
        counts = -(-lens // tile) - lows // tile
        row = np.repeat(np.arange(len(slots)), counts)
        place = ragged_ranges(lows // tile, lows // tile + counts) * tile
        address = tile_address(page_table, slots[row], place, page_size, tile)
        order = np.argsort(address, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))

        column = np.arange(counts.max())
        is_tile = column < counts[:, None]
        begin = (np.cumsum(counts) - counts)[:, None]
        arrays = (
            address[order],
            row[order],
            np.maximum(lows[row] - place, 0)[order].astype(np.int32),
            np.minimum(lens[row] - place, tile)[order].astype(np.int32),
            rank[begin + np.where(is_tile, column, 0)],
            is_tile,
            (lows // tile).astype(np.int64),
        )
        return DecodeTiles(*map(torch.from_numpy, arrays))


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """The tiles that longer spans read, for the layers with one window, as the compiled source reads them."""

    address: Tensor  # int64: the tiles of all spans
    # int64 [S, 4]: a span's first row of the query, its first position, one past its last, and the place
    # among the addresses at which the first tile of its request would stand
    spans: Tensor
    window: int | None

    @staticmethod
    def of(
        first_rows: Index,
        starts: Index,
        stops: Index,
        slots: Index,
        page_table: NDArray[np.int32],
        page_size: int,
        tile: int,
        window: int | None,
    ) -> PromptTiles:
        """Plan the positions [starts, stops) of rows `slots` [S] of the page table."""
        lows = np.zeros_like(starts) if window is None else np.maximum(starts + 1 - window, 0) // tile
        counts = -(-stops // tile) - lows
        place = ragged_ranges(lows, lows + counts) * tile
        address = tile_address(page_table, np.repeat(slots, counts), place, page_size, tile)
        spans = np.stack((first_rows, starts, stops, np.cumsum(counts) - counts - lows), axis=1)
        return PromptTiles(torch.from_numpy(address), torch.from_numpy(spans.astype(np.int64)), window)


@dataclass(frozen=True, slots=True)
class QueryChunk:
    """Query positions of one span that are computed together."""

    tokens: Tensor  # int64 [rows]: rows of its queries in the step
    rows: Tensor  # int64 [padded rows]: the same, padded with the last
    keys: slice  # slice of the span's keys
    first: Tensor  # int32 [padded rows]: the first of these keys that each query sees
    last: Tensor  # int32 [padded rows]: the last of them


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A longer span, as the layers with one window read it."""

    # The step's tokens that form the span, if each of them sees all of it up to itself
    whole: slice | None
    # int64 [padded keys]: the step's tokens that are its keys, if all keys are in this step
    fresh: Tensor | None
    tiles: Tensor | None  # int64: otherwise, the tiles of the cache that hold its keys
    known: int  # keys that exist; the rest are padding
    chunks: tuple[QueryChunk, ...]

    @staticmethod
    def of(
        first_row: int,
        start: int,
        stop: int,
        pages: NDArray[np.int32],
        page_size: int,
        tile: int,
        window: int | None,
        first_key: int = 0,
    ) -> PromptSpan:
        """Plan a request's positions [start, stop), whose first query is row `first_row` of the step."""
        reach = window or stop
        if start:
            base = max(start - reach + 1, 0) // tile * tile
            place = np.arange(base, stop, tile)
            address = tile_address(pages[None], np.zeros_like(place), place, page_size, tile)
            fresh, tiles = None, torch.from_numpy(address)
            num_keys = len(place) * tile
        else:
            base, tiles = 0, None
            fresh = _padded(first_row, stop)
            num_keys = len(fresh)
        chunks = []
        for begin in range(start, stop, QUERY_ROWS):
            end = min(begin + QUERY_ROWS, stop)
            rows = _padded(first_row + begin - start, end - begin)
            low = max(begin - reach + 1 - base, 0) // STEP * STEP
            high = min(_round_up(end - base, STEP), num_keys)
            last = np.minimum(np.arange(begin, begin + len(rows)), end - 1) - base - low
            # A query before the first key sees itself: a row of the mask that hides everything would be NaN
            first = np.maximum(last - (reach - 1), np.minimum(last, max(0, first_key - base - low)))
            seen = (torch.from_numpy(each.astype(np.int32)) for each in (first, last))
            chunks.append(QueryChunk(rows[: end - begin], rows, slice(low, high), *seen))
        sees_all = not start and reach >= stop and not first_key
        whole = slice(first_row, first_row + stop) if sees_all else None
        return PromptSpan(whole, fresh, tiles, stop - base, tuple(chunks))


def _padded(start: int, count: int) -> Tensor:
    """Return consecutive tokens, padded with the last of them to a multiple of STEP."""
    tokens = torch.arange(start, start + _round_up(count, STEP))
    return tokens.clamp_max_(start + count - 1)


def tile_address(
    page_table: NDArray[np.int32], slots: Index, places: Index, page_size: int, tile: int
) -> Index:
    """Return the tile of the cache that holds each of these tokens of a row."""
    page, offset = np.divmod(places, page_size)
    address: Index = page_table[slots, page].astype(np.int64) * (page_size // tile) + offset // tile
    return address


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
