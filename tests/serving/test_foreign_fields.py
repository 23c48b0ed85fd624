"""Fields of other engines: those that ask for nothing are taken, the rest is read by our names or refused."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from borders.field_table import FIELDS
from borders.foreign_fields import FOREIGN
from serving.api.schemas import ChatBody, CompletionBody
from tests.each_of import each_of

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT: dict[str, Any] = {"prompt": "Hello"}


def read(body: Any, fields: dict[str, Any]) -> dict[str, Any]:
    own = body.model_validate(fields).model_dump(exclude_unset=True)
    return {name: value for name, value in own.items() if name not in ("messages", "prompt")}


def test_every_foreign_field_is_taken_as_null() -> None:
    assert read(ChatBody, CHAT | dict.fromkeys(FOREIGN.keys() - FIELDS.keys() - {"messages"})) == {}


@each_of(
    "foreign, own",
    [
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"max_new_tokens": 5, "min_new_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
        ({"max_tokens": -1, "n_predict": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 9, "n_predict": 7}, {"max_completion_tokens": 7}),
        ({"max_tokens": 9, "n_predict": 7, "max_new_tokens": 8}, {"max_tokens": 7}),
        (
            {"max_tokens": 5, "max_completion_tokens": 9, "n_predict": 7},
            {"max_tokens": 5, "max_completion_tokens": 5},
        ),
        ({"penalize_nl": False, "presence_penalty": 0}, {"presence_penalty": 0}),
        ({"think": True, "reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"think": "low", "enable_thinking": True}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "high"}, "thinking": {"type": "enabled"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"enabled": True}, "think": True}, {"reasoning_effort": "medium"}),
        ({"think": False, "reasoning_effort": "minimal"}, {"reasoning_effort": "minimal"}),
        (
            {"think": True, "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "medium", "chat_template_kwargs": {"enable_thinking": True}},
        ),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1}),
        ({"regex": "a+"}, {"guided_regex": "a+"}),
        ({"ebnf": 'root ::= "a"'}, {"guided_grammar": 'root ::= "a"'}),
        ({"grammar": 'root ::= "a"'}, {"guided_grammar": 'root ::= "a"'}),
        ({"json_schema": {"type": "object"}}, {"guided_json": {"type": "object"}}),
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        ({"format": {"type": "object"}}, {"guided_json": {"type": "object"}}),
        ({"think": False}, {"reasoning_effort": "none"}),
        ({"enable_thinking": True}, {"reasoning_effort": "medium"}),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            {"reasoning_effort": "medium", "thinking_token_budget": 9},
        ),
        ({"reasoning": {"effort": "low", "exclude": False}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"max_tokens": 9}}, {"thinking_token_budget": 9}),
        ({"reasoning": {"enabled": False}}, {"reasoning_effort": "none"}),
    ],
)
def test_what_means_the_same_is_read_by_our_name(foreign: dict[str, Any], own: dict[str, Any]) -> None:
    assert read(ChatBody, CHAT | foreign) == own


def test_usage_in_a_stream_is_asked_for_by_our_name() -> None:
    asked = ChatBody.model_validate(CHAT | {"stream": True, "usage": {"include": True}})
    assert asked.stream_options is not None
    assert asked.stream_options.include_usage
    beside = {"stream": True, "usage": {"include": True}, "stream_options": {"include_obfuscation": False}}
    asked = ChatBody.model_validate(CHAT | beside)
    assert asked.stream_options is not None
    assert (asked.stream_options.include_usage, asked.stream_options.include_obfuscation) == (True, False)
    with pytest.raises(pydantic.ValidationError, match="usage means stream_options, which is another"):
        ChatBody.model_validate(CHAT | beside | {"stream_options": {"include_usage": False}})


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens"])
def test_minus_one_asks_a_completion_for_as_many_tokens_as_fit(name: str) -> None:
    assert CompletionBody.model_validate(PROMPT | {name: -1}).fills
    assert not CompletionBody.model_validate(PROMPT).fills
    if name != "max_completion_tokens":
        assert not CompletionBody.model_validate(PROMPT | {name: 5}).fills
    both = CompletionBody.model_validate(PROMPT | {"max_tokens": 5} | {"n_predict": -1})
    assert (both.fills, both.max_tokens) == (False, 5)
    with pytest.raises(pydantic.ValidationError, match="_tokens"):
        CompletionBody.model_validate(PROMPT | {name: -1.0})


def test_what_is_nested_more_deeply_than_can_be_compared_is_refused() -> None:
    def deep() -> Any:
        made: Any = 1
        for _ in range(5000):
            made = [made]
        return made

    with pytest.raises(pydantic.ValidationError, match="json_schema means guided_json, which is another"):
        ChatBody.model_validate(CHAT | {"guided_json": {"a": deep()}, "json_schema": {"a": deep()}})


def test_prompts_of_completions_get_their_special_tokens() -> None:
    assert read(CompletionBody, PROMPT | {"add_special_tokens": True}) == {}
    with pytest.raises(pydantic.ValidationError, match="add_special_tokens is not supported"):
        read(CompletionBody, PROMPT | {"add_special_tokens": False})


@each_of(
    "fields, said",
    [
        ({"mirostat": 2}, "mirostat is not supported as llama.cpp has it; `0` is accepted: leave it out"),
        ({"typical_p": 0.9}, "typical_p is not supported"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n is not supported"),
        ({"chat_template": "{{ x }}"}, "chat_template .* null is accepted: the model's own is used"),
        ({"request_id": "a"}, "send it as the header x-request-id"),
        ({"options": {"num_ctx": 1024}}, "send each of them as a field of its own"),
        ({"use_beam_search": True}, "use beam_width"),
        ({"n_probs": 3}, "use logprobs"),
        ({"think": "often"}, "think is not supported"),
        ({"thinking": {"type": "enabled", "depth": 3}}, "thinking is not supported"),
        ({"reasoning": {"exclude": True}}, "reasoning is not supported"),
        ({"reasoning": {"enabled": "false"}}, "reasoning is not supported"),
        ({"reasoning": {"enabled": False, "effort": "high"}}, "reasoning is not supported"),
        ({"reasoning": {"enabled": True, "effort": "none"}}, "reasoning is not supported"),
        ({"reasoning": {"effort": "none", "max_tokens": 500}}, "reasoning is not supported"),
        ({"thinking": {"type": "disabled"}, "thinking_token_budget": 100}, "thinking is not supported"),
        ({"enable_thinking": False, "reasoning": {"max_tokens": 9}}, "enable_thinking is not supported"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking is"),
        ({"guided_json": {"const": 1}, "json_schema": {"const": True}}, "json_schema means guided_json"),
        (
            {"usage": {"include": False}, "stream": True, "stream_options": {"include_usage": True}},
            "usage is not supported",
        ),
        ({"think": True, "reasoning_effort": "none"}, "think means reasoning_effort, which is another"),
        ({"think": False, "reasoning_effort": "high"}, "think means reasoning_effort, which is another"),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking is not supported"),
        ({"penalize_nl": False, "repeat_penalty": 1.1}, "penalize_nl is not supported"),
        ({"presence_penalty": 0.5, "repeat_last_n": 64}, "repeat_last_n is not supported"),
        ({"max_tokens": -1.0}, "max_tokens"),
        ({"keep_alive": []}, "keep_alive is not supported"),
        ({"detokenize": 1}, "detokenize is not supported"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "means repetition_penalty, which is another"),
        ({"regex": "a", "guided_regex": "b"}, "regex means guided_regex, which is another: leave one"),
        ({"n_predict": "5"}, "max_tokens"),
        ({"n_predikt": 5}, 'unknown field "n_predikt"'),
        ({"service_tier": "fast"}, "service_tier"),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=said):
        read(ChatBody, CHAT | fields)


def test_what_only_a_conversation_has_is_refused_in_completions() -> None:
    with pytest.raises(pydantic.ValidationError, match="think means reasoning_effort, which this request"):
        read(CompletionBody, PROMPT | {"think": True})
