"""An OpenAI client gets tool calls, whole or as a stream, and can answer them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.each_of import each_of
from tests.lazy import openai
from tests.patience import PATIENCE_S
from tests.serving.server import Server

QUESTION: list[Any] = [{"role": "user", "content": "What is 12+30?"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": [30]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
NAMED: Any = {"type": "function", "function": {"name": "add"}}


@pytest.fixture
def client(thinker: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{thinker.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def test_a_stream_adds_up_to_the_same_calls(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": [ADD],
        "tool_choice": NAMED,
        "temperature": 0,
        "max_tokens": 100,
        "parallel_tool_calls": False,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    pieces: list[Any] = []
    reasons = []
    for event in client.chat.completions.create(stream=True, **asked):
        pieces += event.choices[0].delta.tool_calls or []
        assert not event.choices[0].delta.content
        reasons.append(event.choices[0].finish_reason)
    assert [each for each in reasons if each is not None] == ["tool_calls"] == reasons[-1:]
    assert pieces[0].id
    assert pieces[0].function.name == "add"
    assert all(each.id is None and each.function.name is None and each.index == 0 for each in pieces[1:])
    assert len(pieces) > 2, "the arguments come in pieces"
    assert "".join(each.function.arguments for each in pieces) == call.function.arguments


def test_the_clients_own_helper_reads_the_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(
        model="tiny", messages=QUESTION, temperature=0, max_tokens=100, **asked
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    parsed: Any = final.message.tool_calls[0].function.parsed_arguments
    assert parsed["b"] == 30


def test_text_stays_text_where_tools_may_be_called(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    plain = client.chat.completions.create(**asked).choices[0]
    loose = {"type": "function", "function": {"name": "add"}}
    for tools in ([loose], [ADD]):  # ADD is strict: a grammar holds for calls, and for no other text
        beside = client.chat.completions.create(tools=tools, **asked).choices[0]
        assert beside.message.content == plain.message.content
        assert (beside.finish_reason, beside.message.tool_calls) == (plain.finish_reason, None)


@each_of(
    "fields, said",
    [
        ({"tools": [ADD, ADD]}, 'tools[1].function.name is "add", which an earlier tool has'),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            'tool_choice names "sub"',
        ),
        ({"tools": [ADD], "tool_choice": "always"}, 'tool_choice is "always"; it must be "none", "auto"'),
        ({"tool_choice": "required"}, 'tool_choice is "required", and there are no tools'),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name is"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "it must be 1 to 128 letters,"),
        *(
            ({"tools": [tool]}, 'must be {"type": "function"')
            for tool in ({"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}})
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
                ]
            },
            'the JSON schema in tools uses the keyword "not"',
        ),
        (
            {"tools": [ADD], "response_format": {"type": "json_object"}, "tool_choice": "required"},
            "response_format and",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(client: openai.OpenAI, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=QUESTION, **fields)
    assert said in str(refused.value.message)


def test_what_the_prompt_opened_is_thought(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    open_ended = {"add_generation_prompt": False, "continue_final_message": True}
    messages: list[Any] = [*QUESTION, {"role": "assistant", "content": "<think>"}]
    whole = (
        client.chat.completions.create(messages=messages, extra_body=open_ended, **asked).choices[0].message
    )
    assert whole.content is None
    thoughts = whole.model_extra
    assert thoughts is not None
    assert thoughts["reasoning_content"] == thoughts["reasoning"] != ""
    asked["tools"] = [ADD]  # its grammar lets text come first
    streamed, content = "", ""
    events = client.chat.completions.create(messages=messages, extra_body=open_ended, stream=True, **asked)
    for event in events:
        delta = event.choices[0].delta
        streamed += (delta.model_extra or {}).get("reasoning_content", "")
        content += delta.content or ""
    assert (streamed, content) == (thoughts["reasoning_content"], "")
