"""Write the rules of a grammar, in llguidance's notation, for the arguments of a call by their schema.

Where a format writes arguments as JSON, llguidance reads the schema itself. In the other formats each
argument has a rule of its own, and they come in the order of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from serving.grammars.matching import JSON_OPTIONS
from serving.tools.arguments import Types
from serving.tools.formats import Pairs, ToolFormat

_DEEPEST = 32  # values within each other and references that are followed; what is deeper is any value


def argument_rules(form: ToolFormat, name: str, schema: Any, mark: Mapping[str, int]) -> list[str]:
    """Return the rules of the arguments of one function, of which the first has this name."""
    if form.arguments == "json":
        return [f"{name}: {json_rule(schema)}"]
    if form.arguments == "pairs":
        assert form.pairs is not None, "a format of pairs says how they are written"
        return [*_PairRules(form.pairs, name, schema, mark).rules()]
    if form.arguments == "bare":
        return _BareRules(form.quote, name, schema, mark).rules
    values = {key: json_rule(_alone(value, schema)) for key, value in _properties(schema).items()}
    items = [f"{_quoted(key + '=')} {value}" for key, value in values.items()]
    return [*_in_order(name, schema, items, '", "')]


def json_rule(schema: Any) -> str:
    """Return a rule's body for JSON of this schema."""
    options = {"x-guidance": JSON_OPTIONS}
    return "%json " + json.dumps({**schema, **options} if isinstance(schema, Mapping) else options)


def literal(text: str, mark: Mapping[str, int]) -> str:
    """Return a text as a literal of the grammar, in which control tokens are written as tokens."""
    if not mark:
        return _quoted(text)
    parts = re.split(f"({'|'.join(map(re.escape, mark))})", text)
    return " ".join(f"<[{mark[part]}]>" if part in mark else _quoted(part) for part in parts if part) or '""'


def slashed(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _alone(value: Any, root: Any) -> Any:
    """Return a part of a schema with the definitions to which it may refer."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**value, **shared} if isinstance(value, Mapping) else value


def _in_order(name: str, schema: Any, items: list[str], between: str) -> Iterator[str]:
    """Yield the rules of arguments that come in the order of the schema, some of which may be left out."""
    required = set(schema.get("required", []))
    yield f"{name}: {name}_first_0"
    for at, (key, item) in enumerate(zip(_properties(schema), items)):
        yield f"{name}_item_{at}: {item}"
        for place, before in (("first", ""), ("rest", between)):
            skip = "" if key in required else f" | {name}_{place}_{at + 1}"
            yield f"{name}_{place}_{at}: {before} {name}_item_{at} {name}_rest_{at + 1}{skip}"
    yield from (f'{name}_{place}_{len(items)}: ""' for place in ("first", "rest"))


def _branches(schema: Any, root: Any, depth: int = 0) -> list[Any]:
    """Return the schemas of which a value has one: those of a union, or this one, without references."""
    if depth > _DEEPEST or not isinstance(schema, Mapping):
        return [schema]
    if isinstance(schema.get("$ref"), str) and schema.keys() <= {"$ref", "$defs", "definitions"}:
        return _branches(_resolved(root, schema["$ref"]), root, depth + 1)
    for union in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(union)
        is_union = isinstance(parts, list) and (union != "allOf" or len(parts) == 1)
        if is_union and schema.keys() <= {union, "$defs", "definitions"}:
            return [part for each in schema[union] for part in _branches(each, root, depth + 1)]
    if isinstance(schema.get("type"), list) and "enum" not in schema:
        return [{**schema, "type": each} for each in schema["type"]]
    return [schema]


def _resolved(root: Any, reference: str) -> Any:
    for name in reference.removeprefix("#").split("/")[1:]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def _values(schema: Any) -> list[Any] | None:
    """Return the values of which a schema allows one, or None."""
    if not isinstance(schema, Mapping):
        return None
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [schema["const"]] if "const" in schema else None


class _PairRules:
    """Writes the rules of tagged pairs; text in them may be anything but the closing tag."""

    def __init__(self, pairs: Pairs, name: str, schema: Any, mark: Mapping[str, int]) -> None:
        self._pairs, self._name, self._schema, self._mark = pairs, name, schema, mark
        self._numbers = count()
        self._close = pairs.margin + pairs.close
        self._extra: list[str] = []

    def rules(self) -> Iterator[str]:
        """Yield the rules."""
        properties = _properties(self._schema)
        if properties or self._schema.get("additionalProperties") is False:
            items = [self._item(key, value) for key, value in properties.items()]
            yield from _in_order(self._name, self._schema, items, "")
        else:
            key = f"{self._name.upper()}_KEY"
            value = self._value(self._schema.get("additionalProperties", {}))
            yield f"{key}: /[A-Za-z0-9_.-]{{1,64}}/"
            yield f"{self._name}: ({self._spelt(self._pairs.key)} {key} {value})*"
        yield from self._extra

    def _spelt(self, text: str) -> str:
        return literal(text, self._mark)

    def _tagged(self, before: str, value: str) -> str:
        margin, behind = self._pairs.margin, self._pairs.behind
        return f"{self._spelt(before + margin)} {value} {self._spelt(behind)}"

    def _item(self, key: str, schema: Any) -> str:
        return f"{self._spelt(self._pairs.key + key)} {self._value(schema)}"

    def _value(self, schema: Any) -> str:
        ways = [way for each in _branches(schema, self._schema) for way in self._ways(each)]
        return f"({' | '.join(dict.fromkeys(ways))})"

    def _ways(self, schema: Any) -> Iterator[str]:
        """Yield how a value of a schema that is no union may be written."""
        pairs, values = self._pairs, _values(schema)
        if values is not None:
            words = [each for each in values if isinstance(each, str)]
            values = [each for each in values if not isinstance(each, str)]
            if words:
                spelt = " | ".join(self._spelt(word + self._close) for word in words)
                yield self._tagged(pairs.value, f"({spelt})")
            if not values:
                return
            schema = {"enum": values}
        types = Types({"properties": {"value": schema}}).of("value")
        if "string" in types:
            yield self._tagged(pairs.value, self._text(schema))
        if types != {"string"} and ("string" not in types or pairs.json_value):
            value = json_rule(_alone(schema, self._schema))
            yield self._tagged(pairs.json_value or pairs.value, f"{value} {self._spelt(self._close)}")

    def _text(self, schema: Any) -> str:
        """Return the name of a rule for a text and the closing tag behind it."""
        close, number = self._close, next(self._numbers)
        rule, word = f"{self._name}_text_{number}", f"{self._name.upper()}_TEXT_{number}"
        begin = re.split("|".join(map(re.escape, self._mark)), close)[0] if self._mark else close
        if not begin:
            self._extra += [f"{rule}: {word}? {self._spelt(close)}", f"{word}: {_content(schema)}"]
        elif begin != close:  # what precedes the control token in the closing tag may be text, too
            self._extra.append(f"{rule}: {rule}_part+ {self._spelt(close.removeprefix(begin))}")
            self._extra.append(f"{rule}_part[lazy]: /(?s:.*){slashed(begin)}/")
        else:
            end, line = slashed(close), slashed(f"\n{self._pairs.key}")
            body = f"{_content(schema, end)} & ~/(?s:.*){end}(?s:.+)/"
            if self._pairs.is_by_line:  # there, the parser would find the next pair
                body += f" & ~/(?s:.*){line}(?s:.*)/"
            self._extra += [f"{rule}: {word}", f"{word}: {body}"]
        return rule


def _content(schema: Any, end: str = "") -> str:
    """Return regular expressions of a text by its schema, with `end` behind it."""
    given = schema if isinstance(schema, Mapping) else {}
    most = given.get("maxLength", "")
    found = [f"/(?s:.{{{given.get('minLength', 0)},{most}}}){end}/"]
    if isinstance(given.get("pattern"), str):
        pattern = re.sub(r"(?<!\\)/", r"\\/", given["pattern"]).replace("\n", "\\n")
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        rest = "" if re.search(r"(?<!\\)\$$", pattern) else "(?s:.*)"
        pattern = pattern.removeprefix("^")
        found.append(f"/{begin}({pattern if rest else pattern[:-1]}){rest}{end}/")
    return " & ".join(found)


class _BareRules:
    """Writes the rules of Gemma's notation."""

    def __init__(self, quote: str, name: str, schema: Any, mark: Mapping[str, int]) -> None:
        self._quote, self._root, self._mark, self._name = quote, schema, mark, name
        self._numbers = count()
        self._named: dict[str, str] = {}  # the rule of each reference
        self.rules: list[str] = []
        whole = self._object(schema)
        self.rules = [f"{name}: {whole}", *self.rules]

    def _rule(self, body: str) -> str:
        name = f"{self._name}_{next(self._numbers)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any) -> str:
        """Return an expression of the values of a schema."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(reference, str):
            if reference not in self._named:
                name = self._named[reference] = f"{self._name}_named_{len(self._named)}"
                self.rules.append(f"{name}: {self._value(_resolved(self._root, reference))}")
            return self._named[reference]
        branches = _branches(schema, self._root)
        if len(branches) > 1:
            return f"({' | '.join(dict.fromkeys(map(self._value, branches)))})"
        schema = branches[0] if isinstance(branches[0], Mapping) else {}
        values = _values(schema)
        if values is not None:
            return f"({' | '.join(map(self._constant, values))})"
        ways = {"string": self._text, "array": self._array, "object": self._object}
        types = sorted(Types({"properties": {"value": schema}}).of("value"))
        if len(types) > 3:  # any value
            return self._any()
        made = [ways[name](schema) if name in ways else json_rule({**schema, "type": name}) for name in types]
        return f"({' | '.join(made)})" if len(made) > 1 else made[0]

    def _constant(self, value: Any) -> str:
        return literal(_bare(value, self._quote), self._mark)

    def _text(self, schema: Any) -> str:
        quote, name = literal(self._quote, self._mark), f"{self._name.upper()}_T{next(self._numbers)}"
        if self._quote in self._mark:
            self.rules.append(f"{name}: {_content(schema)}")
            return f"{quote} {name}? {quote}"
        end = slashed(self._quote)
        self.rules.append(f"{name}: {_content(schema, end)} & ~/(?s:.*){end}(?s:.+)/")
        return f"{quote} {name}"

    def _array(self, schema: Any) -> str:
        item = self._rule(self._value(schema.get("items", True)))
        least, most = schema.get("minItems", 0), schema.get("maxItems", "")
        if most == 0:
            return '"[]"'
        rest = f'("," {item}){{{max(least - 1, 0)},{most - 1 if most != "" else ""}}}'
        return f'"[" {item} {rest} "]"' if least else f'"[" ({item} {rest})? "]"'

    def _object(self, schema: Any) -> str:
        properties = _properties(schema)
        if not properties and schema.get("additionalProperties") is not False:
            return self._mapping(self._value(schema.get("additionalProperties", True)))
        items = [f"{literal(key + ':', {})} {self._value(each)}" for key, each in properties.items()]
        name = f"{self._name}_{next(self._numbers)}"
        self.rules += _in_order(name, schema, items, '","')
        return f'"{{" {name} "}}"'

    def _mapping(self, value: str) -> str:
        key = f"{self._name.upper()}_K{next(self._numbers)}"
        self.rules.append(f"{key}: /[A-Za-z0-9_.-]{{1,64}}/")
        pair = self._rule(f'{key} ":" {value}')
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _any(self) -> str:
        """Return the name of the rule of any value."""
        name = f"{self._name}_any"
        if name not in self._named:
            self._named[name] = name
            plain = json_rule({"type": ["number", "boolean", "null"]})
            parts = [plain, self._text({}), f'"[" ({name} ("," {name})*)? "]"', self._mapping(name)]
            self.rules.append(f"{name}: {' | '.join(parts)}")
        return name


def _bare(value: Any, quote: str) -> str:
    """Return a value in Gemma's notation."""
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(_bare(each, quote) for each in value)}]"
        case Mapping():
            return f"{{{','.join(f'{key}:{_bare(each, quote)}' for key, each in value.items())}}}"
    return json.dumps(value)
