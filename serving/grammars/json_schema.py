"""Prepare a JSON schema for the matcher that holds an answer to it.

What the matcher enforces is passed on, and annotations, which constrain no value, are left out, as JSON
Schema has it; so are keywords and formats that nobody knows. A keyword that constrains values and is not
enforced is left out, too, and named to whoever asked (`Prepared.notes`); those by which a schema means
something else without them are refused where it is `strict`. What would take the matcher long is bounded
here, before the matcher sees it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from borders.field_table import MOST_SCHEMA_BYTES
from borders.numbers import POSITIVE, integers, numbers
from borders.refusal import BadRequest, abbreviate_json

MOST_LEVELS = 32  # levels of nested schemas
MOST_PROPERTIES = 500  # properties of all objects together; a step's cost grows with them
MOST_VALUES = 1000  # values of all enums together
MOST_BRANCHES = 200  # branches of all anyOf, oneOf and allOf together
LARGEST_STEP = 1000  # largest multipleOf without its decimal point; the matcher has as many states
_BOUNDS = numbers(-(2**53), 2**53)  # JavaScript's largest integers, which its schemas name as bounds
MOST_NOTES, LONGEST_NOTE = 8, 100  # notes that an answer carries, and characters of one
MOST_REPEATS = 100_000  # largest minLength, maxLength, minItems, ...

_NOTES = frozenset(
    {
        *("$schema", "$id", "$comment", "title", "description", "default", "examples", "example"),
        *("deprecated", "readOnly", "writeOnly", "discriminator", "$anchor", "$vocabulary", "externalDocs"),
        *("contentEncoding", "contentMediaType", "contentSchema", "propertyOrdering", "xml", "nullable"),
    }
)
# Constraints without which a schema describes other values, and which the matcher does not enforce
_HARD = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    }
)
_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
        "unknown",  # the matcher's own word for any text
    }
)
_PLAIN = frozenset({"type", "format", "pattern", "required", "$ref"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS = frozenset({"prefixItems", "anyOf", "oneOf", "allOf"})
_ONE = frozenset({"items", "additionalProperties"})
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A schema as the matcher takes it, and the constraints in it that are not enforced, by their places."""

    schema: dict[str, Any]
    notes: tuple[str, ...]


def prepared(schema: object, field: str, *, strict: bool = False) -> Prepared:
    """Return a schema for the matcher; `field` is the request's field, which a refusal names.

    Raises BadRequest where it cannot be enforced, as far as that shows without compiling it.
    """
    check = _Preparation(field, strict=strict)
    return Prepared(check.whole(schema), tuple(check.notes))


class _Preparation:
    """Prepares one schema."""

    def __init__(self, field: str, *, strict: bool) -> None:
        self._field, self._strict = field, strict
        self._num_properties = self._num_values = self._num_branches = 0
        self.notes: list[str] = []

    def whole(self, schema: object) -> dict[str, Any]:
        """Return the schema for the matcher."""
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise self._bad("", f"is {abbreviate_json(schema)}; it must be a JSON schema, as an object")
        size = _num_bytes(schema, self._field)
        if size > MOST_SCHEMA_BYTES:
            problem = f"is a schema of {size} bytes as compact JSON; it may have {MOST_SCHEMA_BYTES}"
            raise BadRequest(self._field, problem, value=size, limit=MOST_SCHEMA_BYTES, fix="make it smaller")
        made = self._schema(schema, "", 1)
        assert isinstance(made, dict), "an object stays one"
        return made

    def _schema(self, schema: object, place: str, level: int) -> dict[str, Any] | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self._bad(
                place, f"is {abbreviate_json(schema)}; it must be a schema: an object, true or false"
            )
        if level > MOST_LEVELS:
            raise self._bad(place, f"is nested more than {MOST_LEVELS} levels deep", "use $defs and $ref")
        made: dict[str, Any] = {}
        for keyword, value in schema.items():
            at = f"{place}.{keyword}"
            if keyword in _NAMED:
                made[keyword] = self._mapping(value, at, level)
                if keyword in ("properties", "patternProperties"):
                    self._num_properties = self._counted(
                        at, "properties", self._num_properties + len(value), MOST_PROPERTIES
                    )
            elif keyword in _LISTS:
                made[keyword] = self._list(value, at, level)
                if keyword != "prefixItems":
                    self._num_branches = self._counted(
                        at, "branches", self._num_branches + len(value), MOST_BRANCHES
                    )
            elif keyword in _ONE:
                made[keyword] = self._schema(value, at, level + 1)
            elif self._is_enforced(keyword, value, at):
                self._value(keyword, value, at)
                made[keyword] = value
        if _may_repeat_names(schema):
            problem = "is above 1 beside properties of any name, which could then come twice"
            fix = "set additionalProperties to false, or list required properties"
            raise self._bad(f"{place}.minProperties", problem, fix)
        if "oneOf" in made and "anyOf" not in made and isinstance(schema.get("discriminator"), Mapping):
            made["anyOf"] = made.pop("oneOf")  # the discriminator keeps the branches apart
        return _or_null(made) if schema.get("nullable") is True else made

    def _is_enforced(self, keyword: str, value: Any, place: str) -> bool:
        """Whether a keyword without schemas of its own is passed on; notes a constraint that is not."""
        known = _PLAIN | _NUMBERS | _COUNTS | {"enum", "const", "multipleOf"}
        if keyword == "format" and isinstance(value, str) and value not in _FORMATS:
            self._note(place, value)
            return False
        if keyword in known:
            return True
        if keyword in _HARD and self._strict:
            problem = f"uses the keyword {abbreviate_json(keyword)}, which cannot be enforced"
            raise self._bad(place.removesuffix(f".{keyword}"), problem, "leave it out, or strict")
        is_any_name = keyword == "propertyNames" and (value is True or value in ({}, {"type": "string"}))
        is_off = value is False and keyword in ("uniqueItems", "not")  # elsewhere false allows no value
        if not (keyword in _NOTES or keyword.startswith("x-") or is_off or is_any_name):
            self._note(place)
        return False

    def _note(self, place: str, value: str = "") -> None:
        shown = place.lstrip(".") + (f" {value}" if value else "")
        if len(self.notes) < MOST_NOTES:
            self.notes.append("".join(each if " " <= each <= "~" else "?" for each in shown)[:LONGEST_NOTE])

    def _mapping(self, value: object, place: str, level: int) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self._bad(
                place, f"is {abbreviate_json(value)}; it must be an object of schemas by their names"
            )
        return {name: self._schema(each, f"{place}.{name}", level + 1) for name, each in value.items()}

    def _list(self, value: object, place: str, level: int) -> list[dict[str, Any] | bool]:
        if not isinstance(value, list):
            raise self._bad(place, f"is {abbreviate_json(value)}; it must be a list of schemas")
        return [self._schema(each, f"{place}[{index}]", level + 1) for index, each in enumerate(value)]

    def _value(self, keyword: str, value: Any, place: str) -> None:
        """Check the value of a keyword that is enforced and holds no schemas."""
        if keyword == "enum":
            if not isinstance(value, list) or not value:
                raise self._bad(
                    place, f"is {abbreviate_json(value)}; it must be a list of at least one value"
                )
            self._num_values = self._counted(place, "values", self._num_values + len(value), MOST_VALUES)
        elif keyword in _COUNTS:
            count = numbers(0, MOST_REPEATS).read(value)
            if count is None or not count.is_integer():
                raise self._bad(place, f"is {abbreviate_json(value)}; it must be {integers(0, MOST_REPEATS)}")
        elif keyword in _NUMBERS:
            if _BOUNDS.read(value) is None:
                raise self._bad(place, f"is {abbreviate_json(value)}; it must be {_BOUNDS}")
        elif keyword == "multipleOf":
            if POSITIVE.read(value) is None or _digits(value) > LARGEST_STEP:
                limit = f"above 0 and, without its point and zeros at the end, at most {LARGEST_STEP}"
                raise self._bad(place, f"is {abbreviate_json(value)}; it must be {limit}")
        elif keyword in _PLAIN and not _PLAIN_CHECKS[keyword](value):
            raise self._bad(place, f"is {abbreviate_json(value)}, which this keyword does not accept")

    def _counted(self, place: str, what: str, count: int, most: int) -> int:
        if count > most:
            raise self._bad(place, f"brings the schema to {count} {what}; it may have {most} in all")
        return count

    def _bad(self, place: str, problem: str, fix: str = "") -> BadRequest:
        subject = f"the JSON schema in {self._field}" + (f", at {place.lstrip('.')}," if place else "")
        return BadRequest(self._field, problem, fix=fix, subject=subject)


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that takes null, too, as OpenAPI 3.0's `nullable` has it."""
    shared: dict[str, Any] = {name: schema.pop(name) for name in ("$defs", "definitions") if name in schema}
    return {"anyOf": [schema, {"type": "null"}], **shared}  # references lead to their places still


def _num_bytes(schema: object, field: str) -> int:
    try:
        return len(json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode())
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRequest(field, f"cannot be written as JSON ({error})") from error


def _may_repeat_names(schema: Mapping[str, Any]) -> bool:
    """Return whether the matcher could count one name twice, since it does not remember names it has seen."""
    least = schema.get("minProperties", 0)
    is_open = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    return least > max(1, len(schema.get("required", []))) and is_open


def _digits(value: float) -> int:
    """Return the digits of a number as an integer: 5 for 0.05, 12 for 1.2, 1 for 100."""
    return int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits)))


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(each, str) and each in _TYPES for each in names)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_string(value: object) -> bool:
    return isinstance(value, str)


_PLAIN_CHECKS: dict[str, Callable[[object], bool]] = {
    "type": _is_type,
    "format": _is_string,
    "pattern": _is_string,
    "required": _is_names,
    "$ref": lambda value: isinstance(value, str) and value.startswith("#"),
}
