"""Write the arguments of calls as JSON while a model writes them in another notation.

A reader is given the text that has arrived, and says how much of it is decided and what that adds to the
JSON. No decision depends on how the text was cut.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Protocol

from serving.grammars.schema_references import Path, References
from serving.tools.formats import MAYBE, MOST_SPACE, NO, Pairs, ToolFormat, after_space, match

LONGEST_KEY = 256
_ALL = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
# How names of types begin, those of other languages included, which vLLM reads as well
_BEGINNINGS = {
    **dict.fromkeys(("int", "uint", "unsigned", "long", "short"), "integer"),
    **dict.fromkeys(("num", "float", "double"), "number"),
    **dict.fromkeys(("obj", "dict"), "object"),
    **dict.fromkeys(("arr", "list"), "array"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    "null": "null",
}
_PYTHON = {"True": ("true", "boolean"), "False": ("false", "boolean"), "None": ("null", "null")}
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DEEPEST = 32  # references and unions of a schema that are followed within each other
_MOST_PARTS = 500  # parts of a schema that are searched for the names of arguments


class Reader(Protocol):
    """Reads the arguments of one call."""

    is_complete: bool

    @property
    def is_text(self) -> bool:
        """Whether a text is arriving, which is passed on as it comes."""

    def read(self, held: str) -> tuple[int, str]:
        """Return how many characters are decided, and the JSON that they add."""

    def rest(self, held: str, *, is_ended: bool) -> str:
        """Return what else is certain when no more text comes; whether the model has ended the answer."""


def reader_of(form: ToolFormat, schema: Any, *, is_held: bool = False) -> Reader:
    """Return the reader of a call of a function whose arguments have this schema.

    A call that `is_held` to a grammar has every closing tag.
    """
    if form.pairs is not None:
        return PairReader(form, schema, is_held=is_held)
    return BareReader(form.quote, form.end_mark)


class PairReader:
    """Reads the pairs of a format up to the first tag behind them, which it leaves.

    A value ends at the closing tag behind which the next key or the end stands, so that it may contain such
    tags itself. Text is passed on as it arrives; another value when it has ended. Of a key that comes twice,
    the first value counts, since it has been passed on.

    A call that lacks an end is taken to end only where the model has ended the answer there, since a text may
    hold whatever else would follow, other calls included.
    """

    def __init__(self, form: ToolFormat, schema: Any, *, is_held: bool = False) -> None:
        assert form.pairs is not None, "a format of pairs says how they are written"
        self.is_complete = False
        self._pairs: Pairs = form.pairs
        self._is_by_line = form.pairs.is_by_line and not is_held
        text = frozenset({"string"}) if self._pairs.json_value else None
        # What may stand before a value, and the types that it has then, if that says them
        said = {
            self._pairs.value: text,
            self._pairs.json_value: _ALL - {"string"},
            self._pairs.loose_value: None,
        }
        self._said = {each: types for each, types in said.items() if each}
        self._end = form.tail.split()[0]
        # What ends a call for certain, even where its last value is not closed
        behind = (form.closing, form.between + form.head) if form.closing else ("",)
        self._whole_ends = [form.tail + each for each in behind]
        # With what an answer may end behind its last value and, without the first word, behind a closing tag
        self._last_ends = [form.tail, form.tail + form.closing]
        late = "".join(self._last_ends[1].split()[1:])
        self._late_ends = [late] if late else []
        self._types = Types(schema)
        self._seen: set[str] = set()
        self._key: str | None = None  # the key whose value is arriving
        self._allowed = frozenset[str]()  # the types that this value may have
        self._is_silent = False  # whether this value is passed over
        self._is_fresh = True  # whether nothing of this value has been read
        self._is_doubtful = False  # whether this value has what looks like its end, and is not
        self._sought = 0  # the search for the value's end goes on here in the text that is held

    def read(self, held: str) -> tuple[int, str]:
        """Return how many characters are decided, and the JSON that they add."""
        taken, said = (0, "") if self._key is None else self._value(held)
        if self._key is None and not taken:  # the value has ended, and what follows is left
            further, more = self._between(held)
            return further, said + more
        return taken, said

    def rest(self, held: str, *, is_ended: bool) -> str:
        """Return the part of a text, or the value, that the answer has when it breaks off."""
        if self._key is None:
            return ""
        start = self._begin(held)
        last = next((at for at, end in self._ends(held, start) if end == MAYBE), len(held))
        is_certain = is_ended and not self._is_doubtful  # said before the search, which may come to doubt
        if is_ended and (end := self._unless_more(held, last)) >= 0:
            return self._ended(held, start, last, end)[1] + "}"
        at, is_closed = self._last(held, start)
        brace = "}" if is_certain and is_closed else ""
        if self._is_silent:
            return brace
        if self.is_text:
            return self._opened() + _escaped(held[start:at]) + ('"' if is_closed else "") + brace
        return self._written(held[start:at]) + brace if is_closed else ""

    @property
    def is_text(self) -> bool:
        """Whether the value that is arriving is a text."""
        return self._key is not None and self._allowed == {"string"}

    def _between(self, held: str) -> tuple[int, str]:
        found = self._next_key(held, 0)
        if isinstance(found, int):
            if found == MAYBE or match(self._end, held, 0) == MAYBE:
                return 0, ""
            self.is_complete = True  # here they end, or something else begins
            return 0, "}" if self._seen else "{}"
        key, at, said = found
        self._key, self._is_fresh, self._is_doubtful, self._sought = key, True, False, 0
        self._is_silent = key in self._seen
        self._seen.add(key)
        self._allowed = self._types.of(key) if said is None else said
        if self._is_silent:
            return at, ""
        return at, ("{" if len(self._seen) == 1 else ", ") + json.dumps(key, ensure_ascii=False) + ": "

    def _next_key(self, held: str, at: int) -> tuple[str, int, frozenset[str] | None] | int:
        """Return a key, where its value begins, and its types if the text says them; or as `match` does."""
        pairs = self._pairs
        begin = match(pairs.key, held, at)
        if begin < 0:
            return begin
        first = (pairs.value.split() or [""])[0][:1]
        end = held.find(first, begin)
        while end >= 0:
            found = {each: match(each, held, end) for each in self._said}
            key = held[begin:end].strip()
            if not key or "\n" in key or end - begin > LONGEST_KEY:
                return NO
            for value, begun in found.items():
                if begun >= 0:
                    return key, begun, self._said[value]
            if MAYBE in found.values():
                return MAYBE
            end = held.find(first, end + 1)
        is_key = len(held) - begin <= LONGEST_KEY and "\n" not in held[begin:].strip()
        return MAYBE if is_key else NO

    def _begin(self, held: str) -> int:
        """Return where the value begins, behind the margin."""
        return len(self._pairs.margin) if self._is_fresh and held.startswith(self._pairs.margin) else 0

    def _value(self, held: str) -> tuple[int, str]:
        if self._is_fresh and self._pairs.margin and not held:
            return 0, ""
        start = self._begin(held)
        for at, end in self._ends(held, start):
            if end == NO:
                self._sought = at + 1
                continue
            if end == MAYBE:
                return self._part(held, start, at)
            return self._ended(held, start, at, end)
        return self._part(held, start, len(held))

    def _ends(self, held: str, start: int, *, is_over: bool = False) -> Iterator[tuple[int, int]]:
        """Yield where a value may end, and where what follows its closing tag begins, or NO or MAYBE.

        Unless the text `is_over`, MAYBE is also where the value ends if the answer does.
        """
        pairs, at = self._pairs, max(self._sought, start)
        search = re.compile(f"{re.escape(pairs.close[0])}|\n")
        while found := search.search(held, at):
            at = found.start()
            end = _ahead(pairs.close, held, at)
            if end >= 0:
                end = self._followed(held, end)
            elif self._is_by_line and held[at] == "\n":
                end = self._forgotten(held, at)
            if end == NO and not is_over and self._unless_more(held, at) != NO:
                end = MAYBE
            yield at, end
            at += 1

    def _followed(self, held: str, end: int) -> int:
        """Return `end` where the next key or the end of all pairs follows; NO or MAYBE."""
        follows = [match(each, held, end) for each in (self._pairs.key, self._end)]
        if max(follows) >= 0:
            return end
        return MAYBE if MAYBE in follows else NO

    def _unless_more(self, held: str, at: int) -> int:
        """Return as `_ends` does whether a value ends here that lacks an end, if no more text comes."""
        end, begin, ends = _ahead(self._pairs.close, held, at), 0, self._late_ends
        if end >= 0:
            begin = end
        elif held.startswith("\n", at) and _ahead(self._end, held, at + 1) != NO:
            end, begin, ends = at, at + 1, self._last_ends
        else:
            return NO
        found = [match(each, held, begin) for each in ends]
        if not self._is_doubtful:
            if any(each >= 0 and after_space(held, each, MOST_SPACE) == len(held) for each in found):
                return end
            if MAYBE in found:
                return MAYBE
        self._is_doubtful = True
        return NO

    def _forgotten(self, held: str, at: int) -> int:
        """Return `at` where a line begins with the next pair or ends the call: a value without a tag ends."""
        begin = _ahead(self._pairs.key, held, at + 1)
        if begin >= 0:
            found = self._next_key(held, at + 1)
            if isinstance(found, int):
                return found
            return at if self._types.has_next(found[0], self._seen) else NO
        end = _ahead(self._end, held, at + 1)
        if end >= 0:
            ends = [match(each, held, at + 1) for each in self._whole_ends]
            return at if max(ends) >= 0 else min(ends)
        return min(begin, end)

    def _part(self, held: str, start: int, at: int) -> tuple[int, str]:
        """Pass on text before `at`, without what may be the margin behind it."""
        self._sought = at
        if not self.is_text:
            return 0, ""
        at -= len(self._pairs.margin) if held[start:at].endswith(self._pairs.margin) else 0
        if at <= start and not (self._is_fresh and start):
            return 0, ""
        said = "" if self._is_silent else self._opened() + _escaped(held[start:at])
        self._is_fresh, self._sought = False, self._sought - at
        return at, said

    def _ended(self, held: str, start: int, at: int, end: int) -> tuple[int, str]:
        margin = self._pairs.margin
        is_closed = end > at  # its tag closes it, and not a key that is not its own
        if is_closed and margin and held[start:at].endswith(margin):
            at -= len(margin)
        text, was_silent, opened = held[start:at], self._is_silent, self._opened()
        written = f'{opened}{_escaped(text)}"' if self.is_text else self._written(text)
        self._key = None
        return end, "" if was_silent else written

    def _last(self, held: str, start: int) -> tuple[int, bool]:
        """Return where a value ends with which an answer breaks off, and whether its closing tag has come."""
        margin, at, is_closed = self._pairs.margin, len(held), False
        ends = self._ends(held, start, is_over=True)
        undecided = next((at for at, end in ends if end == MAYBE), None)
        if undecided is not None:
            at, is_closed = undecided, held.startswith(self._pairs.close, undecided)
        if margin and held[start:at].endswith(margin):
            at -= len(margin)
        return at, is_closed

    def _opened(self) -> str:
        return '"' if self._is_fresh else ""

    def _written(self, text: str) -> str:
        """Return the JSON of a value that need not be text."""
        return as_json(text, self._allowed)


class BareReader:
    """Reads an object in Gemma's notation, from its first brace to its last or to the end of the call.

    Outside of texts, white space has no meaning. Python's constants, and keys and texts as JSON has them, are
    read as well, since models write them.
    """

    def __init__(self, quote: str, end: str) -> None:
        self.is_complete = False
        self._quote, self._end = quote, end
        self._word_end = re.compile(rf"[,\]}}]|{re.escape(quote)}|{re.escape(end)}")
        self._key_end = re.compile(f":|{re.escape(end)}")
        self._num_sought = 0  # characters of a word that has not ended, in which its end was sought
        self._stack: list[str] = []  # the brackets that are open
        self._is_text = False
        self._is_json_text = False  # whether a text as JSON has it goes on
        self._is_key = False  # whether a key, and not a value, comes next
        self._has_comma = False  # whether a comma is written before what comes next

    @property
    def is_text(self) -> bool:
        """Whether a text is arriving, in quotes of either kind."""
        return self._is_text or self._is_json_text

    def read(self, held: str) -> tuple[int, str]:
        """Return how many characters are decided, and the JSON that they add."""
        at, said = 0, ""
        while at < len(held) and not self.is_complete:
            end, piece = self._next(held, at)
            if end == MAYBE:
                break
            at, said = end, said + piece
        return at, said

    def rest(self, held: str, *, is_ended: bool) -> str:
        """Return nothing: what is undecided is a part of a mark, of an escape, of a key or of a number."""
        return ""

    def _next(self, held: str, at: int) -> tuple[int, str]:
        """Return where the piece ends that begins here, or MAYBE, and the JSON that it adds."""
        if self._is_json_text:
            return self._in_json_text(held, at)
        begin = held[at : at + len(self._quote)]
        if begin == self._quote:
            self._is_text = not self._is_text
            return at + len(begin), (self._before() if self._is_text else "") + '"'
        if self._quote.startswith(begin):
            return MAYBE, ""
        if self._is_text:
            return at + 1, _escaped(held[at])
        if held[at].isspace():
            return at + 1, ""
        if (end := _ahead(self._end, held, at)) != NO:
            self.is_complete = end >= 0
            closers = "".join("}" if each == "{" else "]" for each in reversed(self._stack))
            return (at, closers or "{}") if self.is_complete else (MAYBE, "")
        if held[at] in ("},:" if self._is_key else "{}[],:"):  # a key may begin with a bracket
            return at + 1, self._step(held[at])
        if held[at] == '"':
            self._is_json_text = True
            return at + 1, self._before() + '"'
        return self._word(held, at)

    def _in_json_text(self, held: str, at: int) -> tuple[int, str]:
        if held[at] == '"':
            self._is_json_text = False
            return at + 1, '"'
        if held[at] != "\\":
            return at + 1, _escaped(held[at])
        if _CUT_ESCAPE.match(held, at):
            return MAYBE, ""
        found = _ESCAPE.match(held, at)
        return (at + 1, _escaped("\\")) if found is None else (found.end(), found[0])

    def _before(self) -> str:
        comma, self._has_comma, self._is_key = self._has_comma, False, False
        return ", " if comma else ""

    def _step(self, char: str) -> str:
        if char == ":":
            return ": "
        said = "" if char == "," else char
        if char in "{[":
            said = self._before() + char
            self._stack.append(char)
        elif char in "}]" and self._stack:
            self._stack.pop()
            self.is_complete = not self._stack
        self._has_comma = char == ","
        self._is_key = bool(self._stack) and self._stack[-1] == "{" and char in "{,"
        return said

    def _word(self, held: str, at: int) -> tuple[int, str]:
        """Return the same of a key or a value that does not stand between two quotes."""
        ends = self._key_end if self._is_key else self._word_end
        found = ends.search(held, at + self._num_sought)
        if found is None:
            longest = max(len(self._quote), len(self._end))
            self._num_sought = max(0, len(held) - at - longest)  # an end that is cut may begin there
            return MAYBE, ""
        self._num_sought = 0
        word = held[at : found.start()].strip()
        said = dumped(word) if self._is_key else as_json(word, _ALL - {"string"})
        return found.start(), self._before() + said


class Types:
    """The types that the arguments of a function may have, by its schema.

    The schema is as the client sent it, so its references may lead anywhere in it. Each part is looked at
    once, and the work stays in proportion to the schema's size.
    """

    def __init__(self, schema: Any) -> None:
        self._references = References(schema)
        self._root = schema
        self._known: dict[Path, frozenset[str]] = {}  # the types of the part at each place
        self._names: set[str] = set()
        self._is_open = False  # whether a part names arguments by patterns
        self._collect()

    def of(self, key: str) -> frozenset[str]:
        """Return the possible types of an argument; where the schema allows no such argument, it is text."""
        return self._argument(key, self._root, (), {}) or frozenset({"string"})

    def has_next(self, key: str, seen: set[str]) -> bool:
        """Whether this key may come where those `seen` have come."""
        return key not in seen and (key in self._names or self._is_open or not self._names)

    def _parts(self, schema: Mapping[str, Any], place: Path) -> Iterator[list[tuple[Any, Path]]]:
        """Yield lists of schemas; a value of `schema` satisfies at least one schema of each list."""
        reference = schema.get("$ref")
        target = self._references.target(reference, place) if isinstance(reference, str) else None
        if target is not None:
            yield [(self._references.at(target), target)]
        for keyword in ("allOf", "anyOf", "oneOf"):
            if isinstance(branches := schema.get(keyword), list) and branches:
                found = [(each, (*place, keyword, index)) for index, each in enumerate(branches)]
                yield from [[each] for each in found] if keyword == "allOf" else [found]

    def _collect(self) -> None:
        """Collect the names of the arguments that the schema and its parts have."""
        waiting: list[tuple[Any, Path]] = [(self._root, ())]
        seen = set[Path]()
        while waiting and len(seen) < _MOST_PARTS:
            schema, place = waiting.pop()
            if not isinstance(schema, Mapping) or place in seen:
                continue
            seen.add(place)
            if isinstance(named := schema.get("properties"), Mapping):
                self._names |= named.keys()
            self._is_open |= bool(schema.get("patternProperties"))
            waiting += [each for parts in self._parts(schema, place) for each in parts]

    def _argument(
        self, key: str, schema: Any, place: Path, known: dict[Path, frozenset[str]], depth: int = 0
    ) -> frozenset[str]:
        """Return the types that an object's schema allows an argument."""
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return _ALL
        if place in known:
            return known[place]
        known[place] = _ALL  # what a reference in a circle adds
        found = _ALL
        for parts in self._parts(schema, place):
            found &= _union(self._argument(key, *each, known, depth + 1) for each in parts)
        named, patterns = schema.get("properties"), schema.get("patternProperties")
        others = (schema.get("additionalProperties"), (*place, "additionalProperties"))
        if isinstance(named, Mapping) and key in named:
            found &= self._of(named[key], (*place, "properties", key))
        elif isinstance(patterns, Mapping) and patterns:
            # Which pattern a key meets is left open: a client's expression may take very long to match.
            at = (*place, "patternProperties")
            given = [self._of(each, (*at, name)) for name, each in patterns.items()]
            found &= _union([*given, *([self._of(*others)] if others[0] is not None else [])])
        else:
            found &= self._of(*others)
        known[place] = found
        return found

    def _of(self, schema: Any, place: Path, depth: int = 0) -> frozenset[str]:
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return _ALL
        if place in self._known:
            return self._known[place]
        self._known[place] = _ALL  # what a reference in a circle adds
        found = _own_types(schema)
        for parts in self._parts(schema, place):
            found &= _union(self._of(*each, depth + 1) for each in parts)
        if found == _ALL and ("properties" in schema or "additionalProperties" in schema):
            found = frozenset({"object"})
        elif found == _ALL and "items" in schema:
            found = frozenset({"array"})
        if schema.get("nullable") is True:
            found |= {"null"}
        self._known[place] = found
        return found


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema names itself, in which an integer is a number."""
    found, named = _ALL, schema.get("type")
    if isinstance(named, str | list):
        given = [named] if isinstance(named, str) else [each for each in named if isinstance(each, str)]
        names = _union(map(_types_named, given))
        found &= names | ({"integer"} if "number" in names else set())
    if isinstance(schema.get("enum"), list):
        found &= _union([{_type(each)} for each in schema["enum"]])
    if "const" in schema:
        found &= {_type(schema["const"])}
    return found


def _types_named(name: str) -> frozenset[str]:
    """Return the type of this name, which other languages may use; one that is unknown is text, as `date`."""
    if name.lower() == "any":
        return _ALL
    known = (kind for begin, kind in _BEGINNINGS.items() if name.lower().startswith(begin))
    return frozenset({next(known, "string")})


def _union(sets: Iterable[Set[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def as_json(text: str, allowed: frozenset[str]) -> str:
    """Return a value as JSON: as it is written where it is JSON of a type that is `allowed`, else as text."""
    word, is_text = text.strip(), json.dumps(text, ensure_ascii=False)
    if word in _PYTHON and _PYTHON[word][1] in allowed:
        return _PYTHON[word][0]
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return is_text if "string" in allowed else _of_literal(word, allowed) or is_text
    if "string" not in allowed:
        return word
    found = _type(value)
    is_allowed = found in allowed or (found == "integer" and "number" in allowed)
    return word if is_allowed and found != "string" else is_text


def _of_literal(word: str, allowed: frozenset[str]) -> str | None:
    """Return a list or an object that is written as Python has it as JSON; None if it is neither."""
    if word[:1] not in ("[", "{"):
        return None
    try:
        value = ast.literal_eval(word)
        return dumped(value) if _type(value) in allowed else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _type(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return _NAMES.get(type(value), "null")


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def dumped(value: Any) -> str:
    """Return a value as JSON in which every character can be encoded: surrogates are joined or escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", joined)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ahead(literal: str, held: str, at: int) -> int:
    """Return where a text ends that stands here exactly, or NO, or MAYBE if it is cut off."""
    if held.startswith(literal, at):
        return at + len(literal)
    return MAYBE if literal.startswith(held[at : at + len(literal)]) else NO
