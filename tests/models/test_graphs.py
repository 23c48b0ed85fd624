"""Captured steps of decodes: which sizes, and what stands in the rows that no request has."""

from __future__ import annotations

import numpy as np
import pytest

from models.graphs import COLUMNS, SOURCE, _pad, ladder


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("most", [1, 2, 7, 16, 100, 256])
def test_the_ladder_reaches_the_most_and_leaves_at_most_a_page_of_filling(most, page_size):
    sizes = ladder(most, page_size)
    assert sizes[0] == 1
    assert sizes[-1] == most
    steps = np.diff(sizes)
    assert (steps > 0).all()
    assert (steps - 1 < page_size).all()


def test_the_ladder_doubles_within_a_page():
    assert ladder(256, 128) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert ladder(64, 16) == [1, 2, 4, 8, 16, 32, 48, 64]


def test_filling_is_one_token_a_row_at_places_of_its_own_of_the_null_page():
    host = np.full((COLUMNS + 3, 5), 77, dtype=np.int32)
    _pad(host)
    token_ids, positions, write_index, kv_lens, rope_lens = host[:SOURCE]
    assert not token_ids.any()
    assert not positions.any()
    assert write_index.tolist() == [0, 1, 2, 3, 4]
    assert (kv_lens == 1).all()
    assert (rope_lens == 1).all()
    assert not host[SOURCE:].any()
