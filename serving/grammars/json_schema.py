"""Prepare a JSON schema for the matcher that holds an answer to it.

What the matcher enforces is passed on, and annotations, which constrain no value, are left out, as JSON
Schema has it; so are keywords and formats that nobody knows. A keyword that constrains values and is not
enforced is left out, too, and named to whoever asked (`Prepared.notes`); those by which a schema means
something else without them are refused where it is `strict`. What would take the matcher long is bounded
here, before the matcher sees it.

A reference may lead anywhere in a schema: by a JSON pointer, by an anchor, or by the `$id` of a part. What
it leads to stands in `$defs` of the prepared schema, and nothing else does, so that a prepared schema can be
put into another one together with its `$defs`.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from borders.field_table import MOST_SCHEMA_BYTES
from borders.numbers import POSITIVE, integers, numbers
from borders.refusal import BadRequest, abbreviate_json, one_line
from serving.grammars.schema_references import Path, References, are_apart, written

MOST_LEVELS = 32  # levels of nested schemas
MOST_LEVELS_IN_ALL = 600  # levels with those that references lead to; the matcher's stack is finite
MOST_DEPTH = 200  # lists and objects in each other, in constants and annotations, too
MOST_PROPERTIES = 500  # properties of all objects together; a step's cost grows with them
MOST_VALUES = 1000  # values of all enums together
MOST_BRANCHES = 200  # branches of all anyOf, oneOf and allOf together, beside those that bring no choice
LONGEST_TEXT = 16 * MOST_SCHEMA_BYTES  # characters of a schema's text, with its spaces and escapes
LARGEST_STEP = 1000  # largest multipleOf without its decimal point; the matcher has as many states
_BOUNDS = numbers(-(2**53), 2**53)  # JavaScript's largest integers, which its schemas name as bounds
LONGEST_NOTE = 100  # characters of a note
MOST_REPEATS = 100_000  # largest minLength, maxLength, minItems, ...
MOST_NOTES = 50  # notes of one schema
_MOST_PATTERNS = 200  # patterns of one schema, and formats beside others, that are tried; 1.5 ms each
# Prepared schemas are kept, since an agent sends the same ones with each turn. Large ones take some 16 times
# the bytes of their text, small ones up to 45 times.
_MOST_KEPT, _MOST_KEPT_BYTES = 2**11, 2**20
# A string that is not closed ends with the text; searches would otherwise begin again at each quote in it.
_QUOTED = re.compile(r'(?s)"(?:[^"\\]|\\.)*(?:"|\\?\Z)')

_NOTES = frozenset(
    {
        *("$schema", "$id", "id", "$comment", "title", "description", "default", "examples", "example"),
        *("deprecated", "readOnly", "writeOnly", "discriminator", "$anchor", "$vocabulary", "externalDocs"),
        *("contentEncoding", "contentMediaType", "contentSchema", "propertyOrdering", "xml", "nullable"),
        *("$defs", "definitions", "$dynamicAnchor"),  # which hold only what references lead to
    }
)
# Constraints that the matcher does not enforce
_UNHELD = frozenset({"uniqueItems", "propertyNames", "contains", "minContains", "maxContains"})
# Those of them without which a schema describes other values
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
_PLAIN = frozenset({"type", "format", "pattern", "required"})
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_NUMBERS = frozenset({*_LOWER, *_UPPER})
_LEAST_STEP = 1e-12  # The step from an exclusive bound of 0, or of few digits, to what is let through.
_BESIDE_FORMAT = frozenset({"pattern", "minLength", "maxLength", "enum", "const"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_NAMED = frozenset({"properties", "patternProperties"})
_LISTS = frozenset({"prefixItems", "anyOf", "oneOf", "allOf"})
_ONE = frozenset({"items", "additionalProperties"})
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A schema as the matcher takes it, and the constraints in it that are not enforced, by their places.

    Neither is ever changed, since other requests share them.
    """

    schema: Mapping[str, Any]
    notes: tuple[str, ...]


# Patterns with look-around that zod 4 writes of email() and iso.duration(), and pydantic of Decimal, and the
# same texts without it
_CLOCK = r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_NEGATED = re.compile(r"(?s)\\.|\[\^[\]-]?")  # A negated class begins so, and not behind a backslash
_PLAINLY = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]"
        r"@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_CLOCK})?|{_CLOCK})$"
    ),
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}


def prepared(schema: object, field: str, *, strict: bool = False) -> Prepared:
    """Return a schema for the matcher; `field` is the request's field, which a refusal names.

    Raises BadRequest where it cannot be enforced, as far as that shows without compiling it.
    """
    text, size, depth = _as_json(schema, field)
    if depth > MOST_DEPTH:
        raise BadRequest(field, f"is nested {depth} levels deep; lists and objects may be {MOST_DEPTH}")
    if not isinstance(schema, Mapping) and schema is not True:
        problem = f"is {abbreviate_json(schema)}; it must be a JSON schema, as an object"
        raise BadRequest(field, problem, subject=f"the JSON schema in {field}")
    if size > MOST_SCHEMA_BYTES:
        problem = f"is a schema of {size} bytes as compact JSON; it may have {MOST_SCHEMA_BYTES}"
        raise BadRequest(field, problem, value=size, limit=MOST_SCHEMA_BYTES, fix="make it smaller")
    found = _KEPT.get(text, field, strict)
    if isinstance(found, BadRequest):
        raise found.of_field(field)  # a new exception, whose traceback is its own
    return found


@dataclass(slots=True)
class _Kept:
    """Prepares schemas, and keeps those that were asked for last; all threads share them."""

    _found: OrderedDict[tuple[str, str, bool], Prepared | BadRequest] = field(default_factory=OrderedDict)
    _num_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, text: str, name: str, strict: bool) -> Prepared | BadRequest:
        """Return the schema of a JSON text, or why it is refused."""
        asked = text, name, strict
        with self._lock:
            if asked in self._found:
                self._found.move_to_end(asked)
                return self._found[asked]
        try:
            made: Prepared | BadRequest = _Preparation(json.loads(text), name, strict=strict).whole()
        except BadRequest as bad:
            made = bad.with_traceback(None)
        with self._lock:
            if asked not in self._found:
                self._found[asked] = made
                self._num_bytes += len(text)
            while self._num_bytes > _MOST_KEPT_BYTES or len(self._found) > _MOST_KEPT:
                (oldest, _, _), _ = self._found.popitem(last=False)
                self._num_bytes -= len(oldest)
        return made


_KEPT = _Kept()


class _Preparation:
    """Prepares one schema, which is an object or true."""

    def __init__(self, schema: Any, field: str, *, strict: bool) -> None:
        self._root, self._field, self._strict = schema, field, strict
        self._references = References(schema)
        self._deepest = self._num_levels = 0
        self._num_properties = self._num_values = self._num_branches = 0
        self._made: dict[Path, dict[str, Any] | bool] = {}  # each schema that is prepared, by its place
        self._levels: dict[Path, int] = {}  # levels of each schema, itself included
        self._names: dict[Path, str] = {}  # the name in `$defs` of each place that a reference leads to
        self._waiting: list[Path] = []  # those of them that `$defs` does not have yet
        self._taken = set[str]()  # the names
        self._compiles: dict[str, bool] = {}  # whether the matcher can hold each text's schema
        self._notes: dict[Path, str] = {}
        self._unknown = set[Path]()  # those of them that are about a keyword which nobody knows

    def whole(self) -> Prepared:
        """Return the schema for the matcher."""
        made = self._schema(self._root, (), 1)
        whole = {} if made is True else made
        self._count_levels(())
        defs: dict[str, Any] = {}
        while self._waiting:  # what a reference leads to may hold further references
            place = self._waiting.pop()
            if place not in self._made:
                self._schema(self._references.at(place), place, 1)
            self._count_levels(place)
            defs[self._names[place]] = self._made[place]
        self._check_circles(defs)
        if not _can_end(whole, _endless(defs)):
            problem = "has no answer that ends, since a value that it requires holds another of itself"
            raise self._bad((), problem, "leave it out of required, or let it be null")
        # Its type and its properties are looked at where it is used.
        while isinstance(whole, dict) and whole.keys() == {"$ref"}:
            whole = defs[whole["$ref"].removeprefix("#/$defs/")]
        if not isinstance(whole, dict):
            raise self._bad((), "refers to false, which no answer follows", "refer to another part")
        if defs:
            whole = {**whole, "$defs": defs}
            if (size := _as_json(whole, self._field)[1]) > (most := 2 * MOST_SCHEMA_BYTES):
                problem = f"comes to {size} bytes with what its references lead to; it may have {most}"
                raise self._bad((), problem, "refer to smaller parts, in $defs")
        # A keyword that nobody knows may be where a schema keeps what it refers to.
        holds = {holder for place in self._names if (holder := self._holder(place)) in self._unknown}
        return Prepared(whole, tuple(note for place, note in self._notes.items() if place not in holds))

    def _count_levels(self, place: Path) -> None:
        self._num_levels += self._levels[place]
        if self._num_levels > MOST_LEVELS_IN_ALL:
            problem = f"has more than {MOST_LEVELS_IN_ALL} levels of schemas with what its references lead to"
            raise self._bad((), problem, "refer to fewer or flatter parts")

    def _holder(self, place: Path) -> Path | None:
        """Return the place of the first keyword on the way to `place` that nobody knows."""
        return next((part for end in range(len(place)) if (part := place[:end]) in self._unknown), None)

    def _schema(self, schema: object, place: Path, level: int) -> dict[str, Any] | bool:
        if isinstance(schema, bool):
            self._made[place], self._levels[place] = schema, 1
            return schema
        if not isinstance(schema, Mapping):
            raise self._bad(
                place, f"is {abbreviate_json(schema)}; it must be a schema: an object, true or false"
            )
        if level > MOST_LEVELS:
            raise self._bad(place, f"is nested more than {MOST_LEVELS} levels deep", "use $defs and $ref")
        made: dict[str, Any] = {}
        deepest_before, self._deepest, is_never = self._deepest, level, False
        for keyword, value in schema.items():
            at = (*place, keyword)
            if keyword in _NAMED:
                made[keyword] = self._mapping(value, at, level)
                if keyword == "patternProperties":
                    self._check_names(value, at)
                    made[keyword] = {_without_nul(name): each for name, each in made[keyword].items()}
                self._num_properties = self._counted(
                    at, "properties", self._num_properties + len(value), MOST_PROPERTIES
                )
            elif keyword in _LISTS:
                made[keyword] = self._list(value, at, level)
                if keyword != "prefixItems":
                    self._num_branches = self._counted(
                        at, "branches", self._num_branches + _num_choices(value), MOST_BRANCHES
                    )
            elif keyword == "items" and isinstance(value, list):
                made |= self._tuple(schema, at, level)
            elif keyword in _ONE:
                made[keyword] = self._schema(value, at, level + 1)
            elif keyword == "$ref":
                leads_to, name = self._referred(value, at)
                is_never |= leads_to is False
                made |= {} if isinstance(leads_to, bool) else {keyword: f"#/$defs/{name}"}
            elif self._is_enforced(keyword, value, at):
                self._value(keyword, value, at)
                if keyword in _COUNTS:
                    made[keyword] = int(value)  # the matcher takes no 3.0
                elif keyword != "pattern":
                    made[keyword] = value
                elif self._holds(pattern=(plain := _without_nul(str(_PLAINLY.get(value, value))))):
                    made[keyword] = plain
                else:
                    self._note(at)
        _close(made)
        if "format" in made and not self._strict:
            self._drop_impossible_format(made, (*place, "format"))
        if _may_repeat_names(schema):
            problem = "is above 1 beside properties of any name, which could then come twice"
            fix = "set additionalProperties to false, or list required properties"
            raise self._bad((*place, "minProperties"), problem, fix)
        if "oneOf" in made:
            self._split(made, schema["oneOf"], place)
        if schema.get("nullable") is True:  # OpenAPI 3.0's word for a type beside others
            made = {"anyOf": [made, {"type": "null"}]}
        self._made[place], self._levels[place] = not is_never and made, self._deepest - level + 1
        self._deepest = max(deepest_before, self._deepest)
        return self._made[place]

    def _tuple(self, schema: Mapping[str, Any], place: Path, level: int) -> dict[str, Any]:
        """Read a list of `items` and `additionalItems`, as drafts before 2020 have them."""
        if "prefixItems" in schema:
            raise self._bad(place, "is a list beside prefixItems", "keep prefixItems, and give one schema")
        made: dict[str, Any] = {"prefixItems": self._list(schema["items"], place, level)}
        if "additionalItems" in schema:
            rest = (*place[:-1], "additionalItems")
            made["items"] = self._schema(schema["additionalItems"], rest, level + 1)
        return made

    def _split(self, made: dict[str, Any], branches: Sequence[object], place: Path) -> None:
        """Write `oneOf` as `anyOf`, which is the same where no value can satisfy two branches.

        Where that does not show, the matcher judges a strict schema, and another one has a note.
        """
        places = ((*place, "oneOf", index) for index in range(len(branches)))
        if not are_apart(list(zip(branches, places)), self._references):
            if self._strict:
                return
            self._note((*place, "oneOf"))
        if "anyOf" in made:
            made["allOf"] = [*made.get("allOf", ()), {"anyOf": made.pop("oneOf")}]
        else:
            made["anyOf"] = made.pop("oneOf")

    def _referred(self, reference: object, place: Path) -> tuple[object, str]:
        """Return what a reference leads to, and the name of that in `$defs`; true and false need none."""
        target = self._references.target(reference, place[:-1]) if isinstance(reference, str) else None
        if target is None:
            problem = f"is {abbreviate_json(reference)}, which leads to no place in the schema"
            raise self._bad(place, problem, 'refer to a part of it, as "#/$defs/name"')
        leads_to = self._references.at(target)
        if target not in self._names and not isinstance(leads_to, bool):
            name = str(target[-1]) if target else "root"
            is_plain = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
            if not is_plain or name in self._taken:
                name = f"part.{len(self._names)}"  # no plain name has a dot
            self._names[target] = name
            self._taken.add(name)
            self._waiting.append(target)
        return leads_to, self._names.get(target, "")

    def _check_circles(self, defs: Mapping[str, Any]) -> None:
        """Raise BadRequest for references that lead to each other without a value in between."""
        done, places = set[str](), {name: place for place, name in self._names.items()}
        for start in defs:
            path: dict[str, Iterator[str]] = {start: _same_value(defs[start])}
            while path:
                name, further = next(reversed(path.items()))
                each = next((one for one in further if one not in done), None)
                if each is None:
                    done.add(name)
                    del path[name]
                elif each in path:
                    raise self._bad(
                        places[each], "refers to itself before it comes to a value", "give it one"
                    )
                else:
                    path[each] = _same_value(defs[each])

    def _is_enforced(self, keyword: str, value: Any, place: Path) -> bool:
        """Whether a keyword without schemas of its own is passed on; notes a constraint that is not."""
        known = _PLAIN | _NUMBERS | _COUNTS | {"enum", "const", "multipleOf"}
        if keyword == "format" and isinstance(value, str) and value not in _FORMATS:
            self._note(place, value)
            return False
        if keyword in _NUMBERS and not self._strict and _is_of_a_type(keyword, value):
            self._note(place)
            return False
        if keyword in known:
            return True
        if keyword in _HARD and self._strict:
            problem = f"uses the keyword {abbreviate_json(keyword)}, which cannot be enforced"
            raise self._bad(place[:-1], problem, "leave it out, or strict")
        is_any_name = keyword == "propertyNames" and (value is True or value in ({}, {"type": "string"}))
        is_off = value is False and keyword in ("uniqueItems", "not")  # elsewhere false allows no value
        is_read = keyword == "additionalItems"  # it means nothing without a list of items
        if not (keyword in _NOTES or keyword.startswith("x-") or is_off or is_any_name or is_read):
            self._note(place)
            if keyword not in _HARD | _UNHELD:
                self._unknown.add(place)
        return False

    def _holds(self, **keywords: Any) -> bool:
        """Whether these of a text are left to the matcher, which refuses strict ones that it cannot compile.

        What is beyond those that are tried is not.
        """
        if self._strict:
            return True
        asked = json.dumps({"type": "string", **keywords})
        if asked not in self._compiles:
            if len(self._compiles) == _MOST_PATTERNS:
                return False
            self._compiles[asked] = _compiles(asked)
        return self._compiles[asked]

    def _drop_impossible_format(self, made: dict[str, Any], place: Path) -> None:
        """Leave out a format that no text meets together with the keywords beside it.

        JSON Schema has it as an annotation, while what stands beside it constrains the text. The matcher
        would leave out the property instead, or allow only its other types.
        """
        beside = {keyword: made[keyword] for keyword in _BESIDE_FORMAT & made.keys()}
        if beside and not self._holds(**beside, format=made["format"]) and self._holds(**beside):
            self._note(place, made.pop("format"))

    def _check_names(self, patterns: Iterable[str], place: Path) -> None:
        for each in patterns:
            if not self._holds(pattern=each):
                problem = "is a pattern that cannot be enforced"
                raise self._bad((*place, each), problem, "use no look-around and no reference back")

    def _note(self, place: Path, value: str = "") -> None:
        if len(self._notes) == MOST_NOTES:
            return
        shown = written(place) + (f" {value}" if value else "")
        printed = "".join(each if " " <= each <= "~" else "?" for each in shown)
        self._notes[place] = printed[:LONGEST_NOTE].strip()

    def _mapping(self, value: object, place: Path, level: int) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self._bad(
                place, f"is {abbreviate_json(value)}; it must be an object of schemas by their names"
            )
        return {name: self._schema(each, (*place, name), level + 1) for name, each in value.items()}

    def _list(self, value: object, place: Path, level: int) -> list[dict[str, Any] | bool]:
        if not isinstance(value, list):
            raise self._bad(place, f"is {abbreviate_json(value)}; it must be a list of schemas")
        return [self._schema(each, (*place, index), level + 1) for index, each in enumerate(value)]

    def _value(self, keyword: str, value: Any, place: Path) -> None:
        """Check the value of a keyword that is enforced and holds no schemas."""
        if keyword in ("enum", "const") and _is_rounded(value):
            problem = (
                "holds a number that cannot be kept to its last digit, and another one would be answered"
            )
            raise self._bad(place, problem, "send it as a string")
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

    def _counted(self, place: Path, what: str, count: int, most: int) -> int:
        if count > most:
            raise self._bad(place, f"brings the schema to {count} {what}; it may have {most} in all")
        return count

    def _bad(self, place: Path, problem: str, fix: str = "") -> BadRequest:
        subject = f"the JSON schema in {self._field}" + (f", at {one_line(written(place))}," if place else "")
        return BadRequest(self._field, problem, fix=fix, subject=subject)


def _same_value(schema: object) -> Iterator[str]:
    """Yield the names of references that judge the very value which a schema judges."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield schema["$ref"].removeprefix("#/$defs/")
        for keyword in ("anyOf", "oneOf", "allOf"):
            for each in schema.get(keyword, ()):
                yield from _same_value(each)


def without_other_spellings(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a prepared schema in which a property is not taken for another one where escapes spell its name.

    The matcher knows the names of properties by their usual spelling, and further ones have any other, so
    that "\\u0061" would pass what "a" must be. The names that a pattern matches have the usual spelling. The
    matcher does not merge such patterns with other ones, so a schema that merges others is returned as it is.
    """
    return schema if _merges(schema) else _with_usual_names(schema)


def _merges(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    own = schema.keys() - {"$defs"}
    merges = "allOf" in own or (len(own) > 1 and bool(own & {"$ref", "anyOf", "oneOf"}))
    return merges or any(map(_merges, _parts(schema)))


def _with_usual_names(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for keyword in made.keys() & (_NAMED | {"$defs"}):
        made[keyword] = {name: _with_usual_names(each) for name, each in schema[keyword].items()}
    for keyword in made.keys() & _LISTS:
        made[keyword] = [_with_usual_names(each) for each in schema[keyword]]
    for keyword in made.keys() & _ONE:
        made[keyword] = _with_usual_names(schema[keyword])
    is_open = made.get("additionalProperties", True) in (True, {}) and "patternProperties" not in made
    if made.get("properties") and is_open:
        made |= {"patternProperties": {"": True}, "additionalProperties": False}
    return made


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    for keyword, value in schema.items():
        if keyword in _NAMED | {"$defs"}:
            yield from value.values()
        elif keyword in _LISTS:
            yield from value
        elif keyword in _ONE:
            yield value


def _endless(defs: Mapping[str, Any]) -> set[str]:
    """Return the names of the parts whose every value would hold a value of such a part."""
    endless, num_before = set(defs), len(defs) + 1
    while len(endless) < num_before:
        num_before = len(endless)
        endless -= {name for name in endless if _can_end(defs[name], endless)}
    return endless


def _can_end(schema: Any, endless: Collection[str]) -> bool:
    """Return whether a schema may have a value that holds none of the endless parts.

    Without references it has one as far as this looks, whatever its constraints say.
    """
    if isinstance(schema, bool):
        return True
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") in endless:
        return False
    if not all(_can_end(each, endless) for each in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_can_end(each, endless) for each in schema[keyword]):
            return False
    if schema.get("type") in ("object", ["object"]):
        named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        rest = True if "patternProperties" in schema else others
        return all(_can_end(named.get(name, rest), endless) for name in schema.get("required", ()))
    if schema.get("type") in ("array", ["array"]):
        first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        needed = [*first[: int(least)], *([schema.get("items", True)] if least > len(first) else [])]
        return all(_can_end(each, endless) for each in needed)
    return True


def _as_json(schema: object, field: str) -> tuple[str, int, int]:
    """Return a schema as compact JSON, its number of bytes, and of lists and objects in each other."""
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text, len(text.encode()), depth_of(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRequest(field, f"cannot be written as JSON ({error})") from error


def depth_of(text: str) -> int:
    """Return how many lists and objects are in each other in a JSON text."""
    depth = deepest = 0
    for each in re.findall(r"[\[\]{}]", _QUOTED.sub("", text)):
        depth += 1 if each in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _may_repeat_names(schema: Mapping[str, Any]) -> bool:
    """Return whether the matcher could count one name twice, since it does not remember names it has seen."""
    least = schema.get("minProperties", 0)
    is_open = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    return least > max(1, len(schema.get("required", []))) and is_open


def _digits(value: float) -> int:
    """Return the digits of a number as an integer: 5 for 0.05, 12 for 1.2, 1 for 100."""
    return int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits)))


def _num_choices(branches: Sequence[Any]) -> int:
    """Return how many branches count: null beside others does not, nor does one that is alone then."""
    has_null = any(isinstance(each, Mapping) and each.get("type") == "null" for each in branches)
    num_choices = len(branches) - has_null
    return num_choices if num_choices > 1 else 0


def _is_of_a_type(keyword: str, bound: object) -> bool:
    """Whether a bound is that of a type, as int64's or float32's, which excludes next to nothing.

    The matcher takes none so large.
    """
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        return False
    return bound < _BOUNDS.least if keyword in _LOWER else bound > _BOUNDS.most


def _close(made: dict[str, Any]) -> None:
    """Write an exclusive bound as the nearest inclusive one where the matcher would let the bound through.

    It does so where the bound is whole, and the other one is within 1 of it and farther from zero.
    """
    for sign, (least, excluded), others in ((1, _LOWER, _UPPER), (-1, _UPPER, _LOWER)):
        bound = made.get(excluded)
        other = min((sign * made[each] for each in others if each in made), default=math.inf)
        if bound is not None and float(bound).is_integer() and 0 <= sign * bound > other - 1:
            step = max(math.ulp(bound), _LEAST_STEP)
            made[least] = sign * max(sign * bound + step, sign * made.get(least, bound))
            del made[excluded]


def _without_nul(pattern: str) -> str:
    """Return the pattern whose negated classes lack NUL, too.

    Through a class that has all control characters the matcher lets quotes and backslashes as escapes,
    whatever the class says of them.
    """

    def written(found: re.Match[str]) -> str:
        begun = found[0]
        return begun if begun[0] == "\\" else "[^\\x00" + ("\\" + begun[2:] if begun[2:] else "")

    return _NEGATED.sub(written, pattern)


def _is_rounded(value: Any) -> bool:
    """Whether a constant holds a number that the matcher, which reads numbers as doubles, would change."""
    if isinstance(value, Mapping):
        return any(map(_is_rounded, value.values()))
    if isinstance(value, list):
        return any(map(_is_rounded, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, int) or value.is_integer():
        # Beyond int64 it writes the nearest one where the type is integer, and -2**63 crashes it.
        return not -(2**63) < value < 2**63 or int(float(value)) != value
    if not math.isfinite(value):
        return True
    # It reads the digits as one number, and divides that by a power of ten.
    _, digits, power = Decimal(repr(value)).as_tuple()
    read, places = float(int("".join(map(str, digits)))), -int(power)
    while places > 308:
        read, places = read / 1e308, places - 308
    return read / float(10**places) != abs(value)


def _compiles(schema: str) -> bool:
    """Whether the matcher can compile a text's schema; without it, each request that needs it is refused."""
    with contextlib.suppress(ImportError):
        from llguidance import LLMatcher

        return not LLMatcher.validate_grammar(f"start: %json {schema}")
    return True


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
}
