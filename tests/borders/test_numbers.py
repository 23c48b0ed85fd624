"""A number from outside is read within its bounds, and nothing else is taken for a number."""

from __future__ import annotations

import math
from typing import Any

import pytest

from borders.numbers import POSITIVE, Range, integers, numbers

SMALL, SHARE = integers(-5, 5), Range(float, 0.0, 1.0, is_open=True)
NO_NUMBERS = [None, True, False, "1", b"1", [1], {}, math.nan, math.inf, -math.inf, 10**400, -(10**400)]


@pytest.mark.parametrize(
    ("allowed", "given", "taken"),
    [
        (SMALL, [-5, 0, 5], [-5, 0, 5]),
        (numbers(0, 1), [0, 1, 0.5], [0.0, 1.0, 0.5]),
        (SHARE, [1e-300, 1], [1e-300, 1.0]),
        (POSITIVE, [5e-324, 10**300], [5e-324, 1e300]),
        (Range(int, 1, 9, also=-1), [-1, 1, 9], [-1, 1, 9]),
    ],
    ids=str,
)
def test_a_value_is_read_within_its_bounds(allowed: Range[Any], given: list[Any], taken: list[Any]) -> None:
    found = [allowed.read(each) for each in given]
    assert found == taken
    assert {type(each) for each in found} == {allowed.kind}
    assert [allowed.read(each) for each in NO_NUMBERS] == [None] * len(NO_NUMBERS)


def test_what_lies_beyond_a_bound_is_no_number_of_the_range() -> None:
    assert [SMALL.read(each) for each in (-6, 6, 1.0)] == [None] * 3
    assert [SHARE.read(each) for each in (0, 0.0, math.nextafter(1, 2))] == [None] * 3
    assert [Range(int, 1, 9, also=-1).read(each) for each in (0, -2, 10)] == [None] * 3


@pytest.mark.parametrize(
    ("allowed", "given", "taken"),
    [
        (SMALL, ["-5", "05", "6", "1.0", "1e0", "٥", "", "-", " 1", "9" * 5000], [-5, 5, *[None] * 8]),
        (numbers(0, 9), ["0", "1e0", ".5", "nan", "inf", "٥", "", "x"], [0.0, 1.0, 0.5, *[None] * 5]),
        (Range(float, 1.0, 9.0, also=math.inf), ["inf", "9", "10", "9" * 400], [math.inf, 9.0, None, None]),
    ],
    ids=str,
)
def test_a_text_is_read_so_too(allowed: Range[Any], given: list[str], taken: list[Any]) -> None:
    assert [allowed.parse(each) for each in given] == taken


def test_the_words_of_a_range_say_its_bounds_exactly() -> None:
    assert str(integers(0, 2**63 - 1)) == "an integer from 0 to 9223372036854775807"
    assert str(numbers(0.001, 1048576.0, "seconds")) == "a number from 0.001 to 1048576 seconds"
    assert str(SHARE) == "a number above 0, at most 1"
    assert str(Range(int, 1, 9, also=-1)) == "an integer from 1 to 9, or -1"
