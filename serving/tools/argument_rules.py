"""Write the rules of a grammar, in llguidance's notation, for the arguments of a call by their schema.

Where a format writes arguments as JSON, llguidance reads the schema itself. In the other formats each
argument has a rule of its own, and they come in the order of the schema.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from serving.grammars.matching import json_rule, quoted, why_not
from serving.tools.alternatives import (
    TYPES,
    Alternative,
    Alternatives,
    Unheld,
    properties_of,
)
from serving.tools.arguments import LONGEST_KEY, as_json
from serving.tools.formats import Pairs, ToolFormat
from serving.tools.patterns import whole_text

# Parts that have rules of their own in Gemma's notation, and rules behind which further ones are any value:
# each rule may lie inside the last, and the matcher's stack is finite
_MOST_NAMED, _MOST_RULES = 500, 3000
# Characters of parts that the matcher is asked of alone: so many, or so many times those of the schema
_LEAST_LOOKED, _TIMES_LOOKED = 2**16, 8
_REFERENCE = re.compile(r'"\$ref": ("(?:[^"\\]|\\.)*")')
_MOST_ALTERNATIVES = 2000  # alternatives of all parts of one schema
_ANY: Alternative = {"type": [*TYPES]}
_OF_TEXT = frozenset({"minLength", "maxLength", "pattern", "allOf"})
_WORDS = {"boolean": ("true", "false"), "null": ("null",)}
# Texts that are read as a value of another type where the schema has that type as well
_READ_AS = {"boolean": "true|false|True|False", "null": "null|None"}
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
_BEGINS = {"array": r"\[", "object": r"\{"}


def argument_rules(
    form: ToolFormat, name: str, schema: Any, mark: Mapping[str, int]
) -> tuple[list[str], list[str]]:
    """Return the rules of the arguments of one function, of which the first has this name.

    Beside them are the constraints of the schema that they do not hold, each by its place.
    """
    if form.arguments == "json":
        return [f"{name}: {json_rule(schema)}"], []
    writer: _Writer
    if form.arguments == "pairs":
        assert form.pairs is not None, "a format of pairs says how they are written"
        writer = _PairRules(form.pairs, name, schema, mark)
    elif form.arguments == "bare":
        writer = _BareRules(form.quote, name, schema, mark)
    else:
        writer = _KeywordRules(name, schema, mark)
    return writer.written(), [*writer.unheld]


def literal(text: str, mark: Mapping[str, int]) -> str:
    """Return a text as a literal of the grammar, in which control tokens are written as tokens."""
    if not mark:
        return quoted(text)
    parts = re.split(f"({'|'.join(map(re.escape, mark))})", text)
    return " ".join(f"<[{mark[part]}]>" if part in mark else quoted(part) for part in parts if part) or '""'


def slashed(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


class _Writer:
    """Writes the rules of one function's arguments in a notation that is not JSON."""

    between = ""  # what stands between two arguments
    key_rule = "/[A-Za-z0-9_.-]{1,64}/"

    def __init__(self, name: str, schema: Any, mark: Mapping[str, int]) -> None:
        self._name, self._root, self._mark = name, schema, mark
        self._alternatives = Alternatives(schema)
        self._num_alternatives = 0
        self._numbers = count()
        self._rules: list[str] = []
        # Parts repeat what they refer to, so looking at each of them could cost the schema's square
        self._num_to_look = max(_LEAST_LOOKED, _TIMES_LOOKED * len(json.dumps(schema)))
        self.unheld: dict[str, None] = {}  # the constraints that are not held

    def written(self) -> list[str]:
        """Return the rules."""
        objects = [self._object(each, "") for each in self._objects()]
        return [f"{self._name}: {' | '.join(dict.fromkeys(objects))}", *self._rules]

    def _item(self, key: str, schema: Any, place: str) -> str:
        """Return an expression of an argument with this key."""
        raise NotImplementedError

    def _open_item(self, key: str, schema: Any, place: str) -> str:
        """Return an expression of an argument whose key has the rule `key`."""
        raise NotImplementedError

    def _can_write(self, key: str) -> bool:
        """Whether the parser can read this key."""
        raise NotImplementedError

    def _objects(self) -> list[Alternative]:
        found = [each for each in self._of(self._root, "") if "object" in each["type"]]
        if any("enum" in each for each in found):
            self._note("", "enum")
        found = [each for each in found if _is_possible(each)] or found
        return [{**each, "type": ["object"]} for each in found]

    def _note(self, place: str, what: object) -> None:
        self.unheld[f"{place}: {what}".removeprefix(": ")] = None

    def _of(self, schema: Any, place: str) -> list[Alternative]:
        """Return the alternatives of a schema; any value where they cannot be told."""
        try:
            found = self._alternatives.of(schema)
        except Unheld as unheld:
            self._note(place, unheld)
            return [_ANY]
        self._num_alternatives += len(found)
        if not found or self._num_alternatives > _MOST_ALTERNATIVES:
            self._note(place, "alternatives beyond the schema's limit" if found else "no value")
            return [_ANY]
        return found

    def _object(self, schema: Alternative, place: str) -> str:
        """Return the name of the rule of the arguments, or of the keys, that an object has."""
        name = f"{self._name}_{next(self._numbers)}"
        if "patternProperties" in schema:
            self._note(place, "patternProperties")
        try:
            properties = properties_of(schema)
        except Unheld as unheld:
            self._note(place, unheld)
            properties = {
                key: each for key, each in schema.get("properties", {}).items() if each is not False
            }
        others = schema.get("additionalProperties", True)
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", "")
        if not properties and others is not False:
            self._rules.append(f"{name}: {self._mapping(others, place, least, most)}")
            return name
        required = {*schema.get("required", ())}
        if least > len(required) or (most != "" and most < len(properties)):
            self._note(place, "the number of properties")
        for key in [key for key in properties if not self._can_write(key)]:
            self._note(place, f"the name {json.dumps(key)}")
            del properties[key]
        items = {
            key: self._item(key, each, f"{place}.{key}".removeprefix(".")) for key, each in properties.items()
        }
        self._rules += _in_order(name, items, required, self.between)
        return name

    def _mapping(self, schema: Any, place: str, least: int, most: int | str) -> str:
        """Return an expression of arguments, or keys, of any name, each with a value of this schema."""
        if isinstance(most, int) and least > most:
            self._note(place, "the number of properties")
            least = 0
        if most == 0:
            return '""'
        key = f"{self._name.upper()}_K{next(self._numbers)}"
        pair = self._named_rule(self._open_item(key, schema, place))
        self._rules.append(f"{key}: {self.key_rule}")
        rest = _repeated(f"{quoted(self.between)} {pair}", least - 1, most)
        return f"{pair} {rest}" if least else f"({pair} {rest})?"

    def _named_rule(self, body: str) -> str:
        name = f"{self._name}_{next(self._numbers)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _json(self, schema: Any, place: str) -> str:
        """Return a rule's body for JSON of a part of the schema; of its type where the matcher refuses it."""
        rule = json_rule({**schema, **self._definitions(schema)} if isinstance(schema, Mapping) else schema)
        if not self._refuses(rule):
            return rule
        self._note(place, "a schema that cannot be followed")
        return json_rule({"type": schema["type"]} if "type" in schema else True)

    def _definitions(self, part: Any) -> dict[str, dict[str, Any]]:
        """Return those of the schema's definitions that a part of it leads to."""
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        found: dict[str, dict[str, Any]] = {}
        waiting = [part]
        while waiting:
            for written in _REFERENCE.findall(json.dumps(waiting.pop())):
                _, key, name = (*json.loads(written).split("/", 2), "", "")[:3]
                if name not in shared.get(key, {}):
                    return shared  # it leads somewhere within one
                if name not in found.setdefault(key, {}):
                    found[key][name] = shared[key][name]
                    waiting.append(shared[key][name])
        return found

    def _refuses(self, rule: str) -> bool:
        """Whether the matcher refuses a part's rule, as far as it is still asked."""
        self._num_to_look -= len(rule)
        return self._num_to_look >= 0 and bool(why_not(rule))

    def _held_text(self, schema: Alternative, place: str) -> Alternative:
        """Return a text's schema; that of any text where no text follows it, or the matcher refuses it."""
        limits = {key: schema[key] for key in _OF_TEXT & schema.keys()}
        if not limits or not self._refuses(json_rule({**limits, "type": "string"})):
            return schema
        self._note(place, "a schema that cannot be followed")
        return {"type": ["string"]}

    def _content(self, schema: Alternative, place: str, end: str = "") -> str:
        """Return regular expressions of a text, with `end` behind it."""
        found = [f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}){end}/"]
        for each in (schema, *schema.get("allOf", ())):
            if isinstance(pattern := each.get("pattern"), str):
                try:
                    found.append(f"/{whole_text(pattern)}{end}/")
                except Unheld as unheld:
                    self._note(place, unheld)
        return " & ".join(found)


def _is_possible(schema: Alternative) -> bool:
    try:
        properties_of(schema)
    except Unheld:
        return False
    return True


def _repeated(further: str, least: int, most: int | str) -> str:
    """Return how all but the first of at most `most` things are written; the matcher takes no {0,0}."""
    return "" if most == 1 else f"({further}){{{max(least, 0)},{most - 1 if isinstance(most, int) else ''}}}"


def _in_order(name: str, items: Mapping[str, str], required: set[str], between: str) -> Iterator[str]:
    """Yield the rules of arguments that come in the order of the schema, some of which may be left out."""
    yield f"{name}: {name}_first_0"
    for at, (key, item) in enumerate(items.items()):
        yield f"{name}_item_{at}: {item}"
        for place, before in (("first", ""), ("rest", quoted(between) if between else "")):
            skip = "" if key in required else f" | {name}_{place}_{at + 1}"
            yield f"{name}_{place}_{at}: {before} {name}_item_{at} {name}_rest_{at + 1}{skip}"
    yield from (f'{name}_{place}_{len(items)}: ""' for place in ("first", "rest"))


class _KeywordRules(_Writer):
    """Writes the rules of Python's keywords, whose values are JSON."""

    between = ", "
    key_rule = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ & ~/({'|'.join(keyword.kwlist)})/"

    def _item(self, key: str, schema: Any, place: str) -> str:
        return f"{quoted(key + '=')} {self._json(schema, place)}"

    def _open_item(self, key: str, schema: Any, place: str) -> str:
        return f'{key} "=" {self._json(schema, place)}'

    def _can_write(self, key: str) -> bool:
        return key.isascii() and key.isidentifier() and not keyword.iskeyword(key)


class _PairRules(_Writer):
    """Writes the rules of tagged pairs; text in them may be anything but the closing tag."""

    def __init__(self, pairs: Pairs, name: str, schema: Any, mark: Mapping[str, int]) -> None:
        super().__init__(name, schema, mark)
        self._pairs = pairs
        self._values: dict[str, str] = {}  # the rule of the values of each schema
        self._close = pairs.margin + pairs.close

    def _objects(self) -> list[Alternative]:
        found = super()._objects()
        if self._pairs.json_value or len(found) == 1:
            return found
        for key in dict.fromkeys(key for each in found for key in each.get("properties", {})):
            # The parser reads an argument by all objects that allow it.
            schemas = [
                each.get("properties", {}).get(key, each.get("additionalProperties", True)) for each in found
            ]
            types = {
                frozenset(kind for one in self._of(each, key) for kind in one["type"])
                for each in schemas
                if each is not False
            }
            if len(types) > 1 and any("string" in each for each in types):
                self._note(key, "text in one of several objects")
        return found

    def _can_write(self, key: str) -> bool:
        first = self._pairs.value.strip()[0]
        return key == key.strip() != "" and not {first, "\n"} & {*key} and len(key) <= LONGEST_KEY

    def _spelt(self, text: str) -> str:
        return literal(text, self._mark)

    def _tagged(self, before: str, value: str) -> str:
        margin, behind = self._pairs.margin, self._pairs.behind
        return f"{self._spelt(before + margin)} {value} {self._spelt(behind)}"

    def _item(self, key: str, schema: Any, place: str) -> str:
        return f"{self._spelt(self._pairs.key + key)} {self._value(schema, place)}"

    def _open_item(self, key: str, schema: Any, place: str) -> str:
        return f"{self._spelt(self._pairs.key)} {key} {self._value(schema, place)}"

    def _value(self, schema: Any, place: str) -> str:
        """Return the name of the rule of a schema's values."""
        spelt = json.dumps(schema, sort_keys=True)
        if spelt not in self._values:
            self._values[spelt] = self._named_rule(self._written_value(schema, place))
        return self._values[spelt]

    def _written_value(self, schema: Any, place: str) -> str:
        pairs, found = self._pairs, self._of(schema, place)
        texts = [each for each in found if "string" in each["type"]]
        others = [other for each in found if (other := _without_text(each))]
        is_mixed = bool(texts and others) and not pairs.json_value
        if is_mixed and any(map(_is_free, texts)) and all(map(_is_free, others)):
            texts, others, is_mixed = (
                [{"type": ["string"]}],
                [],
                False,
            )  # any text is right, however it is read
        if is_mixed:
            others = [one for each in others for one in _by_kind(each)]
        unlike = _unlike(others) if is_mixed else []
        # The parser reads a word as a value of another type only where the schema has that type.
        types = frozenset(kind for each in found for kind in each["type"]) if is_mixed else None
        ways = [self._tagged(pairs.value, each) for each in self._texts(texts, unlike, place, types)]
        for each in others:
            written = self._scalars(each) if is_mixed else None
            value = written or f"{self._json(_few_types(each), place)} {self._spelt(self._close)}"
            ways.append(self._tagged(pairs.json_value or pairs.value, value))
        return f"({' | '.join(dict.fromkeys(ways))})"

    def _texts(
        self, schemas: list[Alternative], unlike: list[str], place: str, types: frozenset[str] | None
    ) -> Iterator[str]:
        """Yield how texts are written, which are `unlike` the values of other types that may stand there.

        `types` are those and the texts' own; None if the parser reads everything as text.
        """
        for each in schemas:
            if "enum" not in each:
                yield self._text(each, unlike, place)
                continue
            words = [word for word in each["enum"] if isinstance(word, str)]
            words = [word for word in words if types is None or _stays_text(word, types)]
            if words:
                yield f"({' | '.join(self._spelt(word + self._close) for word in words)})"

    def _scalars(self, schema: Alternative) -> str | None:
        """Return values and the closing tag behind them in one piece, so that no text is taken for them."""
        types = {*schema["type"]}
        if "enum" in schema:
            words = [json.dumps(each) for each in schema["enum"] if not isinstance(each, str)]
        elif types & {"array", "object"} or (types & {"integer", "number"} and not _is_free(schema)):
            return None
        else:
            words = [word for each in schema["type"] for word in _WORDS.get(each, ())]
        ways = [self._spelt(word + self._close) for word in words]
        if "enum" not in schema and types & {"integer", "number"}:
            number = _NUMBER if "number" in types else "-?(?:0|[1-9][0-9]*)"
            name, begin = f"{self._name.upper()}_N{next(self._numbers)}", self._before_mark()
            self._rules.append(f"{name}: /{number}{slashed(begin)}/")
            rest = self._close.removeprefix(begin)
            ways.append(f"{name} {self._spelt(rest)}" if rest else name)
        return f"({' | '.join(ways)})"

    def _before_mark(self) -> str:
        """Return what of the closing tag precedes the control token in it."""
        close = self._close
        return re.split("|".join(map(re.escape, self._mark)), close)[0] if self._mark else close

    def _text(self, schema: Alternative, unlike: list[str], place: str) -> str:
        """Return an expression of a text and the closing tag behind it."""
        schema = self._held_text(schema, place)
        close, begin = self._close, self._before_mark()
        word, end = f"{self._name.upper()}_T{next(self._numbers)}", slashed(begin)
        parts = [self._content(schema, place, end), *(f"~/(?s:{each}){end}/" for each in unlike)]
        if begin != close:  # the control token ends the text
            self._rules.append(f"{word}: {' & '.join(parts)}")
            is_empty = not begin and not schema.get("minLength") and not _patterns(schema)
            return f"{word}{'?' if is_empty else ''} {self._spelt(close.removeprefix(begin))}"
        # The parser ends a text at the tag, whether or not a line break stands before it
        parts.append(f"~/(?s:.*){slashed(self._pairs.close)}(?s:.+)/")
        self._rules.append(f"{word}: {' & '.join(parts)}")
        return word


def _without_text(schema: Alternative) -> Alternative | None:
    """Return an alternative without its strings; None if it has nothing else."""
    types = [each for each in schema["type"] if each != "string"]
    if "enum" in schema:
        values = [each for each in schema["enum"] if not isinstance(each, str)]
        return {**schema, "type": types, "enum": values} if values else None
    return {**schema, "type": types} if types else None


def _few_types(schema: Alternative) -> Alternative:
    """Return an alternative whose list of types has no integer beside number."""
    types = [each for each in schema["type"] if each != "integer" or "number" not in schema["type"]]
    return {**schema, "type": types}


def _is_free(schema: Alternative) -> bool:
    """Whether an alternative has every value of its types."""
    others = schema.keys() - {"type", "format"}
    return not (others if "string" in schema["type"] else others - _OF_TEXT)


def _patterns(schema: Alternative) -> bool:
    return "pattern" in schema or "allOf" in schema


def _by_kind(schema: Alternative) -> list[Alternative]:
    """Return an alternative as several, each of one type; numbers stay together, and so do constants."""
    types = _few_types(schema)["type"]
    if "enum" in schema or len(types) == 1:
        return [schema]
    return [{**schema, "type": ["integer", "number"] if each == "number" else [each]} for each in types]


def _unlike(schemas: list[Alternative]) -> list[str]:
    """Return expressions of the texts that would be read as values of these schemas, or begin like them.

    Each schema is of one kind. Where its values are JSON that the matcher reads piece by piece, no text may
    begin like them.
    """
    words, begins = dict[str, None](), dict[str, None]()
    for schema in schemas:
        for each in schema["type"]:
            if each in _READ_AS:
                words[_READ_AS[each]] = None
            elif each in _BEGINS:
                begins[_BEGINS[each]] = None
            elif "enum" in schema or _is_free(schema):
                words[_NUMBER] = None
            else:
                begins["[-0-9]"] = None
    found = [rf"\s*(?:{'|'.join(words)})\s*"] if words else []
    return found + ([rf"\s*(?:{'|'.join(begins)}).*"] if begins else [])


def _stays_text(word: str, types: frozenset[str]) -> bool:
    return as_json(word, types) == json.dumps(word, ensure_ascii=False)


class _BareRules(_Writer):
    """Writes the rules of Gemma's notation."""

    between = ","

    def __init__(self, quote: str, name: str, schema: Any, mark: Mapping[str, int]) -> None:
        super().__init__(name, schema, mark)
        self._quote = quote
        self._named: dict[str, str] = {}  # the rule of each part that has references or unions
        self._waiting: list[tuple[str, Any, str]] = []  # those of them that are not written yet

    def written(self) -> list[str]:
        """Return the rules."""
        first = " | ".join(f'"{{" {self._object(each, "")} "}}"' for each in self._objects())
        while self._waiting:
            name, schema, place = self._waiting.pop()
            if len(self._rules) > _MOST_RULES:
                self._note(place, "parts of parts without end")
                schema = True
            self._rules.append(f"{name}: {self._direct(schema, place)}")
        return [f"{self._name}: {first}", *self._rules]

    def _can_write(self, key: str) -> bool:
        return key == key.strip() != "" and ":" not in key and key[0] not in '},"' and "<" not in key

    def _item(self, key: str, schema: Any, place: str) -> str:
        return f"{literal(key + ':', {})} {self._value(schema, place)}"

    def _open_item(self, key: str, schema: Any, place: str) -> str:
        return f'{key} ":" {self._value(schema, place)}'

    def _value(self, schema: Any, place: str) -> str:
        """Return an expression of the values of a schema."""
        if not isinstance(schema, Mapping) or not {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
            return self._direct(schema, place)
        spelt = json.dumps(schema, sort_keys=True)
        if spelt not in self._named:
            if len(self._named) > _MOST_NAMED:
                self._note(place, "parts of parts without end")
                return self._any()
            self._named[spelt] = f"{self._name}_named_{len(self._named)}"
            self._waiting.append((self._named[spelt], schema, place))
        return self._named[spelt]

    def _direct(self, schema: Any, place: str) -> str:
        ways = dict.fromkeys(way for each in self._of(schema, place) for way in self._ways(each, place))
        return f"({' | '.join(ways)})"

    def _ways(self, schema: Alternative, place: str) -> Iterator[str]:
        types = {*schema["type"]}
        if "enum" in schema:
            yield from map(self._constant, schema["enum"])
        elif types == {*TYPES} and schema.keys() == {"type"}:
            yield self._any()
        else:
            if "string" in types:
                yield self._text(schema, place)
            if "array" in types:
                yield self._array(schema, place)
            if "object" in types:
                yield f'"{{" {self._object(schema, place)} "}}"'
            if plain := sorted(types - {"string", "array", "object"}):
                yield self._json(_few_types({**schema, "type": plain}), place)

    def _constant(self, value: Any) -> str:
        if not isinstance(value, str):
            return literal(_bare(value, self._quote), self._mark)
        # The quote is a piece of its own, as before any other text that may stand here.
        return f"{literal(self._quote, self._mark)} {literal(value + self._quote, self._mark)}"

    def _text(self, schema: Alternative, place: str) -> str:
        schema = self._held_text(schema, place)
        quote, name = literal(self._quote, self._mark), f"{self._name.upper()}_T{next(self._numbers)}"
        if self._quote in self._mark:
            self._rules.append(f"{name}: {self._content(schema, place)}")
            is_empty = not schema.get("minLength") and not _patterns(schema)
            return f"{quote} {name}{'?' if is_empty else ''} {quote}"
        end = slashed(self._quote)
        self._rules.append(f"{name}: {self._content(schema, place, end)} & ~/(?s:.*){end}(?s:.+)/")
        return f"{quote} {name}"

    def _array(self, schema: Alternative, place: str) -> str:
        if "prefixItems" in schema:
            self._note(place, "prefixItems")
        items = True if "prefixItems" in schema else schema.get("items", True)
        least, most = schema.get("minItems", 0), 0 if items is False else schema.get("maxItems", "")
        if most != "" and least > most:
            self._note(place, "the number of items")
            least = 0
        if most == 0:
            return '"[]"'
        item = self._named_rule(self._value(items, f"{place}[]"))
        rest = _repeated(f'"," {item}', least - 1, most)
        return f'"[" {item} {rest} "]"' if least else f'"[" ({item} {rest})? "]"'

    def _any(self) -> str:
        """Return the name of the rule of any value."""
        name = f"{self._name}_any"
        if name not in self._named:
            self._named[name] = name
            plain = json_rule({"type": ["number", "boolean", "null"]})
            key, text = f"{self._name.upper()}_ANY_KEY", self._text({"type": ["string"]}, "")
            pair = f'{key} ":" {name}'
            parts = [plain, text, f'"[" ({name} ("," {name})*)? "]"', f'"{{" ({pair} ("," {pair})*)? "}}"']
            self._rules += [f"{key}: {self.key_rule}", f"{name}: {' | '.join(parts)}"]
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
