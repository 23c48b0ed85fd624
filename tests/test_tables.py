"""A table that is one test runs every case and names all that fail."""

from __future__ import annotations

import pytest

from tests.each_of import each_of


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
