"""The events of a response add up to it, however its text is cut.

The items of a conversation become messages.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import TypeAdapter

from borders.refusal import BadRequest
from continuous_batching.request import Request, SamplingParams, TokenLogprobs
from recipes.schema.recipe import ROOT
from serving.answers.answers import AnswerDelta, AnswerStream
from serving.api.answer_parser import AnswerParser
from serving.api.items import carrying
from serving.api.messages import MessageObject, MessagesBody
from serving.api.pieces import Turns
from serving.api.responses import ResponseObject, ResponsesBody
from serving.api.responses_input import _Turns, messages_of
from serving.api.writer import AnswerWriter, ResponseForm
from serving.engine.messages import SampleEnd
from serving.failures import CutOff, EngineEnded, Failure, Overloaded, RequestFailed, Unavailable
from serving.router.reply import first_data, refuses, tells_of_loss
from serving.text.chat_template import check_messages, joined
from serving.text.tokenizer import Text, TextOptions
from serving.tools.definitions import tool_use
from tests.each_of import each_of
from tests.lazy import openai
from tests.serving.channel_model import write_model
from tests.serving.test_tool_parsing import cut, written
from tests.thorough import cases

TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": {}} for name in ("add", "get_weather")]
CALLS: list[tuple[str, dict[str, Any]]] = [("add", {"a": 1}), ("get_weather", {"city": '"}天'})]


@cache
def events_adapter() -> TypeAdapter[Any]:
    """Return what reads the events of a stream as OpenAI's client does."""
    return TypeAdapter(openai.types.responses.ResponseStreamEvent)


@pytest.fixture(scope="module")
def text() -> Text:
    loaded = Text.load(ROOT / "recipes/tiny/weights", "hermes", "think")
    assert loaded is not None
    return loaded


def answer_of(text: Text) -> AnswerStream:
    """An answer that no engine makes."""
    request = Request("resp_1", np.array([1, 2], dtype=np.int32), SamplingParams())
    return AnswerStream(request, text, TextOptions(), num_answers=1, max_unread_tokens=1000)


def response_of(text: Text, answer: AnswerStream | None = None, **fields: Any) -> ResponseObject:
    """The form of a response."""
    answer = answer or answer_of(text)
    use = tool_use({"tools": [{"type": "function", "function": {"name": each["name"]}} for each in TOOLS]})
    body = ResponsesBody(input="a", tools=TOOLS, **fields)
    return ResponseObject(text, answer, AnswerParser(text, answer.request, use), body, "tiny")


def deltas(pieces: list[str], reason: str) -> list[AnswerDelta]:
    made = [AnswerDelta(0, each, [5]) for each in pieces] or [AnswerDelta(0, "", [5])]
    made[-1].finish_reason = reason
    return made


def whole_of(text: Text, pieces: list[str], reason: str) -> dict[str, Any]:
    form = response_of(text)
    form.take([(0, each) for each in deltas(pieces, reason)])
    found: dict[str, Any] = json.loads(b"".join(form.whole()))
    return found


def events_of(text: Text, pieces: list[str], reason: str) -> list[dict[str, Any]]:
    return told_by(response_of(text), deltas(pieces, reason))


def told_by(form: ResponseObject, parts: Iterable[AnswerDelta]) -> list[dict[str, Any]]:
    sent = b"".join(part for each in parts for part in form.events([(0, each)]))
    assert form.end() == b""
    lines = sent.decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.partition("\ndata: ")[2]) for line in lines]


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is drawn."""
    return [{name: value for name, value in each.items() if name not in ("id", "call_id")} for each in items]


def accumulated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What OpenAI's helper makes of the deltas alone: each item as it is before it is done."""
    from openai.lib.streaming.responses._responses import ResponseStreamState  # takes a second to import

    state: Any = ResponseStreamState(input_tools=[], text_format=openai.omit)
    for each in events:
        state.handle_event(events_adapter().validate_python(each))
    return [each.to_dict() for each in state._output_items.values()]


@pytest.mark.slow
def test_every_way_to_cut_an_answer_gives_the_same_response(text: Text) -> None:
    rng = random.Random(5)
    words = [
        "<think>",
        "So.",
        "</think>",
        "\n",
        "It is ",
        "42.",
        "<tool_call>",
        "天气",
        written("hermes", CALLS),
    ]
    for _ in range(cases(40, 200)):
        answer = "".join(rng.choice(words) for _ in range(rng.randrange(7)))
        reason = rng.choice(["stop", "length"])
        whole = whole_of(text, [answer], reason)
        for pieces in ([answer], list(answer), cut(answer, rng)):
            events = events_of(text, pieces, reason)
            response = events[-1]["response"]
            assert bare(response["output"]) == bare(whole["output"]), answer
            assert (
                response["status"] == whole["status"] == ("completed" if reason == "stop" else "incomplete")
            )
            assert [each["sequence_number"] for each in events] == [*range(len(events))]
            check_order(events)
            for grown, item in zip(accumulated(events), response["output"], strict=True):
                if item["type"] == "function_call":
                    assert grown["arguments"] == item["arguments"]
                elif item["type"] == "message":
                    assert grown["content"][0]["text"] == item["content"][0]["text"]


def check_order(events: list[dict[str, Any]]) -> None:
    """Each item is added, told in pieces that add up to it, and done, before the next one is added."""
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == events[-1]["response"]["status"]
    at = 2
    for index, item in enumerate(events[-1]["response"]["output"]):
        count = kinds[at:].index("output_item.done") + 1
        own, at = events[at : at + count], at + count
        assert {each["output_index"] for each in own} == {index}
        told = "".join(each.get("delta", "") for each in own)
        if item["type"] == "function_call":
            shape, text = ["function_call_arguments.done", "output_item.done"], item["arguments"]
            begins = 1
        else:
            part = item["content"][0]
            shape, text = [f"{part['type']}.done", "content_part.done", "output_item.done"], part["text"]
            begins = 2
        assert told == text
        assert own[-1]["item"] == item
        assert [each["type"].removeprefix("response.") for each in own[-len(shape) :]] == shape
        first = ["output_item.added", "content_part.added"][:begins]
        assert [each["type"].removeprefix("response.") for each in own[:begins]] == first
        assert all(each["type"].endswith(".delta") for each in own[begins : -len(shape)])
    assert at == len(events) - 1


def test_thoughts_text_and_calls_are_items(text: Text) -> None:
    pieces = [
        "<think>So.",
        "</think>",
        "Let me see. ",
        *(written("hermes", [each]) for each in CALLS),
        " Well.",
    ]
    response = events_of(text, pieces, "stop")[-1]["response"]
    kinds = ["reasoning", "message", "function_call", "function_call", "message"]
    assert [each["type"] for each in response["output"]] == kinds
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "So."}]
    assert [json.loads(each["arguments"]) for each in response["output"][2:4]] == [each for _, each in CALLS]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert len({each["call_id"] for each in response["output"][2:4]}) == 2


def ended(text: Text, pieces: list[str]) -> AnswerStream:
    """An answer of the tokens of these pieces, each with its log-probability, and of one that ends it."""
    answer, (eos, *_) = answer_of(text), text.eos_token_ids
    tokens = [token for each in pieces for token in text.encode_within(each)]
    for at, token in enumerate([*tokens, eos]):
        end = SampleEnd(0, "stop", None, at, 0, 0, 0.0, 0.0, 0.0, []) if at == len(tokens) else None
        answer.take(0, token, TokenLogprobs(token, -float(at), ()), end)
    return answer


def served_whole(answer: AnswerStream, form: ResponseForm) -> Any:
    """An answer that has ended, as the server writes it where it is not streamed."""
    never: Any = SimpleNamespace(receive=asyncio.Event().wait)
    llm: Any = SimpleNamespace(limits=SimpleNamespace(release=lambda _: None))
    response = asyncio.run(AnswerWriter(llm, Turns(), [answer]).whole(never, form))
    return json.loads(bytes(response.body))


def streamed(text: Text, pieces: list[str], **fields: Any) -> list[dict[str, Any]]:
    """The events of the stream of a response."""
    answer = ended(text, pieces)
    return told_by(response_of(text, answer, **fields), asyncio.run(answer.next()))


@each_of(
    "pieces",
    [
        ["<think>", "So.", "</think>", "\n\n", "It", " is", " 42."],
        ["It", " is", " 42."],
        ["Let me", " see.", written("hermes", CALLS[:1]), "\n", "Well", "."],
        ["<think>", "So.", "</think>", "\n", "a", " <", "<", " b", " <tool", " c"],
        ["<think>", "\n", "So.", "</think>", "\n\n", "天气", "\n", written("hermes", CALLS), "\n"],
        ["<think>", "So."],
    ],
)
def test_a_message_has_the_log_probabilities_of_its_own_tokens(text: Text, pieces: list[str]) -> None:
    """None is of a mark, a thought or a call, and a stream tells of the same ones."""
    fields = {"include": ["message.output_text.logprobs"]}
    answer = ended(text, pieces)
    whole = served_whole(answer, response_of(text, answer, **fields))
    events = streamed(text, pieces, **fields)
    response = events[-1]["response"]
    assert bare(whole["output"]) == bare(response["output"])
    assert whole["usage"] == response["usage"]
    for index, item in enumerate(whole["output"]):
        if item["type"] != "message":
            continue
        (part,) = item["content"]
        entries, last = part["logprobs"], item is whole["output"][-1]
        assert b"".join(bytes(each["bytes"]) for each in entries).decode() == part["text"] + "</s>" * last
        told = [
            one
            for each in events
            if each["type"] == "response.output_text.delta" and each["output_index"] == index
            for one in each["logprobs"]
        ]
        assert told == entries[: len(entries) - last]


@each_of("pieces", [["<think>", "So.", "</think>", "\n\n", "It"], ["<think>", "So."], ["It"]])
def test_thoughts_are_counted_alike_in_every_form_of_an_answer(text: Text, pieces: list[str]) -> None:
    """Also where no token of the vocabulary ends them alone."""
    assert text.think_marks == ()
    answer = ended(text, pieces)
    usage = served_whole(answer, response_of(text, answer))["usage"]
    assert usage == streamed(text, pieces)[-1]["response"]["usage"]
    message, body = ended(text, pieces), MessagesBody(model="a", messages=["a"], max_tokens=9)
    form = MessageObject(message, AnswerParser(text, message.request, None), body, "request")
    thoughts = served_whole(message, form)["usage"]["output_tokens_details"]["thinking_tokens"]
    assert thoughts == usage["output_tokens_details"]["reasoning_tokens"]
    num_behind = sum(len(text.encode_within(each)) for each in pieces[3:]) + 1  # with the end of the answer
    wanted = {5: usage["output_tokens"] - num_behind, 2: usage["output_tokens"], 1: 0}
    assert thoughts == wanted[len(pieces)]


def told_of(text: Text, pieces: list[str]) -> tuple[str, list[str]]:
    """The text of the last message, and the pieces whose entries it has, where each piece is of one token."""
    form = response_of(text, include=["message.output_text.logprobs"])
    for at, piece in enumerate(pieces):
        form.take([(0, AnswerDelta(0, piece, [5], [TokenLogprobs(5, -float(at), ())]))])
    form.take([(0, AnswerDelta(0, "", finish_reason="stop"))])
    items = json.loads(b"".join(form.whole()))["output"]
    (part,) = [each for each in items if each["type"] == "message"][-1]["content"]
    return part["text"], [pieces[-round(each["logprob"])] for each in part["logprobs"]]


def test_marks_of_channels_are_of_no_message(tmp_path: Path) -> None:
    text = Text.load(write_model(tmp_path), "harmony", "harmony")
    assert text is not None
    heads = [["<|channel|>", name, "<|message|>"] for name in ("analysis", "final", "final")]
    turn = ["<|end|>", "<|start|>", "assistant"]
    pieces = [*heads[0], "So", *turn, *heads[1], "a", " b", "<", *turn, *heads[2], "\n\n", "s", ""]
    assert told_of(text, pieces) == ("a b<\n\n\ns", ["a", " b", "<", "\n\n", "s", ""])


THOUGHT = ["<think>", "So", "</think>", "\n\n"]
CALLED = ["<tool_call>", "\n", '{"name": "add", "arguments": {"a": 1}}', "\n", "</tool_call>"]


@each_of(
    "tool_format, reasoning, pieces, own",
    [
        ("mistral", "none", [], ["[", "[", "1", ",", "2", "]", "]"]),
        ("hermes", "think", THOUGHT, ["<", "<", "EOF"]),
        ("hermes", "none", [], ["It", " is", " <", *CALLED]),
        ("gemma4", "none", [], ["<", "<|tool_call>", "call:add{a:1}", "<tool_call|>"]),
        ("hermes", "hunyuan", [*THOUGHT, "<answer>", "\n"], ["It", " is", "\n", "</answer>"]),
        ("pythonic", "think", ["<think>", "So</t", "hink"], [">\n</", "b>"]),
        ("pythonic", "none", [], ["[add(a=", "[b", "](x)"]),
    ],
)
def test_a_mark_has_no_entry_in_a_message_and_no_token_of_it_lacks_one(
    tool_format: str, reasoning: str, pieces: list[str], own: list[str]
) -> None:
    """Though its characters are those of the text beside it, and some come before it is decided."""
    text = Text.load(ROOT / "recipes/tiny/weights", tool_format, reasoning)
    assert text is not None
    said, entries = told_of(text, [*pieces, *own, ""])
    marks = [*CALLED, "<|tool_call>", "call:add{a:1}", "<tool_call|>", "\n", "</answer>"]
    wanted = [each for each in own if each not in marks]
    assert said == "".join(wanted).removeprefix(">\n")
    ends_by_call = own[-1] in marks and own[-1] != "</answer>"  # its end is no token of the message then
    assert entries == [*wanted, *([] if ends_by_call else [""])]


def test_a_failure_ends_a_stream_as_a_response(text: Text) -> None:
    form = response_of(text)
    sent = b"".join(form.events([(0, AnswerDelta(0, "It", [5]))]))
    last = form.failed(RequestFailed("the engine was lost"))
    assert sent.count(b"sequence_number") == 5
    event = events_adapter().validate_json(last.decode().partition("\ndata: ")[2])
    assert (event.type, event.sequence_number, event.response.status) == ("response.failed", 5, "failed")
    assert (event.response.error.code, event.response.error.message) == (
        "server_error",
        "the engine was lost",
    )
    assert event.response.output_text == "It"


@pytest.mark.parametrize(
    ("failure", "code", "is_refusal", "is_loss"),
    [
        (RequestFailed("not finite"), "server_error", False, False),
        (CutOff("aborted", "asked"), "server_error", False, False),
        (BadRequest("input", "is wrong"), "invalid_prompt", False, False),
        (Overloaded("full", 1.0), "rate_limit_exceeded", True, False),
        (Unavailable("asleep"), "server_error", True, False),
        (EngineEnded("killed"), "server_error", True, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_router_reads_from_a_failure_whether_another_replica_may_answer(
    text: Text, failure: Failure | BadRequest, code: str, is_refusal: bool, is_loss: bool
) -> None:
    sent = response_of(text).failed(failure)
    *opening, last = [each.partition("\ndata: ")[2] for each in sent.decode().split("\n\n")[:-1]]
    event = events_adapter().validate_json(last)
    assert (event.sequence_number, event.response.error.code) == (len(opening), code)
    assert (refuses(sent), tells_of_loss(first_data(sent))) == (is_refusal, is_loss)


def test_the_clients_helper_reads_a_response_that_fails_at_once(text: Text) -> None:
    """It asks for `response.created` before everything else."""
    sent = response_of(text).failed(RequestFailed("not finite"))
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=sent)
    over = httpx.Client(transport=httpx.MockTransport(lambda _: answer))
    with (
        openai.OpenAI(base_url="http://server", api_key="any", http_client=over) as client,
        client.responses.stream(model="tiny", input="Hello") as stream,
    ):
        events = list(stream)
    kinds = ["response.created", "response.in_progress", "response.failed"]
    assert [(each.type, each.sequence_number) for each in events] == list(zip(kinds, range(3)))


def test_items_become_the_messages_of_their_turns(text: Text) -> None:
    pieces = ["<think>So.</think>", "Let me see. ", *(written("hermes", [each]) for each in CALLS)]
    output = events_of(text, pieces, "stop")[-1]["response"]["output"]
    results = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": "1"} for each in output[2:]
    ]
    messages = messages_of([{"role": "user", "content": "a"}, *output, *results], "Be kind.")
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "tool", "tool"]
    turn = check_messages(messages)[2]
    assert (joined(turn["content"]), turn["reasoning_content"]) == ("Let me see. ", "So.")
    assert [each["function"]["arguments"] for each in turn["tool_calls"]] == [each for _, each in CALLS]
    assert [each["tool_call_id"] for each in messages[3:]] == [each["call_id"] for each in output[2:]]
    held = {"type": "reasoning", "summary": [], "encrypted_content": carrying("So.")}
    (again,) = messages_of([held, output[1]], None)
    assert again == {"role": "assistant", "content": again["content"], "reasoning_content": "So."}
    foreign = held | {"encrypted_content": "of another service"}
    assert "reasoning_content" not in messages_of([foreign, output[1]], None)[0]
    foreign["summary"] = [{"type": "summary_text", "text": "It thought."}]
    told = output[1] | {"phase": "final_answer"}
    assert messages_of([foreign, told], None) == messages_of([output[1]], None)
    said = {"role": "assistant", "content": "b"}
    assert messages_of([said, said], None) == [said, said], "two messages are two turns"


def reasoned(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


ADD, PUT = ({"type": "function_call", "call_id": name, "name": "add", "arguments": "{}"} for name in "ab")
ADDED, PUT_IN = ({"type": "function_call_output", "call_id": name, "output": "1"} for name in "ab")
SAID = {"role": "assistant", "content": "So"}


@each_of(
    "items, told",
    [
        ([ADD, SAID, ADDED], ["So:None:a", "tool"]),
        ([SAID, ADD, SAID, ADDED], ["So\nSo:None:a", "tool"]),
        ([SAID, ADD, SAID | {"content": ""}, ADDED], ["So:None:a", "tool"]),
        ([reasoned("x"), ADD, reasoned("y"), PUT, ADDED, PUT_IN], [":x\ny:ab", "tool", "tool"]),
        ([reasoned("x"), reasoned("y"), SAID], ["So:x\ny:"]),
        # What follows a result, and reasoning behind a text, is of a next answer
        ([ADD, ADDED, SAID, reasoned("x"), PUT, PUT_IN], [":None:a", "tool", "So:None:", ":x:b", "tool"]),
        ([SAID, ADD, ADDED, reasoned("x"), PUT, PUT_IN], ["So:None:a", "tool", ":x:b", "tool"]),
        ([ADD, ADDED, SAID], [":None:a", "tool", "So:None:"]),
    ],
)
def test_a_turn_of_the_assistant_is_one_message_that_results_follow(items: Any, told: list[str]) -> None:
    found = []
    for each in check_messages(messages_of(items, None)):
        calls = "".join(call["id"] for call in each.get("tool_calls", []))
        said = f"{joined(each.get('content', ''))}:{each.get('reasoning_content')}:{calls}"
        found.append(said if each["role"] == "assistant" else each["role"])
    assert found == told


def test_no_item_copies_those_before_it() -> None:
    """A copy for each would be quadratic, and is made where all other requests wait."""
    turns, kept = _Turns(), list[Any]()
    for item in (ADD, SAID, SAID, SAID, reasoned("x"), reasoned("y"), reasoned("z")):
        turns.add("", item)
        kept.append((turns.messages[0]["content"], turns.messages[0].get("reasoning_content")))
    assert kept[2][0] is kept[3][0]
    assert kept[4][1] is kept[5][1] is kept[6][1]
    [message] = turns.finished()
    assert (joined(message["content"]), message["reasoning_content"]) == ("So\nSo\nSo", "x\ny\nz")


KIMI = "<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
MISTRAL = "[TOOL_CALLS]add[CALL_ID]{}[ARGS]{{}}"


@each_of(
    "tool_format, call, written_ids, ids",
    [
        ("kimi_k2", KIMI, "45", ["functions.add:4", "functions.add:5"]),
        ("kimi_k2", KIMI, "445", ["functions.add:4", "functions.add:5", "functions.add:6"]),
        ("mistral_v11", MISTRAL, "aba", ["a", "b"]),
    ],
)
@each_of("in_thoughts", [False, True])
def test_an_id_that_a_model_gives_twice_names_one_call(
    tool_format: str, call: str, written_ids: str, ids: list[str], in_thoughts: bool
) -> None:
    loaded = Text.load(ROOT / "recipes/tiny/weights", tool_format, "think")
    assert loaded is not None
    first, *rest = [call.format(each) for each in written_ids]
    opening, closing = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    if tool_format == "mistral_v11":
        opening = closing = ""
    pieces = ["<think>So.", opening, first, closing, "</think>", opening, *rest, closing]
    if not in_thoughts:
        pieces = ["<think>So.</think>", opening, first, *rest, closing]
    output = whole_of(loaded, pieces, "stop")["output"]
    given = [each["call_id"] for each in output if each["type"] == "function_call"]
    assert given[: len(ids)] == ids
    assert len({*given}) == len(given) == len(written_ids)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (1, r"input\[0\] is 1; it must be an object"),
        ({"type": "function_call_output", "output": "1"}, r"input\[0\].call_id is null"),
        ({"type": "reasoning", "encrypted_content": "carried.*"}, r"input\[0\].encrypted_content is not as"),
        ({"type": "reasoning", "summary": [{"text": "x"}]}, r"input\[0\] is a summary alone"),
        ({"type": "reasoning", "content": ["x"]}, r"input\[0\].content\[0\] is"),
        ({"type": "reasoning", "content": 5}, r"input\[0\].content is 5; it must be a list"),
        ({"type": "reasoning", "content": "So."}, r'input\[0\].content is "So."; it must be a list'),
        ({"role": "user", "content": "\ud800"}, r"input\[0\].content is not Unicode text"),
        ({"role": "user", "content": 1}, r"input\[0\].content is 1; it must be a string"),
    ],
)
def test_an_item_that_cannot_be_read_is_named(item: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        messages_of([item], None)
