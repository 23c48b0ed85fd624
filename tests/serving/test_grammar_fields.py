"""Forms of an answer that exceed the limits are refused by name before anything is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from borders.field_table import LONGEST_GRAMMAR, MOST_CHOICES, MOST_SCHEMA_BYTES
from borders.refusal import BadRequest
from serving.grammars.json_schema import MOST_BRANCHES, MOST_LEVELS, MOST_PROPERTIES, MOST_VALUES
from serving.grammars.structured_output import grammar_of, schema_notes


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels - 1):
        schema = {"type": "array", "items": schema}
    return schema


def asked(**fields: Any) -> Any:
    grammar = grammar_of(fields)
    return None if grammar is None else json.loads(grammar)


def test_each_field_says_its_kind() -> None:
    schema = {"type": "object", "properties": {"é": {"const": None}}}
    wrapped = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    assert asked(response_format=wrapped) == ["response_format", "json", schema]
    assert asked(response_format={"type": "json_object"}) == ["response_format", "json", {"type": "object"}]
    assert asked(structured_outputs={"json": schema}) == ["structured_outputs", "json", schema]
    assert asked(structured_outputs={"json_object": True})[2] == {"type": "object"}
    assert asked(structured_outputs={"regex": "a", "choice": None}) == ["structured_outputs", "regex", "a"]
    assert asked(guided_json=json.dumps(schema)) == ["guided_json", "json", schema]
    assert asked(guided_choice=["a", "b"]) == ["guided_choice", "choice", ["a", "b"]]
    assert asked(guided_grammar="start: A") == ["guided_grammar", "grammar", "start: A"]
    assert asked(response_format={"type": "text"}, seed=1) is None
    assert asked(guided_regex=None) is None


LARGE = {f"p{number}": {} for number in range(MOST_PROPERTIES)}


@pytest.mark.parametrize(
    "schema",
    [
        nested(MOST_LEVELS),
        {"properties": LARGE},
        {"enum": list(range(MOST_VALUES))},
        {"anyOf": [{}] * MOST_BRANCHES},
        {"const": "x" * (MOST_SCHEMA_BYTES - len('{"const":""}'))},
        {"multipleOf": 0.01, "minimum": -1e15},
        {"minProperties": 2, "required": ["a", "b"]},
        {"minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        {"title": "a", "$ref": "#/$defs/a", "$defs": {"a": True}},
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_what_is_within_the_limits_is_taken(schema: dict[str, Any]) -> None:
    kept = {keyword: value for keyword, value in schema.items() if keyword != "title"}
    assert asked(guided_json=schema)[2] == kept, "annotations are left out"


@pytest.mark.parametrize(
    ("schema", "kept", "notes"),
    [
        # As pydantic, zod, OpenAPI and Gemini's clients write schemas
        ({"type": "string", "format": "uri-reference"}, {"type": "string"}, ("format uri-reference",)),
        ({"type": "integer", "format": "int64"}, {"type": "integer"}, ("format int64",)),
        ({"type": "string", "contentMediaType": "application/json", "x-order": 1}, {"type": "string"}, ()),
        (
            {"type": "array", "items": {}, "uniqueItems": True},
            {"type": "array", "items": {}},
            ("uniqueItems",),
        ),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}, ()),
        ({"type": "object", "unevaluatedProperties": False}, {"type": "object"}, ("unevaluatedProperties",)),
        ({"type": "object", "propertyNames": False}, {"type": "object"}, ("propertyNames",)),
        ({"type": "object", "propertyNames": {"type": "string"}}, {"type": "object"}, ()),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, {"type": "object"}, ("propertyNames",)),
        ({"type": "integer", "maximum": 2**53 - 1}, {"type": "integer", "maximum": 2**53 - 1}, ()),
        ({"type": "string", "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, ()),
        (
            {"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": {"type": "integer"}}},
            {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "integer"}}},
            (),
        ),
        (
            {"oneOf": [{"const": 1}, {"const": 2}], "discriminator": {"propertyName": "k"}},
            {"anyOf": [{"const": 1}, {"const": 2}]},
            (),
        ),
        ({"properties": {"a": {"not": {}}}}, {"properties": {"a": {}}}, ("properties.a.not",)),
        ({"if": {}, "then": {}, "dependentRequired": {}}, {}, ("if", "then", "dependentRequired")),
        ({"type": "string", "maxlength": 2}, {"type": "string"}, ("maxlength",)),
        ({"x-guidance": {"lenient": True}}, {}, ()),
        (True, {}, ()),
        ("true", {}, ()),
    ],
)
def test_what_is_not_enforced_is_noted(schema: Any, kept: dict[str, Any], notes: tuple[str, ...]) -> None:
    """What anybody's tools write is taken, and a constraint that an answer need not meet is named."""
    assert asked(guided_json=schema)[2] == kept
    assert schema_notes({"guided_json": schema}) == notes
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert schema_notes({"tools": [tool]}) == notes


@pytest.mark.parametrize("keyword", ["not", "if", "dependentRequired", "unevaluatedProperties"])
def test_a_strict_schema_is_held_whole(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {keyword: {}}}}
    said = f'at properties.a, uses the keyword "{keyword}", which cannot be enforced: leave it out, or strict'
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    with pytest.raises(BadRequest, match=said):
        grammar_of({"response_format": form})
    form["json_schema"]["strict"] = False  # type: ignore[index]
    assert grammar_of({"response_format": form}) is not None


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (nested(MOST_LEVELS + 1), "is nested more than 32 levels deep"),
        ({"properties": LARGE, "$defs": {"a": {"properties": {"b": {}}}}}, "to 501 properties"),
        ({"enum": list(range(MOST_VALUES + 1))}, "to 1001 values; it may have 1000 in all"),
        ({"items": {"oneOf": [{}] * (MOST_BRANCHES + 1)}}, "to 201 branches"),
        ({"const": "x" * MOST_SCHEMA_BYTES}, "is a schema of 65548 bytes as compact JSON"),
        ({"items": [{}]}, "at items, is [{}]; it must be a schema"),
        ({"properties": []}, "it must be an object of schemas by their names"),
        ({"anyOf": {}}, "it must be a list of schemas"),
        ({"type": "int"}, 'at type, is "int", which this keyword does not accept'),
        ({"required": "a"}, "at required"),
        ({"enum": []}, "it must be a list of at least one value"),
        ({"maxLength": -1}, "it must be an integer from 0 to 100000"),
        ({"minItems": 10**6}, "it must be an integer from 0 to 100000"),
        ({"maxItems": True}, "at maxItems"),
        ({"minimum": "1"}, "it must be a number from -9007199254740992 to 9007199254740992"),
        ({"maximum": 1e300}, "it must be a number from -9007199254740992 to 9007199254740992"),
        ({"multipleOf": 9_999_991}, "at multipleOf"),
        ({"multipleOf": 0.00123457}, "at multipleOf"),
        ({"multipleOf": 0}, "at multipleOf"),
        ({"$ref": "https://example.com/schema"}, "at $ref"),
        ({"minProperties": 2}, "which could then come twice"),
        ({"minProperties": 2, "additionalProperties": False, "patternProperties": {"a": {}}}, "come twice"),
        ([], "it must be a JSON schema, as an object"),
        ("{", "guided_json is no JSON"),
        ({"const": float("nan")}, "cannot be written as JSON"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_is_not_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        grammar_of({"guided_json": schema})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.field == "guided_json"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": "json"}, "response_format is"),
        ({"response_format": {"type": "xml"}}, 'response_format.type is "xml"'),
        ({"response_format": {"type": "text", "schema": {}}}, 'response_format has no "schema"'),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is null"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 2}}},
            "json_schema.strict is 2",
        ),
        ({"structured_outputs": []}, "structured_outputs is []"),
        ({"structured_outputs": {}}, "must hold exactly one of json,"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "not regex and json"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"guided_choice": "a"}, "guided_choice is"),
        ({"guided_choice": []}, "a list of at least one string"),
        ({"guided_choice": [""]}, "holds an empty string"),
        ({"guided_choice": ["a"] * (MOST_CHOICES + 1)}, "of at most 1000 choices"),
        ({"guided_choice": ["a" * LONGEST_GRAMMAR, "a"]}, "of at most 32768 characters"),
        ({"guided_choice": ["\ud800"]}, "is not Unicode text"),
        ({"guided_regex": ""}, "a string of at least one character"),
        ({"guided_regex": "a" * (LONGEST_GRAMMAR + 1)}, "of at most 32768 characters"),
        ({"guided_grammar": 3}, "guided_grammar is 3"),
        ({"guided_grammar": "a", "guided_regex": "b"}, "both set the form of the answer"),
        ({"response_format": {"type": "text"}, "guided_regex": "b"}, "both set the form of the answer"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_fields_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        grammar_of(fields)
    assert said in str(refused.value)
    assert refused.value.field in fields
