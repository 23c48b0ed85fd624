"""Find what the references in a JSON schema lead to, and whether branches can be told apart.

A reference is a URI: a JSON pointer or an anchor, in the part of the schema around it that has an `$id`, or
in the part whose `$id` it names. Nothing is ever fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

Path = tuple[str | int, ...]  # the keys and indices that lead from a schema to a place in it

MOST_TOKENS = 128  # longest path that a reference may take; levels of schemas come with two or three
_DATA = frozenset({"enum", "const", "default", "examples", "example"})  # which hold values, not schemas
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_PLACED = frozenset(
    {
        *("prefixItems", "anyOf", "oneOf", "allOf", "items", "additionalItems", "additionalProperties"),
        *("not", "if", "then", "else", "contains", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)


class Part(NamedTuple):
    """An object in a schema."""

    place: Path
    base: Path  # place of the innermost part with an `$id` around it, or of itself
    uri: str  # the `$id` of that part
    node: Mapping[str, Any]


class References:
    """Finds what the references in one schema lead to."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._anchors: dict[tuple[Path, str], Path] | None = None  # keys: the anchor's part, its name
        self._of_uri: dict[str, Path] = {}  # places of parts by their absolute `$id`
        self._uris: dict[Path, str] = {(): ""}  # the absolute `$id` of each part that has one
        self._targets: dict[tuple[str, Path], Path | None] = {}

    def target(self, reference: str, place: Path) -> Path | None:
        """Return the place that a reference in the schema at `place` leads to; None where there is none."""
        anchors, base = self._found(), self._base(place)
        asked = reference, base
        if asked not in self._targets:
            self._targets[asked] = self._target(reference, base, anchors)
        return self._targets[asked]

    def resolved(self, schema: object, place: Path) -> tuple[object, Path]:
        """Return a schema at `place`, or what its reference leads to, and where that is.

        Where a schema takes null besides what its reference leads to, the result is true: any value may come.
        """
        seen = set[Path]()
        while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            target = self.target(schema["$ref"], place)
            if target is None or target in seen:
                break
            if schema.get("nullable") is True:
                return True, place
            seen.add(target)
            schema, place = self.at(target), target
        return schema, place

    def at(self, place: Path) -> Any:
        """Return what stands at a place."""
        node: Any = self._root
        for key in place:
            node = node[key]
        return node

    def _target(self, reference: str, base: Path, anchors: Mapping[tuple[Path, str], Path]) -> Path | None:
        fragment = reference.removeprefix("#")
        if not reference.startswith("#"):
            try:
                uri, fragment = urldefrag(urljoin(self._uris[base], reference))
            except ValueError:  # it is no URI
                return None
            if uri not in self._of_uri:
                return None
            base = self._of_uri[uri]
        pointer = unquote(fragment)
        if pointer and not pointer.startswith("/"):
            return anchors.get((base, pointer))
        tokens = pointer.split("/")[1:]
        if len(tokens) > MOST_TOKENS:
            return None
        path, node = list[str | int](), self.at(base)
        for token in tokens:
            key: str | int = token.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < len(node)):
                    return None
                key = int(token)
            elif not isinstance(node, Mapping) or key not in node:
                return None
            path.append(key)
            node = node[key]
        return (*base, *path) if isinstance(node, (Mapping, bool)) else None

    def _base(self, place: Path) -> Path:
        """Return the innermost part with an `$id` around a place; references in it start there."""
        if len(self._uris) > 1:
            for length in range(min(len(place), MOST_TOKENS), 0, -1):
                if place[:length] in self._uris:
                    return place[:length]
        return ()

    def _found(self) -> Mapping[tuple[Path, str], Path]:
        """Return the anchors; on the first call, find them and the ids of parts.

        Those in a place where JSON Schema has schemas come before those that stand elsewhere.
        """
        if self._anchors is None:
            self._anchors = {}
            for part in _parts(self._root):
                if part.place == part.base:
                    self._uris[part.place] = part.uri
                    self._of_uri.setdefault(part.uri, part.place)
                for name in ("$anchor", "$dynamicAnchor", "$id"):
                    anchor = part.node.get(name)
                    if isinstance(anchor, str) and (name != "$id" or anchor.startswith("#")):
                        self._anchors.setdefault((part.base, anchor.removeprefix("#")), part.place)
        return self._anchors


def written(place: Path) -> str:
    """Return a place as a client reads it: properties.a.anyOf[0]."""
    keys = (f"[{key}]" if isinstance(key, int) else f".{key}" if key else '.""' for key in place)
    return "".join(keys).removeprefix(".")


def are_apart(branches: Sequence[tuple[object, Path]], references: References, levels: int = 2) -> bool:
    """Return whether it shows that no value satisfies two of these schemas, each with its place.

    It shows by their types, by their constants, or by what tells a property apart that all of them require;
    `levels` are those of properties that are looked at.
    """
    of_type: dict[str, list[tuple[Mapping[str, Any], Path]]] = {}
    found = [references.resolved(*each) for each in branches]
    if len(found) == 1:
        return True
    if len({place for _, place in found}) < len(found):
        return False
    for each, place in found:
        if each is False:
            continue  # no value satisfies it
        if not isinstance(each, Mapping) or each.get("nullable") is True:
            return False
        for kind in _types_of(each):
            of_type.setdefault(kind, []).append((each, place))
    for kind, same in of_type.items():
        if len(same) == 1 or _differ([_constants(each) for each, _ in same]):
            continue
        if kind != "object" or not levels or not _property_differs(same, references, levels):
            return False
    return True


def _property_differs(
    branches: Sequence[tuple[Mapping[str, Any], Path]], references: References, levels: int
) -> bool:
    """Return whether a property that all branches require tells them apart."""
    required = [_required(each) for each, _ in branches]
    for name in set[str].intersection(*map(set, required)):
        places = [(*place, "properties", name) for _, place in branches]
        schemas = [each[name] for each in required]
        if are_apart(list(zip(schemas, places)), references, levels - 1):
            return True
    return False


def _parts(root: object) -> Iterator[Part]:
    """Yield the objects in a schema, level by level, those at places of schemas first."""
    waiting: deque[tuple[Path, Path, str, object, Literal["schema", "named", "other"]]] = deque()
    waiting.append(((), (), "", root, "schema"))
    others = list[Part]()
    while waiting:
        place, base, uri, node, kind = waiting.popleft()
        if isinstance(node, Mapping):
            if kind != "named" and (own := _id_of(node, uri)) is not None:
                base, uri = place, own
            if kind == "schema":
                yield Part(place, base, uri, node)
            elif kind == "other":
                others.append(Part(place, base, uri, node))
        children = _children(node, kind) if len(place) < MOST_TOKENS else ()
        waiting += [((*place, key), base, uri, each, child) for key, each, child in children]
    yield from others


def _children(
    node: object, kind: Literal["schema", "named", "other"]
) -> Iterator[tuple[str | int, object, Literal["schema", "named", "other"]]]:
    """Yield the objects and lists directly in a node, each with its key and what may stand there."""
    if isinstance(node, Mapping):
        for key, each in node.items():
            if not isinstance(each, (Mapping, list)) or (kind == "schema" and key in _DATA):
                continue
            if kind == "named":
                yield key, each, "schema"
            elif kind == "schema" and key in _NAMED:
                yield key, each, "named"
            else:
                yield key, each, "schema" if kind == "schema" and key in _PLACED else "other"
    elif isinstance(node, list):
        yield from (
            (index, each, kind) for index, each in enumerate(node) if isinstance(each, (Mapping, list))
        )


def _id_of(node: Mapping[str, Any], base: str) -> str | None:
    """Return the absolute `$id` of a part; drafts before 2019 wrote an anchor as one that begins with #."""
    own = node.get("$id")
    if not isinstance(own, str) or own.startswith("#"):
        return None
    try:
        return urldefrag(urljoin(base, own))[0]
    except ValueError:  # it is no URI
        return None


def _required(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the properties that a schema requires."""
    names, properties = schema.get("required"), schema.get("properties")
    if not isinstance(names, list) or not isinstance(properties, Mapping):
        return {}
    wanted = {name for name in names if isinstance(name, str)}
    return {name: each for name, each in properties.items() if name in wanted}


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of a schema's values, in which an integer is a number."""
    if (values := _constants(schema)) is not None:
        kinds = {str: "string", type(None): "null", bool: "boolean"}
        return {kinds.get(type(each), "number") for _, each in values}
    given = schema.get("type", ("null", "boolean", "number", "string", "array", "object"))
    names = given if isinstance(given, (list, tuple)) else [given]
    return {"number" if each == "integer" else each for each in names if isinstance(each, str)}


def _constants(schema: Mapping[str, Any]) -> set[tuple[bool, Any]] | None:
    """Return the only values of a schema; None where others may be allowed, or they are no plain values."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    plain = (str, int, float, bool, type(None))
    if not isinstance(values, list) or not all(isinstance(each, plain) for each in values):
        return None
    return {(isinstance(each, bool), each) for each in values}  # Python takes true for 1


def _differ(sets: Sequence[set[tuple[bool, Any]] | None]) -> bool:
    """Return whether all sets are known, and no value stands in two of them."""
    known = [each for each in sets if each is not None]
    return len(known) == len(sets) and len(set().union(*known)) == sum(map(len, known))
