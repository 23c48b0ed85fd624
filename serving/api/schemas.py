"""Define the JSON bodies that clients may send.

Types, names and the length of long lists are checked here, ranges where requests are made
(serving/text/request_fields.py). A field that is null counts as absent. A field of the OpenAI API that is not
supported is refused by name, unless its value asks for nothing. The limit on a body's size admits a million
list entries: they are checked in one pass in C, and refused together, not with an error for each.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from serving.api.errors import whole
from serving.api.ignored_fields import IGNORED, Ignored, problem_of
from serving.text.field_types import LONGEST_NAME, MOST_ALLOWED

_MOST_BIASES = 1024  # SamplingParams has the same bound

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_SCHEMA = {
    "anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, _IDS, {"type": "array", "items": _IDS}]
}


def _prompt(given: Any) -> Any:
    """Accept a text, token ids, or a list of either."""
    if isinstance(given, str):
        return given
    types = set(map(type, given)) if isinstance(given, list) else set()
    if types <= {str} or types == {int}:
        if isinstance(given, list):
            return given
    elif types == {list} and all(set(map(type, each)) <= {int} for each in given):
        return given
    raise PydanticCustomError("prompt", "it must be a string, a list of token ids, or a list of either")


def _all(kind: type) -> Callable[[Any], Any]:
    def check(given: Any) -> Any:
        if isinstance(given, list) and not set(map(type, given)) <= {kind}:
            name = {int: "integers", str: "strings"}[kind]
            raise PydanticCustomError("entries", "it must be a list of {kind}", {"kind": name})
        return given

    return check


def _bounded(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > _MOST_BIASES:
        raise PydanticCustomError(
            "too_many",
            "it is of {count} tokens; it must be of at most {most}",
            {"count": len(given), "most": _MOST_BIASES},
        )
    return given


def _few(given: Any) -> Any:
    if isinstance(given, list) and len(given) > MOST_ALLOWED:
        raise PydanticCustomError(
            "too_many",
            "it is of {count} tokens; it must be of at most {most}",
            {"count": len(given), "most": MOST_ALLOWED},
        )
    return given


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]], PlainValidator(_prompt), WithJsonSchema(_SCHEMA)
]
Integers = Annotated[list[int], BeforeValidator(_all(int))]
Strings = Annotated[list[str], BeforeValidator(_all(str))]
Biases = Annotated[dict[str, float], BeforeValidator(_bounded)]
Allowed = Annotated[list[int], BeforeValidator(_all(int)), BeforeValidator(_few)]
Name = Annotated[str, Field(max_length=LONGEST_NAME)]


def refused(field: str, message: str) -> PydanticCustomError:
    """Return the error that refuses a body because of one field."""
    return PydanticCustomError("refused", "{message}", {"message": message, "field": field})


class StrictBody(BaseModel):
    """A JSON object with these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    ignored: ClassVar[Ignored] = IGNORED

    @model_validator(mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name in given.keys() & cls.ignored.keys():
            if (problem := problem_of(name, given, cls.ignored)) is not None:
                raise refused(name, problem)
        for name in given.keys() - cls.model_fields.keys() - cls.ignored.keys():
            shown = whole(name if len(name) <= 60 else f"{name[:57]}...")
            near = difflib.get_close_matches(shown, cls.model_fields, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise refused(shown, f'unknown field "{shown}"; {hint}')
        return {name: value for name, value in given.items() if name in cls.model_fields}


class PaddingOptions(StrictBody):
    """Whether the events of a stream are padded to one size."""

    include_obfuscation: Literal[False] | None = Field(None, description="events are never padded")


class StreamOptions(PaddingOptions):
    """What a stream contains besides answers."""

    include_usage: bool | None = Field(None, description="a last event has the numbers of tokens")
    continuous_usage_stats: bool | None = Field(None, description="every event has those so far")


class RequestBody(StrictBody):
    """The fields that all requests to the model share.

    `apart` names the fields that `parse_request` does not read.
    """

    apart: ClassVar[frozenset[str]] = frozenset()
    model: str | None = Field(None, description="a name of `/v1/models`; null: the one that is served")
    truncate_prompt_tokens: int | None = Field(
        None, description="keep only so many of the prompt's last tokens; -1: as many as fit"
    )
    user: Name | None = None
    tenant: Name | None = Field(
        None, description="whose share it counts against; only without keys, or with a gateway's"
    )
    priority: int | None = Field(None, description="larger goes first, if the recipe's queue is ordered so")
    cache_salt: Name | None = Field(None, description="only requests of the same salt share pages")
    timeout_s: float | None = Field(None, description="after so long the answer ends, complete or not")


class SamplingBody(RequestBody):
    """The fields that all requests for sampled tokens share."""

    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: off")
    min_p: float | None = None
    repetition_penalty: float | None = Field(None, description="from 0.01 to 100; 1: off")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: Biases | None = Field(None, description="by token id, what to add to its logit")
    allowed_token_ids: Allowed | None = Field(None, description="no other tokens may be chosen")
    bad_words: Strings | None = Field(None, description="the answer never holds the tokens of these words")
    logits_processors: list[Any] | None = Field(None, description="the operator's own, by name and args")
    stop: str | Strings | None = None
    stop_token_ids: Integers | None = None
    ignore_eos: bool | None = None
    max_draft_tokens: int | None = Field(
        None, description="guesses of the answer that one step checks, at most; 0: no speculation"
    )
    stream: bool | None = None
    service_tier: Literal["auto", "default"] | None = Field(None, description="there is one: the default")


class GenerationBody(SamplingBody):
    """The fields that completions and chats share."""

    apart = frozenset({"stream_options", "prompt", "messages", "echo", "return_token_ids"})
    max_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    beam_width: int | None = Field(None, description="search for the answers by so many beams")
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    response_format: dict[str, Any] | None = Field(
        None, description="text, json_object or json_schema: the form of the answer"
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="the same by one of json, json_object, regex, choice and grammar"
    )
    guided_json: dict[str, Any] | str | None = Field(None, description="a JSON schema of the answer")
    guided_regex: str | None = Field(None, description="the whole answer matches it")
    guided_choice: Strings | None = Field(None, description="the answer is one of these")
    guided_grammar: str | None = Field(None, description="a grammar of the answer, as Lark or GBNF")
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="show the ids of the answer's tokens")
    prompt_logprobs: int | None = Field(
        None, description="log-probabilities of the prompt's tokens and of the likeliest"
    )

    @model_validator(mode="after")
    def _fits_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise refused("prompt_logprobs", "prompt_logprobs needs stream: false")
        return self


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: Prompt = Field(description="text or token ids, or several")
    best_of: int | None = Field(
        None, description="so many samples are drawn, and the n likeliest are the answers"
    )
    echo: bool | None = Field(None, description="show the prompt before the answer")
    logprobs: int | None = Field(None, description="log-probabilities of each token and of the likeliest")

    @model_validator(mode="after")
    def _tells_prompts_once(self) -> CompletionBody:
        if self.echo and self.truncate_prompt_tokens is not None:
            raise refused("echo", "echo must be left out beside truncate_prompt_tokens")
        if not self.echo or self.logprobs is None:
            return self
        if self.prompt_logprobs is not None:
            raise refused("echo", "echo with logprobs tells what prompt_logprobs asks for")
        if self.beam_width:
            raise refused("echo", "echo with logprobs must be left out beside beam_width")
        return self


class Conversation(StrictBody):
    """The fields that decide how messages become a prompt."""

    add_generation_prompt: bool | None = Field(None, description="null: true")
    continue_final_message: bool | None = Field(
        None, description="the answer continues the last message; needs add_generation_prompt: false"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the template")
    reasoning_effort: str | None = Field(None, description="how hard to think, if the template has a word")


class ChatBody(GenerationBody, Conversation):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Any] = Field(description='each {"role": ..., "content": ...}')
    max_completion_tokens: int | None = Field(None, description="in place of max_tokens")
    tools: list[Any] | None = Field(None, description="functions that the answer may call")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto, required, or the function that must be called; null: auto"
    )
    parallel_tool_calls: bool | None = Field(None, description="several calls in one answer; null: true")
    thinking_token_budget: int | None = Field(None, description="the most tokens of thoughts; null: any")
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(Conversation):
    """The body of `POST /tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = Field(None, description="null: true")
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: Integers
