"""Split a step's attention into programs of similar size.

The queries of a span are split into tiles. If there are too few tiles to keep the device busy, the positions
that a tile reads are split into shares as well. All this is arithmetic on the host, once for each step and
window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import ragged_ranges
from kv_cache.pages import Index

TILE_FIELDS, JOIN_FIELDS = 8, 4  # numbers of columns, powers of two


@dataclass(frozen=True, slots=True)
class TileSizes:
    """How large tiles and shares of positions may be.

    A tile has at most `num_queries`. Positions are split into shares that are multiples of `step` and not
    smaller than `least`, so that there are about `num_tiles` in all; or, with `chunk`, into chunks of that
    many positions, one share each. Positions before `first_key` are not read.
    """

    num_queries: int
    step: int
    num_tiles: int
    least: int
    chunk: int = 0
    first_key: int = 0


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """The tables that the kernels read, and how many rows of partial results (parts) they need.

    The columns of a tile are: first row of the packed query, number of queries, position of the first, the
    positions that it reads (first, one past the last), span, first row of its parts or -1, 0. The columns of
    a join are: row of the packed query, first row of its parts, rows between two of its parts, number of
    parts.
    """

    tiles: NDArray[np.int32]  # [n, 8], the tiles that read most first
    joins: NDArray[np.int32]  # [m, 4]
    num_parts: int

    @classmethod
    def of(cls, starts: Index, stops: Index, window: int | None, sizes: TileSizes) -> QueryTiles:
        """Split packed spans; with a window w the query at position p sees positions p-w+1 to p."""
        lens = stops - starts
        num_tiles = -(-lens // sizes.num_queries)
        span = np.repeat(np.arange(len(lens)), num_tiles)
        offset = ragged_ranges(np.zeros_like(num_tiles), num_tiles) * sizes.num_queries
        row = (np.cumsum(lens) - lens)[span] + offset
        count = np.minimum(lens[span] - offset, sizes.num_queries)
        position = starts[span] + offset
        high = position + count
        low = np.minimum(position, sizes.first_key)
        if window is not None:
            low = np.maximum(low, position - window + 1)

        share, num_shares = _shares(low, high, sizes)
        of_tile = np.repeat(np.arange(len(row)), num_shares)
        number = ragged_ranges(np.zeros_like(num_shares), num_shares)
        parted = num_shares > 1
        num_rows = np.where(parted, num_shares * count, 0)
        first_part = np.cumsum(num_rows) - num_rows
        begin = ((low // share)[of_tile] + number) * share
        whole = ~parted[of_tile]
        tiles = np.zeros((len(of_tile), TILE_FIELDS), np.int32)
        tiles[:, 0], tiles[:, 1], tiles[:, 2] = row[of_tile], count[of_tile], position[of_tile]
        tiles[:, 3] = np.where(whole, low[of_tile], np.maximum(low[of_tile], begin))
        tiles[:, 4] = np.where(whole, high[of_tile], np.minimum(high[of_tile], begin + share))
        tiles[:, 5] = span[of_tile]
        tiles[:, 6] = np.where(whole, -1, first_part[of_tile] + number * count[of_tile])
        tiles = tiles[np.argsort(tiles[:, 3] - tiles[:, 4], kind="stable")]
        joins = _joins(row[parted], count[parted], first_part[parted], num_shares[parted])
        return cls(tiles, joins, int(num_rows.sum()))


def _shares(low: Index, high: Index, sizes: TileSizes) -> tuple[int, Index]:
    """Return the positions of a share, and the number of shares of each tile.

    Shares begin at multiples of their size.
    """
    if not sizes.chunk:
        wanted = -(-int((high - low).sum()) // sizes.num_tiles)
        share = max(sizes.least, -(-wanted // sizes.step) * sizes.step)
        return share, -(-high // share) - low // share
    num_shares = -(-high // sizes.chunk) - low // sizes.chunk
    # Chunks are combined in the same way within a program and after it, so only the longest tiles are split,
    # as far as there is room
    order = np.argsort(-num_shares, kind="stable")
    added = np.cumsum(num_shares[order] - 1)
    num_shares[order[added > sizes.num_tiles]] = 1
    return sizes.chunk, num_shares


def _joins(row: Index, count: Index, first_part: Index, num_shares: Index) -> NDArray[np.int32]:
    """Return a join for each query of the tiles that have parts."""
    of_tile = np.repeat(np.arange(len(row)), count)
    number = ragged_ranges(np.zeros_like(count), count)
    columns = (row[of_tile] + number, first_part[of_tile] + number, count[of_tile], num_shares[of_tile])
    return np.stack(columns, 1).astype(np.int32).reshape(-1, JOIN_FIELDS)
