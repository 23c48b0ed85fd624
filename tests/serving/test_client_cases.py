"""Requests of other engines' clients are answered, or refused by the name of the field.

The fields are those of users of vLLM, SGLang, llama.cpp, Ollama, OpenRouter, LM Studio and OpenAI, most with
a value that asks for nothing; the messages and tools are those that frameworks send back; the schemas are
those that pydantic and zod write.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import httpx
import pydantic
import pytest
from pydantic import AnyUrl, BaseModel, Field, create_model

from borders.refusal import BadRequest
from recipes.schema.reader import load
from serving.api.schemas import ChatBody
from serving.grammars.json_schema import prepared
from serving.grammars.matching import Grammars
from serving.grammars.structured_output import form_notes, grammar_of
from serving.text.chat_options import ChatOptions
from serving.text.tokenizer import Text
from serving.tools.definitions import tool_use
from serving.tools.formats import TOOL_FORMATS
from tests.each_of import each_of
from tests.patience import PATIENCE_S
from tests.serving.server import Server

HELLO = [{"role": "user", "content": "hi"}]
NOTHING: dict[str, dict[str, Any]] = {
    "vLLM": {
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "top_k": 20, "min_p": 0.0,
        "include_stop_str_in_output": False, "repetition_penalty": 1.05, "length_penalty": 1.0,
        "use_beam_search": False, "early_stopping": False, "detokenize": True, "add_special_tokens": False,
        "documents": [], "priority": 0, "cache_salt": "x", "return_tokens_as_token_ids": False,
        "include_reasoning": True, "ignore_eos": False, "min_tokens": 0, "stop_token_ids": [],
        "kv_transfer_params": None, "echo": False, "mm_processor_kwargs": None, "prompt_logprobs": None,
        "guided_decoding_backend": "xgrammar", "guided_whitespace_pattern": None, "bad_words": [],
        "add_generation_prompt": True, "truncate_prompt_tokens": None, "return_token_ids": False,
        "structural_tag": None, "media_io_kwargs": None, "logits_processors": None,
        "allowed_token_ids": None, "thinking_token_budget": None,
    },
    "SGLang": {
        "regex": "a+", "ebnf": 'root ::= "a"', "json_schema": "{}", "separate_reasoning": True,
        "stream_reasoning": True, "min_new_tokens": 0, "no_stop_trim": False, "lora_path": None,
        "return_hidden_states": False, "continue_final_message": False, "custom_params": None,
    },
    "llama.cpp": {
        "cache_prompt": True, "n_predict": 5, "repeat_penalty": 1.1, "mirostat": 0, "id_slot": -1,
        "grammar": 'root ::= "a"', "typical_p": 1.0, "dry_multiplier": 0.0, "xtc_probability": 0.0,
        "n_keep": 0, "repeat_last_n": 64, "tfs_z": 1.0, "dynatemp_range": 0.0, "min_keep": 0, "n_probs": 0,
        "reasoning_format": "auto", "return_progress": False,
    },
    "Ollama, OpenRouter and LM Studio": {
        "think": False, "keep_alive": "5m", "reasoning": {"effort": "low"}, "provider": {"order": []},
        "transforms": [], "models": ["a"], "route": "fallback", "usage": {"include": True}, "plugins": [],
        "ttl": 5, "format": "json", "enable_thinking": False, "thinking": {"type": "disabled"}, "top_a": 0.0,
        "raw": False, "stream_options": None, "temperature": None, "top_p": None, "stop": None, "n": None,
        "max_tokens": None, "seed": None, "logit_bias": None, "user": None, "tools": None,
        "tool_choice": None, "response_format": None, "parallel_tool_calls": None,
    },
    "OpenAI": {
        "reasoning_effort": "low", "verbosity": "low", "max_completion_tokens": 3, "modalities": ["text"],
        "service_tier": "flex", "store": True, "metadata": {"a": "b"}, "prompt_cache_key": "a",
        "parallel_tool_calls": True, "tool_choice": "none", "tools": [], "response_format": {"type": "text"},
        "logprobs": False, "top_logprobs": 0, "temperature": 2.0, "stop": [],
    },
    "out of our own range": {"max_tokens": -1, "top_k": -1, "seed": -1},
}  # fmt: skip
# They set the form of an answer, its effort, or a penalty beside the number of tokens that it looks back at
ALONE = {"regex", "ebnf", "json_schema", "grammar", "format", "reasoning", "repeat_penalty"}
# What would change the answer, or asks for what is not here: the field, and what is said about it
REFUSED: list[tuple[str, Any, str]] = [
    ("chat_template", "{{ messages[0].content }}", "chat_template is not supported as vLLM has it"),
    ("request_id", "a", "send it as the header x-request-id"),
    ("rid", "a", "send it as the header x-request-id"),
    ("vllm_xargs", {"a": 1}, "use logits_processors"),
    ("timings_per_token", True, "`false` is accepted"),
    ("samplers", ["top_k"], "samplers is not supported as llama.cpp has it"),
    ("options", {"num_ctx": 1024}, "send each of them as a field of its own"),
    ("web_search_options", {}, "web_search_options is not supported"),
    ("stream_options", {"include_usage": True}, "needs stream: true"),
    ("max_tokens", 100_000, "maximum context length is 2048 tokens"),
    ("top_p", -0.1, "it must be a number from 0 to 1"),
    ("tempersture", 1, "did you mean temperature?"),
    ("audio", {}, "audio is not supported: leave it out"),
    (
        "tools",
        [{"type": "function", "function": {"name": "f"}}],
        "tools are not supported: the recipe names no server.tool_format for this model: leave them out, "
        'or send tool_choice: "none"',
    ),
]


@pytest.fixture(scope="module")
def tiny(shared: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=PATIENCE_S) as client:
        yield client


def asked(client: httpx.Client, **fields: Any) -> tuple[int, str]:
    body = {"messages": HELLO, "max_tokens": 2, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    error = answer.json().get("error") or {}
    return answer.status_code, error.get("message", "")


@each_of("who", NOTHING)
def test_a_field_that_asks_for_nothing_or_for_what_is_here_is_taken(tiny: httpx.Client, who: str) -> None:
    """All that a client has beside each other, but for those of which a request has one."""
    together = {name: value for name, value in NOTHING[who].items() if name not in ALONE}
    assert asked(tiny, **together) == (200, "")
    for name in NOTHING[who].keys() & ALONE:
        assert asked(tiny, **{name: NOTHING[who][name]}) == (200, ""), name


@each_of("name, value, said", REFUSED)
def test_what_is_not_here_is_refused_by_its_name(
    tiny: httpx.Client, name: str, value: Any, said: str
) -> None:
    status, message = asked(tiny, **{name: value})
    assert (status, said in message) == (400, True), message


def test_completions_take_their_nulls(tiny: httpx.Client) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "suffix": None, "best_of": 1, "logprobs": None}
    assert tiny.post("/v1/completions", json=body).status_code == 200


PRICE = {"id": "call_1", "type": "function", "function": {"name": "price", "arguments": '{"item": "lamp"}'}}
USER = {"role": "user", "content": "What does the lamp cost?"}
SAYS = {"role": "assistant", "content": "x"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [PRICE]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "348"}
BARE = {"id": "c", "function": {"name": "price", "arguments": "{}"}}
SYSTEM = {"role": "system", "content": "a"}
TALKS: dict[str, list[dict[str, Any]]] = {
    "nulls": [
        USER,
        {**SAYS, "refusal": None, "audio": None, "function_call": None, "tool_calls": None},
        USER,
    ],
    "annotations": [USER, {**SAYS, "annotations": []}, USER],
    "no calls": [USER, {**SAYS, "tool_calls": []}, USER],
    "two names of thoughts": [USER, {**SAYS, "reasoning_content": "r", "reasoning": "r"}, USER],
    "blocks of thoughts": [USER, {**SAYS, "thinking_blocks": [], "provider_specific_fields": {}}, USER],
    "details of thoughts": [USER, {**SAYS, "reasoning_details": []}, USER],
    "an id": [USER, {**SAYS, "id": "msg_1"}, USER],
    "an answer without a word": [USER, {"role": "assistant", "content": None}, USER],
    "marks of a cache": [
        {
            "role": "system",
            "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        },
        USER,
    ],
    "a name": [{**USER, "name": "bob"}],
    "a result with its function's name": [USER, CALLED, {**RESULT, "name": "price"}],
    "a result in parts": [USER, CALLED, {**RESULT, "content": [{"type": "text", "text": "348"}]}],
    "a call as it was streamed": [USER, {"role": "assistant", "tool_calls": [{**PRICE, "index": 0}]}, RESULT],
    "a call without arguments": [
        USER,
        {**CALLED, "tool_calls": [{**PRICE, "function": {"name": "price", "arguments": ""}}]},
        {**RESULT, "content": ""},
    ],
    "a call without a type": [USER, {**CALLED, "tool_calls": [BARE]}, {**RESULT, "tool_call_id": "c"}],
    "a result of another call": [USER, CALLED, {**RESULT, "tool_call_id": "other"}],
    "two system messages": [SYSTEM, SYSTEM, USER],
    "a late system message": [USER, SYSTEM],
    "two user messages": [USER, USER],
    "an assistant at the end": [USER, {"role": "assistant", "content": "The"}],
    "only a system message": [SYSTEM],
    "an empty text": [{"role": "user", "content": ""}],
    "no parts": [{"role": "user", "content": []}],
    "a refusal": [USER, {**SAYS, "content": None, "refusal": "I cannot."}, USER],
    "a refusal in parts": [USER, {**SAYS, "content": [{"type": "refusal", "refusal": "I cannot."}]}, USER],
    "thoughts twice": [USER, {**SAYS, "reasoning": "r", "reasoning_details": [{"text": "r"}]}, USER],
    "a result of nothing": [USER, CALLED, {**RESULT, "content": None}],
    "a mark of a cache at a message": [USER, CALLED, {**RESULT, "cache_control": {"type": "ephemeral"}}],
    "a call with a null for its type": [USER, {**CALLED, "tool_calls": [{**PRICE, "type": None}]}, RESULT],
    "a call with an empty type": [USER, {**CALLED, "tool_calls": [{**PRICE, "type": ""}]}, RESULT],
    "a result in the older way": [USER, {"role": "function", "name": "price", "content": "1"}],
}


@pytest.fixture(scope="module")
def agents() -> Text:
    found = Text.of(load("recipes/tiny/agent.yaml"))
    assert found is not None
    return found


@each_of("name", TALKS)
def test_messages_are_taken_as_frameworks_send_them_back(agents: Text, name: str) -> None:
    body = ChatBody.model_validate({"messages": TALKS[name]})
    assert agents.chat(body.messages)


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS: dict[str, dict[str, Any]] = {
    "strict": tool(strict=True, parameters={"type": "object", "properties": {}}),
    "no parameters": tool(),
    "nulls": tool(description=None, parameters=None),
    "any parameters": tool(parameters={}),
    "a name with signs": tool("my-tool.x", parameters={"type": "object"}),
    "the longest name": tool("mcp__" + "a" * 59, parameters={"type": "object"}),
    "marks of a cache": tool(parameters={"type": "object"}) | {"cache_control": {"type": "ephemeral"}},
}


@each_of("name", TOOLS)
def test_tools_are_taken_as_frameworks_send_them(agents: Text, name: str) -> None:
    assert tool_use({"tools": [TOOLS[name]]}) is not None
    assert agents.chat([USER], ChatOptions(tools=[TOOLS[name]]))


class Unit(enum.Enum):
    ONE = 1
    X = "x"


class Cat(BaseModel):
    k: Literal["cat"]
    n: int


class Dog(BaseModel):
    k: Literal["dog"]
    n: str


class Tree(BaseModel):
    v: int
    ch: list[Tree] = []


class Open(BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


FIELDS: dict[str, Any] = {
    "set": set[str], "frozenset": frozenset[int], "decimal": decimal.Decimal, "date": datetime.date,
    "datetime": datetime.datetime, "timedelta": datetime.timedelta, "time": datetime.time, "uuid": uuid.UUID,
    "url": AnyUrl, "enum": Unit, "dict": dict[str, int], "dict of anything": dict[str, Any],
    "dict by numbers": dict[int, str], "tuple": tuple[int, str], "long tuple": tuple[int, ...],
    "optional": int | None, "union": int | str | None, "any": Any, "bytes": bytes, "path": pathlib.Path,
    "discriminated": Annotated[Cat | Dog, Field(discriminator="k")], "tree": Tree,
    "address": ipaddress.IPv4Address, "bounded": Annotated[int, Field(gt=0, le=100)],
    "short list": Annotated[list[int], Field(min_length=1, max_length=3)],
    "pattern": Annotated[str, Field(pattern=r"^\d{3}-\d{4}$")],
    "notes": Annotated[str, Field(examples=["a"], description="d", title="t", deprecated=True)],
    "json": pydantic.Json, "secret": pydantic.SecretStr, "float": float, "literal": Literal[1, "x", True],
    "dict with one": Annotated[dict[str, int], Field(min_length=1)],
    "halves": Annotated[float, Field(multiple_of=0.5)],
    "named keys": dict[Annotated[str, Field(pattern="^[a-z]+$")], int],
}  # fmt: skip


def of_text(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", **more}}}


# Of zod 4.0 and 4.1, and of all versions of zod 4
ZODS_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
ZODS_DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
PYDANTICS_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
SCHEMAS: dict[str, Any] = {
    **{name: create_model("M", a=(each, ...)).model_json_schema() for name, each in FIELDS.items()},
    "open": Open.model_json_schema(),
    "not": {"type": "object", "properties": {"a": {"not": {"type": "null"}}}},
    "if": of_text() | {"if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["a"]}},
    "needs another": of_text() | {"dependentRequired": {"a": ["a"]}},
    "definitions": {
        "definitions": {"X": {"type": "string"}},
        "type": "object",
        "properties": {"a": {"$ref": "#/definitions/X"}},
    },
    "nullable": of_text(nullable=True),
    "own keywords": of_text(**{"x-foo": 1}) | {"x-order": 1},
    "order": of_text() | {"propertyOrdering": ["a"]},
    "empty": {},
    "int64": {"type": "object", "properties": {"a": {"type": "integer", "format": "int64"}}},
    "double": {"type": "object", "properties": {"a": {"type": "number", "format": "double"}}},
    "reference": of_text(format="uri-reference"),
    "email of zod 4.0": of_text(format="email", pattern=ZODS_EMAIL),
    "duration of zod": of_text(format="duration", pattern=ZODS_DURATION),
    "decimal of pydantic 2.12": of_text(pattern=PYDANTICS_DECIMAL),
    **json.loads(pathlib.Path(__file__).with_name("zod_schemas.json").read_text(encoding="utf-8")),
}


@pytest.mark.parametrize(
    ("pattern", "signs"),
    [
        (ZODS_EMAIL, ("a", "Z9", ".", "-", "'", "@", ".co")),
        (ZODS_DURATION, "P1YMDTHSW."),
        (PYDANTICS_DECIMAL, "+-.01"),
    ],
)
def test_a_pattern_with_look_around_is_followed_by_one_without(pattern: str, signs: Sequence[str]) -> None:
    """Both take the same ones of random texts; `re` of Python is the judge, which has look-around."""
    schema = prepared(of_text(pattern=pattern), "response_format").schema
    assert isinstance(schema, dict)
    plain = re.compile(schema["properties"]["a"]["pattern"])
    rng, judge, found = random.Random(3), re.compile(pattern), [0, 0]
    good = ("a.b@c-d.ef", "a@b.cd", "P1Y1M1DT1H1M1.1S", "P1W", "PT1S", "P1DT1H", "-1.50", "+.5")
    for _ in range(20_000):
        text = list(rng.choice(good)) if rng.random() < 0.8 else []
        for _ in range(rng.randrange(4) if text else rng.randrange(10)):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randrange(2)] = rng.choice(signs)
        said = bool(judge.search("".join(text)))
        assert said == bool(plain.search("".join(text))), "".join(text)
        found[said] += 1
    assert min(found) > 1000


def test_a_constant_with_the_sign_delete_can_be_called_with(agents: Text) -> None:
    schema = {"type": "object", "properties": {"a\x7f": {"enum": ["b\x7f"]}}, "required": ["a\x7f"]}
    use = tool_use({"tools": [tool(parameters=schema, strict=True)], "tool_choice": "required"})
    assert use is not None
    grammar = use.grammar(TOOL_FORMATS["glm47"], {})
    assert grammar is not None
    matcher = Grammars(lambda: agents, agents.vocab_size, agents.eos_token_ids).beginning(grammar)
    pair = "<arg_key>a\x7f</arg_key><arg_value>b\x7f</arg_value>"
    tokens = agents.encode_within(f"<tool_call>f{pair}</tool_call>")
    assert matcher.try_consume_tokens(tokens) == len(tokens)


@each_of("pattern", [r"^(?!\s*$).+", r"^(?=a)", r"(a)\1", "[", r"\bword\b"])
def test_a_pattern_that_cannot_be_held_is_refused_where_it_is_strict_alone(
    agents: Text, pattern: str
) -> None:
    schema, grammars = (
        of_text(pattern=pattern),
        Grammars(lambda: agents, agents.vocab_size, agents.eos_token_ids),
    )
    for is_strict in (False, True):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": is_strict}}
        fields = {"tools": [tool(parameters=schema, strict=is_strict)], "tool_choice": "required"}
        use = tool_use(fields)
        assert use is not None
        place, name = "properties.a.pattern", use.tools[0]["function"]["name"]
        formed = grammar_of({"response_format": form})
        assert formed is not None
        assert form_notes({"response_format": form}) == (() if is_strict else (place,))
        if is_strict:
            with pytest.raises(BadRequest, match=f"strict tool {name} in tools .* cannot be followed"):
                use.grammar(TOOL_FORMATS["hermes"], {})
            with pytest.raises(BadRequest, match="cannot be followed"):
                grammars.beginning(formed)
        else:
            called = use.grammar(TOOL_FORMATS["hermes"], {})
            assert called is not None
            assert grammars.beginning(called)
            assert grammars.beginning(formed)
            assert use.notes_in(TOOL_FORMATS["hermes"]) == (f"{name}: {place}",)
    named = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}}
    use = tool_use({"tools": [tool(parameters=named)], "tool_choice": "required"})
    assert use is not None
    assert use.notes[0].endswith(": parameters")


@each_of("name", [*SCHEMAS, "true"])
def test_schemas_are_taken_as_libraries_write_them(agents: Text, name: str) -> None:
    """As the form of an answer and, where it is an object, as the parameters of a tool."""
    schema = SCHEMAS.get(name, True)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    grammar = grammar_of({"response_format": form})
    assert grammar is not None
    assert Grammars(lambda: agents, agents.vocab_size, agents.eos_token_ids).beginning(grammar)
    if name in ("arr", "true"):
        with pytest.raises(BadRequest, match="tools"):
            tool_use({"tools": [tool(parameters=schema)]})
    else:
        assert tool_use({"tools": [tool(parameters=schema)]}) is not None
