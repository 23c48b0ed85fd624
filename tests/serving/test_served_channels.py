"""OpenAI's client reads thoughts, answers and calls of a model with channels, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.lazy import openai
from tests.patience import PATIENCE_S
from tests.serving.channel_model import tokenizer, write_model
from tests.serving.server import Server
from tests.serving.test_tools import ADD, CLOCK, QUESTION

FORM = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "is_it": {"type": "boolean"}},
    "required": ["kind", "is_it"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": FORM}}
# The weights are random: so that a message ends at some time, and so that there is something to think
ENDS = {str(tokenizer().token_to_id("<|end|>")): 6}
ASKED: dict[str, Any] = {"model": "gpt-oss", "temperature": 1, "max_tokens": 900, "logit_bias": ENDS}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("gpt_oss"))
    server = Server(
        "recipes/gpt_oss/gpt_oss_20b_cpu.yaml", f"model.path={folder}", "model.weights=random",
        "cache.memory_gib=null", "cache.num_pages=400", "device.compile=false",
        "server.model_names=[gpt-oss]",
        environment={"MODELS": "/none"},
    ).ready()  # fmt: skip
    yield server
    assert server.close() == 0


@pytest.fixture
def client(served: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def said(client: openai.OpenAI, **fields: Any) -> tuple[str, str, list[list[str]], str]:
    """Thoughts, content, calls and why it ended, of a whole answer and of its stream, which agree."""
    one = client.chat.completions.create(messages=QUESTION, **ASKED, **fields).choices[0]
    extra = one.message.model_extra or {}
    calls = [[each.function.name, each.function.arguments] for each in one.message.tool_calls or []]
    thoughts, content, found, reason = "", "", list[list[str]](), ""
    for event in client.chat.completions.create(messages=QUESTION, stream=True, **ASKED, **fields):
        delta = event.choices[0].delta
        thoughts += (delta.model_extra or {}).get("reasoning_content", "")
        content += delta.content or ""
        for call in delta.tool_calls or []:
            found += [[call.function.name, ""]] if call.id else []
            found[call.index][1] += call.function.arguments
        reason = event.choices[0].finish_reason or reason
    whole = (extra.get("reasoning_content", ""), one.message.content or "", calls, one.finish_reason)
    assert (thoughts, content, found, reason) == whole
    assert not any(mark in thoughts + content for mark in ("<|start|>", "<|channel|>", "<|end|>"))
    return whole


@pytest.mark.slow
def test_a_form_stands_behind_thoughts_and_is_all_of_the_content(client: openai.OpenAI) -> None:
    answers = [said(client, seed=seed, response_format=JSON) for seed in range(2)]
    for _, content, calls, reason in answers:
        assert (calls, reason) == ([], "stop")
        jsonschema.validate(json.loads(content), FORM)
    assert any(thoughts for thoughts, *_ in answers)


def test_calls_come_with_their_arguments(client: openai.OpenAI) -> None:
    for seed in range(2):
        _, content, calls, reason = said(client, seed=seed, tools=[ADD, CLOCK], tool_choice="required")
        ((name, arguments),) = calls
        assert (content, reason) == ("", "tool_calls")
        assert name in ("add", "clock")
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.slow
def test_an_agent_s_loop_goes_on_with_what_was_thought(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"tools": [ADD], **ASKED}
    first = client.chat.completions.create(messages=QUESTION, tool_choice="required", seed=1, **asked)
    message = first.choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    talk: list[Any] = [*QUESTION, message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(
        messages=talk, response_format=JSON, tool_choice="none", seed=2, reasoning_effort="low", **asked
    )
    jsonschema.validate(json.loads(last.choices[0].message.content or ""), FORM)


@pytest.mark.slow
def test_a_response_has_items_for_thoughts_and_calls_and_counts_its_thoughts(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", **ADD["function"]}]
    counts = []
    for seed in (0, 3, 4):
        response = client.responses.create(
            model="gpt-oss", input="What is 12+30?", tools=tools, tool_choice="required", temperature=1,
            max_output_tokens=900, extra_body={"seed": seed, "logit_bias": ENDS},
        )  # fmt: skip
        kinds = [each.type for each in response.output]
        assert kinds in (["function_call"], ["reasoning", "function_call"])
        assert response.usage is not None
        counts.append(response.usage.output_tokens_details.reasoning_tokens)
        if kinds[0] == "reasoning":
            part = response.output[0].model_dump()["content"][0]
            # A character is a token or more; so are the marks, and the letters of the channel's name
            assert counts[-1] >= len(part["text"]) + len("analysis") + 3
        assert 0 <= counts[-1] < response.usage.output_tokens
    assert any(counts)


def test_a_budget_of_thoughts_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget is not supported"):
        client.chat.completions.create(
            messages=QUESTION, model="gpt-oss", extra_body={"thinking_token_budget": 3}
        )
