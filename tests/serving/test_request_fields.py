"""A request is understood as it is meant, or refused with the name of its field."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuous_batching.request import SamplingParams
from kv_cache.page_keys import page_salt
from serving.text.request_fields import parse_request, text_options
from serving.text.tokenizer import Text, TextOptions
from tests.each_of import each_of
from tests.thorough import cases

IDS = {"id": "a", "prompt_token_ids": [1, 2]}


def test_every_field_arrives(texts: dict[str, Text]) -> None:
    text = texts["byte_level"]
    same: dict[str, Any] = {"max_tokens": 30, "min_tokens": 2, "temperature": 0.5, "top_k": 4, "top_p": 0.9}
    same |= {"min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": -0.1}
    same |= {"seed": 7, "logprobs": 3, "ignore_eos": True, "max_draft_tokens": 0}
    own = {"logit_bias": {"123": -1.5, "4": 2}, "stop": ["\n", "end"], "stop_token_ids": [5]}
    beside = {"tenant": "us", "cache_salt": "salt", "priority": -3, "timeout_s": 2.5}
    request = parse_request({"id": "a", "prompt": "Hello", "arrival_s": 2, **same, **own, **beside}, text)
    assert request.id == "a"
    assert request.prompt.tolist() == text.encode("Hello")
    assert (request.arrival_s, request.tenant, request.cache_salt) == (2.0, "us", page_salt("salt"))
    assert (request.priority, request.timeout_s) == (-3, 2.5)
    assert request.params == SamplingParams(
        **same, logit_bias={123: -1.5, 4: 2.0}, stop=("\n", "end"), stop_token_ids=(5,)
    )


def test_the_fields_of_a_search_and_of_samples() -> None:
    search = {"beam_width": 4, "length_penalty": 0.5, "early_stopping": "never", "n": 3, "temperature": 0}
    request = parse_request(IDS | search, None)
    assert request.params == SamplingParams(
        beam_width=4, length_penalty=0.5, early_stopping="never", temperature=0.0
    )
    assert request.followers == []
    request = parse_request(IDS | {"n": 3, "seed": 7}, None)
    assert [each.id for each in request.followers] == ["a#1", "a#2"]
    assert [each.params.seed for each in (request, *request.followers)] == [7, 8, 9]


def test_each_form_of_prompt(texts: dict[str, Text]) -> None:
    text = texts["byte_level"]
    messages = [{"role": "user", "content": "Hi"}]
    assert parse_request({"id": "a", "messages": messages}, text).prompt.tolist() == text.chat(messages)
    request = parse_request(IDS, None)
    assert request.prompt.tolist() == [1, 2]
    assert request.prompt.dtype == np.int32
    assert request.params == SamplingParams()


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(("prompt", "messages", "temperature", "stop", "logprobs", "seed", "tenant"))
    assert parse_request({**IDS, **nulls}, None).params == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": 0}, 0),
        ({"logprobs": 5}, 5),
    ],
)
def test_logprobs_as_in_completions_and_as_in_chats(fields: dict[str, Any], num_top: int | None) -> None:
    assert parse_request({**IDS, **fields}, None).params.logprobs == num_top


def test_names_that_mean_the_same() -> None:
    request = parse_request({**IDS, "max_tokens": 3, "max_completion_tokens": 9, "user": "u"}, None)
    assert request.params.max_tokens == 9
    assert request.tenant == "u"
    assert parse_request({**IDS, "stop_token_ids": []}, None).params.stop_token_ids == ()


def test_one_stop_string_needs_no_list(texts: dict[str, Text]) -> None:
    assert parse_request({**IDS, "stop": "\n"}, texts["byte_level"]).params.stop == ("\n",)


@each_of(
    "fields, said",
    [
        ({"temprature": 1}, 'unknown field "temprature"; did you mean temperature?'),
        ({"zzz": 1}, 'unknown field "zzz"; docs/request_fields.md lists the fields'),
        ({"id": None}, "id is missing"),
        ({"id": 7}, "id is 7; it must be a string"),
        (
            {"prompt": "a"},
            "exactly one of prompt, messages and prompt_token_ids must be given, not prompt and",
        ),
        ({"prompt_token_ids": None}, "must be given, not none of them"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty; it must hold at least one token"),
        ({"prompt_token_ids": "1"}, 'prompt_token_ids is "1"; it must be a list of token ids'),
        (
            {"prompt_token_ids": [1, "2"]},
            'prompt_token_ids[1] is "2"; it must be a token id, an integer from 0 to',
        ),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids[1] is true; it must be a token id"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids[0] is -1; it must be a token id"),
        ({"prompt_token_ids": None, "prompt": "a"}, "prompt needs a tokenizer, and this model has none"),
        ({"prompt_token_ids": None, "messages": [{}]}, "messages needs a tokenizer, and this model has none"),
        ({"stop": "x"}, "stop needs a tokenizer, and this model has none; use stop_token_ids"),
        ({"stop": [1]}, "stop is [1]; it must be a string or a list of strings"),
        ({"temperature": "hot"}, 'temperature is "hot"; it must be a number'),
        ({"temperature": True}, "temperature is true; it must be a number"),
        ({"temperature": float("nan")}, "temperature is NaN; it must be a number"),
        ({"temperature": 10**400}, "it must be a number"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be an integer"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens is 5; it must be from 0 to max_tokens (4)"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be true or false"),
        ({"logprobs": 1.0}, "logprobs is 1.0; it must be an integer"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs: true, not false"),
        ({"logprobs": 2, "top_logprobs": 2}, "top_logprobs needs logprobs: true, not 2"),
        ({"logit_bias": [1]}, "logit_bias is [1]; it must be an object of token ids and numbers"),
        ({"logit_bias": {"a": 1}}, 'an object whose keys are token ids; "a" is none'),
        ({"logit_bias": {"5": "x"}}, 'logit_bias[5] is "x"; it must be a number'),
        ({"logit_bias": {"5": 101}}, "logit_bias[5] is 101; it must be a number from -100 to 100"),
        ({"tenant": "a", "user": "b"}, "tenant and user are two names of one field"),
        ({"cache_salt": 5}, "cache_salt is 5; it must be a string"),
        ({"n": 3, "best_of": 2}, "best_of is 2; it must be an integer from n (3) to 128"),
        ({"beam_width": 4, "best_of": 4}, "best_of is 4; it must be left out beside beam_width"),
        ({"beam_width": 4, "n": 5}, "n is 5; it must be at most beam_width (4)"),
        ({"beam_width": 1}, "beam_width is 1; it must be 0"),
        (
            {"beam_width": 4, "early_stopping": "soon"},
            'early_stopping is "soon"; it must be true, false or "never"',
        ),
        ({"beam_width": 4, "temperature": 0.7}, "temperature is 0.7; it must be left out beside beam_width"),
        ({"beam_width": 4, "top_p": 0.9}, "top_p is 0.9; it must be left out beside beam_width"),
        ({"length_penalty": 2}, "length_penalty is 2.0; it must be left out without beam_width"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - its whole text is compared below
        parse_request({**IDS, **fields}, None)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_an_empty_prompt_is_refused(texts: dict[str, Text]) -> None:
    for fields in ({"prompt": ""}, {"messages": []}):
        with pytest.raises(ValueError, match="is empty; it must hold at least one token"):
            parse_request({"id": "a", **fields}, texts["byte_fallback"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["id", "prompt", "messages", "prompt_token_ids", "stop", "logit_bias"]
NAMES += ["seed", "top_k", "logprobs", "beam_width", "early_stopping", "x"]


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), st.booleans())
@settings(max_examples=cases(100, 400), deadline=None)
def test_anything_else_is_a_request_or_a_refusal(
    texts: dict[str, Text], fields: dict[str, Any], bare: bool
) -> None:
    with contextlib.suppress(ValueError):
        assert len(parse_request(fields, None if bare else texts["byte_level"]).prompt)


def test_how_an_answer_is_shown_is_parted_from_what_is_computed(texts: dict[str, Text]) -> None:
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert parse_request(IDS | shown, None).params == SamplingParams()
    assert text_options(IDS | shown) == TextOptions(
        skip_special_tokens=False, include_stop_str_in_output=True
    )
    chat = {"messages": [{"role": "user", "content": "Hi"}], "skip_special_tokens": None}
    assert text_options(chat) == TextOptions(is_chat=True, start=True)
    with pytest.raises(ValueError, match="skip_special_tokens is 1; it must be true or false"):
        parse_request(IDS | {"skip_special_tokens": 1}, None)
