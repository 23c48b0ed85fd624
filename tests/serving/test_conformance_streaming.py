"""Streams: what clients rely on."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from serving.answers.answers import AnswerDelta
from serving.api.completion import CompletionFormat
from serving.api.schemas import CompletionBody
from tests.lazy import openai
from tests.serving.server import Server

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
STORY = {"prompt": "One day", "temperature": 0, "max_tokens": 24}


def lines_of(http: httpx.Client, body: dict[str, Any]) -> list[str]:
    """What stands between blank lines."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    *lines, rest = response.text.split("\n\n")
    assert rest == ""
    return lines


def events_of(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = lines_of(http, body)
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_stream_is_not_held_up_on_its_way(http: httpx.Client) -> None:
    headers = http.post("/v1/completions", json=STORY | {"stream": True}).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("asked", [STORY, HELLO])
def test_no_event_is_empty(http: httpx.Client, asked: dict[str, Any]) -> None:
    """Half a character yields no text; the first event comes all the same, since clients time it."""
    body = asked | {"guided_regex": "[à-ö]{8}", "temperature": 1, "max_tokens": 24}
    assert http.post("/tokenize", json={"prompt": "é"}).json()["count"] > 1
    _, *pieces, last = (each["choices"][0] for each in events_of(http, body))
    assert last["finish_reason"] == "stop"
    assert all(each.get("text") or each["delta"]["content"] for each in pieces)
    options = {"stream_options": {"include_usage": True}}
    *_, end = events_of(http, body | options)
    assert end["usage"]["completion_tokens"] > len(pieces) + 2
    entries = [
        each["choices"][0]["logprobs"]
        for each in events_of(http, body | {"logprobs": "messages" in body or 1})
    ]
    assert all(entries), "a token whose log-probability is asked for has an event"


def test_the_role_comes_with_the_first_token(http: httpx.Client) -> None:
    first, *others = events_of(http, HELLO)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "Hello"}
    assert not any("role" in event["choices"][0]["delta"] for event in others)


def test_a_stream_has_one_id(http: httpx.Client) -> None:
    for body, kind in ((HELLO, "chat.completion.chunk"), (STORY, "text_completion")):
        heads = {
            (each["id"], each["created"], each["model"], each["object"]) for each in events_of(http, body)
        }
        ((_, _, model, name),) = heads
        assert (model, name) == ("tiny", kind)


def test_a_character_is_never_split(http: httpx.Client) -> None:
    """Its bytes, each a token, in any order."""
    sign = "😀"
    spelt = http.post("/tokenize", json={"prompt": sign, "add_special_tokens": False}).json()["tokens"]
    own = sign.encode()
    ids = spelt[-len(own) :]
    sampling = {"temperature": 10, "seed": 5, "max_tokens": 60, "top_k": len(own), "ignore_eos": True}
    body = STORY | sampling | {"logit_bias": {str(token): 100 for token in ids}, "return_token_ids": True}
    choices = [event["choices"][0] for event in events_of(http, body)]
    byte_of = dict(zip(ids, own))
    data = bytes(byte_of[token] for choice in choices for token in choice["token_ids"])
    assert len(data) == 60
    assert "".join(choice["text"] for choice in choices) == data.decode(errors="replace")


def test_usage_comes_last_or_with_every_piece_if_asked_for(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = events_of(http, STORY | {"stream_options": options})
    assert last["choices"] == []
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert 1 <= counts[0] <= counts[-1] == last["usage"]["completion_tokens"] == 24
    *silent, last = events_of(http, STORY | {"stream_options": {"include_usage": True}})
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 24)
    assert all(piece["choices"] and "usage" not in piece for piece in silent)
    refused = http.post("/v1/completions", json=STORY | {"stream_options": options})
    assert refused.json()["error"]["message"] == "stream_options needs stream: true"


def test_every_choice_ends_once(http: httpx.Client) -> None:
    events = events_of(http, HELLO | {"n": 3, "temperature": 1, "max_tokens": 20})
    ends = Counter(
        choice["index"]
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    )
    assert ends == {0: 1, 1: 1, 2: 1}


def test_the_best_of_several_is_streamed_whole(http: httpx.Client) -> None:
    body = STORY | {"best_of": 4, "temperature": 1, "seed": 1}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert "".join(event["choices"][0]["text"] for event in events_of(http, body)) == choice["text"]


def test_several_answers_come_side_by_side(http: httpx.Client) -> None:
    body = STORY | {"prompt": ["One day", "有一天"], "n": 2, "max_tokens": 40, "ignore_eos": True}
    indices = [choice["index"] for event in events_of(http, body) for choice in event["choices"]]
    assert set(indices) == {0, 1, 2, 3}
    assert indices != sorted(indices)


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_several_answers_are_told_to_their_ends(http: httpx.Client, max_tokens: int) -> None:
    asked = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    prompts = ["One day", "Two days", "1+1=", "Hello"]
    events = events_of(http, asked | {"prompt": prompts, "stream": True})
    told = [choice for event in events for choice in event["choices"]]
    whole = http.post("/v1/completions", json=asked | {"prompt": prompts}).json()["choices"]
    for choice in whole:  # all have ended in one step
        pieces = [each for each in told if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in pieces) == choice["text"]
        assert [each["finish_reason"] for each in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_an_answer_cut_short_says_so(http: httpx.Client) -> None:
    body = STORY | {"max_tokens": 1500, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        name = json.loads(next(lines).removeprefix("data: "))["id"]
        assert http.post(f"/abort/{name}").json() == {"id": name, "aborted": 1}
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["message"] == "the request was aborted"


def test_many_streams_at_once(shared: Server) -> None:
    """With the asynchronous client, each told its own."""

    async def one(client: openai.AsyncOpenAI, left: int) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=f"{left}+1=", temperature=0, stream=True
        )
        return "".join([piece.choices[0].text async for piece in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(one(client, left) for left in range(10, 42)))

    assert asyncio.run(all_of_them()) == [str(left + 1) for left in range(10, 42)]


def test_without_a_tokenizer_each_token_has_an_event() -> None:
    """Its tokens never have text, and clients time them."""
    body = CompletionBody.model_validate({"prompt": [1], "stream": True})
    answers: Any = [SimpleNamespace(num_answers=1)]
    form = CompletionFormat(None, answers, [{"prompt_token_ids": [1]}], body)
    assert all(form.event(AnswerDelta(0, "", tokens=[5]), 0) is not None for _ in range(3))
