"""Write a prepared schema as alternatives, each of which says in one piece what a value must be.

Notations other than JSON need to know which types a value may have, and how each of them is written. The
alternatives of a schema have no references and no unions: what several parts say together is joined.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
MOST_JOINS = 5000  # pairs of alternatives that are joined for all parts of one schema
_DEEPEST = 64  # references and unions that are followed within each other
_APART = frozenset({"$ref", "allOf", "anyOf", "oneOf", "$defs", "definitions"})
_LARGEST = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_SMALLEST = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})

Alternative = Mapping[str, Any]


class Unheld(Exception):
    """Says which part of a schema cannot be written as alternatives."""


class Alternatives:
    """Writes the parts of one schema as alternatives; references lead to `$defs` of its root."""

    def __init__(self, root: Any) -> None:
        self._defs: Mapping[str, Any] = root.get("$defs", {}) if isinstance(root, Mapping) else {}
        self._named: dict[str, list[Alternative]] = {}  # the alternatives of what each reference leads to
        self._num_joins = 0

    def of(self, schema: Any) -> list[Alternative]:
        """Return the alternatives, each with a list of types; none where no value is allowed.

        Raises Unheld.
        """
        return [each for found in self._of(schema, 0) if (each := _typed(found)) is not None]

    def _of(self, schema: Any, depth: int) -> list[Alternative]:
        if not isinstance(schema, Mapping):
            return [] if schema is False else [{}]
        if depth > _DEEPEST:
            raise Unheld("references and unions deep within each other")
        if schema.get("oneOf"):  # a schema's preparation leaves those whose branches may both be met
            raise Unheld("oneOf")
        own = {key: value for key, value in schema.items() if key not in _APART}
        found: list[Alternative] = [own]
        if "const" in own:
            only = _joined(own, {"enum": [own.pop("const")]})
            found = [] if only is None else [only]
        for factor in self._factors(schema, depth):
            self._num_joins += len(found) * len(factor)
            if self._num_joins > MOST_JOINS:
                raise Unheld("unions of too many alternatives")
            joined = (_joined(one, other) for one in found for other in factor)
            found = _distinct([each for each in joined if each is not None])
        return found

    def _factors(self, schema: Mapping[str, Any], depth: int) -> Iterator[list[Alternative]]:
        """Yield the alternatives of each part that a value must satisfy, too."""
        if isinstance(reference := schema.get("$ref"), str):
            name = reference.removeprefix("#/$defs/")
            if name not in self._named:
                self._named[name] = self._of(self._defs.get(name, True), depth + 1)
            yield self._named[name]
        for each in schema.get("allOf", ()):
            yield self._of(each, depth + 1)
        if schema.get("anyOf"):
            yield _distinct([one for each in schema["anyOf"] for one in self._of(each, depth + 1)])


def properties_of(schema: Alternative) -> dict[str, Any]:
    """Return the arguments or keys that an object may have, those that it requires among them.

    Raises Unheld where it requires one that it does not allow.
    """
    found, others = dict(schema.get("properties", {})), schema.get("additionalProperties", True)
    for key in schema.get("required", ()):
        found.setdefault(key, others)
        if found[key] is False:
            raise Unheld(f"required {key}")
    return {key: value for key, value in found.items() if value is not False}


def _distinct(found: list[Alternative]) -> list[Alternative]:
    unlike = list({id(each): each for each in found}.values())
    if len(unlike) == 1:
        return unlike
    return list({json.dumps(each, sort_keys=True): each for each in unlike}.values())


def _joined(one: Alternative, other: Alternative) -> Alternative | None:
    """Return what two alternatives say together; None where no value satisfies both."""
    if not one or not other:
        return one or other
    made: dict[str, Any] = {**other, **one}
    if _OF_OBJECTS & one.keys() and _OF_OBJECTS & other.keys():
        made |= _joined_objects(one, other)
    for key in (one.keys() & other.keys()) - _OF_OBJECTS:
        left, right = one[key], other[key]
        if left == right and key != "enum":
            continue
        if key == "type":
            made[key] = [each for each in types_of(one) if each in types_of(other)]
        elif key == "enum":
            right = {_spelt(each) for each in right}
            made[key] = [each for each in left if _spelt(each) in right]
        elif key in _LARGEST | _SMALLEST:
            made[key] = max(left, right) if key in _LARGEST else min(left, right)
        elif key == "items" and not {"prefixItems"} & made.keys():
            made[key] = _both(left, right)
        elif key == "allOf":
            made[key] = [*left, *right]
        elif key in ("pattern", "format", "multipleOf"):
            made["allOf"] = [*made.get("allOf", ()), {key: right}]
        else:
            raise Unheld(f"two of {key}")
    return None if made.get("type") == [] or made.get("enum") == [] else made


def _joined_objects(one: Alternative, other: Alternative) -> dict[str, Any]:
    if "patternProperties" in one or "patternProperties" in other:
        raise Unheld("patternProperties beside other properties")
    made: dict[str, Any] = {"properties": {}}
    for key in dict.fromkeys([*one.get("properties", {}), *other.get("properties", {})]):
        parts = [
            each.get("properties", {}).get(key, each.get("additionalProperties", True))
            for each in (one, other)
        ]
        made["properties"][key] = _both(*parts)
    others = _both(*(each.get("additionalProperties", True) for each in (one, other)))
    required = dict.fromkeys([*one.get("required", ()), *other.get("required", ())])
    return made | {"additionalProperties": others, "required": [*required]}


def _both(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one == other or other is True or other == {}:
        return one
    if one is True or one == {}:
        return other
    # The order is fixed and nothing is nested, so that parts that recur are the same however they came.
    parts = {_spelt(each): each for given in (one, other) for each in _all_of(given)}
    return {"allOf": [parts[spelt] for spelt in sorted(parts)]} if len(parts) > 1 else one


def _all_of(schema: Any) -> list[Any]:
    return list(schema["allOf"]) if isinstance(schema, Mapping) and schema.keys() == {"allOf"} else [schema]


def types_of(schema: Alternative) -> list[str]:
    """Return the types of an alternative; a number may be an integer."""
    given = schema.get("type", TYPES)
    names = {given} if isinstance(given, str) else {*given}
    return sorted(names | ({"integer"} if "number" in names else set()))


def _typed(schema: Alternative) -> Alternative | None:
    """Return an alternative with its list of types, and with those of its constants that it allows."""
    types = types_of(schema)
    made = {**schema, "type": types}
    if "enum" in schema:
        values = [each for each in schema["enum"] if type_of(each) in types and _allows(schema, each)]
        made["enum"] = values
        made["type"] = sorted({type_of(each) for each in values})
    return made if made["type"] else None


def type_of(value: Any) -> str:
    """Return the name of the type of a value of JSON."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _allows(schema: Alternative, value: Any) -> bool:
    """Whether an alternative allows one of its constants, whose type it has."""
    kind = type_of(value)
    if kind in ("integer", "number"):
        if "multipleOf" in schema or "allOf" in schema:
            raise Unheld("constants beside multipleOf")
        return (
            schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and not value <= schema.get("exclusiveMinimum", value - 1)
            and not value >= schema.get("exclusiveMaximum", value + 1)
        )
    if kind == "string":
        if {"pattern", "format", "allOf"} & schema.keys():
            raise Unheld("constants beside pattern or format")
        return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))
    if kind in ("array", "object") and schema.keys() - {"type", "enum", "minLength", "maxLength", "pattern"}:
        raise Unheld("lists and objects as constants beside other keywords")
    return True


def _spelt(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
