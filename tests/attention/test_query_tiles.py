"""Every position that a query sees is read once, and every part is joined once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attention.cuda.query_tiles import QueryTiles, TileSizes
from tests.each_of import each_of
from tests.thorough import cases

STEP = 16


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, int | None, TileSizes]:
    rng = np.random.default_rng(seed)
    num_spans = int(rng.integers(1, 9))
    starts = rng.integers(0, 300, num_spans) * rng.integers(0, 2, num_spans)
    stops = starts + np.where(rng.random(num_spans) < 0.6, 1, rng.integers(1, 90, num_spans))
    window = None if rng.random() < 0.5 else int(rng.integers(1, 120))
    chunk = int(rng.choice([0, 0, STEP, 4 * STEP]))
    return (
        starts,
        stops,
        window,
        TileSizes(int(rng.choice([1, 5, 16])), STEP, int(rng.integers(1, 40)), 2 * STEP, chunk),
    )


def read(tiles: QueryTiles, first_rows: np.ndarray) -> tuple[dict[tuple[int, int], list[int]], list[int]]:
    """The positions that each row's query is given, by (row, row of parts or -1); and the parts written."""
    seen: dict[tuple[int, int], list[int]] = {}
    written = []
    for row, count, position, low, high, span, part, _ in tiles.tiles.tolist():
        assert first_rows[span] <= row
        assert low < high
        for query in range(count):
            own = range(low, min(high, position + query + 1))
            seen[row + query, part + query if part >= 0 else -1] = list(own)
            written += [part + query] if part >= 0 else []
    return seen, written


@each_of("seed", range(cases(30, 60)))
def test_each_query_is_given_what_it_sees_once(seed: int) -> None:
    starts, stops, window, cut = drawn(seed)
    tiles = QueryTiles.of(starts, stops, window, cut)
    lens = stops - starts
    first_rows = np.cumsum(lens) - lens
    seen, written = read(tiles, first_rows)
    assert sorted(written) == list(range(tiles.num_parts))
    joined = {
        row: [first + n * stride for n in range(count)] for row, first, stride, count in tiles.joins.tolist()
    }
    assert sorted(part for parts in joined.values() for part in parts) == sorted(written)
    for span, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist())):
        for position in range(start, stop):
            row = int(first_rows[span]) + position - start
            given = [seen[row, part] for part in joined.get(row, [-1])]
            flat = [each for part in given for each in part]
            least = 0 if window is None else max(0, position - window + 1)
            assert flat == list(range(flat[0], position + 1)), "a position twice, out of order or left out"
            assert flat[0] <= least
            assert all(part[0] % cut.step == 0 for part in given[1:] if part), "a part begins within a step"


@each_of("seed", range(cases(30, 60)))
def test_there_are_no_more_tiles_than_asked_for(seed: int) -> None:
    starts, stops, window, cut = drawn(seed)
    tiles = QueryTiles.of(starts, stops, window, cut)
    whole = int((-(-(stops - starts) // cut.num_queries)).sum())
    assert whole <= len(tiles.tiles) <= cut.num_tiles + (1 if cut.chunk or window is None else 2) * whole
    work = tiles.tiles[:, 4] - tiles.tiles[:, 3]
    assert (np.diff(work) <= 0).all(), "the longest do not come first"


def test_few_long_decodes_are_shared_out_and_many_are_not() -> None:
    few = QueryTiles.of(np.array([1023]), np.array([1024]), None, TileSizes(1, 64, 66, 128))
    assert len(few.tiles) == 8
    assert len(few.joins) == 1
    starts = np.full(256, 1023)
    many = QueryTiles.of(starts, starts + 1, None, TileSizes(1, 64, 66, 128))
    assert len(many.tiles) == 256
    assert not len(many.joins)


def test_chunks_are_shared_out_by_whole_chunks_the_longest_first() -> None:
    stops = np.array([100, 1000, 300])
    tiles = QueryTiles.of(stops - 1, stops, None, TileSizes(1, 16, 9, 16, chunk=100))
    parted = tiles.tiles[tiles.tiles[:, 6] >= 0]
    assert set(parted[:, 5].tolist()) == {1}
    assert sorted(parted[:, 3].tolist()) == list(range(0, 1000, 100))


@each_of("seed", range(20))
def test_what_lies_before_the_first_key_is_not_read(seed: int) -> None:
    starts, stops, _, cut = drawn(seed)
    starts, stops = starts + 1, stops + 1  # no query stands there
    tiles = QueryTiles.of(starts, stops, None, replace(cut, first_key=1))
    assert tiles.tiles[:, 3].min() == 1
    lens = stops - starts
    seen, _ = read(tiles, np.cumsum(lens) - lens)
    assert sum(map(len, seen.values())) == sum(
        position for start, stop in zip(starts, stops) for position in range(start, stop)
    )
