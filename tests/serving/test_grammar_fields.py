"""Forms of an answer that exceed the limits are refused by name before anything is compiled."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from borders.field_table import LONGEST_GRAMMAR, MOST_CHOICES, MOST_SCHEMA_BYTES, MOST_TOOLS
from borders.refusal import BadRequest
from serving.grammars import json_schema
from serving.grammars.json_schema import (
    LONGEST_TEXT,
    MOST_BRANCHES,
    MOST_LEVELS,
    MOST_LEVELS_IN_ALL,
    MOST_PROPERTIES,
    MOST_VALUES,
)
from serving.grammars.matching import MOST_GRAMMAR_LEVELS, Grammars
from serving.grammars.structured_output import form_notes, grammar_of
from serving.tools.definitions import tool_use
from serving.tools.formats import TOOL_FORMATS
from tests.each_of import each_of


class Bytes:
    """A tokenizer whose tokens are the bytes, and an end."""

    vocab_size = 257

    def token_bytes(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        return bytes([token]) if token < 256 else b"" if skip_special_tokens else b"<end>"

    def encode_within(self, text: str) -> list[int]:
        return list(text.encode())


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels - 1):
        schema = {"type": "array", "items": schema}
    return schema


def requiring(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"n": schema}, "required": ["n"]}


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


CLOCK = r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$"  # as zod has it; the format needs a time zone
LARGE = {f"p{number}": {} for number in range(MOST_PROPERTIES)}


@each_of(
    "schema",
    [
        nested(MOST_LEVELS),
        {"properties": LARGE},
        {"enum": list(range(MOST_VALUES))},
        {"anyOf": [{}] * MOST_BRANCHES},
        {"anyOf": [{}] * MOST_BRANCHES + [{"type": "null"}]},
        {"properties": {name: {"anyOf": [{"type": "string"}, {"type": "null"}]} for name in LARGE}},
        {"const": "x" * (MOST_SCHEMA_BYTES - len('{"const":""}'))},
        {"enum": [2**63 - 1024, 1024 - 2**63, 0.1, -2.5e-300, 1e15, 3.0]},
        {"multipleOf": 0.01, "minimum": -1e15},
        {"minProperties": 2, "required": ["a", "b"]},
        {"minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        {"title": "a", "$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": {"type": "integer"}}},
    ],
)
def test_what_is_within_the_limits_is_taken(schema: dict[str, Any]) -> None:
    kept = {keyword: value for keyword, value in schema.items() if keyword != "title"}
    assert asked(guided_json=schema)[2] == kept, "annotations are left out"


@each_of(
    "schema, kept, notes",
    [
        # Schemas that pydantic, zod, OpenAPI and Gemini's clients write
        ({"type": "string", "format": "uri-reference"}, {"type": "string"}, ("format uri-reference",)),
        ({"type": "string", "contentMediaType": "application/json", "x-order": 1}, {"type": "string"}, ()),
        (
            {"type": "array", "items": {}, "uniqueItems": True},
            {"type": "array", "items": {}},
            ("uniqueItems",),
        ),
        (
            {"type": "array", "items": [{"type": "null"}], "additionalItems": False},
            {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
            (),
        ),
        ({"type": "object", "unevaluatedProperties": False}, {"type": "object"}, ("unevaluatedProperties",)),
        ({"type": "object", "propertyNames": False}, {"type": "object"}, ("propertyNames",)),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, {"type": "object"}, ("propertyNames",)),
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
        (True, {}, ()),
        # Bounds of int64, which the matcher does not take
        (
            {"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**63, "maximum": 2**53},
            {"type": "integer", "maximum": 2**53},
            ("minimum", "exclusiveMaximum"),
        ),
        (
            {"type": "string", "format": "time", "pattern": CLOCK},
            {"type": "string", "pattern": CLOCK},
            ("format time",),
        ),
        ({"format": "time", "enum": ["09:00"]}, {"enum": ["09:00"]}, ("format time",)),
        ({"format": "date", "const": "2026-01-01"}, {"format": "date", "const": "2026-01-01"}, ()),
        ({"format": "date", "enum": [1]}, {"format": "date", "enum": [1]}, ()),
        ({"format": "date", "maxLength": 3}, {"maxLength": 3}, ("format date",)),
        ({"const": [2**60, 0.1, True, None]}, {"const": [2**60, 0.1, True, None]}, ()),
    ],
)
def test_what_is_not_enforced_is_noted(schema: Any, kept: dict[str, Any], notes: tuple[str, ...]) -> None:
    """What anybody's tools write is taken, and a constraint that an answer need not meet is named."""
    assert asked(guided_json=schema)[2] == kept
    assert form_notes({"guided_json": schema}) == notes


@each_of("kind", [["object"], ["object", "null"], None])
@each_of("strict", [False, True])
def test_the_parameters_of_a_tool_are_an_object_however_their_type_says_so(kind: Any, strict: bool) -> None:
    schema = {"type": kind, "properties": {"a": {"type": "integer"}}}
    use = tool_use(
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]}
    )
    assert use is not None
    assert use.schemas == {"f": schema | {"type": "object"}}
    assert use.notes == ()
    with pytest.raises(BadRequest, match="arguments are an object"):
        tool_use(
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": ["null"]}}}]}
        )


@pytest.mark.parametrize(
    ("bounds", "held", "others"),
    [
        ({"exclusiveMinimum": 3, "maximum": 3.5}, ["3.001", "3.5"], ["3", "3.0", "2.9", "3.51"]),
        ({"minimum": -3.5, "exclusiveMaximum": -3}, ["-3.001", "-3.5"], ["-3", "-3.0", "-2.9", "-3.51"]),
        ({"exclusiveMinimum": -1, "exclusiveMaximum": -0.5}, ["-0.51", "-0.999"], ["-1", "-1.0", "-0.5"]),
        ({"minimum": 1.5, "exclusiveMaximum": 2}, ["1.5", "1.999"], ["2", "2.0", "1.4"]),
        ({"exclusiveMinimum": 0, "maximum": 0.25}, ["0.25", "0.1", "0.00001"], ["0", "0.0", "0.3"]),
        ({"exclusiveMinimum": 3, "minimum": 3.25, "maximum": 3.5}, ["3.25"], ["3", "3.2"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5"], ["0", "0.0", "1", "1.0"]),
    ],
)
def test_an_exclusive_bound_is_out_where_the_other_one_is_near(
    bounds: dict[str, float], held: list[str], others: list[str]
) -> None:
    grammar = grammar_of({"guided_json": {"type": "number", **bounds}})
    assert grammar is not None
    for said in [*held, *others]:
        matcher = Grammars(lambda: Bytes(), 257, [256]).beginning(grammar)
        tokens = [*said.encode(), 256]
        assert (matcher.validate_tokens(tokens) == len(tokens)) == (said in held), said


def test_a_count_with_a_point_is_written_as_the_integer_that_it_is() -> None:
    grammar = grammar_of({"guided_json": {"type": "string", "minLength": 3.0, "maxLength": 4}})
    assert grammar is not None
    assert '"minLength":3,' in grammar
    Grammars(lambda: Bytes(), 257, [256]).beginning(grammar)


def test_notes_name_the_tool_and_what_became_any_object() -> None:
    schemas = {"a": {"minProperties": 2}, "b": {"type": "object", "": 1}}
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()]
    use = tool_use({"tools": tools})
    assert use is not None
    assert (use.notes, use.schemas["a"]) == (("a: parameters", 'b: ""'), {"type": "object"})
    assert tool_use({"tools": tools, "tool_choice": "none"}).notes == ()
    tools[0]["function"]["strict"] = True
    with pytest.raises(BadRequest, match="come twice"):
        tool_use({"tools": tools})


def test_a_strict_schema_keeps_what_the_matcher_refuses() -> None:
    for schema, said in (({"minimum": -(2**63)}, "it must be a number from"), ({"format": "time"}, "")):
        asked_for = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
        schema["pattern"] = CLOCK
        if said:
            with pytest.raises(BadRequest, match=said):
                grammar_of({"response_format": asked_for})
        else:
            assert asked(response_format=asked_for)[2] == schema


A = {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}
B = {"type": "object", "properties": {"k": {"enum": ["b", "c"]}}, "required": ["k"]}


@each_of(
    "branches, are_apart",
    [
        ([A, B], True),
        ([A, B, {"type": "null"}, {"type": ["string", "boolean"]}, {"type": "integer"}], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
        ([{"const": 1, "title": "one"}, {"enum": [2, "1"]}], True),
        ([A, A], False),
        ([A, {**B, "required": []}], False),
        ([A, {**A, "properties": {"k": {"$ref": "#/$defs/b/properties/k"}}}], True),
        ([{"const": None}, {"const": 1}, {"enum": [2, 1e400 > 1]}], True),
        ([{"const": 0}, {"const": False}], True),
        ([{"const": 0}, {"const": -0.0}], False),
        ([{"$ref": "#/$defs/s", "nullable": True}, {"type": "null"}], False),
        (
            [
                {"$id": "u:b", "$ref": "#/$defs/s", "$defs": {"s": {"type": "integer"}}},
                {"type": "number"},
            ],
            False,
        ),
        ([A, {"properties": B["properties"], "required": ["k"]}], True),
        ([A, {"properties": B["properties"], "required": ["k"]}, {"type": "null"}], False),
        ([{**A, "nullable": True}, {**B, "nullable": True}], False),
        ([A, {**B, "properties": {"k": {"enum": ["b"], "nullable": True}}}], False),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"type": "string"}, {}], False),
    ],
)
def test_branches_become_alternatives_where_no_value_can_meet_two(branches: Any, are_apart: bool) -> None:
    """A discriminator alone says nothing: what the branches require tells them apart."""
    schema = {
        "oneOf": branches,
        "discriminator": {"propertyName": "k"},
        "$defs": {"a": {"$ref": "#/$defs/A"}, "A": A, "b": B, "s": {"type": "string"}},
    }
    assert set(asked(guided_json=schema)[2]) - {"$defs"} == {"anyOf"}
    assert form_notes({"guided_json": schema}) == (() if are_apart else ("oneOf",))
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert ("anyOf" if are_apart else "oneOf") in asked(response_format=form)[2], "the matcher judges it"


@pytest.mark.parametrize("keyword", ["not", "if", "dependentRequired", "unevaluatedProperties"])
def test_a_strict_schema_is_held_whole(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {keyword: {}}}}
    said = f'at properties.a, uses the keyword "{keyword}", which cannot be enforced: leave it out, or strict'
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    with pytest.raises(BadRequest, match=said):
        grammar_of({"response_format": form})
    form["json_schema"]["strict"] = False
    assert grammar_of({"response_format": form}) is not None


def test_a_reference_into_a_keyword_that_is_not_held_leaves_its_note() -> None:
    schema = {
        "properties": {"v": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        "additionalProperties": {"$ref": "#/not/items"},
        "items": {"$ref": "#/properties/v/oneOf/0"},
        "not": {"items": {"type": "string"}},
    }
    assert form_notes({"guided_json": schema}) == ("properties.v.oneOf", "not")


def test_a_root_that_is_only_a_reference_is_what_it_leads_to() -> None:
    """So that its type and its properties are seen, as those of a tool's parameters."""
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "object"}}}
    assert asked(guided_json=schema)[2]["type"] == "object"
    tool = {"type": "function", "function": {"name": "f", "parameters": schema | {"nullable": True}}}
    use = tool_use({"tools": [tool]})
    assert use is not None
    assert use.schemas["f"]["type"] == "object"


def test_a_oneof_beside_an_anyof_is_held_with_it() -> None:
    schema = {"anyOf": [{"maximum": 9}], "oneOf": [{"type": "integer"}, {"type": "number"}], "allOf": [{}]}
    assert asked(guided_json=schema)[2] == {
        "anyOf": [{"maximum": 9}],
        "allOf": [{}, {"anyOf": [{"type": "integer"}, {"type": "number"}]}],
    }


def chained(num_parts: int, levels: int, keyword: str) -> dict[str, Any]:
    """A schema whose parts refer to each other in turn, each from its innermost level."""
    parts: dict[str, Any] = {}
    for number in range(num_parts):
        inner: Any = {"$ref": f"#/$defs/{number + 1}"} if number + 1 < num_parts else {}
        for _ in range(levels - 1):
            inner = {keyword: [inner] if keyword == "prefixItems" else inner}
        parts[f"{number}"] = inner
    return {"$ref": "#/$defs/0", "$defs": parts}


@pytest.mark.parametrize(("levels", "keyword"), [(2, "items"), (30, "items"), (30, "prefixItems")])
def test_no_chain_of_references_overflows_the_matcher_s_stack(levels: int, keyword: str) -> None:
    """What is accepted is compiled: an overflow would end the process, not this test."""
    most = MOST_LEVELS_IN_ALL // (levels + 1)
    grammars = Grammars(lambda: Bytes(), 257, [256])
    for num_parts in (most, 60 * most):
        schema = chained(num_parts, levels, keyword)
        if num_parts == most:
            grammars.beginning(json.dumps(asked(guided_json=schema)))
        else:
            with pytest.raises(BadRequest, match=r"600 levels of schemas|bytes as compact JSON"):
                grammar_of({"guided_json": schema})


def rules(levels: int, brackets: int = 0, mark: str = ":", name: str = "a") -> str:
    """A grammar of so many levels: rules that each name the next, within brackets, and a last one."""
    num_rules = (levels - 1) // (1 + brackets)
    named = (f"{name}{n}{mark} {'(' * brackets}{name}{n + 1}{')' * brackets}\n" for n in range(1, num_rules))
    start = "root" if "=" in mark else "start"
    return f'{start}{mark} {name}1\n{"".join(named)}{name}{num_rules}{mark} "b"\n'


HIDDEN = 'x: <\x1c"> /[#"(]/ "/\\"" "a"i\n# "\n'  # none of which opens or closes a text around the next rules


@pytest.mark.parametrize(
    "grammar",
    [
        rules(MOST_GRAMMAR_LEVELS + 1),
        rules(2 * MOST_GRAMMAR_LEVELS, brackets=16),
        rules(MOST_GRAMMAR_LEVELS + 1, name="A"),
        rules(MOST_GRAMMAR_LEVELS + 1, mark=" ::="),
        HIDDEN + rules(MOST_GRAMMAR_LEVELS + 1) + 'y: <"> "',
        "start: " + "%lark {\nstart: " * 50 + "x",
    ],
)
def test_a_grammar_that_could_overflow_the_matcher_s_stack_is_refused(grammar: str) -> None:
    written = json.dumps(asked(guided_grammar=grammar))
    with pytest.raises(BadRequest, match=rf"has \d+ levels, .*it may have {MOST_GRAMMAR_LEVELS}"):
        Grammars(lambda: Bytes(), 257, [256]).beginning(written)


@pytest.mark.parametrize(
    "fields",
    [{"guided_grammar": rules(MOST_GRAMMAR_LEVELS)}, {"guided_json": chained(19, 30, "prefixItems")}],
)
def test_the_deepest_that_is_taken_fits_the_stack_of_a_thread(fields: dict[str, Any]) -> None:
    """However little stack the threads of a process have by themselves."""
    code = (
        "import sys, threading; from serving.grammars.matching import Grammars\n"
        "from tests.serving.test_grammar_fields import Bytes\n"
        "grammars = Grammars(lambda: Bytes(), 257, [256])\n"
        "def compile(): print(grammars.beginning(sys.stdin.read()).is_error())\n"
        "threading.Thread(target=compile).start()\n"
    )
    command = ["bash", "-c", 'ulimit -Ss 2048; exec "$0" "$@"', sys.executable, "-c", code]
    done = subprocess.run(command, input=json.dumps(asked(**fields)), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_rules_that_name_no_others_and_what_only_looks_nested_are_no_levels() -> None:
    """Grammars of languages have hundreds of keywords, and rules that lead back to others."""
    words = "".join(f'W{number}: ("w{number}"i)\n' for number in range(1500))
    opened = '"(" ' * 1500
    grammar = f'start: "x" | {opened} start // {opened}\n{words}'
    Grammars(lambda: Bytes(), 257, [256]).beginning(json.dumps(["guided_grammar", "grammar", grammar]))


@each_of(
    "schema",
    [
        requiring({"type": "integer"}),
        requiring({"type": "integer"}) | {"additionalProperties": {}},
        requiring({"type": "integer"}) | {"additionalProperties": False},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": requiring({"type": "integer"})}},
        {"allOf": [requiring({"type": "integer"}) | {"additionalProperties": False}]},
    ],
)
def test_a_property_is_no_other_one_by_another_spelling(schema: dict[str, Any]) -> None:
    grammars = Grammars(lambda: Bytes(), 257, [256])
    matcher = grammars.beginning(json.dumps(asked(guided_json=schema)))
    said = b'{"n":1,"\\u006e":"x"}'
    assert matcher.validate_tokens(list(said)) < len(said)
    assert matcher.validate_tokens([*b'{"n":1}', 256]) == 8
    if "additionalProperties" not in str(schema) or schema.get("additionalProperties") == {}:
        further = [*'{"n":1,"é\\u0001\\n":"x","m":[]}'.encode(), 256]
        assert matcher.validate_tokens(further) == len(further)


@each_of(
    "pattern", [r'^[^"]*$', r"^[^\\]*$", r'^[^"\\]*$', r'^[^]"\\]*$', r'^[^-"\\]+$', r'^[^,"]+(?:,[^,"]+)*$']
)
def test_a_class_that_excludes_quotes_or_backslashes_lets_none_through(pattern: str) -> None:
    """Neither in values nor in names, nor as escapes; the other control characters pass."""
    grammars = Grammars(lambda: Bytes(), 257, [256])
    value = {"type": "string", "pattern": pattern}
    name = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
    for schema, written in ((value, "%s"), (name, "{%s:1}")):
        matcher = grammars.beginning(json.dumps(asked(guided_json=schema)))
        for text in ("a", "a\n", "\x01é", 'a"', "a\\", "\\n"):
            said = [*(written % json.dumps(text, ensure_ascii=False)).encode(), 256]
            passes = re.search(pattern, text) is not None
            assert (matcher.validate_tokens(said) == len(said)) is passes, (schema, text)


def combined(levels: int) -> dict[str, Any]:
    """A schema of which each level has twice the alternatives of the next, all below an allOf."""
    parts: dict[str, Any] = {f"a{levels}": {"type": "object"}}
    for level in range(levels):
        named = [{"type": "object", "properties": {f"{side}{level}": {"type": "string"}}} for side in "lr"]
        parts[f"a{level}"] = {"anyOf": [{"allOf": [{"$ref": f"#/$defs/a{level + 1}"}, n]} for n in named]}
    return {"$ref": "#/$defs/a0", "$defs": parts}


def test_alternatives_that_combine_are_refused_before_a_mask_is_made() -> None:
    """Their masks took seconds; what tools and large schemas need stays below the limit."""
    grammars = Grammars(lambda: Bytes(), 257, [256])
    text = {"type": "string"}
    inner = {"type": "object", "properties": {"key": text, "value": {"type": "number"}}}
    nested = {"type": "object", "properties": {"id": text, "items": {"type": "array", "items": inner}}}
    kinds = [text, {"type": "integer"}, {"type": ["string", "null"]}, {"type": "array", "items": text}]
    kinds += [nested, {"enum": ["a", "b", "c"]}]
    tools = []
    for tool in range(MOST_TOOLS):
        values = {f"p{tool}_{number}": kinds[number % len(kinds)] for number in range(20)}
        function = {"name": f"t{tool}", "parameters": {"type": "object", "properties": values}}
        tools.append({"type": "function", "function": function})
    use = tool_use({"tools": tools, "tool_choice": "required"})
    assert use is not None
    for form in ("hermes", "qwen3_coder"):
        written = use.grammar(TOOL_FORMATS[form], {})
        assert written is not None
        grammars.beginning(written)
    for levels in (7, 10):
        asked_for = json.dumps(asked(guided_json=combined(levels)))
        if levels == 7:
            grammars.beginning(asked_for)
        else:
            with pytest.raises(BadRequest, match="grammar size"):
                grammars.beginning(asked_for)


@pytest.mark.parametrize("strict", [True, False])
def test_hostile_schemas_are_read_in_bounds(strict: bool) -> None:
    """Each took seconds or raised another error than a refusal; patience here is the runner's own limit."""
    name = {"$ref": "#/$defs/a"}
    many = {f"p{number}": {} for number in range(490)}
    required = [f"q{number}" for number in range(4500)]
    deep: Any = [{"$anchor": "0"}]
    for _ in range(180):
        deep = {"a": deep}
    hostile: list[Any] = [
        {"oneOf": [name] * 190, "$defs": {"a": {"enum": [1] * 28_000}}},
        {"oneOf": [name] * 200, "$defs": {"a": {"type": "object", "properties": many, "required": required}}},
        {"prefixItems": [{"$ref": "#0"}] * 1700, "x": deep},
        {"prefixItems": [{"$ref": "#/x"}], "x": [1] * 28_000},
        {"anyOf": [{}], "$ref": "#/anyOf/" + "9" * 5000},
        {"$ref": "http://["},
        {"$id": "http://[", "$ref": "a"},
        "[" * 989 + "]" * 989,
        {"type": "string", "default": json.loads("[" * 250 + "]" * 250)},
        {"type": [json.loads("[" * 150 + "]" * 150)]},
        {"properties": {"a": {"required": {"b": 1}}}},
        {"oneOf": [{"type": "object", "required": 5, "properties": 3}, {"type": [[]]}]},
    ]
    for schema in hostile:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}
        with contextlib.suppress(BadRequest):
            grammar_of({"response_format": form})


def test_kept_schemas_are_bounded_in_bytes_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        grammar_of({"guided_json": {"const": ["x"] * 10_000, "title": f"{number}"}})
    assert len(json_schema._KEPT._found) < 35
    assert json_schema._KEPT._num_bytes <= json_schema._MOST_KEPT_BYTES
    monkeypatch.setattr(json_schema, "_MOST_KEPT", 20)
    for number in range(30):
        grammar_of({"guided_json": {"title": f"{number}"}})
    assert len(json_schema._KEPT._found) == 20


LOOPS: dict[str, Any] = {"const": "x" * 30_000}
for number in range(4):
    LOOPS = {"properties": {"a": LOOPS, "b": {"$ref": "#" + "/properties/a" * (4 - number)}}}


@each_of(
    "schema",
    [
        requiring({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        requiring({"$ref": "#", "nullable": True}),
        requiring({"$ref": "#"}) | {"required": []},
        requiring({"$ref": "#"}) | {"type": ["object", "null"]},
        requiring({"type": "array", "items": {"$ref": "#"}}),
        requiring({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1}),
        requiring({"type": "integer"}) | {"additionalProperties": {"$ref": "#"}},
    ],
)
def test_what_may_hold_another_of_itself_is_taken_where_it_can_end(schema: dict[str, Any]) -> None:
    grammars = Grammars(lambda: Bytes(), 257, [256])
    assert grammars.beginning(json.dumps(asked(guided_json=schema))) is not None


@each_of(
    "schema, said",
    [
        (nested(MOST_LEVELS + 1), "is nested more than 32 levels deep"),
        (
            {"properties": LARGE, "items": {"$ref": "#/x"}, "x": {"properties": {"b": {}}}},
            "to 501 properties",
        ),
        ({"enum": list(range(MOST_VALUES + 1))}, "to 1001 values; it may have 1000 in all"),
        ({"items": {"oneOf": [{}] * (MOST_BRANCHES + 1)}}, "to 201 branches"),
        ({"const": "x" * MOST_SCHEMA_BYTES}, "is a schema of 65548 bytes as compact JSON"),
        ({"items": 1}, "at items, is 1; it must be a schema"),
        ({"items": [{}], "prefixItems": [{}]}, "at items, is a list beside prefixItems"),
        ({"default": json.loads("[" * 300 + "]" * 300)}, "is nested 301 levels deep"),
        ("[" * 300 + "]" * 300, "is nested 300 levels deep"),
        ({"properties": []}, "it must be an object of schemas by their names"),
        ({"anyOf": {}}, "it must be a list of schemas"),
        ({"type": "int"}, 'at type, is "int", which this keyword does not accept'),
        ({"required": "a"}, "at required"),
        ({"enum": []}, "it must be a list of at least one value"),
        ({"anyOf": [{"type": "null"}] * (MOST_BRANCHES + 2)}, "to 201 branches"),
        (
            {"enum": [1234567890123456789, 2]},
            "at enum, holds a number that cannot be kept to its last digit",
        ),
        ({"const": [{"id": 10**400}]}, "and another one would be answered: send it as a string"),
        *(
            ({"const": [each]}, "at const, holds a number that cannot")
            for each in (2**63, 10**20, -(10**20), -1e19, 0.9836942765531325)
        ),
        ({"maxLength": -1}, "it must be an integer from 0 to 100000"),
        ({"minimum": "1"}, "it must be a number from -9007199254740992 to 9007199254740992"),
        ({"minimum": 2**63}, "it must be a number from -9007199254740992 to 9007199254740992"),
        ({"multipleOf": 9_999_991}, "at multipleOf"),
        ({"multipleOf": 0.00123457}, "at multipleOf"),
        (
            {"$ref": "https://example.com/schema"},
            'at $ref, is "https://example.com/schema", which leads to no',
        ),
        ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "which leads to no place in the schema: refer to a part"),
        ({"$ref": "#/allOf/1", "allOf": [{}]}, "which leads to no place in the schema"),
        ({"$ref": "#/$defs/a", "$defs": {"a": False}}, "refers to false, which no answer follows"),
        ({"$ref": "#/$defs/b", "$defs": {"a": False, "b": {"$ref": "#/$defs/a"}}}, "refers to false, which"),
        ({"$ref": 5}, "is 5, which leads to no place in the schema"),
        ({"$ref": "#"}, "refers to itself before it comes to a value: give it one"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]},
                    "b": {"allOf": [{"$ref": "#/$defs/a"}]},
                },
            },
            "refers to itself before it comes to a value",
        ),
        (requiring({"$ref": "#"}), "has no answer that ends, since a value that it requires holds another"),
        (requiring({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "has no answer that ends"),
        (requiring({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 2}), "has no answer that"),
        (requiring({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}), "has no answer that ends"),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}, "has no answer that"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "int"}}}, 'at $defs.a.type, is "int"'),
        (LOOPS, "bytes with what its references lead to; it may have 131072"),
        ({"minProperties": 2}, "which could then come twice"),
        ({"minProperties": 2, "additionalProperties": False, "patternProperties": {"a": {}}}, "come twice"),
        ([], "it must be a JSON schema, as an object"),
        ("{", "guided_json is no JSON"),
        # Read in quadratic time, each of these three takes a minute or more.
        ('"' + '\\"' * 30_000, "guided_json is no JSON"),
        ('"' + '\\"' * 30_000 + "\\\n", "guided_json is no JSON"),
        ('"[' + '\\"[' * 30_000 + "\\", "guided_json is no JSON"),
        (" " * LONGEST_TEXT + "{}", "is a text of 1048578 characters; a schema's may have 1048576"),
        ({"const": float("nan")}, "cannot be written as JSON"),
    ],
)
def test_what_is_not_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        grammar_of({"guided_json": schema})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.field == "guided_json"


@each_of(
    "fields, said",
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
        ({"guided_regex": ""}, "a string of at least one character"),
        ({"guided_regex": "a" * (LONGEST_GRAMMAR + 1)}, "of at most 32768 characters"),
        ({"guided_grammar": 3}, "guided_grammar is 3"),
        ({"guided_grammar": f'start: %json {{"const": {-(2**63)}}}'}, "at const, holds a number"),
        (
            {"structured_outputs": {"grammar": f"s: %json\n {json.dumps(chained(22, 30, 'items'))}"}},
            "more than 600 levels",
        ),
        ({"guided_json": f'{{"enum": [{-(2**63)}]}}'}, "at enum, holds a number"),
        ({"guided_json": {"properties": {"a\nb": 1}}}, "at properties.a b, is 1"),
        ({"guided_json": {"properties": {"a" * 9999: 1}}}, "aaa..., is 1"),
        ({"guided_grammar": "a", "guided_regex": "b"}, "both set the form of the answer"),
        ({"response_format": {"type": "text"}, "guided_regex": "b"}, "both set the form of the answer"),
    ],
)
def test_fields_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        grammar_of(fields)
    assert said in str(refused.value)
    assert refused.value.field in fields
