"""A random model's answer that is held to a random schema satisfies that schema.

The judge is `jsonschema`.
"""

from __future__ import annotations

import json
import os
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from borders.refusal import BadRequest
from continuous_batching.request import Request, SamplingParams
from recipes.schema.recipe import ROOT
from serving.grammars.matching import Grammars
from serving.grammars.structured_output import grammar_of
from serving.text.tokenizer import Text
from tests.each_of import each_of

pytestmark = pytest.mark.in_order  # the last test counts what those before it saw

EXAMPLES = 2000 if os.environ.get("THOROUGH") else 60
NAMES = st.sampled_from(["a", "b", "name", "näme", 'quo"te', "with space", "", "x/y~z"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-50, 50) | st.sampled_from(["", "a", "é\n", 0.5, -1.25, 'b"']),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)


@st.composite
def ranges(draw: Any, least: str, most: str, largest: int) -> dict[str, Any]:
    """None, one or both of two bounds that leave something between."""
    low = draw(st.integers(0, largest))
    high = draw(st.integers(low, low + largest))
    return {**({least: low} if draw(st.booleans()) else {}), **({most: high} if draw(st.booleans()) else {})}


@st.composite
def numbers(draw: Any) -> dict[str, Any]:
    kind = draw(st.sampled_from(["integer", "number"]))
    low = draw(st.integers(-500, 500))
    bounds = {draw(st.sampled_from(["minimum", "exclusiveMinimum"])): low} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        bounds[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = low + draw(st.integers(3, 400))
    if kind == "integer" and draw(st.integers(0, 4)) == 0:
        bounds = {"multipleOf": draw(st.integers(1, 30))}
    return {"type": kind, **bounds}


@st.composite
def strings(draw: Any) -> dict[str, Any]:
    if draw(st.booleans()):
        return {"type": "string", **draw(ranges("minLength", "maxLength", 6))}
    patterns = ["^[a-c]{1,4}$", "^x", "b+$", "[0-9]{2}", "^(é|日本)+$", r"^\\n?$", "a|b"]
    if draw(st.booleans()):
        return {"type": "string", "pattern": draw(st.sampled_from(patterns))}
    formats = ["date", "ipv4", "uuid", "email", "ipv6"]  # those that the judge knows as the draft has them
    return {"type": "string", "format": draw(st.sampled_from(formats))}


@st.composite
def arrays(draw: Any, inner: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": draw(inner), "maxItems": draw(st.integers(0, 3))}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    if draw(st.booleans()):
        schema["minItems"] = draw(st.integers(0, schema["maxItems"]))
    return schema


@st.composite
def objects(draw: Any, inner: Any) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["additionalProperties"] = draw(st.just(False) | inner | st.booleans())
    if properties and draw(st.booleans()):
        schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    if draw(st.integers(0, 3)) == 0:
        schema["patternProperties"] = {"^p[0-9]": draw(inner)}
    if not properties and "patternProperties" not in schema:  # they are refused beside these
        schema["maxProperties"] = draw(st.integers(1, 4))
        schema["minProperties"] = draw(st.integers(0, 1))
    return schema


LEAVES = (
    numbers()
    | strings()
    | st.sampled_from([{}, True, {"type": "null"}, {"type": ["boolean", "null"]}, {"type": "boolean"}])
    | st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=4))
    | st.builds(lambda value: {"const": value}, VALUES)
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        arrays(inner)
        | objects(inner)
        | st.builds(lambda each: {"anyOf": each}, st.lists(inner, min_size=1, max_size=3))
        | st.builds(lambda each: {"oneOf": each}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(lambda each: {"allOf": each}, st.lists(inner, min_size=1, max_size=2))
    ),
    max_leaves=5,
).filter(lambda schema: isinstance(schema, dict))


@pytest.fixture(scope="module")
def text() -> Text:
    found = Text.load(ROOT / "recipes/tiny/weights")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def grammars(text: Text) -> Grammars:
    return Grammars(lambda: text, text.vocab_size, text.eos_token_ids)


def answer_of(grammars: Grammars, text: Text, grammar: str, seed: int, most: int) -> bytes | None:
    """What a model says whose logits are random, of what may come; None where it is cut at `most` tokens."""
    request = Request("a", np.array([1]), SamplingParams(grammar=grammar))
    grammars.constrain(request)
    constraint, random = request.constraint, np.random.default_rng(seed)
    assert constraint is not None
    answer: list[int] = []
    closing = [
        token for token in range(text.vocab_size) if text.token_bytes(token) in {b'"', b"}", b"]", b","}
    ]
    for _ in range(most):
        (mask,) = constraint.masks(np.array(answer, dtype=np.int64), np.empty(0, dtype=np.int64))
        assert mask is not None
        assert not constraint.error, constraint.error
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: text.vocab_size]
        logits = random.normal(size=text.vocab_size)
        logits[closing] += 2.5  # else few answers come to an end
        logits[list(text.eos_token_ids)] += 3
        logits[bits == 0] = -np.inf
        token = int((logits / 1.5 + random.gumbel(size=len(logits))).argmax())
        if token in text.eos_token_ids:
            return b"".join(map(text.token_bytes, answer))
        answer.append(token)
    return None


finished = {"whole": 0, "cut": 0, "refused": 0}


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_answers_are_valid(grammars: Grammars, text: Text, schema: dict[str, Any], seed: int) -> None:
    try:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
        grammar = grammar_of({"response_format": form})
        assert grammar is not None
        said = answer_of(grammars, text, grammar, seed, most=150)
    except BadRequest:  # no value satisfies it, or one of two branches cannot be told from the other
        finished["refused"] += 1
        return
    if said is None:
        finished["cut"] += 1
        return
    finished["whole"] += 1
    value = json.loads(said.decode())
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    judge.validate(value)


def test_most_of_them_came_to_an_end() -> None:
    assert finished["whole"] > sum(finished.values()) / 3, finished


TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["v"]}


@each_of(
    "schema, values",
    [
        (TREE | {"additionalProperties": False}, [{"v": 1, "next": {"v": 2}}, {"v": 1, "next": {}}, {}]),
        (
            {
                "properties": {
                    "a": {"anyOf": [{"enum": [1]}, {"enum": [2]}]},
                    "b": {"$ref": "#/properties/a/anyOf/1"},
                },
                "required": ["b"],
                "type": "object",
            },
            [{"b": 2}, {"b": 1}, {"a": 1, "b": 2}],
        ),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {"$id": "http://x/", "$ref": "#/$defs/b", "$defs": {"b": {"enum": ["in"]}}},
                    "b": {"enum": ["out"]},
                },
            },
            ["in", "out"],
        ),
        (
            {
                "$ref": "#x",
                "$defs": {"a": {"$anchor": "x", "enum": [1]}},
                "x-any": {"$anchor": "x", "enum": [2]},
            },
            [1, 2],
        ),
        (
            {
                "$id": "http://a/",
                "$ref": "c",
                "$defs": {
                    "r": {"$id": "c", "enum": [1]},
                    "p": {"$id": "http://b/", "$defs": {"q": {"$id": "c", "enum": [2]}}},
                },
            },
            [1, 2],
        ),
        ({"$ref": "#x", "$defs": {"default": {"$anchor": "x", "enum": [1]}, "enum": {"enum": [2]}}}, [1, 2]),
        (
            {"$id": "http://a/root.json", "$ref": "/b.json", "$defs": {"b": {"$id": "b.json", "enum": [1]}}},
            [1, 2],
        ),
        ({"$ref": "#t", "$defs": {"a": {"$anchor": "t", "enum": [1]}, "t": {"enum": [2]}}}, [1, 2]),
        ({"$ref": "#/x-parts/a~1b", "x-parts": {"a/b": {"enum": [1]}}}, [1, 2]),
        ({"$ref": "#/x/A%20b", "x": {"A b": {"enum": [1]}}}, [1, 2]),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, [{"a": [{"a": []}]}, {"a": [1]}]),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"enum": [1]}, "a": {"type": "int"}}}, [1, 2]),
        (
            {"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer", "minimum": 2}}},
            [1, 2, 3, 4],
        ),
    ],
)
def test_references_mean_what_json_schema_says(
    grammars: Grammars, text: Text, schema: dict[str, Any], values: list[Any]
) -> None:
    judge, beginning = jsonschema.Draft202012Validator(schema), grammar_of({"guided_json": schema})
    assert beginning is not None
    for value in values:
        tokens = text.encode_within(json.dumps(value, separators=(",", ":")))
        matcher = grammars.beginning(beginning)
        is_taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert is_taken == judge.is_valid(value), value
