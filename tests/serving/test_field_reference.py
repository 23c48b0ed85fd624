"""Does the reference of a request's fields say what the checks take?"""

from __future__ import annotations

import json
import math

import pytest

from serving.text.field_reference import FIELDS, RequestField
from serving.text.request_fields import BUDGET, parse_request
from serving.text.request_fields import FIELDS as KNOWN
from tests.serving.test_thinking import text_with_marks

RANGES = [
    pytest.param(each, name, id=name) for each in FIELDS if each.least is not None for name in each.names
]
BESIDE = {"length_penalty": {"beam_width": 2}, "best_of": {"n": 1}}


def parsed(name: str, value: float) -> None:
    text = text_with_marks() if name == BUDGET else None
    parse_request({"id": "a", "prompt_token_ids": [1], **BESIDE.get(name, {}), name: value}, text)


def beyond(value: float, towards: float) -> float:
    """The next value of the same type outside a range."""
    return (
        math.nextafter(value, towards) if isinstance(value, float) else value + int(math.copysign(1, towards))
    )


def test_every_field_is_there_once() -> None:
    names = [name for each in FIELDS for name in each.names]
    assert sorted(names) == sorted(KNOWN)


@pytest.mark.parametrize(("field", "name"), RANGES)
def test_both_ends_of_a_range_are_taken_and_nothing_beyond(field: RequestField, name: str) -> None:
    assert field.least is not None
    if field.exclusive:
        with pytest.raises(ValueError, match="|".join(field.names)):
            parsed(name, field.least)
        parsed(name, math.nextafter(field.least, math.inf))
    else:
        parsed(name, field.least)
        with pytest.raises(ValueError, match="|".join(field.names)):
            parsed(name, beyond(field.least, -math.inf))
    if field.most is not None:
        parsed(name, field.most)
        with pytest.raises(ValueError, match="|".join(field.names)):
            parsed(name, beyond(field.most, math.inf))


@pytest.mark.parametrize(
    "field", [each for each in FIELDS if not each.default], ids=lambda each: each.names[0]
)
def test_a_default_that_is_shown_can_be_sent(field: RequestField) -> None:
    parsed(field.names[0], json.loads(field.default_text))
