"""Every two values of two options meet in a case, in far fewer cases than the product has."""

from __future__ import annotations

import itertools

import pytest

from tests.pairs import _covering


@pytest.mark.parametrize(
    "sizes", [(1,), (4,), (2, 2), (5, 4, 4), (4, 5, 4, 2), (9, 2, 3), (1, 3, 1), (2,) * 7]
)
def test_every_two_values_meet(sizes: tuple[int, ...]) -> None:
    options = [[f"{at}{value}" for value in range(size)] for at, size in enumerate(sizes)]
    rows = _covering(options)
    for (one, ours), (other, theirs) in itertools.combinations(enumerate(options), 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(ours, theirs))
    assert all(value in column for column, values in zip(zip(*rows), options) for value in values)
    largest = sorted(sizes)[-2:]
    assert len(rows) <= 2 * largest[0] * largest[-1]
