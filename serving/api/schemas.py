"""Define the JSON bodies that clients may send, and the fields that are accepted although nothing reads them.

The latter are fields of the OpenAI API that change no answer: notes for a store that this server does not
have, hints about speed, and values that mean "none". Any other value is refused, with the values that would
be accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from borders.field_table import MOST_TOOLS, Form, RequestField, taken_by
from borders.field_types import LONGEST_NAME, Biases, FieldType, String, TokenIds
from borders.foreign_fields import FOREIGN, ForeignField, same_value
from serving.api.errors import whole

Fields = Mapping[str, Any]
MOST_NOTES = 16
LONGEST_NOTE_NAME = 64
LONGEST_NOTE = 512


def _never(_: Any, __: Fields) -> bool:
    return False


def _one_of(*values: Any) -> Callable[[Any, Fields], bool]:
    return lambda given, _: any(type(given) is type(each) and given == each for each in values)


def _label(given: Any, _: Fields) -> bool:
    return isinstance(given, str) and len(given) <= LONGEST_NAME


def _count(given: Any, _: Fields) -> bool:
    return type(given) is int and given > 0


def _notes(given: Any, _: Fields) -> bool:
    return (
        isinstance(given, dict)
        and len(given) <= MOST_NOTES
        and all(len(name) <= LONGEST_NOTE_NAME for name in given)
        and all(isinstance(each, str) and len(each) <= LONGEST_NOTE for each in given.values())
    )


def _object(given: Any, _: Fields) -> bool:
    return isinstance(given, dict)


def _unused(choice: str) -> Callable[[Any, Fields], bool]:
    """Accept a list of tools that may not be called."""

    def allows(given: Any, beside: Fields) -> bool:
        if not isinstance(given, list) or len(given) > MOST_TOOLS:
            return False
        return not given or (beside.get(choice) == "none" and all(isinstance(each, dict) for each in given))

    return allows


def _prediction(given: Any, _: Fields) -> bool:
    return isinstance(given, dict) and given.keys() == {"type", "content"} and given["type"] == "content"


_STRING = f"a string of at most {LONGEST_NAME} characters"
_NOTES = f"up to {MOST_NOTES} strings of {LONGEST_NOTE} characters, by names of {LONGEST_NOTE_NAME}"
_NOTHING_IS_KEPT = "no response is kept; send the items of earlier ones in input"
# The check of each field's value, and the accepted values in words (empty where no value is accepted).
Ignored = Mapping[str, tuple[Callable[[Any, Fields], bool], str]]
IGNORED: Ignored = {
    "audio": (_never, ""),
    "function_call": (_one_of("none"), '"none"'),
    "functions": (_unused("function_call"), f'up to {MOST_TOOLS} beside function_call: "none"'),
    "metadata": (_notes, _NOTES),
    "modalities": (_one_of(["text"]), '["text"]'),
    "moderation": (_never, ""),
    "prediction": (_prediction, '{"type": "content", "content": ...}'),
    "prompt_cache_key": (_label, _STRING),
    "prompt_cache_options": (_never, ""),
    "prompt_cache_retention": (_one_of("in_memory", "in-memory", "24h"), '"in_memory" or "24h"'),
    "safety_identifier": (_label, _STRING),
    "store": (_one_of(True, False), "true or false"),
    "suffix": (_one_of(""), '""'),
    "verbosity": (_one_of("low", "medium", "high"), '"low", "medium" or "high"'),
    "web_search_options": (_never, ""),
}


IN_RESPONSES: Ignored = {
    **{
        name: IGNORED[name]
        for name in (
            *("metadata", "moderation", "prompt_cache_key", "prompt_cache_options"),
            *("prompt_cache_retention", "safety_identifier", "store"),
        )
    },
    "access_programs": (_never, ""),
    "background": (_one_of(False), "false"),
    "background_options": (_never, ""),
    "client_metadata": (_object, "an object"),  # Codex names its installation in it
    "context_management": (_never, ""),
    "conversation": (_never, ""),
    "image": (_never, ""),
    "max_tool_calls": (_count, "1 or more, of built-in tools, of which there are none"),
    "previous_response_id": (_never, ""),
    "prompt": (_never, ""),
    "truncation": (_one_of("disabled"), '"disabled"'),
}


IN_MESSAGES: Ignored = {
    "cache_control": (_object, "an object"),  # pages are shared by their content
    "container": (_never, ""),
    "diagnostics": (_object, "an object"),
    "inference_geo": (_never, ""),
    "mcp_servers": (_one_of([]), "[]"),
    "metadata": (_object, "an object"),
    "speed": (_one_of("standard"), '"standard"'),
}
_FIXES = {"previous_response_id": _NOTHING_IS_KEPT, "conversation": _NOTHING_IS_KEPT}


def problem_of(name: str, fields: Fields, ignored: Ignored = IGNORED) -> str | None:
    """Return why a field cannot be accepted as it was sent, or None if it can."""
    allows, allowed = ignored[name]
    if fields[name] is None or allows(fields[name], fields):
        return None
    accepted = f"; only {allowed} is accepted" if allowed else ""
    return f"{name} is not supported{accepted}: {_FIXES.get(name, 'leave it out')}"


Body = TypeVar("Body", bound="StrictBody")

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


def _at_most(most: int) -> Callable[[Any], Any]:
    def check(given: Any) -> Any:
        if isinstance(given, (dict, list)) and len(given) > most:
            problem = "it has {count} tokens; it must have at most {most}"
            raise PydanticCustomError("too_many", problem, {"count": len(given), "most": most})
        return given

    return check


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]], PlainValidator(_prompt), WithJsonSchema(_SCHEMA)
]
Integers = Annotated[list[int], BeforeValidator(_all(int))]
Strings = Annotated[list[str], BeforeValidator(_all(str))]
Name = Annotated[str, Field(max_length=LONGEST_NAME)]


def refused(field: str, message: str) -> PydanticCustomError:
    """Return the error that refuses a body because of one field."""
    return PydanticCustomError("refused", "{message}", {"message": message, "field": field})


_BOUNDS = ("max_completion_tokens", "max_tokens")  # the first counts if both are sent
_UNBOUNDED = (*_BOUNDS, "n_predict", "max_new_tokens")  # -1 asks for as many tokens as fit


class StrictBody(BaseModel):
    """A JSON object with these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    ignored: ClassVar[Ignored] = IGNORED
    foreign: ClassVar[Mapping[str, ForeignField]] = {}  # fields of other engines that are understood

    @model_validator(mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = cls._translated(given)
        for name in given.keys() & cls.ignored.keys():
            if (problem := problem_of(name, given, cls.ignored)) is not None:
                raise refused(name, problem)
        for name in given.keys() - cls.model_fields.keys() - cls.ignored.keys():
            shown = whole(name if len(name) <= 60 else f"{name[:57]}...")
            near = difflib.get_close_matches(shown, cls.model_fields, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise refused(shown, f'unknown field "{shown}"; {hint}')
        return {name: value for name, value in given.items() if name in cls.model_fields}

    @classmethod
    def _translated(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return a body in which other engines' fields have become this project's, or are left out."""
        known = cls.model_fields.keys() | cls.ignored.keys()
        meant = {
            name: cls.foreign[name].read(given[name], given) for name in given.keys() & cls.foreign.keys()
        }
        own = {name: value for name, value in given.items() if name in known and meant.get(name) != {}}
        own |= {name: value for name, value in given.items() if name not in known and name not in meant}
        bounds = []
        for name in sorted(meant.keys() - known):
            each, read = cls.foreign[name], {} if given[name] is None else meant[name]
            if read is None:
                problem = f"{name} is not supported as {each.engines} has it; {each.taken} is accepted"
                raise refused(name, f"{problem}: {each.fix}")
            for field, value in read.items():
                if field not in known:
                    raise refused(name, f"{name} means {field}, which this request does not take: {each.fix}")
                if field == "max_tokens":
                    bounds.append(value)
                    continue
                beside = own.get(field)
                if field == "stream_options" and isinstance(beside, dict):  # each sets a part
                    given_there = {each: said for each, said in beside.items() if said is not None}
                    beside, value = {**value, **given_there}, {**given_there, **value}
                if beside is not None and not same_value(beside, value):
                    raise refused(name, f"{name} means {field}, which is another: leave one of them out")
                own[field] = value
        return own if not bounds else cls._bounded(own, bounds)

    @classmethod
    def _bounded(cls, own: dict[str, Any], bounds: list[Any]) -> dict[str, Any]:
        """Return a body that keeps the smallest of several bounds of its answer's tokens, and so all."""
        names = [name for name in _BOUNDS if own.get(name) is not None]
        bounds = [*bounds, *(own[name] for name in names)]
        wrong = [each for each in bounds if type(each) is not int]  # which its field refuses
        return own | {names[0] if names else "max_tokens": wrong[0] if wrong else min(bounds)}


def takes(form: Form) -> Callable[[type[Body]], type[Body]]:
    """Give a body the fields that requests of this form take, except those that it defines itself."""

    def with_fields(body: type[Body]) -> type[Body]:
        added: dict[str, Any] = {
            each.name: (_checked(each.kind) | None, Field(None, description=_description(each)))
            for each in taken_by(form)
            if each.name not in body.model_fields
        }
        return create_model(
            body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **added
        )

    return with_fields


def _description(field: RequestField) -> str:
    return f"{field.meaning} ({field.kind.allowed}; default: {field.stated})"


def _checked(kind: FieldType) -> Any:
    """Return a field's type, with the checks that a body of a million values needs before it is converted."""
    match kind:
        case TokenIds():
            return Annotated[Integers, BeforeValidator(_at_most(kind.most))]
        case Biases():
            return Annotated[kind.hint, BeforeValidator(_at_most(kind.most))]
        case String(longest=int(longest)):
            return Annotated[str, Field(max_length=longest)]
    return Strings if kind.hint == list[str] else str | Strings if kind.hint == str | list[str] else kind.hint


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

    if TYPE_CHECKING:  # the fields that `takes` adds

        def __getattr__(self, name: str) -> Any: ...


class SamplingBody(RequestBody):
    """The fields that all requests for sampled tokens share."""

    stream: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="there is one: the default"
    )


class GenerationBody(SamplingBody):
    """The fields that completions and chats share."""

    foreign = FOREIGN
    apart = frozenset({"stream_options", "prompt", "messages", "echo", "return_token_ids"})
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="show the ids of the answer's tokens")

    @model_validator(mode="after")
    def _fits_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise refused("prompt_logprobs", "prompt_logprobs needs stream: false")
        return self


@takes("completions")
class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`."""

    _fills: bool = PrivateAttr(False)
    prompt: Prompt = Field(description="text or token ids, or several")
    echo: bool | None = Field(None, description="show the prompt before the answer")
    logprobs: int | None = Field(None, description="log-probabilities of each token and of the likeliest")

    @property
    def fills(self) -> bool:
        """Whether an answer may be as long as model and cache allow, as -1 asks in place of a bound."""
        return self._fills and self.max_tokens is None

    @model_validator(mode="wrap")
    @classmethod
    def _reads_no_bound(
        cls, given: Any, handler: ModelWrapValidatorHandler[CompletionBody]
    ) -> CompletionBody:
        body = handler(given)
        body._fills = isinstance(given, dict) and any(given.get(name) == -1 for name in _UNBOUNDED)
        return body

    @model_validator(mode="after")
    def _tells_prompts_once(self) -> CompletionBody:
        if self.echo and self.truncate_prompt_tokens is not None:
            raise refused("echo", "echo must be left out beside truncate_prompt_tokens")
        if not self.echo or self.logprobs is None:
            return self
        if self.prompt_logprobs is not None:
            raise refused(
                "echo", "echo with logprobs returns what prompt_logprobs asks for; leave one of them out"
            )
        if self.beam_width:
            raise refused("echo", "echo with logprobs must be left out beside beam_width")
        return self


@takes("chats")
class ChatBody(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Any] = Field(description='each {"role": ..., "content": ...}')
    logprobs: bool | None = None


@takes("tokenize")
class TokenizeBody(StrictBody):
    """The body of `POST /tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = Field(None, description="functions that the conversation's template shows")
    add_special_tokens: bool | None = Field(None, description="null: true")
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: Integers
