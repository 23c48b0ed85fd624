"""A table that is one test runs every case and names all that fail; of its options, every two values meet."""

from __future__ import annotations

import itertools

import pytest

from tests.each_of import each_of
from tests.pairs import _covering


def test_every_case_runs_and_all_that_fail_are_named(tmp_path: object) -> None:
    ran: list[tuple[int, str]] = []

    @each_of("word", ["a", "b"])
    @each_of("number, factor", [(1, 2), (3, 4)])
    def table(word: str, number: int, factor: int, tmp_path: object) -> None:
        ran.append((number * factor, word))
        assert word == "a", "is b"
        if number == 3:
            pytest.skip("would hide the rest")

    with pytest.raises(AssertionError) as failed:
        table(tmp_path=tmp_path)
    assert ran == [(2, "a"), (12, "a"), (2, "b"), (12, "b")]
    said = str(failed.value)
    assert said.startswith("2 of 2 cases fail\nword='a': AssertionError: 1 of 2 cases fail\nnumber=3, factor")
    assert "number=1, factor=2: AssertionError: is b" in said
    assert said.count("would hide the rest") == 1


def test_a_table_all_of_which_skips_is_skipped_and_one_without_a_case_is_none() -> None:
    with pytest.raises(pytest.skip.Exception, match="no device"):
        each_of("number", [1, 2])(lambda number: pytest.skip("no device"))()
    with pytest.raises(AssertionError, match="there is no case"):
        each_of("number", [])


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
