"""Anthropic's form of a chat: what it is read as, what it answers, and its events in their order."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from borders.refusal import BadRequest
from serving.api.messages import Blocks, CountBody
from serving.api.messages_input import (
    _Turns,
    messages_of,
    signature_of,
    thinking_of,
    tool_choice_of,
    tools_of,
)
from serving.tools.parsing import CallDelta, Parsed
from tests.each_of import each_of
from tests.patience import PATIENCE_S
from tests.serving.server import Server
from tests.thorough import cases

PRICES = {"lamp": "348", "clock": "275"}
TOOLS: list[Any] = [
    {
        "name": name,
        "description": "A tool.",
        "input_schema": {"type": "object", "properties": properties, "required": [*properties]},
    }
    for name, properties in (
        ("price", {"item": {"type": "string"}}),
        ("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
    )
]
ASKED: dict[str, Any] = {"model": "agent", "max_tokens": 200, "temperature": 0}
QUESTION = [{"role": "user", "content": "What do the lamp and the clock cost together? Answer in JSON."}]
ADAPTIVE = {"type": "adaptive"}


def post(server: Server, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=fields, timeout=PATIENCE_S)


def ask(server: Server, messages: list[Any], **fields: Any) -> Any:
    answer = post(server, **{**ASKED, "messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(server: Server, messages: list[Any], **fields: Any) -> list[Any]:
    """The events of a stream, each under the name that its data has."""
    *lines, last = post(server, **{**ASKED, "messages": messages, "stream": True, **fields}).text.split(
        "\n\n"
    )
    assert last == ""
    events = []
    for line in lines:
        name, _, data = line.partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    return events


def put_together(events: list[Any]) -> Any:
    """The message that the events of a stream tell of, as a client adds it up."""
    message: Any = None
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"] | {"said": ""})
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "signature_delta":
                    block["signature"] = delta["signature"]
                else:
                    block["said"] += delta[delta["type"].removesuffix("_delta").replace("input", "partial")]
            case "content_block_stop":
                block = message["content"][event["index"]]
                said = block.pop("said")
                named = {"text": "text", "thinking": "thinking"}.get(block["type"])
                block |= {"input": json.loads(said)} if named is None else {named: said}
            case "message_delta":
                message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
    return message


def alike(message: Any) -> Any:
    """A message without what differs from answer to answer: its ids, and what was found in the cache."""
    blocks = [{name: each for name, each in block.items() if name != "id"} for block in message["content"]]
    kept = {name: message[name] for name in ("model", "role", "type", "stop_reason", "stop_sequence")}
    return kept | {"content": blocks, "output_tokens": message["usage"]["output_tokens"]}


@pytest.mark.slow
def test_a_loop_of_an_agent_thinks_calls_and_answers(agent: Server) -> None:
    """With every block sent back as it came; a stream tells of the same message."""
    messages: list[Any] = [*QUESTION]
    told = []
    for _ in range(3):
        message = ask(agent, messages, tools=TOOLS, thinking=ADAPTIVE)
        streamed = put_together(events_of(agent, messages, tools=TOOLS, thinking=ADAPTIVE))
        assert alike(streamed) == alike(message)
        usage = message["usage"]
        counted = post(
            agent,
            "/v1/messages/count_tokens",
            model="agent",
            messages=messages,
            tools=TOOLS,
            thinking=ADAPTIVE,
        )
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        told.append([each["type"] for each in message["content"]] + [message["stop_reason"]])
        calls = [each for each in message["content"] if each["type"] == "tool_use"]
        messages.append({"role": "assistant", "content": message["content"]})
        results = []
        for call in calls:
            given = call["input"]
            said = PRICES[given["item"]] if call["name"] == "price" else str(given["a"] + given["b"])
            content = [{"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}]
            results.append({"type": "tool_result", "tool_use_id": call["id"], "content": content})
        messages.append({"role": "user", "content": results})
    assert told == [
        ["thinking", "tool_use", "tool_use", "tool_use"],
        ["thinking", "tool_use", "tool_use"],
        ["thinking", "text", "end_turn"],
    ]
    assert message["content"][-1]["text"] == '{"total": 623}'
    assert usage["cache_read_input_tokens"] > 0
    assert usage["output_tokens_details"]["thinking_tokens"] > 0


def test_the_events_of_a_stream_come_in_the_documented_order(agent: Server) -> None:
    events = events_of(agent, QUESTION, tools=TOOLS, thinking=ADAPTIVE)
    told = [(each["type"], each.get("index")) for each in events if each["type"] != "content_block_delta"]
    blocks: list[tuple[str, int | None]] = [
        (kind, at) for at in range(3) for kind in ("content_block_start", "content_block_stop")
    ]
    blocks.insert(1, ("ping", None))
    assert told == [("message_start", None), *blocks, ("message_delta", None), ("message_stop", None)]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    deltas: list[list[str]] = [[], [], []]
    for each in events:
        if each["type"] == "content_block_delta":
            deltas[each["index"]].append(each["delta"]["type"])
    assert {*deltas[0][:-1]} == {"thinking_delta"}
    assert deltas[0][-1] == "signature_delta"
    assert {*deltas[1], *deltas[2]} == {"input_json_delta"}
    put_together(events)  # in which a delta stands within its block


def test_why_an_answer_ends(agent: Server) -> None:
    lamp = [{"role": "user", "content": "What does the lamp cost?"}]
    stopped = ask(agent, lamp, stop_sequences=["tool"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "tool")
    assert stopped["content"] == [{"type": "text", "text": "I have no "}]
    cut = ask(agent, lamp, max_tokens=2)
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)

    def asking(times: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "What does the lamp cost? " * times}]

    def num_tokens(times: int) -> int:
        counted = post(agent, "/v1/messages/count_tokens", model="agent", messages=asking(times)).json()
        return int(counted["input_tokens"])

    few = num_tokens(10)
    near_full = asking(10 + 10 * ((2048 - few - 1) // (num_tokens(20) - few)))
    filled = ask(agent, near_full, max_tokens=10**6, ignore_eos=True)
    assert filled["stop_reason"] == "model_context_window_exceeded"
    usage = filled["usage"]
    whole = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
    assert whole == 2048
    late = ask(agent, lamp, max_tokens=10**6, ignore_eos=True, timeout_s=1e-3)
    assert late["stop_reason"] == "pause_turn"
    called = ask(agent, QUESTION, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert (called["stop_reason"], len(called["content"])) == ("tool_use", 1)


def test_a_call_that_is_cut_is_still_an_object(agent: Server) -> None:
    choice = {"type": "tool", "name": "price"}
    whole = ask(agent, QUESTION, tools=TOOLS, tool_choice=choice)
    for length in range(1, whole["usage"]["output_tokens"], cases(9, 1)):
        cut = ask(agent, QUESTION, tools=TOOLS, tool_choice=choice, max_tokens=length)
        assert cut["stop_reason"] == "max_tokens"
        for block in cut["content"]:
            assert block["type"] != "tool_use" or block["input"].keys() <= {"item"}


def test_a_call_that_is_cut_behind_its_name_has_no_arguments() -> None:
    blocks = Blocks(lambda call: "toolu_1", shows_thoughts=True)
    events = [*blocks.push(Parsed([CallDelta(0, "price")])), *blocks.end()]
    assert [each["type"] for each in events] == ["content_block_start", "ping", "content_block_stop"]
    assert blocks.written() == [{"type": "tool_use", "id": "toolu_1", "name": "price", "input": {}}]


def test_thoughts_come_only_where_they_are_asked_for(agent: Server) -> None:
    def kinds(**fields: Any) -> list[str]:
        return [each["type"] for each in ask(agent, QUESTION, tools=TOOLS, **fields)["content"]]

    assert "thinking" not in kinds()
    assert "thinking" not in kinds(thinking={"type": "disabled"}, output_config={"effort": "high"})
    counts = []
    for budget in (1024, 3):
        message = ask(agent, QUESTION, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": budget})
        assert message["content"][0]["type"] == "thinking"
        counts.append(message["usage"]["output_tokens_details"]["thinking_tokens"])
    assert counts[1] < counts[0]


def test_thoughts_that_are_not_shown_come_back_in_their_signature(agent: Server) -> None:
    hidden = {"type": "adaptive", "display": "omitted"}
    shown, omitted = (ask(agent, QUESTION, tools=TOOLS, thinking=each) for each in (ADAPTIVE, hidden))
    assert omitted["content"][0]["thinking"] == ""
    streamed = put_together(events_of(agent, QUESTION, tools=TOOLS, thinking=hidden))
    assert streamed["content"][0] == omitted["content"][0]
    counts = []
    for message in (shown, omitted):
        calls = [each for each in message["content"] if each["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": each["id"], "content": "348"} for each in calls]
        turns = [*QUESTION, {"role": "assistant", "content": message["content"]}]
        turns.append({"role": "user", "content": results})
        fields = {"model": "agent", "messages": turns, "tools": TOOLS, "thinking": ADAPTIVE}
        counts.append(post(agent, "/v1/messages/count_tokens", **fields).json())
    assert counts[0] == counts[1]


def test_a_form_of_the_answer_is_held(agent: Server) -> None:
    schema = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        (block,) = ask(agent, QUESTION, **fields)["content"]
        assert json.loads(block["text"]).keys() == {"total"}


def test_a_server_that_cannot_think_says_that_a_budget_has_no_effect(shared: Server) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    fields = {"model": "tiny", "max_tokens": 20, "temperature": 0, "thinking": thinking}
    answer = post(shared, **fields, messages=[{"role": "user", "content": "What is 12+30?"}])
    assert answer.json()["content"] == [{"type": "text", "text": "12+30=42."}]
    assert "no effect" in answer.headers["x-reasoning-effort"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_errors_have_anthropics_form(shared: Server) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "messages": hello}
    long = [{"role": "user", "content": "Hello " * 3000}]
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    tool = {"type": "web_search_20250305", "name": "web_search"}
    for changed, kind, said in (
        ({"model": "other"}, "not_found_error", "there is no model 'other'"),
        ({"max_tokens": None}, "invalid_request_error", "max_tokens: input should be a valid integer"),
        ({"max_tokens": 0}, "invalid_request_error", "max_tokens is 0"),
        ({"foo": 1}, "invalid_request_error", 'unknown field "foo"'),
        ({"container": "x"}, "invalid_request_error", "container is not supported"),
        ({"messages": long}, "invalid_request_error", "prompt is too long: "),
        ({"messages": image}, "invalid_request_error", 'messages[0].content[0].type is "image"'),
        ({"tools": [tool]}, "invalid_request_error", "tools[0].type is"),
        ({"stop_sequences": ["a"] * 17}, "invalid_request_error", "stop_sequences has 17 strings"),
    ):
        answer = post(shared, **{**fields, **changed})
        body = answer.json()
        assert body["type"] == "error"
        assert {"type", "message"} <= body["error"].keys() <= {"type", "message", "details"}
        assert (body["error"]["type"], body["error"]["message"][: len(said)]) == (kind, said)
        assert answer.status_code == (404 if kind == "not_found_error" else 400)
        assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    # This tells Anthropic's runners of tools that they have to send the whole conversation
    threaded = post(shared, **fields, thread={"type": "create"}).json()
    assert threaded["error"]["details"] == {"error_code": "thread_unsupported_request"}
    unknown = httpx.get(f"{shared.url}/v1/messages/batches", timeout=PATIENCE_S)
    assert unknown.json()["error"]["type"] == "not_found_error"


def test_models_are_listed_as_the_client_reads_them(shared: Server) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = httpx.get(f"{shared.url}/v1/models", headers=headers, timeout=PATIENCE_S).json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "tiny")
    one = httpx.get(f"{shared.url}/v1/models/tiny", headers=headers, timeout=PATIENCE_S).json()
    assert listed["data"] == [one]
    assert (one["type"], one["id"], one["max_input_tokens"]) == ("model", "tiny", 2048)


def test_turns_of_a_conversation_become_those_of_a_chat() -> None:
    call = {"type": "tool_use", "id": "a", "name": "price", "input": {"item": "lamp"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "no such item", "is_error": True}
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"},
        {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
    ]
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "words"}}
    turns: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, document]},
        {"role": "system", "content": "c"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, call],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "d"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "e", "citations": None}]},
    ]
    function = {"name": "price", "arguments": {"item": "lamp"}}
    called = {"id": "a", "type": "function", "function": function}
    texts = ["a", "b", "T\nwords", "<system-reminder>\nc\n</system-reminder>"]
    error = [{"type": "text", "text": each} for each in ("Error:", "no such item")]
    assert messages_of(turns, system) == [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": [{"type": "text", "text": each} for each in texts]},
        {"role": "assistant", "reasoning_content": "t", "tool_calls": [called]},
        {"role": "tool", "content": error, "tool_call_id": "a"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    assert messages_of([{"role": "user", "content": []}], "s")[-1] == {"role": "user", "content": ""}


def test_no_block_copies_those_before_it() -> None:
    """A copy for each would be quadratic, and is made where all other requests wait."""
    turns = _Turns()
    turns.system([{"type": "text", "text": each} for each in "ab"])
    for role, field in (("system", "content"), ("user", "content"), ("assistant", "reasoning_content")):
        kind, name = ("thinking", "thinking") if role == "assistant" else ("text", "text")
        kept = []
        for each in "cde":
            turns.add("", {"role": role, "content": [{"type": kind, name: each}]})
            kept.append(turns.messages[-1][field])
        assert kept[1] is kept[2], role
    system, user, assistant = turns.finished()
    assert [each["text"] for each in system["content"] + user["content"]] == [*"abcdecde"]
    assert assistant == {"role": "assistant", "content": "", "reasoning_content": "c\nd\ne"}


def thought(text: str, *more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": text}, *more]}


def turn_of(*contents: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in contents]
    return {"role": "user", "content": texts}


RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
USE = {"type": "tool_use", "id": "a", "name": "price", "input": {}}
THOUGHTFUL = [
    *(turn_of("1"), thought("a")),
    # One turn, though a client adds its reminders to the results
    *(turn_of("2"), thought("b", USE), turn_of(RESULT, "Be brief."), thought("c", USE), turn_of(RESULT)),
    *(thought("d", {"type": "text", "text": "said"}), turn_of("3")),
    *({"role": "assistant", "content": "no thoughts"}, turn_of("4"), thought("e"), turn_of("5")),
]
CLEAR = {"type": "clear_thinking_20251015"}


@each_of(
    "edits, kept",
    [
        (None, "abcde"),
        ([], "abcde"),
        ([CLEAR | {"keep": "all"}], "abcde"),
        ([CLEAR | {"keep": {"type": "all"}}], "abcde"),
        ([CLEAR], "e"),
        ([CLEAR | {"keep": {"type": "thinking_turns", "value": 1}}], "e"),
        ([CLEAR | {"keep": {"type": "thinking_turns", "value": 2}}], "bcde"),
        ([CLEAR | {"keep": {"type": "thinking_turns", "value": 9}}], "abcde"),
    ],
)
def test_thoughts_of_earlier_turns_are_cleared_as_asked(edits: Any, kept: str) -> None:
    body = CountBody(model="a", messages=THOUGHTFUL, context_management={"edits": edits})
    whole = messages_of(THOUGHTFUL, None)
    cleared = body.fields()["messages"]
    assert "".join(each.get("reasoning_content", "") for each in cleared) == kept
    for each, before in zip(cleared, whole, strict=True):
        assert each.get("tool_calls") == before.get("tool_calls")
        assert each.get("content", "") == before.get("content", "")
        assert each.keys() & {"content", "reasoning_content", "tool_calls"}, "a message says something"


@each_of(
    "given, said",
    [
        ({"edits": 1}, ".edits is 1"),
        ({"edits": [1]}, ".edits[0] is 1"),
        ({"edits": [{"type": "clear_tool_uses_20250919"}]}, '.edits[0].type is "clear_tool_uses_20250919"'),
        ({"edits": [CLEAR | {"keep": "some"}]}, '.edits[0].keep is "some"'),
        ({"edits": [CLEAR | {"keep": {"type": "thinking_turns", "value": 0}}]}, ".edits[0].keep is {"),
        ({"edits": [CLEAR | {"keep": {"type": "all", "value": 1}}]}, ".edits[0].keep is {"),
        ({"edits": [CLEAR | {"x": 1}]}, '.edits[0] has no "x"'),
        ({"x": 1}, ' has no "x"'),
    ],
)
def test_an_edit_of_the_context_that_is_not_understood_is_named(given: Any, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        CountBody(model="a", messages=THOUGHTFUL, context_management=given).fields()
    assert str(refused.value).startswith(f"context_management{said}")


@each_of(
    "content, place",
    [
        (7, "[0].content is 7"),
        ([7], "[0].content[0] is 7"),
        ([{"type": "text"}], "[0].content[0].text is null"),
        ([{"type": "text", "text": "\ud800"}], "[0].content[0].text is not Unicode"),
        ([{"type": "text", "text": "a", "x": 1}], '[0].content[0] has no "x"'),
        ([{"type": "tool_use", "id": "a", "name": "b", "input": {}}], '[0].content[0].type is "tool_use"'),
        ([{"type": "tool_result", "content": "a"}], "[0].content[0].tool_use_id is null"),
        (
            [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
            '[0].content[0].content[0].type is "image"',
        ),
        (
            [{"type": "document", "source": {"type": "base64"}}],
            '[0].content[0].source is {"type": "base64"}',
        ),
        ([{"type": "search_result", "source": "a", "title": "b"}], "[0].content[0].content is null"),
    ],
)
def test_what_cannot_be_read_is_named(content: Any, place: str) -> None:
    with pytest.raises(BadRequest, match="messages") as refused:
        messages_of([{"role": "user", "content": content}], None)
    assert str(refused.value).startswith(f"messages{place}")


def test_tools_and_thinking_become_fields_of_a_chat() -> None:
    schema = {"type": "object"}
    named = {"name": "f", "input_schema": schema, "cache_control": {"type": "ephemeral"}, "type": "custom"}
    assert tools_of([named]) == [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert tool_choice_of({"type": "none"}) == {"tool_choice": "none"}
    thinks = {"reasoning_effort": "medium"}
    assert thinking_of({"type": "between_tools"}, None, follows_tools=True) == thinks
    assert thinking_of({"type": "between_tools"}, "low", follows_tools=False) == {"reasoning_effort": "none"}
    for wrong in ({"type": "x"}, {"type": "enabled"}, {"type": "adaptive", "budget_tokens": 1}):
        with pytest.raises(BadRequest, match="thinking"):
            thinking_of(wrong, None, follows_tools=False)
    for tool in ({"name": "f"}, 7, {"name": "f", "input_schema": schema, "x": 1}):
        with pytest.raises(BadRequest, match=r"tools\[0\]"):
            tools_of([tool])
    with pytest.raises(BadRequest, match=r"tool_choice\.type"):
        tool_choice_of({"type": "required"})


def test_a_signature_that_was_changed_is_refused() -> None:
    signature = signature_of("a thought", is_shown=False)

    def read(changed: str) -> Any:
        block = {"type": "thinking", "thinking": "", "signature": changed}
        return messages_of([{"role": "assistant", "content": [block]}], None)[0]

    assert read(signature)["reasoning_content"] == "a thought"
    with pytest.raises(BadRequest, match=r"messages\[0\]\.content\[0\]\.signature"):
        read(signature + "*")


def test_a_conversation_without_a_turn_is_refused(agent: Server) -> None:
    nobody = [{"role": "system", "content": []}]
    nested: Any = {}
    for _ in range(600):
        nested = {"a": nested}
    deep = [{"name": "f", "input_schema": {"type": "object", "const": nested}}]
    talk = {"model": "agent", "max_tokens": 4}
    with httpx.Client(base_url=agent.url, timeout=PATIENCE_S) as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            asked = talk if path == "/v1/messages" else {"model": "agent"}
            for more in (
                {"messages": nobody},
                {"messages": [{"role": "user", "content": "a"}], "tools": deep},
            ):
                refused = http.post(path, json=asked | more)
                assert (refused.status_code, refused.json()["type"]) == (400, "error")
