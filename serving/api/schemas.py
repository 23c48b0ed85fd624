"""What may a client's JSON hold?

Types, names and the length of what is rewritten for the engine are checked here, ranges where requests are
made (serving/text/request_fields.py). A field that is null counts as absent. A field that is known
elsewhere and not supported here is refused by name, unless its value asks for nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from serving.api.errors import whole
from serving.api.long_lists import Biases, Integers, Prompt, Strings
from serving.text.request_fields import LONGEST_NAME

Name = Annotated[str, Field(max_length=LONGEST_NAME)]

# Fields of the OpenAI API that ask for what this server does not do, and their values that ask for nothing
UNSUPPORTED: dict[str, Sequence[Any]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class Body(BaseModel):
    """A JSON object without surprises."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name in given.keys() - cls.model_fields.keys():
            value = given[name]
            if name in UNSUPPORTED and (value is None or value in UNSUPPORTED[name]):
                continue
            if name in UNSUPPORTED:
                raise PydanticCustomError(
                    "unsupported", "{name} is not supported; leave it out", {"name": name}
                )
            shown = whole(name if len(name) <= 60 else f"{name[:57]}...")
            near = difflib.get_close_matches(shown, cls.model_fields, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise PydanticCustomError(
                "unknown", 'unknown field "{name}"; {hint}', {"name": shown, "hint": hint}
            )
        return {name: value for name, value in given.items() if name in cls.model_fields}


class StreamOptions(Body):
    """What a stream tells besides."""

    include_usage: bool | None = Field(None, description="a last event tells the tokens of the request")
    continuous_usage_stats: bool | None = Field(None, description="every event tells those so far")
    include_obfuscation: Literal[False] | None = Field(None, description="events are never padded")


class Asked(Body):
    """What completions and chats have in common."""

    model: str | None = Field(None, description="a name of `/v1/models`; null: the one that is served")
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: off")
    min_p: float | None = None
    repetition_penalty: float | None = Field(None, description="from 0.01 to 100; 1: off")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: Biases | None = Field(None, description="what to add to the logits of token ids")
    stop: str | Strings | None = None
    stop_token_ids: Integers | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    beam_width: int | None = Field(None, description="search for the answers by so many beams")
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    tenant: Name | None = Field(None, description="whose share it is served from, where no key says so")
    priority: int | None = Field(None, description="larger goes first, where the recipe's queue says so")
    cache_salt: Name | None = Field(None, description="only requests of the same salt share pages")
    timeout_s: float | None = Field(None, description="after so long it ends where it stands")
    return_token_ids: bool | None = Field(None, description="tell the ids of the answer's tokens")
    prompt_logprobs: int | None = Field(None, description="those of the prompt's tokens and the likeliest")

    @model_validator(mode="after")
    def _fits_a_stream(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream: true", {})
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError("prompt_logprobs", "prompt_logprobs needs stream: false", {})
        return self


class CompletionBody(Asked):
    """`POST /v1/completions`."""

    prompt: Prompt = Field(description="text or token ids, or several")
    best_of: int | None = Field(None, description="so many samples, of which the n likeliest are told")
    echo: bool | None = Field(None, description="the prompt is told before the answer")
    logprobs: int | None = Field(None, description="log-probabilities of each token and of the likeliest")

    @model_validator(mode="after")
    def _tells_prompts_once(self) -> CompletionBody:
        if not self.echo or self.logprobs is None:
            return self
        if self.prompt_logprobs is not None:
            raise PydanticCustomError("echo", "echo with logprobs tells what prompt_logprobs asks for", {})
        if self.beam_width:
            raise PydanticCustomError("echo", "echo with logprobs must be left out beside beam_width", {})
        return self


class ChatBody(Asked):
    """`POST /v1/chat/completions`."""

    messages: list[Any] = Field(description='each {"role": ..., "content": ...}')
    max_completion_tokens: int | None = Field(None, description="in place of max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = Field(None, description="null: true")
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Integers
