"""Split an answer into tool calls and other text as it arrives.

Every decision depends on the text so far and never on how it was cut: what may still become a call is held
back until that is decided. A call is recognised when its name is one of the tools' and its arguments begin;
JSON arguments are then passed on as they arrive, whether the model closes them or not. All other text is
content.

The reasoning is the text of a think block, `<think>` to `</think>`, with which an answer begins, or which its
prompt has opened.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field

from serving.tools.formats import ToolFormat

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Parses one answer.

    `is_open` says that the prompt ends with the beginning of the block and, later, that the text so far ends
    inside it. `has_ended` says that the block's end has been found.
    """

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self.has_ended = False
        self._has_begun = is_open
        self._is_blank = True  # white space around the block, and at its beginning, is dropped
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Add text, and return the reasoning and the answer that are certain with it."""
        self._held += text
        if not self._has_begun:
            begun = self._held.lstrip()
            if len(begun) < len(BEGIN) and BEGIN.startswith(begun):
                return "", ""
            self._has_begun = True
            if not begun.startswith(BEGIN):
                self._is_blank = False
            else:
                self.is_open, self._held = True, begun.removeprefix(BEGIN)
        thoughts = self._thoughts() if self.is_open else ""
        return thoughts, "" if self.is_open else self._shown(len(self._held))

    def finish(self) -> tuple[str, str]:
        """Return the rest, when no more text comes."""
        held, self._held = self._held, ""
        if self.is_open:
            return ("" if self._is_blank else held.rstrip()), ""
        return "", "" if self._is_blank and self._has_begun else held

    def _thoughts(self) -> str:
        """Return reasoning that is certain: without white space with which the block may end."""
        at = self._held.find(END)
        if at >= 0:
            thoughts = self._held[:at].rstrip()
            thoughts = thoughts.lstrip() if self._is_blank else thoughts
            self._held, self._is_blank = self._held[at + len(END) :], True
            self.is_open, self.has_ended = False, True
            return thoughts
        sizes = range(min(len(END) - 1, len(self._held)), 0, -1)
        kept = next((size for size in sizes if self._held.endswith(END[:size])), 0)
        return self._shown(len(self._held[: len(self._held) - kept].rstrip()))

    def _shown(self, size: int) -> str:
        shown, rest = self._held[:size], self._held[size:]
        if self._is_blank:
            shown = shown.lstrip()
            if not shown:
                return ""
            self._is_blank = False
        self._held = rest
        return shown


MOST_SPACE = 64  # most white space within the words around a call; more of it makes them content
LONGEST_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_NO, _MAYBE = -1, -2
_LITERALS = {"true": True, "false": False, "null": None}


@dataclass(slots=True)
class CallDelta:
    """The new part of a call; its name comes first."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Thought:
    """The new part of the reasoning."""

    text: str


@dataclass(slots=True)
class Parsed:
    """The new parts of an answer, in the order of its text; each call has one entry."""

    parts: list[str | Thought | CallDelta] = field(default_factory=list)

    @property
    def thoughts(self) -> str:
        """The reasoning in these parts."""
        return "".join(each.text for each in self.parts if isinstance(each, Thought))

    @property
    def content(self) -> str:
        """The content in these parts."""
        return "".join(each for each in self.parts if isinstance(each, str))

    @property
    def calls(self) -> list[CallDelta]:
        """The calls in these parts."""
        return [each for each in self.parts if isinstance(each, CallDelta)]

    def say(self, text: str) -> None:
        """Add content."""
        if text:
            self.parts.append(text)

    def think(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self.parts.append(Thought(text))

    def add(self, delta: CallDelta) -> None:
        """Add a part of a call."""
        last = self.parts[-1] if self.parts else None
        if isinstance(last, CallDelta) and last.index == delta.index:
            last.arguments += delta.arguments
        else:
            self.parts.append(delta)


class ToolParser:
    """Parses one answer; `num_calls` is the number of calls that have begun."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self.num_calls = 0
        self._form = form
        self._names = names
        self._held = ""
        self._place = self._in_content
        self._is_blank = True  # only white space has come since the start, or since the last call
        self._may_begin = True  # whether a call may begin
        self._name = self._lead = ""  # the name and the head of a call whose keywords are not complete
        self._scan = _Scan()

    def push(self, text: str) -> Parsed:
        """Add text, and return what is certain with it."""
        parsed = Parsed()
        self._held += text
        while self._held and self._place(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """Return the rest, when no more text comes."""
        parsed, held = Parsed(), self._held
        if self._place == self._in_keywords:
            parsed.say(self._lead + self._scan.text + held)
        elif self._place == self._in_content:
            parsed.say(held if held.strip() or not self.num_calls else "")
        elif self._place == self._behind_call and held.strip() and not self._may_close(held):
            parsed.say(held)
        self._held = ""
        return parsed

    def _may_close(self, held: str) -> bool:
        return bool(self._form.closing) and _match(self._form.closing, held, 0) == _MAYBE

    def _in_content(self, parsed: Parsed) -> bool:
        """Look for a call; like the method of every place, returns whether anything was decided."""
        held = self._held
        blank = len(held) - len(held.lstrip()) if self._is_blank else 0
        if self._is_blank and blank == len(held):
            return False
        at = self._candidate(held, blank)
        name, end = self._begun(self._form.opening + self._form.head, held, at)
        shown = at + 1 if end == _NO else at
        if shown > blank:
            parsed.say(held[:shown])
            self._is_blank = False
            blank = 0
            self._held = held[shown:]
        if end >= 0:
            self._held = held[at:]  # white space that only a call follows is not shown
            self._begin(parsed, name, held[at:end])
        return end != _MAYBE and bool(self._held)

    def _candidate(self, held: str, blank: int) -> int:
        """Return where a call may begin; the end of the text if nowhere."""
        if not self._form.is_whole:
            at = held.find((self._form.opening + self._form.head)[0], blank)
            return len(held) if at < 0 else at
        return blank if self._may_begin and self._is_blank else len(held)

    def _begun(self, lead: str, held: str, at: int) -> tuple[str, int]:
        """Return the name of the call that begins at `at` and where its arguments begin, or _NO or _MAYBE."""
        if at == len(held):
            return "", _MAYBE
        at = _match(lead, held, at)
        if at < 0:
            return "", at
        if not self._form.head:
            at = _after_space(held, at)
        found = _NAME.match(held, at)
        assert found is not None, "a name may be empty"
        name, at = found[0], found.end()
        if at == len(held) and len(name) <= LONGEST_NAME:
            return "", _MAYBE
        if name not in self._names:
            return "", _NO
        at = _match(self._form.middle, held, at)
        if at < 0 or self._form.arguments == "keywords":
            return name, at
        after = _after_space(held, at)
        if after - at > MOST_SPACE:
            return "", _NO
        if after == len(held):
            return "", _MAYBE
        return name, after if held[after] == "{" else _NO

    def _begin(self, parsed: Parsed, name: str, lead: str) -> None:
        self._held = self._held[len(lead) :]
        self._scan = _Scan()
        if self._form.arguments == "keywords":
            self._name, self._lead, self._place = name, lead, self._in_keywords
            return
        parsed.add(CallDelta(self.num_calls, name))
        self.num_calls += 1
        self._place = self._in_json

    def _in_json(self, parsed: Parsed) -> bool:
        taken = self._scan.json(self._held)
        parsed.add(CallDelta(self.num_calls - 1, arguments=self._held[:taken]))
        self._held = self._held[taken:]
        if self._scan.depth == 0:
            self._place = self._in_tail
        return True

    def _in_tail(self, parsed: Parsed) -> bool:
        end = _match(self._form.tail, self._held, 0)
        if end == _MAYBE:
            return False
        if end == _NO:
            self._resume()
        else:
            self._held, self._place = self._held[end:], self._behind_call
        return True

    def _in_keywords(self, parsed: Parsed) -> bool:
        taken = self._scan.keywords(self._held)
        self._held = self._held[taken:]
        if self._scan.depth > 0:
            return True
        arguments = _as_json(self._scan.text)
        if arguments is None:
            parsed.say(self._lead + self._scan.text)
            self._resume()
            return True
        parsed.add(CallDelta(self.num_calls, self._name, arguments))
        self.num_calls += 1
        self._place = self._behind_call
        return True

    def _behind_call(self, parsed: Parsed) -> bool:
        form, held = self._form, self._held
        name, end = self._begun(form.between.strip() + form.head, held, 0)
        if end >= 0:
            self._begin(parsed, name, held[:end])
            return True
        closed = _match(form.closing, held, 0) if form.closing else _NO
        if closed < 0 and _MAYBE in (end, closed):
            return False
        self._held = held[max(closed, 0) :]
        self._resume()
        return True

    def _resume(self) -> None:
        self._place, self._is_blank = self._in_content, True
        self._may_begin = not self._form.is_whole


class _Scan:
    """Finds the end of arguments, across pieces of text."""

    def __init__(self) -> None:
        self.depth = 0
        self.text = ""  # the keywords so far
        self._quote = ""
        self._is_escaped = False

    def json(self, text: str) -> int:
        """Return how much of the text belongs to the object, which begins with a brace."""
        for at, char in enumerate(text):
            self._step(char, '"')
            if not self.depth:
                return at + 1
        return len(text)

    def keywords(self, text: str) -> int:
        """Return how much of the text belongs to the keywords, including their closing bracket."""
        self.depth = self.depth or 1
        taken = len(text)
        for at, char in enumerate(text):
            self._step(char, "\"'")
            if not self.depth:
                taken = at + 1
                break
        self.text += text[:taken]
        return taken

    def _step(self, char: str, quotes: str) -> None:
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in quotes:
            self._quote = char
        elif char in "{[(":
            self.depth += 1
        elif char in "}])":
            self.depth -= 1


def _match(literal: str, text: str, at: int) -> int:
    """Return where the literal ends in the text, white space ignored, or _NO, or _MAYBE if it is cut off."""
    num_spaces = 0
    for char in "".join(literal.split()):
        while at < len(text) and text[at].isspace():
            at += 1
            num_spaces += 1
        if num_spaces > MOST_SPACE:
            return _NO
        if at == len(text):
            return _MAYBE
        if text[at] != char:
            return _NO
        at += 1
    return at


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _as_json(keywords: str) -> str | None:
    """Return Python keywords and their closing bracket as a JSON object.

    The result is None if the values are not plain.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # Python warns of a backslash that it would keep
            call = ast.parse(f"call({keywords}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            return None
        values = {
            str(each.arg): ast.literal_eval(_WithConstants().visit(each.value)) for each in call.keywords
        }
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


class _WithConstants(ast.NodeTransformer):
    """Replaces JSON's names of constants by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:  # ast.NodeTransformer requires this name
        return ast.Constant(_LITERALS[node.id]) if node.id in _LITERALS else node
