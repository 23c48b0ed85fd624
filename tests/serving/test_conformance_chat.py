"""Chats, as OpenAI's own client sees them: what clients rely on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import httpx

from tests.lazy import openai
from tests.serving.server import Server

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

HELLO = [{"role": "user", "content": "Hello"}]
ANSWER = "Hello! Ask me for a sum, a count or a story."


def ask(client: openai.OpenAI, messages: list[Any] = HELLO, **fields: Any) -> ChatCompletion:
    """Greedily, unless the fields say otherwise."""
    fields = {"temperature": 0, **fields}
    return client.chat.completions.create(model="tiny", messages=messages, **fields)


def text(answer: ChatCompletion, index: int = 0) -> str:
    content = answer.choices[index].message.content
    assert content is not None
    return content


def test_a_turn_is_an_assistants_text(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert text(answer) == ANSWER


def test_content_may_be_parts(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "12+30?"}]
    answer = ask(client, [{"role": "user", "content": parts}])
    assert text(answer) == text(ask(client, [{"role": "user", "content": "What is\n12+30?"}]))


def test_max_tokens_bounds_an_answer(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].finish_reason == "length"
    assert ANSWER.startswith(text(answer))


def test_n_answers_have_their_indices(client: openai.OpenAI) -> None:
    answer = ask(client, n=4, temperature=1.5, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 12


def test_a_prompts_log_probabilities_come_once_as_in_vllm(client: openai.OpenAI) -> None:
    answer = ask(client, n=2, max_tokens=1, extra_body={"prompt_logprobs": 0}).model_dump()
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert len(others) == answer["usage"]["prompt_tokens"] - 1
    assert not [each for each in answer["choices"] if "prompt_logprobs" in each]


def test_a_seed_repeats_every_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 2, "seed": 7, "max_tokens": 12, "n": 3}
    first, again = ask(client, **fields), ask(client, **fields)
    texts = [text(first, index) for index in range(3)]
    assert texts == [text(again, index) for index in range(3)]
    assert len(set(texts)) == 3


def test_a_stop_string_ends_before_itself(client: openai.OpenAI) -> None:
    answer = ask(client, stop=" sum")
    assert text(answer) == "Hello! Ask me for a"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_dump()["stop_reason"] == " sum"


def test_a_stop_token_may_be_told(client: openai.OpenAI, http: httpx.Client) -> None:
    exclamation = http.post("/tokenize", json={"prompt": "!", "add_special_tokens": False}).json()["tokens"]
    body: dict[str, Any] = {"stop_token_ids": exclamation}
    assert text(ask(client, extra_body=body)) == "Hello"
    answer = ask(client, extra_body=body | {"include_stop_str_in_output": True})
    assert text(answer) == "Hello!"
    assert answer.choices[0].model_dump()["stop_reason"] == exclamation[0]


def test_logprobs_have_their_shape(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == (answer.usage and answer.usage.completion_tokens)
    told = b""
    for entry in logprobs.content:
        assert entry.bytes is not None
        told += bytes(entry.bytes)
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedily
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-6
    assert told.decode().removeprefix(" ").removesuffix("</s>") == ANSWER


def test_a_bias_of_logits_bans_and_forces(client: openai.OpenAI, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "Hello猫", "add_special_tokens": False}).json()["tokens"]
    assert not text(ask(client, logit_bias={str(ids[0]): -100})).startswith("Hello")
    assert text(ask(client, logit_bias={str(ids[-1]): 100}, max_tokens=3)) == "猫猫猫"


def test_usage_is_exact(client: openai.OpenAI, http: httpx.Client, shared: Server) -> None:
    messages = [{"role": "user", "content": "Count from 3 to 9, " * 8}]
    count = http.post("/tokenize", json={"messages": messages}).json()["count"]
    first, again = ask(client, messages, stop="5"), ask(client, messages, stop="5")
    for answer, cached in ((first, 0), (again, count // 16 * 16)):
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens == count
        assert usage.total_tokens == count + usage.completion_tokens
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == cached
