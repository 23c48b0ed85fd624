"""Every interface takes the fields that the table declares for it.

Each is taken within its bounds and has its declared default.
"""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from borders.field_table import FIELDS, RequestField, taken_by
from borders.field_types import LAST_ID, Numeric
from borders.refusal import BadRequest
from continuous_batching.request import SamplingParams
from serving.api.embeddings import EmbeddingsBody
from serving.api.responses import ResponsesBody
from serving.api.schemas import ChatBody, CompletionBody, TokenizeBody
from serving.api.scores import RerankBody, ScoreBody
from serving.outputs import VllmSamplingParams
from serving.text.request_fields import BUDGET, parse_request
from tests.each_of import each_of
from tests.serving.test_thinking import text_with_marks

BESIDE = {
    "length_penalty": {"beam_width": 2},
    "early_stopping": {"beam_width": 2},
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"max_tokens": LAST_ID},
}
BODIES = {
    "completions": [CompletionBody],
    "chats": [ChatBody],
    "responses": [ResponsesBody],
    "embeddings": [EmbeddingsBody],
    "scores": [ScoreBody, RerankBody],
    "tokenize": [TokenizeBody],
}


def parsed(name: str, value: object) -> None:
    text = text_with_marks() if name == BUDGET else None
    given = {"messages": [{"role": "user", "content": "Hi"}]} if text else {"prompt_token_ids": [1]}
    parse_request({"id": "a", **given, **BESIDE.get(name, {}), name: value}, text)


def beyond(value: float, towards: float, kind: Numeric) -> float:
    """The next value of the same type that the field may not have."""
    if isinstance(value, float) or kind.range.kind is float:
        return math.nextafter(value, towards)
    found = value + int(math.copysign(1, towards))
    return beyond(found, towards, kind) if found in (kind.zero, kind.range.also) else found


@each_of("field", [each for each in FIELDS.values() if isinstance(each.kind, Numeric)])
def test_both_ends_of_a_range_are_taken_and_nothing_beyond(field: RequestField) -> None:
    assert isinstance(field.kind, Numeric)
    limits = field.kind.range
    least = math.nextafter(limits.least, math.inf) if limits.is_open else limits.least
    for end, outside in (
        (least, beyond(least, -math.inf, field.kind)),
        (limits.most, beyond(limits.most, math.inf, field.kind)),
    ):
        parsed(field.name, end)
        with pytest.raises(BadRequest) as refusal:
            parsed(field.name, outside)
        assert refusal.value.field == field.name
        if field.attribute:  # a peer and a recording are held to the same bound
            with pytest.raises(BadRequest, match=field.name):
                SamplingParams(**{field.attribute: outside})


@each_of("field", [each for each in FIELDS.values() if each.default is not None])
def test_a_default_that_is_shown_can_be_sent(field: RequestField) -> None:
    if field.name not in {each.name for each in taken_by("tokenize")} | {"parallel_tool_calls"}:
        parsed(field.name, field.default)  # the others need a chat template
    if field.attribute:
        assert getattr(SamplingParams(), field.attribute) == field.default


def test_an_interface_takes_the_fields_that_name_it() -> None:
    for form, bodies in BODIES.items():
        for body in bodies:
            assert {each.name for each in FIELDS.values() if form in each.forms} <= body.model_fields.keys()
    shared = {"model", "stream", "service_tier", "stream_options", "return_token_ids"}
    assert set(CompletionBody.model_fields) - FIELDS.keys() == shared | {"echo"}
    assert set(ChatBody.model_fields) - FIELDS.keys() == shared
    assert {each.name for each in fields(VllmSamplingParams)} == {each.name for each in taken_by("Python")}
    with pytest.raises(TypeError, match="temprature"):
        VllmSamplingParams(temprature=1)
