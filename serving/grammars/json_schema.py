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

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from borders.field_table import MOST_SCHEMA_BYTES
from borders.numbers import POSITIVE, integers, numbers
from borders.refusal import BadRequest, abbreviate_json

MOST_LEVELS = 32  # levels of nested schemas
MOST_PROPERTIES = 500  # properties of all objects together; a step's cost grows with them
MOST_VALUES = 1000  # values of all enums together
MOST_BRANCHES = 200  # branches of all anyOf, oneOf and allOf together
LARGEST_STEP = 1000  # largest multipleOf without its decimal point; the matcher has as many states
_BOUNDS = numbers(-(2**53), 2**53)  # JavaScript's largest integers, which its schemas name as bounds
LONGEST_NOTE = 100  # characters of a note
MOST_REPEATS = 100_000  # largest minLength, maxLength, minItems, ...
_MOST_KEPT = 256  # prepared schemas that are kept; an agent sends the same ones with each turn

_NOTES = frozenset(
    {
        *("$schema", "$id", "$comment", "title", "description", "default", "examples", "example"),
        *("deprecated", "readOnly", "writeOnly", "discriminator", "$anchor", "$vocabulary", "externalDocs"),
        *("contentEncoding", "contentMediaType", "contentSchema", "propertyOrdering", "xml", "nullable"),
        *("$defs", "definitions", "$dynamicAnchor"),  # which hold only what references lead to
    }
)
_DATA = frozenset({"enum", "const", "default", "examples", "example"})  # which hold values, not schemas
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
_PLAIN = frozenset({"type", "format", "pattern", "required"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_NAMED = frozenset({"properties", "patternProperties"})
_LISTS = frozenset({"prefixItems", "anyOf", "oneOf", "allOf"})
_ONE = frozenset({"items", "additionalProperties"})
Path = tuple[str | int, ...]  # the keys and indices that lead from a schema to a place in it
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A schema as the matcher takes it, and the constraints in it that are not enforced, by their places.

    Neither is ever changed, since other requests share them.
    """

    schema: Mapping[str, Any]
    notes: tuple[str, ...]


def prepared(schema: object, field: str, *, strict: bool = False) -> Prepared:
    """Return a schema for the matcher; `field` is the request's field, which a refusal names.

    Raises BadRequest where it cannot be enforced, as far as that shows without compiling it.
    """
    if not isinstance(schema, Mapping) and schema is not True:
        problem = f"is {abbreviate_json(schema)}; it must be a JSON schema, as an object"
        raise BadRequest(field, problem, subject=f"the JSON schema in {field}")
    text, size = _as_json(schema, field)
    if size > MOST_SCHEMA_BYTES:
        problem = f"is a schema of {size} bytes as compact JSON; it may have {MOST_SCHEMA_BYTES}"
        raise BadRequest(field, problem, value=size, limit=MOST_SCHEMA_BYTES, fix="make it smaller")
    try:
        return _prepared(text, field, strict)
    except RecursionError as error:  # in values, which have no limit of levels
        raise BadRequest(field, "is nested too deeply to be read") from error


@lru_cache(maxsize=_MOST_KEPT)
def _prepared(text: str, field: str, strict: bool) -> Prepared:
    return _Preparation(json.loads(text), field, strict=strict).whole()


class _Preparation:
    """Prepares one schema, which is an object or true."""

    def __init__(self, schema: Any, field: str, *, strict: bool) -> None:
        self._root, self._field, self._strict = schema, field, strict
        self._references = _References(schema)
        self._num_properties = self._num_values = self._num_branches = 0
        self._made: dict[Path, dict[str, Any] | bool] = {}  # each schema that is prepared, by its place
        self._names: dict[Path, str] = {}  # the name in `$defs` of each place that a reference leads to
        self._waiting: list[Path] = []  # those of them that `$defs` does not have yet
        self._taken = set[str]()  # the names
        self._notes: dict[Path, str] = {}

    def whole(self) -> Prepared:
        """Return the schema for the matcher."""
        made = self._schema(self._root, (), 1)
        whole = {} if made is True else made
        assert isinstance(whole, dict), "an object stays one, and true becomes one"
        defs: dict[str, Any] = {}
        while self._waiting:  # what a reference leads to may hold further references
            place = self._waiting.pop()
            if place not in self._made:
                self._schema(self._references.at(place), place, 1)
            defs[self._names[place]] = self._made[place]
        self._check_circles(defs)
        if defs:
            whole = {**whole, "$defs": defs}
            if (size := _as_json(whole, self._field)[1]) > (most := 2 * MOST_SCHEMA_BYTES):
                problem = f"comes to {size} bytes with what its references lead to; it may have {most}"
                raise self._bad((), problem, "refer to smaller parts, in $defs")
        # A keyword that nobody knows may be where a schema keeps what it refers to.
        kept = {place[:index] for place in self._names for index in range(len(place))}
        return Prepared(whole, tuple(note for place, note in self._notes.items() if place not in kept))

    def _schema(self, schema: object, place: Path, level: int) -> dict[str, Any] | bool:
        if isinstance(schema, bool):
            self._made[place] = schema
            return schema
        if not isinstance(schema, Mapping):
            raise self._bad(
                place, f"is {abbreviate_json(schema)}; it must be a schema: an object, true or false"
            )
        if level > MOST_LEVELS:
            raise self._bad(place, f"is nested more than {MOST_LEVELS} levels deep", "use $defs and $ref")
        made: dict[str, Any] = {}
        for keyword, value in schema.items():
            at = (*place, keyword)
            if keyword in _NAMED:
                made[keyword] = self._mapping(value, at, level)
                self._num_properties = self._counted(
                    at, "properties", self._num_properties + len(value), MOST_PROPERTIES
                )
            elif keyword in _LISTS:
                made[keyword] = self._list(value, at, level)
                if keyword != "prefixItems":
                    self._num_branches = self._counted(
                        at, "branches", self._num_branches + len(value), MOST_BRANCHES
                    )
            elif keyword == "items" and isinstance(value, list):  # as drafts before 2020 have it
                made["prefixItems"] = self._list(value, at, level)
                if "additionalItems" in schema:
                    rest = (*place, "additionalItems")
                    made["items"] = self._schema(schema["additionalItems"], rest, level + 1)
            elif keyword in _ONE:
                made[keyword] = self._schema(value, at, level + 1)
            elif keyword == "$ref":
                made[keyword] = f"#/$defs/{self._name_of(value, at)}"
            elif self._is_enforced(keyword, value, at):
                self._value(keyword, value, at)
                made[keyword] = value
        if _may_repeat_names(schema):
            problem = "is above 1 beside properties of any name, which could then come twice"
            fix = "set additionalProperties to false, or list required properties"
            raise self._bad((*place, "minProperties"), problem, fix)
        if "oneOf" in made and "anyOf" not in made:
            self._split(made, schema["oneOf"], place)
        if schema.get("nullable") is True:  # OpenAPI 3.0's word for a type beside others
            made = {"anyOf": [made, {"type": "null"}]}
        self._made[place] = made
        return made

    def _split(self, made: dict[str, Any], branches: Sequence[object], place: Path) -> None:
        """Write `oneOf` as `anyOf`, which is the same where no value can satisfy two branches.

        Where that does not show, the matcher judges a strict schema, and another one has a note.
        """
        if not _are_apart([self._references.resolved(each, place) for each in branches]):
            if self._strict:
                return
            self._note((*place, "oneOf"))
        made["anyOf"] = made.pop("oneOf")

    def _name_of(self, reference: object, place: Path) -> str:
        """Return the name in `$defs` of what a reference leads to."""
        target = self._references.target(reference, place[:-1]) if isinstance(reference, str) else None
        if target is None:
            problem = f"is {abbreviate_json(reference)}, which leads to no place in the schema"
            raise self._bad(place, problem, 'refer to a part of it, as "#/$defs/name"')
        if target not in self._names:
            name = str(target[-1]) if target else "root"
            is_plain = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
            if not is_plain or name in self._taken:
                name = f"part.{len(self._names)}"  # no plain name has a dot
            self._names[target] = name
            self._taken.add(name)
            self._waiting.append(target)
        return self._names[target]

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
        if keyword in known:
            return True
        if keyword in _HARD and self._strict:
            problem = f"uses the keyword {abbreviate_json(keyword)}, which cannot be enforced"
            raise self._bad(place[:-1], problem, "leave it out, or strict")
        is_any_name = keyword == "propertyNames" and (value is True or value in ({}, {"type": "string"}))
        is_off = value is False and keyword in ("uniqueItems", "not")  # elsewhere false allows no value
        is_read = keyword == "additionalItems"  # beside a list of items; it means nothing elsewhere
        if not (keyword in _NOTES or keyword.startswith("x-") or is_off or is_any_name or is_read):
            self._note(place)
        return False

    def _note(self, place: Path, value: str = "") -> None:
        shown = _written(place) + (f" {value}" if value else "")
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
        subject = f"the JSON schema in {self._field}" + (f", at {_written(place)}," if place else "")
        return BadRequest(self._field, problem, fix=fix, subject=subject)


class _References:
    """Finds what the references in one schema lead to."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._anchors: dict[tuple[Path, str], Path] | None = None  # by the part that an anchor belongs to
        self._ids: dict[str, Path] = {}

    def target(self, reference: str, place: Path) -> Path | None:
        """Return the place that a reference in the schema at `place` leads to; None where there is none."""
        part, _, fragment = reference.partition("#")
        anchors = self._found()
        base = self._ids.get(part) if part else self._base(place)
        if base is None:
            return None
        pointer = unquote(fragment)
        if pointer and not pointer.startswith("/"):
            return anchors.get((base, pointer))
        path, node = base, self.at(base)
        for token in pointer.split("/")[1:]:
            key: str | int = token.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and token.isascii() and token.isdigit() and int(token) < len(node):
                key = int(token)
            elif not isinstance(node, Mapping) or key not in node:
                return None
            path, node = (*path, key), node[key]
        return path if isinstance(node, (Mapping, bool)) else None

    def resolved(self, schema: object, place: Path) -> object:
        """Return a schema at `place`, or what it leads to where it is nothing but a reference."""
        for _ in range(MOST_LEVELS):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            target = self.target(reference, place) if isinstance(reference, str) else None
            if target is None:
                break
            schema, place = self.at(target), target
        return schema

    def at(self, place: Path) -> Any:
        """Return what stands at a place."""
        node: Any = self._root
        for key in place:
            node = node[key]
        return node

    def _base(self, place: Path) -> Path:
        """Return the innermost part with an `$id` around a place; references in it start there."""
        base, node = Path(), self._root
        for index, key in enumerate(place, 1):
            node = node[key]  # type: ignore[index]  # `place` leads somewhere
            if _id_of(node):
                base = place[:index]
        return base

    def _found(self) -> Mapping[tuple[Path, str], Path]:
        """Return the anchors; on the first call, find them and the ids of parts."""
        if self._anchors is None:
            self._anchors = {}
            for place, base, node in _parts(self._root):
                if own := _id_of(node):
                    self._ids.setdefault(own, place)
                for name in ("$anchor", "$dynamicAnchor", "$id"):
                    anchor = node.get(name)
                    if isinstance(anchor, str) and (name != "$id" or anchor.startswith("#")):
                        self._anchors.setdefault((base, anchor.removeprefix("#")), place)
        return self._anchors


def _id_of(node: object) -> str:
    """Return the `$id` of a part; drafts before 2019 wrote an anchor as one that begins with #."""
    own = node.get("$id") if isinstance(node, Mapping) else None
    return own.removesuffix("#") if isinstance(own, str) and not own.startswith("#") else ""


def _parts(root: object) -> Iterator[tuple[Path, Path, Mapping[str, Any]]]:
    """Yield the objects in a schema, each with its place and that of the part with an `$id` around it."""
    waiting: list[tuple[Path, Path, object]] = [((), (), root)]
    while waiting:
        place, base, node = waiting.pop()
        if isinstance(node, Mapping):
            base = place if _id_of(node) else base
            yield place, base, node
            waiting += [((*place, key), base, each) for key, each in node.items() if key not in _DATA]
        elif isinstance(node, list):
            waiting += [((*place, index), base, each) for index, each in enumerate(node)]


def _same_value(schema: object) -> Iterator[str]:
    """Yield the names of references that judge the very value which a schema judges."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield schema["$ref"].removeprefix("#/$defs/")
        for keyword in ("anyOf", "oneOf", "allOf"):
            for each in schema.get(keyword, ()):
                yield from _same_value(each)


def _are_apart(branches: Sequence[object]) -> bool:
    """Return whether it shows that no value satisfies two of these schemas.

    It shows by their types, by their constants, or by those of a property that all of them require.
    """
    of_type: dict[str, list[Mapping[str, Any]]] = {}
    for each in branches:
        if not isinstance(each, Mapping) or each.get("nullable") is True:
            return False
        for kind in _types_of(each):
            of_type.setdefault(kind, []).append(each)
    for kind, same in of_type.items():
        required = [_required_properties(each) if kind == "object" else {} for each in same]
        names = set[str].intersection(*map(set, required))
        known = ([_constants(each[name]) for each in required] for name in names)
        if len(same) > 1 and not any(map(_differ, ([_constants(each) for each in same], *known))):
            return False
    return True


def _required_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    names, properties = schema.get("required"), schema.get("properties")
    if not isinstance(names, list) or not isinstance(properties, Mapping):
        return {}
    return {name: properties[name] for name in properties if name in names}


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of a schema's values, in which an integer is a number."""
    given = schema.get("type", _TYPES)
    named = given if isinstance(given, (list, tuple)) else [given]
    return {"number" if each == "integer" else str(each) for each in named}


def _constants(schema: object) -> list[str] | None:
    """Return the only values of a schema, as JSON; None where others may be allowed, too."""
    if not isinstance(schema, Mapping) or not schema.keys() & {"const", "enum"} or "nullable" in schema:
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list) or not all(isinstance(each, (str, int, float, bool)) for each in values):
        return None
    return [json.dumps(float(each) if type(each) is int else each) for each in values]


def _differ(lists: Sequence[Sequence[str] | None]) -> bool:
    """Return whether all lists are known, and no value stands in two of them."""
    sets = [set(each) for each in lists if each is not None]
    return len(sets) == len(lists) and len(set().union(*sets)) == sum(map(len, sets))


def _written(place: Path) -> str:
    """Return a place as a client reads it: properties.a.anyOf[0]."""
    keys = (f"[{key}]" if isinstance(key, int) else f".{key}" if key else '.""' for key in place)
    return "".join(keys).removeprefix(".")


def _as_json(schema: object, field: str) -> tuple[str, int]:
    """Return a schema as compact JSON, and its number of bytes."""
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text, len(text.encode())
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
}
