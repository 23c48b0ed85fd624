"""Read the form that a request asks for its answer, as a grammar.

The form is given by OpenAI's `response_format`, by vLLM's `structured_outputs`, or by vLLM's older
`guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`. Each becomes one text,
`SamplingParams.grammar`: a JSON list of the field, the kind of grammar and its content. `matching.py`
compiles it in the engine's process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from borders.field_table import LONGEST_GRAMMAR, MOST_CHOICES
from borders.refusal import BadRequest, abbreviate_json
from serving.grammars.json_schema import LONGEST_TEXT, MOST_DEPTH, Prepared, depth_of, prepared
from serving.grammars.thinking import KIND as THINKING

CHANNELS = "channels"  # the kind of an answer on channels: `outer`, which refers to `form` as `@form`
CALLS = "lark"  # the kind of an answer that calls tools, or may
FIELDS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
_OUTPUTS = {  # the fields of `structured_outputs`, and the kind of grammar of each
    "json": "json",
    "json_object": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_ANY_OBJECT = {"type": "object"}
_FRAGMENT = re.compile(r"%json[ \t\r\n]*(?=\{)")  # what precedes a JSON schema in a grammar


def grammar_of(values: Mapping[str, Any]) -> str | None:
    """Return the grammar that these fields ask for, or None; raises BadRequest."""
    given = [name for name in FIELDS if values.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise BadRequest(given[0], f"and {given[1]} both set the form of the answer; give one of them")
    field, value = given[0], values[given[0]]
    if field == "response_format":
        return _response_format(value)
    if field == "structured_outputs":
        return _structured_outputs(value)
    kind = field.removeprefix("guided_")
    return _written(field, kind, value)


@dataclass(frozen=True, slots=True)
class FormedAnswer:
    """A JSON object that a field asks for, by its schema."""

    field: str
    schema: Any


def formed_answer(grammar: str | None) -> FormedAnswer | None:
    """Return the object that a grammar asks for; None where it asks for none, or for another form."""
    if grammar is None:
        return None
    field, kind, asked = json.loads(grammar)
    is_object = kind == "json" and isinstance(asked, dict) and asked.get("type") == "object"
    return FormedAnswer(field, asked) if is_object else None


def form_of(grammar: str) -> tuple[str, str] | None:
    """Return the field that asked for a form, and the form's kind.

    The result is None if the grammar only bounds reasoning.
    """
    field, kind, asked = json.loads(grammar)
    if kind == CHANNELS and asked["form"] is not None:
        return form_of(asked["form"])
    if kind != THINKING:
        return field, kind
    return None if asked["then"] is None else form_of(asked["then"])


def may_call(grammar: str) -> bool:
    """Return whether an answer of this grammar may call tools; every form but an object stands alone."""
    _, kind, asked = json.loads(grammar)
    if kind == THINKING:
        return asked["then"] is None or may_call(asked["then"])
    return kind in (CHANNELS, CALLS)


def begins_behind_thoughts(grammar: str) -> bool:
    """Return whether a form begins only behind a block of reasoning, in which nothing is held."""
    _, kind, asked = json.loads(grammar)
    return kind == THINKING and asked["then"] is not None


def most_thought(grammar: str) -> int | None:
    """Return how many tokens reasoning has at most, marks included, that a model has ended by itself.

    More are cut by their budget; None if they have none.
    """
    _, kind, asked = json.loads(grammar)
    if kind != THINKING or asked["budget"] is None:
        return None
    return int(asked["budget"]) + (not asked["is_open"])


def form_notes(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the constraints in the schema of an answer's form that are not enforced; raises BadRequest."""
    grammar_of(fields)
    asked, outputs = fields.get("response_format") or {}, fields.get("structured_outputs") or {}
    named = asked.get("json_schema") or {}
    given = {
        "response_format": named.get("schema"),
        "structured_outputs": outputs.get("json"),
        "guided_json": fields.get("guided_json"),
    }
    strict = named.get("strict") is True
    schemas = {field: schema for field, schema in given.items() if schema is not None}
    return tuple(note for field, schema in schemas.items() for note in _schema(field, schema, strict).notes)


def _response_format(value: object) -> str | None:
    field = "response_format"
    if not isinstance(value, Mapping):
        raise BadRequest(field, value=value, limit='an object, such as {"type": "json_object"}')
    kind = value.get("type")
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    _check_names(field, value, known)
    if kind == "text":
        return None
    if kind == "json_object":
        return _written(field, "json", _ANY_OBJECT)
    if kind != "json_schema":
        raise BadRequest(field, value=kind, limit='"text", "json_object" or "json_schema"', place=".type")
    asked = value.get("json_schema")
    if not isinstance(asked, Mapping):
        raise BadRequest(field, value=asked, limit="an object with a schema", place=".json_schema")
    _check_names(f"{field}.json_schema", asked, {"name", "description", "schema", "strict"})
    if not isinstance(asked.get("strict", False), (bool, type(None))):
        limit = "true or false; the answer follows the schema either way"
        raise BadRequest(field, value=asked["strict"], limit=limit, place=".json_schema.strict")
    if asked.get("schema") is None:
        raise BadRequest(field, "is missing", fix="give the schema", place=".json_schema.schema")
    return _written(field, "json", asked["schema"], strict=asked.get("strict") is True)


def _structured_outputs(value: object) -> str | None:
    field = "structured_outputs"
    if not isinstance(value, Mapping):
        raise BadRequest(field, value=value, limit='an object, such as {"choice": ["yes", "no"]}')
    given = {name: each for name, each in value.items() if each is not None and each is not False}
    _check_names(field, given, set(_OUTPUTS))
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise BadRequest(field, f"must hold exactly one of {', '.join(_OUTPUTS)}, not {found}")
    ((name, asked),) = given.items()
    if name == "json_object":
        if asked is not True:
            raise BadRequest(field, value=asked, limit="true or false", place=".json_object")
        asked = _ANY_OBJECT
    return _written(field, _OUTPUTS[name], asked)


def _written(field: str, kind: str, asked: Any, *, strict: bool = False) -> str:
    if kind == "json":
        asked = _schema(field, asked, strict).schema
    elif kind == "choice":
        _check_choices(field, asked)
    else:
        _check_text(field, asked)
        if kind == "grammar":
            _check_fragments(field, asked)
    return json.dumps([field, kind, asked], ensure_ascii=False, separators=(",", ":"))


def _schema(field: str, schema: Any, strict: bool) -> Prepared:
    """Return a schema, which may be sent as a text, for the matcher."""
    if isinstance(schema, str):
        if len(schema) > LONGEST_TEXT:
            problem = f"is a text of {len(schema)} characters; a schema's may have {LONGEST_TEXT}"
            raise BadRequest(field, problem, value=len(schema), limit=LONGEST_TEXT, fix="make it smaller")
        if (depth := depth_of(schema)) > MOST_DEPTH:
            raise BadRequest(field, f"is nested {depth} levels deep; lists and objects may be {MOST_DEPTH}")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadRequest(field, f"is no JSON: {error}") from error
    return prepared(schema, field, strict=strict)


def _check_choices(field: str, choices: object) -> None:
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise BadRequest(field, value=choices, limit="a list of at least one string")
    if len(choices) > MOST_CHOICES:
        raise BadRequest(field, value=len(choices), limit=f"of at most {MOST_CHOICES} choices")
    if not all(choices):
        raise BadRequest(field, "holds an empty string, which is no answer", fix="leave it out")
    _check_text(field, "".join(choices))


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise BadRequest(field, value=text, limit="a string of at least one character")
    if len(text) > LONGEST_GRAMMAR:
        raise BadRequest(field, value=len(text), limit=f"of at most {LONGEST_GRAMMAR} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(field, f"is not Unicode text: character {error.start} is half a pair") from error


def _check_fragments(field: str, grammar: str) -> None:
    """Hold the JSON schemas in a grammar to the bounds of others, beyond which the matcher may crash."""
    for found in _FRAGMENT.finditer(grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue  # it is part of a text, or the matcher refuses it
        prepared(schema, field, strict=True)


def _check_names(field: str, value: Mapping[str, Any], known: set[str]) -> None:
    for name in value:
        if name not in known:
            problem = f"has no {abbreviate_json(name)}; it may have {', '.join(sorted(known))}"
            raise BadRequest(field.partition(".")[0], problem, subject=field)
