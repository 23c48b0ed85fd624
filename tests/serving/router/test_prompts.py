"""With a recipe, the router computes exactly the page keys that the engine computes for a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from kv_cache.page_keys import page_keys, short_key
from recipes.schema.adapters_section import AdaptersSection
from recipes.schema.reader import load
from serving.adapters import KnownAdapters
from serving.api.access import MOST_CONTAINERS
from serving.api.api_keys import ANYBODY
from serving.router.prompts import MOST_LENIENT_BYTES, PART_BYTES, Prompts
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


def test_responses_and_messages_have_the_keys_of_the_chat_that_they_are() -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    chat = {
        "messages": [{"role": "system", "content": "Be kind."}, *CHAT],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "none",
    }
    response = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": STORY}]}],
        "instructions": "Be kind.",
        "tools": [{"type": "function", **function}],
        "tool_choice": "none",
    }
    message = {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "messages": CHAT,
        "tools": [{"name": "look", "input_schema": function["parameters"]}],
        "tool_choice": {"type": "none"},
    }
    prompts = Prompts(TEXT, 16)
    for body, more in ((response, {}), (message, {"reasoning_effort": "none"})):
        data = json.dumps(body | {"model": "tiny"}).encode()
        found = prompts.read(data, prompts.asked(data), ANYBODY, is_message=body is message)
        assert found == routed(prompts, chat | more | {"model": "tiny"})
        assert (found.tokens_a_key, len(found.keys) >= 3) == (16, True)
    wrong = json.dumps(message | {"model": "tiny", "thread": {}}).encode()
    assert prompts.read(wrong, prompts.asked(wrong), ANYBODY, is_message=True).tokens_a_key != 16


def test_keys_of_an_adapter_are_its_own(tmp_path: Path) -> None:
    """As the engine names the pages of its requests."""
    config = {"r": 4, "lora_alpha": 8, "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not read")
    known = KnownAdapters(AdaptersSection(folders={"pirate": str(tmp_path)}, most=1, rank=4))
    fields = {"id": "a", "prompt": STORY, "cache_salt": "s"}
    request = parse_request({**fields, "adapter": "pirate"}, TEXT, adapters=known)
    found = routed(Prompts(TEXT, 16, known), {"prompt": STORY, "cache_salt": "s", "model": "pirate"})
    assert found.keys == [*map(short_key, page_keys(request.prompt, 16, request.cache_salt))]
    plain = routed(Prompts(TEXT, 16, known), {"prompt": STORY, "cache_salt": "s", "model": "tiny"})
    assert not {*plain.keys} & {*found.keys}


def test_text_that_goes_on_begins_alike() -> None:
    prompts = Prompts()
    turn = [*CHAT * 4]
    one = routed(prompts, {"model": "a", "messages": turn})
    two = routed(prompts, {"model": "a", "messages": [*turn, {"role": "assistant", "content": "x" * 999}]})
    assert len(one.keys) >= 3
    assert two.keys[: len(one.keys)] == one.keys
    assert one.num_tokens * 4 >= len(one.keys) * PART_BYTES
    assert not {*routed(prompts, {"model": "b", "messages": turn}).keys} & {*one.keys}


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"{", b'{"messages": 3}', b'{"prompt": [[]]}', b"\xff"),
        *(
            b'{"input": 3}',
            b'{"input": [3]}',
            b'{"input": "a", "tools": 3}',
            b'{"input": "a", "tools": [{}]}',
        ),
        b'{"input": "a", "reasoning": {"effort": 3}}',
    ],
)
def test_a_wrong_body_is_for_the_replica_to_refuse(body: bytes) -> None:
    for prompts in (Prompts(), Prompts(TEXT, 16)):
        prompts.read(body, prompts.asked(body), ANYBODY)


def test_what_cannot_be_read_is_judged_by_its_text() -> None:
    """The replica says what is wrong with it, or reads what this router does not."""
    prompts = Prompts(TEXT, 16)
    nested = {"a": 1}
    for _ in range(600):
        nested = {"a": nested}
    tools = [{"type": "function", "name": "f", "parameters": nested}]
    for path, body in (
        ("", {"input": STORY, "tools": tools}),
        ("", {"messages": CHAT, "chat_template_kwargs": nested}),
        ("messages", {"model": "a", "max_tokens": 4, "messages": [{"role": "system", "content": []}]}),
    ):
        data = json.dumps(body).encode()
        found = prompts.read(data, prompts.asked(data), ANYBODY, is_message=bool(path))
        assert found.tokens_a_key == 64
    for data in (
        b'{"model": "a", "stream": true, "user": "\\ud83d"}',
        b'{"model": "a", "stream": true, "n": NaN}',
    ):
        asked = prompts.asked(data)
        assert (asked.model, asked.stream) == ("a", True)


def test_too_many_values_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits the router's fields is for the replica to refuse; what does not is refused at once."""
    many = b'{"model": "a", "prompt": [%s]' % b",".join([b"{}"] * (MOST_CONTAINERS + 1))
    for name in ("json.loads", "msgspec.json.decode"):
        monkeypatch.setattr(f"serving.router.prompts.{name}", pytest.fail)
    prompts = Prompts(TEXT, 16)
    asked = prompts.asked(many + b"}")
    assert asked.model == "a"
    assert prompts.read(many + b"}", asked, ANYBODY).tokens_a_key != 16
    with pytest.raises(HTTPException, match="lists and objects, and may hold 16384") as refusal:
        prompts.asked(many + b', "user": 5}')
    assert refusal.value.status_code == 413
    long = b'{"user": 5, "prompt": "%s"}' % (b"a" * MOST_LENIENT_BYTES)
    with pytest.raises(HTTPException, match=r"cannot be read: Expected `str.* at most 1048576"):
        prompts.asked(long)
    assert prompts.asked(b"--a\r\n" + many).model is None, "a form with a file"


def test_without_a_recipe_the_system_and_the_tools_count() -> None:
    prompts = Prompts()
    system = "Be kind and thorough. " * 60
    first, second = (
        json.dumps({"model": "a", "system": system, "messages": [{"role": "user", "content": each}]}).encode()
        for each in ("Hello", "Bye")
    )
    one, other = (prompts.read(each, prompts.asked(each), ANYBODY) for each in (first, second))
    assert one.num_tokens > 300
    shared = [here for here, there in zip(one.keys, other.keys) if here == there]
    assert len(shared) >= 4
