"""Completions: what clients rely on, and what is refused beside them."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
import torch

from tests.lazy import openai, transformers
from tests.test_imports import ROOT

SUM = "348+275="


def ask(client: openai.OpenAI, prompt: Any = SUM, **fields: Any) -> openai.types.Completion:
    """Greedily, unless the fields say otherwise."""
    return client.completions.create(model="tiny", prompt=prompt, **{"temperature": 0, **fields})


def ids(http: httpx.Client, prompt: str) -> list[int]:
    found: list[int] = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    return found


def test_a_text_is_continued(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "623"
    assert answer.choices[0].finish_reason == "stop"


def test_each_form_of_prompts_is_continued_in_its_order(client: openai.OpenAI, http: httpx.Client) -> None:
    for prompts in ([SUM, "12+30="], [ids(http, SUM), ids(http, "12+30=")]):
        answer = ask(client, prompts, n=2)
        assert [each.index for each in answer.choices] == [0, 1, 2, 3]
        assert [each.text for each in answer.choices] == ["623", "623", "42", "42"]


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_is_echoed(client: openai.OpenAI, http: httpx.Client, n: int) -> None:
    assert [each.text for each in ask(client, echo=True, n=n).choices] == [f"{SUM}623"] * n
    assert ask(client, ids(http, SUM)[1:], echo=True, n=n).choices[-1].text.startswith(SUM)


def test_an_echo_tells_how_likely_the_prompt_was(client: openai.OpenAI, http: httpx.Client) -> None:
    prompt = "猫 & 348+275="
    answer = ask(client, prompt, echo=True, logprobs=2, max_tokens=1)
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert answer.usage is not None
    num_prompt = answer.usage.prompt_tokens
    assert len(logprobs.tokens) == num_prompt + 1
    assert logprobs.tokens[0] == "<s>"
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    for name, offset in list(zip(logprobs.tokens, logprobs.text_offset))[1:]:
        assert choice.text[offset:].startswith(name)

    model = transformers.AutoModelForCausalLM.from_pretrained(
        ROOT / "recipes/tiny/weights", dtype=torch.float32
    )
    tokens = ids(http, prompt)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    following = [*tokens[1:], int(expected[-1].argmax())]
    for position, token in enumerate(following):
        found = logprobs.token_logprobs[position + 1]
        assert found == pytest.approx(float(expected[position, token]), abs=2e-4)
        best = max(logprobs.top_logprobs[position + 1].values())
        assert best == pytest.approx(float(expected[position].max()), abs=2e-4)


def test_offsets_count_characters_that_stay_unfinished(client: openai.OpenAI, http: httpx.Client) -> None:
    """Bytes that only begin a character are one replacement, which moves what follows."""
    first, second, third = ids(http, "한")[-3:]
    letter = ids(http, "a")[-1]
    prompt = [first, letter, first, second, first, second, third, letter, first, second]
    answer = ask(
        client, prompt, echo=True, logprobs=0, max_tokens=1, extra_body={"allowed_token_ids": [third]}
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "\ufffda\ufffd한a\ufffd\ufffd"
    assert logprobs is not None
    assert logprobs.text_offset == [0, 1, 2, 2, 3, 3, 3, 4, 5, 5, 6]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_so_many_log_probabilities_are_told(client: openai.OpenAI, count: int) -> None:
    answer = ask(client, logprobs=count)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["6", "2", "3", "</s>"]
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    for tops, name, value in zip(logprobs.top_logprobs, logprobs.tokens, logprobs.token_logprobs):
        assert len(tops) == max(count, 1)
        assert tops[name] == max(tops.values()) == value


def test_the_likeliest_of_several_samples_is_told(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 8, "logprobs": 0}
    every = ask(client, "One day", n=6, **fields)
    best = ask(client, "One day", n=2, best_of=6, **fields)

    def likelihood(choice: Any) -> float:
        logprobs = choice.logprobs.token_logprobs
        return math.fsum(logprobs) / len(logprobs)

    ranked = sorted(every.choices, key=likelihood, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens  # all were computed
    with pytest.raises(openai.BadRequestError, match="best_of is 2"):
        ask(client, n=3, best_of=2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_is_scored(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": SUM, "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        lines = http.post("/v1/completions", json=body | options).text.split("\n\n")
        events = [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in lines[:-2]]
        (choice,), usage = events[0]["choices"], events[-1]["usage"]
        assert len(events) == 2
    else:
        answer = http.post("/v1/completions", json=body).json()
        (choice,), usage = answer["choices"], answer["usage"]
    assert choice["text"] == SUM
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == usage["prompt_tokens"] == 9
    assert usage["completion_tokens"] == 0


@pytest.mark.parametrize(("echoed", "num_each"), [({}, 3), ({"echo": True, "max_tokens": 0}, 0)])
def test_the_usage_of_a_search_counts_every_answer_told(
    http: httpx.Client, echoed: dict[str, Any], num_each: int
) -> None:
    body = {"prompt": SUM, "beam_width": 3, "n": 2, "max_tokens": 3, "return_token_ids": True} | echoed
    answer = http.post("/v1/completions", json=body).json()
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [num_each] * 2
    assert answer["usage"]["completion_tokens"] == 2 * num_each
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    events = http.post("/v1/completions", json=streamed).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["usage"] == answer["usage"]


def test_a_search_that_is_not_over_in_time_has_all_its_choices(http: httpx.Client) -> None:
    body = {"prompt": [SUM, "One day"], "beam_width": 2, "n": 2, "max_tokens": 3, "timeout_s": 1e-9}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2, 3]
    assert {(each["text"], each["finish_reason"]) for each in choices} == {("", "timeout")}
    lines = http.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    ends = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


def test_a_prompt_that_is_not_scored_in_time_says_so(http: httpx.Client) -> None:
    body = {"prompt": SUM, "max_tokens": 0, "echo": True, "logprobs": 1, "timeout_s": 1e-9}
    answer = http.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (SUM, "timeout")
    assert {len(entries) for entries in choice["logprobs"].values()} == {0}
    assert answer["usage"]["completion_tokens"] == 0


def test_each_sample_tells_its_prompt(http: httpx.Client) -> None:
    body = {"prompt": ["猫 348+275=", "1+1="], "n": 3, "max_tokens": 2, "temperature": 0}
    echoed = http.post("/v1/completions", json=body | {"echo": True, "logprobs": 2}).json()["choices"]
    scored = http.post("/v1/completions", json=body | {"prompt_logprobs": 2}).json()["choices"]
    for first in (0, 3):
        assert echoed[first]["logprobs"]["token_logprobs"][1] is not None
        assert all(each["logprobs"] == echoed[first]["logprobs"] for each in echoed[first : first + 3])
        told = [each["prompt_logprobs"] for each in scored[first : first + 3]]
        assert len(told[0]) == len(echoed[first]["logprobs"]["tokens"]) - 2
        assert told == [told[0]] * 3


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""]])
def test_an_empty_prompt_is_refused(client: openai.OpenAI, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="empty; it must hold at least one token"):
        ask(client, prompt)


def test_a_prompts_log_probabilities_come_as_in_vllm(client: openai.OpenAI) -> None:
    choice = ask(client, extra_body={"prompt_logprobs": 1}).choices[0].model_dump()
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == 8
    assert [next(iter(each.values()))["decoded_token"] for each in others] == list(SUM)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs needs stream: false"):
        ask(client, extra_body={"prompt_logprobs": 1}, stream=True)


def test_no_probability_leaves_the_likeliest_token(http: httpx.Client) -> None:
    """OpenAI's API takes a top_p of 0."""
    asked = {"prompt": "One day", "max_tokens": 12}
    texts = [
        http.post("/v1/completions", json=asked | more).json()["choices"][0]["text"]
        for more in (
            {"temperature": 0},
            {"temperature": 2, "top_p": 0},
            {"temperature": 2, "top_p": 0, "top_k": 9},
        )
    ]
    assert len(set(texts)) == 1
