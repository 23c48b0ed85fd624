"""OpenAI's client gets its responses, whole or as a stream.

It can send them back with what it answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel

from tests.each_of import each_of
from tests.lazy import openai
from tests.patience import PATIENCE_S
from tests.serving.server import Server
from tests.serving.test_response_items import events_adapter
from tests.serving.test_tools import ADD as CHATS_ADD

ADD: Any = {"type": "function", **CHATS_ADD["function"]}
NAMED: Any = {"type": "function", "name": "add"}


class Sum(BaseModel):
    left: Literal[12]
    right: Literal[30]


@pytest.fixture
def client(thinker: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{thinker.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def ask(client: openai.OpenAI, given: Any = "What is 12+30?", **fields: Any) -> Any:
    return client.responses.create(model="tiny", input=given, temperature=0, **fields)


def test_a_response_is_the_answer_of_a_chat(client: openai.OpenAI) -> None:
    system, user = ({"role": each, "content": "What is 12+30?"} for each in ("system", "user"))
    fields: dict[str, Any] = {"model": "tiny", "temperature": 0}
    chat = client.chat.completions.create(messages=[system, user], **fields)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "What is 12+30?"}]}]
    first = ask(client, instructions="What is 12+30?", metadata={"a": "b"}, store=True)
    for each in (first, ask(client, parts, instructions="What is 12+30?")):
        assert each.output_text == chat.choices[0].message.content
        assert (each.status, each.model, each.error) == ("completed", "tiny", None)
        assert chat.usage is not None
        assert each.usage is not None
        assert each.usage.input_tokens == chat.usage.prompt_tokens
        assert each.usage.output_tokens == chat.usage.completion_tokens
    assert first.metadata == {"a": "b"}
    assert first.instructions == "What is 12+30?"


def test_what_is_sent_is_what_the_client_s_types_say(thinker: Server) -> None:
    """By pydantic's strict reading, which the client itself leaves out."""
    body: dict[str, Any] = {"model": "tiny", "input": "What is 12+30?", "temperature": 0}
    body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    url = f"{thinker.url}/v1/responses"
    whole = httpx.post(url, json=body, timeout=PATIENCE_S).json()
    response = openai.types.responses.Response.model_validate(whole)
    told = response.output[0].content[0].logprobs
    assert told is not None
    assert "".join(each.token for each in told).removesuffix("</s>").strip() == response.output_text
    assert {len(each.top_logprobs) for each in told} == {2}
    lines = httpx.post(url, json=body | {"stream": True}, timeout=PATIENCE_S).text.split("\n\n")
    assert lines.pop() == ""
    events = []
    for line in lines:
        kind, _, data = line.partition("\n")
        events.append(events_adapter().validate_json(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1].type}"
    assert [each.sequence_number for each in events] == [*range(len(events))]
    last: Any = events[-1]
    assert last.response.output_text == response.output_text
    streamed = [one for each in events if each.type == "response.output_text.delta" for one in each.logprobs]
    assert [each.token for each in streamed] == [each.token for each in told][: len(streamed)]


def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    whole = ask(client, max_output_tokens=3)
    assert whole.status == whole.output[-1].status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 3
    asked: dict[str, Any] = {"model": "tiny", "input": "What is 12+30?", "temperature": 0}
    last = list(client.responses.create(stream=True, max_output_tokens=3, **asked))[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text


def test_the_clients_helpers_parse_a_form(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "What is 12+30?", "temperature": 0}
    parsed = client.responses.parse(text_format=Sum, **asked)
    assert parsed.output_parsed == Sum(left=12, right=30)
    with client.responses.stream(text_format=Sum, **asked) as stream:
        kinds = {each.type for each in stream}
        assert stream.get_final_response().output_parsed == Sum(left=12, right=30)
    assert "response.output_text.delta" in kinds
    free = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=9)
    assert free.output_text.startswith("{")


def test_an_agent_calls_and_answers(client: openai.OpenAI) -> None:
    given: list[Any] = [{"role": "user", "content": "What is 12+30?"}]
    first = ask(client, given, tools=[ADD], tool_choice=NAMED)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("add", "completed")
    values = json.loads(call.arguments)
    given += first.output
    result = str(values["a"] + values["b"])
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    given.append({"role": "user", "content": "What is 12+30?"})
    last = ask(client, given, tools=[ADD], tool_choice="none")
    assert last.output_text
    assert [each.type for each in last.output] == ["message"]
    with client.responses.stream(
        model="tiny", input=given[:1], tools=[ADD], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = [each.type.removeprefix("response.") for each in stream]
        (streamed,) = stream.get_final_response().output
    assert kinds[2] == "output_item.added"
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert streamed.type == "function_call"
    assert isinstance(streamed.parsed_arguments, dict)
    assert streamed.parsed_arguments["b"] == 30


def test_a_parsed_response_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.parse(model="tiny", input="Hello", text_format=Sum)
    given: list[Any] = [{"role": "user", "content": "Hello"}, *first.output]
    assert ask(client, [*given, {"role": "user", "content": "Hello"}]).status == "completed"


@each_of(
    "fields, said, param",
    [
        ({"previous_response_id": "resp_1"}, "send the items of earlier ones in input", None),
        ({"conversation": "conv_1"}, "conversation is not supported", None),
        ({"background": True}, "background is not supported; only false is accepted", None),
        ({"truncation": "auto"}, 'only "disabled" is accepted', None),
        ({"client_metadata": "a"}, "only an object is accepted", None),
        ({"include": ["file_search_call.results"]}, 'include[0] is "file_search_call.results"', None),
        ({"top_logprobs": 2}, "top_logprobs needs", None),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary is not supported", None),
        (
            {"reasoning": {"effort": 1}},
            'reasoning.effort is 1; it must be "none", "minimal"',
            "reasoning.effort",
        ),
        ({"input": []}, "input is empty", None),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            'input[0].type is "item_reference"',
            "input",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input[0].content[0]",
            None,
        ),
        ({"input": [{"role": "user", "text": "a"}]}, 'input[0] has no "text"', "input"),
        ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role", "input"),
        ({"text": {"format": {"type": "xml"}}}, 'text.format.type is "xml"', None),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": {"not": {}}}}},
            'the JSON schema in text.format uses the keyword "not"',
            "text.format",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is", "tools"),
        ({"tools": [ADD | {"defer_loading": True}]}, 'tools[0] has no "defer_loading"', "tools"),
        ({"metadata": {"a": "\ud83d"}}, "metadata is not Unicode text", None),
        (
            {"text": {"format": {"type": "json_schema", "name": "\ud83d", "schema": {}}}},
            "text is not Unicode text",
            None,
        ),
        ({"tools": [ADD], "tool_choice": NAMED | {"x": "\ud83d"}}, "tool_choice is not Uni", "tool_choice"),
        ({"max_output_tokens": 10**6}, "maximum context length", "max_output_tokens"),
        ({"max_tokens": 3}, "unknown field", None),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], said: str, param: str | None
) -> None:
    body = json.dumps({"model": "tiny", "input": "Hello"} | fields)  # with halves of pairs, as the client's
    sent: Any = {"headers": {"content-type": "application/json"}}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post("/responses", content=body.encode(), options=sent, cast_to=object)
    assert said in refusal.value.message
    assert refusal.value.param == (param or next(iter(fields)))


def test_what_asks_for_nothing_is_accepted(client: openai.OpenAI) -> None:
    response = ask(
        client,
        "Hello",
        store=False,
        background=False,
        truncation="disabled",
        service_tier="auto",
        user="a",
        safety_identifier="b",
        prompt_cache_key="c",
        max_tool_calls=3,
        max_output_tokens=2,
        text={"verbosity": "low", "format": {"type": "text"}},
        previous_response_id=None,
        reasoning={"effort": "low", "summary": "auto"},
        extra_body={"client_metadata": {"x-codex-installation-id": "d"}},
    )
    assert (response.service_tier, response.truncation, response.user) == ("default", "disabled", "a")


def test_thoughts_come_back_in_the_field_that_a_client_keeps_unread(agent: Server) -> None:
    """As Vercel's client and OpenAI's agents send them where nothing is stored."""
    asked: dict[str, Any] = {"model": "agent", "temperature": 0, "include": ["reasoning.encrypted_content"]}
    with openai.OpenAI(
        base_url=f"{agent.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as client:
        given: list[Any] = [{"role": "user", "content": "What does the lamp cost?"}]
        first = client.responses.create(input=given, **asked)
        thoughts, said = first.output
        assert (thoughts.type, said.type) == ("reasoning", "message")
        counts = []
        for held in (
            {"type": "reasoning", "summary": [], "encrypted_content": thoughts.encrypted_content},
            {"type": "reasoning", "summary": [], "content": [each.to_dict() for each in thoughts.content]},
            {"type": "reasoning", "summary": [], "encrypted_content": "of another service"},
        ):
            answer = client.responses.create(input=[*given, held, said.to_dict(), *given], **asked)
            counts.append(answer.usage.input_tokens)
    assert counts[0] == counts[1]
