"""What a router knows of a prompt: with a recipe, exactly the keys that the engine gives its pages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kv_cache.page_keys import page_keys, short_key
from recipes.schema.reader import load
from serving.api.api_keys import ANYBODY, ApiKeys, Rights
from serving.router.prompts import PART_BYTES, Prompts
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text

TEXT = Text.of(load("recipes/tiny/cpu.yaml"))
STORY = "Once upon a time a boy went to the sea and met a fish that spoke in a soft voice. " * 3
CHAT = [{"role": "user", "content": STORY}]


def routed(prompts: Prompts, body: dict[str, Any], **options: Any) -> Any:
    data = json.dumps(body).encode()
    return prompts.read(data, prompts.asked(data), options.get("client", ANYBODY))


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": STORY},
        {"messages": CHAT, "max_tokens": 3, "temperature": 0.5},
        {"messages": CHAT, "cache_salt": "a"},
        {"prompt": [*range(3, 60)]},
    ],
)
def test_keys_are_the_engines(body: dict[str, Any]) -> None:
    found = routed(Prompts(TEXT, 16), body)
    name = "prompt_token_ids" if isinstance(body.get("prompt"), list) else "prompt"
    fields = {name if key == "prompt" else key: value for key, value in body.items()}
    request = parse_request({"id": "a", **fields}, TEXT)
    keys = page_keys(request.prompt, 16, request.cache_salt)
    assert len(keys) >= 3
    assert found.keys == [*map(short_key, keys)]
    assert (found.num_tokens, found.tokens_a_key) == (request.num_prompt_tokens, 16)


def test_keys_of_others_are_others() -> None:
    clients = ApiKeys({"one": Rights(), "two": Rights()})
    prompts = Prompts(TEXT, 16)
    one, two = (
        routed(prompts, {"prompt": STORY}, client=clients.client(f"Bearer {key}")).keys
        for key in ("one", "two")
    )
    assert not {*one} & {*two}


def test_text_that_goes_on_begins_alike() -> None:
    prompts = Prompts()
    turn = [*CHAT * 4]
    one = routed(prompts, {"model": "a", "messages": turn})
    two = routed(prompts, {"model": "a", "messages": [*turn, {"role": "assistant", "content": "x" * 999}]})
    assert len(one.keys) >= 3
    assert two.keys[: len(one.keys)] == one.keys
    assert one.num_tokens * 4 >= len(one.keys) * PART_BYTES
    assert not {*routed(prompts, {"model": "b", "messages": turn}).keys} & {*one.keys}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": 3}', b'{"prompt": [[]]}', b"\xff"])
def test_a_wrong_body_is_for_the_replica_to_refuse(body: bytes) -> None:
    for prompts in (Prompts(), Prompts(TEXT, 16)):
        prompts.read(body, prompts.asked(body), ANYBODY)
