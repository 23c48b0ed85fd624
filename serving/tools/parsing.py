"""Split an answer into tool calls and other text as it arrives.

Every decision depends on the text so far and never on how it was cut: what may still become a call is held
back until that is decided. A call is recognised when its name is one of the tools' and its arguments begin;
JSON arguments are then passed on as they arrive, whether the model closes them or not. Where calls are JSON
objects, one with its keys in another order, with its arguments as a text or without any is held back until it
ends, and is then read as a whole. All other text is content.

The reasoning is the text of a block, such as `<think>` to `</think>`, with which an answer begins, or which
its prompt has opened. Marks around the text behind it are dropped.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.tools.arguments import Reader, dumped, reader_of
from serving.tools.formats import (
    MAYBE,
    MOST_SPACE,
    NO,
    THOUGHT_FORMATS,
    ThoughtFormat,
    ToolFormat,
    after_space,
    match,
)


class ReasoningParser:
    """Parses one answer.

    `is_open` says that the prompt ends inside the block and, later, that the text so far does. `goes_on` says
    that the prompt has some of the thoughts, and `is_formed` that the answer's form begins right behind the
    block. `has_ended` says that the block's end has been found.
    """

    def __init__(
        self,
        form: ThoughtFormat = THOUGHT_FORMATS["think"],
        *,
        is_open: bool,
        goes_on: bool = False,
        is_formed: bool = False,
    ) -> None:
        self._form = form
        self._begin = form.begin.rstrip()
        self.is_open = is_open
        self.has_ended = False
        self._is_formed = is_formed
        self._has_begun = goes_on  # whether no mark can come that begins the block, even a second time
        self._is_blank = not goes_on  # white space around the block, and at its beginning, is dropped
        self._held = ""
        # Where a form is asked for, the marks are its own text.
        before, behind = ("", "") if is_formed else form.answer
        self._begin_mark = _BeginMark(before)
        self._end_mark = _EndMark(behind)

    @property
    def num_held(self) -> int:
        """The number of characters of the text so far that are not decided."""
        return len(self._held) + self._begin_mark.num_held + self._end_mark.num_held

    def push(self, text: str) -> tuple[str, str]:
        """Add text, and return the reasoning and the answer that are certain with it."""
        thoughts, answer = self._split(text)
        return thoughts, self._begin_mark.push(answer)

    def finish(self) -> tuple[str, str]:
        """Return the rest, when no more text comes."""
        thoughts, answer = self._rest()
        return thoughts, self._begin_mark.push(answer) + self._begin_mark.finish()

    def without_mark(self, answer: Parsed, *, is_last: bool) -> Parsed:
        """Return parts of the answer without the mark at its end, which may stand in a call's arguments."""
        shown, mark = Parsed(), self._end_mark
        mark.is_awaited |= self._begin_mark.has_come and not mark.has_come
        for part in answer.parts:
            if isinstance(part, str):
                shown.say(mark.push(part))
            else:
                shown.say(mark.flush())
                shown.parts.append(part)
        if is_last:
            shown.say(mark.flush().rstrip())
        return shown

    def _split(self, text: str) -> tuple[str, str]:
        self._held += text
        if not self._has_begun:
            begun = self._held.lstrip()
            if len(begun) < len(self._begin) and self._begin.startswith(begun):
                return "", ""
            self._has_begun = True
            if not begun.startswith(self._begin):
                self._is_blank = self.is_open
            else:
                self.is_open, self._held = True, begun.removeprefix(self._begin)
        thoughts = self._thoughts() if self.is_open else ""
        return thoughts, "" if self.is_open else self._shown(len(self._held))

    def _rest(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self.is_open:
            return (held.strip() if self._is_blank else held.rstrip()), ""
        return "", "" if self._is_blank and self._has_begun else held

    def _thoughts(self) -> str:
        """Return reasoning that is certain: without white space with which the block may end."""
        end = self._form.end
        at = self._held.find(end)
        if at >= 0:
            thoughts = self._held[:at].rstrip()
            thoughts = thoughts.lstrip() if self._is_blank else thoughts
            self._held, self._is_blank = self._held[at + len(end) :], not self._is_formed
            self.is_open, self.has_ended = False, True
            return thoughts
        sizes = range(min(len(end) - 1, len(self._held)), 0, -1)
        kept = next((size for size in sizes if self._held.endswith(end[:size])), 0)
        return self._shown(len(self._held[: len(self._held) - kept].rstrip()))

    def _shown(self, size: int) -> str:
        shown, rest = self._held[:size], self._held[size:]
        if self._is_blank:
            shown = shown.lstrip() if self.is_open else _from_its_line(shown)
            if not shown:
                return ""
            self._is_blank = False
        self._held = rest
        return shown


def _from_its_line(text: str) -> str:
    """Return text without white space at its beginning, but with the indentation of a line of its own."""
    shown = text.lstrip()
    _, line_break, indentation = text[: len(text) - len(shown)].rpartition("\n")
    return indentation + shown if line_break and shown else shown


class _BeginMark:
    """Drops the mark with which an answer begins, and the white space behind it."""

    def __init__(self, mark: str) -> None:
        self.has_come = False
        self._mark = mark
        self._is_decided = not mark
        self._held = ""

    @property
    def num_held(self) -> int:
        """The number of characters that are not decided; those of the mark are dropped."""
        return 0 if self._is_mark(self._held) else len(self._held)

    def _is_mark(self, held: str) -> bool:
        return bool(self._mark) and held.lstrip().startswith(self._mark)

    def push(self, text: str) -> str:
        """Add text, and return what is certain with it."""
        if self._is_decided:
            return text
        held = self._held + text
        begun = held.lstrip()
        rest = _from_its_line(begun.removeprefix(self._mark))
        if self._mark.startswith(begun) or not rest:
            self._held = held
            return ""
        self._held, self._is_decided = "", True
        self.has_come = begun.startswith(self._mark)
        return rest if self.has_come else held

    def finish(self) -> str:
        """Return the rest, when no more text comes."""
        held, self._held = self._held, ""
        return "" if self._is_mark(held) else held


class _EndMark:
    """Drops the mark with which an answer ends where it is awaited, and the white space around it.

    A mark behind which the text goes on is the answer's own, as where it tells how such answers are written.
    """

    def __init__(self, mark: str) -> None:
        self.is_awaited = self.has_come = False
        self._mark = mark
        self._held = ""

    @property
    def num_held(self) -> int:
        """The number of characters that are not decided."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Add text, and return what is certain with it."""
        if not self.is_awaited:
            return text
        held = self._held + text
        before = held.rstrip().removesuffix(self._mark)
        if len(before) == len(held.rstrip()):
            sizes = range(min(len(self._mark) - 1, len(held)), 0, -1)
            kept = next((size for size in sizes if held.endswith(self._mark[:size])), 0)
            before = held[: len(held) - kept]
        shown = len(before.rstrip())
        self._held = held[shown:]
        return held[:shown]

    def flush(self) -> str:
        """Return what was held, unless it is the mark, since no more text comes right behind it."""
        held, self._held = self._held, ""
        if self.is_awaited and held.strip() == self._mark:
            self.is_awaited, self.has_come = False, True
            return ""
        return held


LONGEST_NAME = 128
LONGEST_OBJECT = 2**14  # characters of a call that is read as a whole
LONGEST_PLAIN_OBJECT = 2**12  # the same without a mark before it, which may as well be an answer in JSON
MOST_REFUSED = 2**16  # characters of objects that were no calls, after which none are looked for
_SLICE = 2**12
_MOST_MARK_SPACE = 8  # white space between two characters of a mark
# How a call that is read as a whole may begin besides with its name
_BEGINS = ('{"type": "function",', '{"arguments":', '{"parameters":')
_BRACES = re.compile(r"[\s}]{0,64}")
_KEYS = frozenset({"type", "id", "name", "arguments", "parameters"})
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_NUMBER = re.compile(r":\d{0,9}")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ID = re.compile(r"[\w-]{0,64}", re.ASCII)
_LITERALS = {"true": True, "false": False, "null": None}


@dataclass(slots=True)
class CallDelta:
    """The new part of a call; its name comes first, with the id that the model gave it, if it did."""

    index: int
    name: str | None = None
    arguments: str = ""
    id: str | None = None


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

    def extend(self, further: Parsed) -> None:
        """Add the parts that follow these; the rest of a call joins what these have of it."""
        for part in further.parts:
            if isinstance(part, CallDelta):
                self.add(part)
            else:
                self.parts.append(part)


def slices(text: str) -> Iterator[str]:
    """Yield a text in slices, of which at least one comes.

    A parser copies what it holds whenever a part of it is decided, so that a long text at once would take
    time in proportion to the square of its length.
    """
    for at in range(0, max(1, len(text)), _SLICE):
        yield text[at : at + _SLICE]


class ToolParser:
    """Parses one answer; `num_calls` is the number of calls that have begun, before it and in it.

    `schemas` has the schema of each function's arguments, which some formats need to tell text from numbers.
    In the thoughts of an answer, a call without a mark of its own begins at the beginning of a line.
    An answer that `is_held` to a grammar has only calls as that writes them: others would not be held to it.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        num_calls: int = 0,
        *,
        schemas: Mapping[str, Any] | None = None,
        in_thoughts: bool = False,
        is_held: bool = False,
    ) -> None:
        self.num_calls = num_calls
        self._form = form
        self._names = names
        self._schemas = schemas or {}
        self._in_thoughts = in_thoughts
        self._has_grammar = is_held and not in_thoughts  # whether a grammar writes the calls
        self._held = ""
        self._place = self._in_content
        self._is_blank = True  # only white space has come since the start, or since the last call
        self._may_begin = True  # whether a call may begin
        self._is_line = True  # whether what is held begins a line, but for white space
        self._is_unknown = False  # whether the call that has begun is of what is no tool
        self._name = self._lead = ""  # the name and the head of a call whose keywords are not complete
        self._keywords: list[str] = []  # its keywords so far
        self._num_keywords = 0  # their characters
        self._scan, self._tail = _Scan(), form.tail  # the tail of the call that has begun
        self._brace = self._scanned = 0  # An object in what is held begins here, and is read so far.
        self._refused_at = NO  # where one begins in what is held that is no call
        self._reader: Reader | None = None
        wraps = ("", *(begin for begin, _ in form.wraps))
        heads = (form.head, *(() if is_held else form.other_heads))
        self._middles = (form.middle, *(() if is_held else form.other_middles))
        self._leads = [wrap + form.opening + head for wrap in wraps for head in heads]
        # Thoughts may rehearse a call that the answer then makes
        self._line_heads = [form.line_head] if form.line_head and not (is_held or in_thoughts) else []
        before = form.before_object
        has_objects = before is not None and not is_held and not (form.is_whole and in_thoughts)
        self._before_objects = [wrap + (before or "") for wrap in wraps] if has_objects else []
        self._longest_object = LONGEST_PLAIN_OBJECT if form.is_whole else LONGEST_OBJECT
        characters = "".join((before or "").split())
        space = rf"\s{{0,{_MOST_MARK_SPACE}}}"
        self._mark = re.compile(space.join(map(re.escape, characters))) if characters else None
        self._mark_size = len(characters) * (1 + _MOST_MARK_SPACE)  # at most
        self._num_refused = 0  # characters of objects that were no calls
        # What stands before another call
        between = form.between.strip()
        self._next_leads, self._next_objects = [between + form.head], [between + form.head.partition("{")[0]]
        if form.is_whole and not is_held:
            self._next_objects = [gap + wrap for gap in ("", ",", ";") for wrap in wraps]
            if form.arguments == "json":
                self._next_leads = [gap + head for gap in self._next_objects for head in heads]
        self._closings = [form.closing + end for _, end in form.wraps if end]
        self._closings += [form.closing] if form.closing else []
        self._closings += [end for _, end in form.wraps if end and self._before_objects]
        self._first = re.compile("|".join(re.escape(each[0]) for each in (*self._leads, *self._line_heads)))
        # Calls need no opening behind an opening, and behind a call in the block that it opens.
        self._is_within = False
        head = re.escape(form.head[0]) if form.head else r"[\w.-]"
        marks = (form.opening[:1], form.closing.lstrip()[:1])
        self._first_within = re.compile("|".join([*map(re.escape, marks), head]))

    @property
    def num_held(self) -> int:
        """The number of characters of the text so far that are not decided."""
        is_call = self._place == self._in_keywords  # unless its keywords are none
        return len(self._held) + (len(self._lead) + self._num_keywords if is_call else 0)

    def push(self, text: str) -> Parsed:
        """Add text, and return what is certain with it."""
        parsed = Parsed()
        for piece in slices(text):
            self._held += piece
            while self._held and self._place(parsed):
                pass
        return parsed

    def finish(self, *, is_ended: bool = False) -> Parsed:
        """Return the rest, when no more text comes; whether the model has ended it, or it was cut."""
        parsed = Parsed()
        while self._place == self._in_object:  # it never ended, so that it is no call
            self._refuse_object(len(self._held) - self._brace)
            parsed.extend(self.push(""))
        held = self._held
        if is_ended and self._is_call_without_arguments(held):
            parsed.extend(self.push(self._form.end_mark))
        elif self._place == self._in_keywords:
            parsed.say(self._lead + "".join(self._keywords) + held)
        elif self._place == self._in_json:
            self._add(parsed, held)
        elif self._place == self._in_reader and self._reader is not None:
            rest = self._reader.rest(held, is_ended=is_ended)
            self._add(parsed, rest)
            # What has no end might be more than a value, and could not be read
            is_unread = is_ended and not (rest or self._reader.is_text)
            parsed.say(held if is_unread and held.strip() else "")
        elif self._place == self._in_content:
            parsed.say(held if held.strip() or self._is_unknown or not self.num_calls else "")
        elif self._place == self._behind_call and self._is_unknown:
            parsed.say(held)
        elif self._place == self._behind_call and not self._may_close(held):
            parsed.say("" if held.strip() in ("", self._form.between.strip()) else held)
        self._held = ""
        self._resume()  # so that nothing of it is given a second time
        return parsed

    def _is_call_without_arguments(self, held: str) -> bool:
        mark, begun = self._form.end_mark, held.lstrip()
        if self._form.arguments != "json" or self._place not in (self._in_content, self._behind_call):
            return False
        return bool(mark) and self._any_begun(begun + mark, 0)[1] == len(begun)

    def _may_close(self, held: str) -> bool:
        return any(match(each, held, 0) == MAYBE for each in self._closings)

    def _in_content(self, parsed: Parsed) -> bool:
        """Look for a call; like the method of every place, returns whether anything was decided."""
        held = self._held
        blank = len(held) - len(held.lstrip()) if self._is_blank else 0
        if self._is_blank and blank == len(held):
            return False
        at = self._candidate(held, blank)
        lead, end = self._any_begun(held, at)
        is_decided = end != NO or at == self._refused_at
        brace = NO if is_decided else self._object_begun(self._before_objects, held, at)
        end = end if brace == NO else MAYBE
        shown = self._passed(held, at) if end == NO else at
        if shown > blank:
            parsed.say(held[:shown])
            _, is_ended, last = held[:shown].rpartition("\n")
            self._is_line = not last.strip() and (bool(is_ended) or self._is_line)
            self._is_blank = False
            blank = 0
            self._held = held[shown:]
            brace, self._refused_at = brace - shown, self._refused_at - shown
        if end >= 0:
            if lead.name in self._names:
                self._held = held[at:]  # white space that only a call follows is not shown
            self._begin(parsed, lead, held[len(held) - len(self._held) : end])
        elif brace >= 0:
            self._begin_object(brace)
            return True
        return end != MAYBE and bool(self._held)

    def _candidate(self, held: str, blank: int) -> int:
        """Return where a call may begin; the end of the text if nowhere."""
        if self._form.is_whole and not self._in_thoughts:
            return blank if self._may_begin and self._is_blank else len(held)
        first = self._first_within if self._is_within else self._first
        for found in first.finditer(held, blank):
            is_bare = self._form.is_whole or (not self._form.head and found[0] != self._form.opening[0])
            if not is_bare or self._begins_line(held, found.start()):
                return found.start()
        return len(held)

    def _begins_line(self, held: str, at: int) -> bool:
        before = held[:at].rstrip(" \t")
        return before.endswith("\n") or (not before and (self._is_line or self._is_blank))

    def _any_begun(self, held: str, at: int) -> tuple[_Lead, int]:
        """Return the first call that may begin at `at`, as `_begun` does; a block may end there, too."""
        form = self._form
        found = [self._begun(lead, held, at) for lead in self._leads]
        if self._line_heads and self._begins_line(held, at):
            found += [self._begun(lead, held, at) for lead in self._line_heads]
        if self._is_within:
            found.append(self._begun(form.head, held, at))
            found.append((_NONE, min(match(form.closing, held, at), NO)))
        return _decided(found)

    def _passed(self, held: str, at: int) -> int:
        """Return the end of the text at `at`, where no call begins: that of an opening, or one character."""
        form = self._form
        if not form.opening or form.is_whole:
            return at + 1
        if self._is_within and match(form.closing, held, at) >= 0:
            self._is_within = False
        opened = match(form.opening, held, at)
        self._is_within |= opened >= 0
        return max(opened, at + 1)

    def _begun(self, lead: str, held: str, at: int) -> tuple[_Lead, int]:
        """Return the name of the call that begins at `at` and where its arguments begin, or NO or MAYBE."""
        form = self._form
        if at == len(held):
            return _NONE, MAYBE
        at = match(lead, held, at)
        if at < 0:
            return _NONE, at
        is_quoted = form.head.endswith('"')
        begin = at = at if is_quoted else after_space(held, at, MOST_SPACE)
        if at < len(held) and held[at].isspace():
            return _NONE, NO
        found = _NAME.match(held, at)
        assert found is not None, "a name may be empty"
        name, at = found[0], found.end()
        if at == len(held) and len(name) <= LONGEST_NAME + len(form.prefix):
            return _NONE, MAYBE
        name = name if name in self._names else name.removeprefix(form.prefix)
        # One that stands among calls without a mark of their own is passed over, since others may follow
        if name not in self._names and not (form.is_whole and name):
            return _NONE, NO
        own, at = self._own_id(held, begin, at)
        if at >= 0:
            ends = [match(each, held, at) for each in self._middles]
            at = max(ends) if max(ends) >= 0 else min(ends)
        if at < 0 or form.arguments == "keywords":
            return _Lead(name, own), at
        return _Lead(name, own), self._arguments_at(held, at)

    def _object_begun(self, befores: list[str], held: str, at: int) -> int:
        """Return where an object begins, behind one of these texts, that may be a call; NO or MAYBE."""
        ends = [NO]
        for before in befores:
            begins = [match(before + each, held, at) for each in _BEGINS]
            begins.append(self._name_begun(before + '{"name": "', held, at))
            if max(begins) >= 0:
                return match(before + "{", held, at) - 1
            ends += begins
        return MAYBE if MAYBE in ends else NO

    def _name_begun(self, before: str, held: str, at: int) -> int:
        """Return where the name of a tool ends between this text and a quote, or NO or MAYBE."""
        end = match(before, held, at)
        if end < 0:
            return end
        found = _NAME.match(held, end)
        assert found is not None, "a name may be empty"
        if found.end() == len(held) and len(found[0]) <= LONGEST_NAME:
            return MAYBE
        return found.end() if found[0] in self._names and held.startswith('"', found.end()) else NO

    def _begin_object(self, brace: int) -> None:
        self._brace = self._scanned = brace
        self._scan, self._place = _Scan(), self._in_object

    def _own_id(self, held: str, begin: int, at: int) -> tuple[str | None, int]:
        """Return the id that the model gives a call whose name ends at `at`, and where it ends."""
        form = self._form
        if form.is_numbered:
            number = _NUMBER.match(held, at)
            if number is None or number.end() == len(held):
                return None, NO if number is None else MAYBE
            return held[begin : number.end()], number.end()
        if not form.id_mark:
            return None, at
        end = match(form.id_mark, held, at)
        if end == NO:
            return None, at
        found = _ID.match(held, end) if end >= 0 else None
        if found is None or found.end() == len(held):
            return None, MAYBE
        return found[0] or None, found.end()

    def _arguments_at(self, held: str, at: int) -> int:
        """Return where arguments begin behind the middle of a call, or NO or MAYBE."""
        after = after_space(held, at, MOST_SPACE + 1)
        if after - at > MOST_SPACE:
            return NO
        if after == len(held):
            return MAYBE
        pairs, mark = self._form.pairs, self._form.end_mark
        if pairs is None:
            if held[after] == "{" or (mark and held.startswith(mark, after)):
                return after
            return MAYBE if mark.startswith(held[after:]) else NO
        begins = [match(each, held, after) for each in (pairs.key, self._form.tail.split()[0])]
        if max(begins) >= 0:
            return after
        return MAYBE if MAYBE in begins else NO

    def _begin(self, parsed: Parsed, lead: _Lead, text: str) -> None:
        self._held = self._held[len(text) :]
        self._scan, self._tail, self._refused_at = _Scan(), self._form.tail, NO
        self._is_within = bool(self._form.opening) and not self._form.is_whole
        self._is_unknown = lead.name not in self._names
        if self._is_unknown:
            parsed.say(text)
            self._scan.depth, self._place = 1, self._in_unknown
            return
        if self._form.arguments == "keywords":
            self._name, self._lead, self._keywords, self._num_keywords = lead.name, text, [], 0
            self._place = self._in_keywords
            return
        parsed.add(CallDelta(self.num_calls, lead.name, id=lead.id))
        self.num_calls += 1
        if self._form.arguments == "json":
            self._place = self._in_json
        else:
            self._reader = reader_of(self._form, self._schemas.get(lead.name), is_held=self._has_grammar)
            self._place = self._in_reader

    def _in_unknown(self, parsed: Parsed) -> bool:
        scan = self._scan.json if self._form.arguments == "json" else self._scan.keywords
        taken = scan(self._held)
        parsed.say(self._held[:taken])
        self._held = self._held[taken:]
        if self._scan.depth == 0:
            self._place = self._behind_call
        return True

    def _add(self, parsed: Parsed, arguments: str) -> None:
        if arguments:
            parsed.add(CallDelta(self.num_calls - 1, arguments=arguments))

    def _in_json(self, parsed: Parsed) -> bool:
        mark = self._form.end_mark
        taken = self._scan.json(self._held, mark)
        is_empty = self._scan.depth == taken == 0  # the call ends where they would begin
        self._add(parsed, "{}" if is_empty else self._held[:taken])
        self._held = self._held[taken:]
        if self._scan.depth == 0 or (mark and self._held.startswith(mark)):
            self._place = self._in_tail
            return True
        return False

    def _in_object(self, parsed: Parsed) -> bool:
        """Hold a call that is read as a whole: up to its last brace, or to where the next call begins."""
        held, form = self._held, self._form
        sought = max(self._brace + 1, self._scanned - self._mark_size)
        self._scanned += self._scan.json(held[self._scanned :])
        cut = None if self._mark is None else self._mark.search(held, sought, self._scanned)
        size = (self._scanned if cut is None else cut.start()) - self._brace
        if cut is not None or size > self._longest_object:
            self._refuse_object(min(size, self._longest_object))
            return True
        if self._scan.depth:
            return False
        call = self._whole_call(held[self._brace : self._scanned])
        if call is None:
            self._refuse_object(size)
            return True
        parsed.add(call)
        self.num_calls += 1
        self._is_unknown = False
        self._held = held[self._scanned :]
        self._tail = form.tail.removeprefix("}") if form.arguments == "json" else ""
        self._is_within = bool(form.opening) and not form.is_whole
        self._place = self._in_tail
        return True

    def _refuse_object(self, size: int) -> None:
        """Let the object that is held, of so many characters, be looked at again as other text."""
        self._num_refused += size
        if self._num_refused > MOST_REFUSED:
            self._before_objects = self._next_objects = []
        self._refused_at = after_space(self._held, 0, len(self._held))
        self._place = self._in_content

    def _whole_call(self, text: str) -> CallDelta | None:
        """Return the call that a JSON object is, or None."""
        try:
            read = json.loads(text, strict=False)
            given = read.get("arguments", read.get("parameters"))
            # Without a mark before it, an object that names a tool and nothing else need not be a call.
            given = {} if given is None and not self._form.is_whole else given
            given = (json.loads(given) if given.strip() else {}) if isinstance(given, str) else given
            name, is_known = read.get("name"), not read.keys() - _KEYS
            if (
                not is_known
                or not isinstance(name, str)
                or name not in self._names
                or not isinstance(given, dict)
            ):
                return None
            if self._form.is_whole and {"type", "properties"} <= given.keys():  # the answer describes a tool
                return None
            return CallDelta(self.num_calls, name, dumped(given))
        except (ValueError, RecursionError):
            return None

    def _in_reader(self, parsed: Parsed) -> bool:
        assert self._reader is not None, "a reader is made when a call begins"
        taken, arguments = self._reader.read(self._held)
        self._add(parsed, arguments)
        self._held = self._held[taken:]
        if self._reader.is_complete:
            self._place = self._in_tail
        return bool(taken or arguments or self._reader.is_complete)

    def _in_tail(self, parsed: Parsed) -> bool:
        at = self._past_members(self._held)
        end = match(self._tail, self._held, at) if at >= 0 else at
        if end == NO:
            end = self._end_of_spoilt_tail(self._held, at)
        if end == MAYBE:
            return False
        self._held, self._place = self._held[max(end, 0) :], self._behind_call
        return True

    def _past_members(self, held: str) -> int:
        """Return where an object goes on behind an id or a type that follows its arguments, or MAYBE."""
        at, keys = 0, ("id", "type", "id")  # in either order
        for key in keys if self._form.before_object is not None and self._tail[:1] == "}" else ():
            end = match(f', "{key}": "', held, at)
            found = _ID.match(held, end) if end >= 0 else None
            if end == MAYBE or (found is not None and found.end() == len(held)):
                return MAYBE
            if found is not None and held[found.end()] == '"':
                at = found.end() + 1
        return at

    def _end_of_spoilt_tail(self, held: str, at: int) -> int:
        """Return where a tail ends that has too many or too few braces, or no last word; NO or MAYBE."""
        first, *rest = self._tail.split() or [""]
        if first == "}" and rest:
            braces = _BRACES.match(held, at)
            assert braces is not None, "there may be none"
            end = match(rest[0], held, braces.end())
            if end != NO:
                return end
        return match(first, held, at) if rest else NO

    def _in_keywords(self, parsed: Parsed) -> bool:
        taken = self._scan.keywords(self._held)
        self._keywords.append(self._held[:taken])
        self._num_keywords += taken
        self._held = self._held[taken:]
        if self._scan.depth > 0:
            return True
        keywords = "".join(self._keywords)
        arguments = _as_json(keywords)
        if arguments is None:
            parsed.say(self._lead + keywords)
            self._resume()
            return True
        parsed.add(CallDelta(self.num_calls, self._name, arguments))
        self.num_calls += 1
        self._place = self._behind_call
        return True

    def _behind_call(self, parsed: Parsed) -> bool:
        held = self._held
        lead, end = _decided([self._begun(each, held, 0) for each in self._next_leads])
        if end >= 0:
            self._begin(parsed, lead, held[:end])
            return True
        closings = [] if self._is_unknown else [match(each, held, 0) for each in self._closings]
        closed = max(closings, default=NO)
        if MAYBE in (end, *closings) and (closed < 0 or closings[0] == MAYBE):
            return False
        if closed == NO and self._before_objects:
            brace = self._object_begun(self._next_objects, held, 0)
            if brace == MAYBE:
                return False
            if brace >= 0:
                self._resume()
                self._begin_object(brace)
                return True
        self._held = held[max(closed, 0) :]
        self._is_within = self._is_within and closed < 0
        self._resume()
        return True

    def _resume(self) -> None:
        self._place, self._is_blank = self._in_content, True
        self._may_begin = not self._form.is_whole


@dataclass(frozen=True, slots=True)
class _Lead:
    """The name of a call that has begun, and the id that the model gave it."""

    name: str = ""
    id: str | None = None


_NONE = _Lead()


def _decided(found: list[tuple[_Lead, int]]) -> tuple[_Lead, int]:
    """Return one of several that begins; if none does, one that may begin, if there is one."""
    ends = [end for _, end in found]
    return found[ends.index(max(ends)) if max(ends) >= 0 else ends.index(min(ends))]


class _Scan:
    """Finds the end of arguments, across pieces of text."""

    def __init__(self) -> None:
        self.depth = 0
        self._quote = ""  # the quotes that end the text that goes on
        self._num_quotes = 0  # quotes in a row up to here that may be one mark: three begin or end a text
        self._is_escaped = False
        self._is_spoilt = False  # whether a text has begun where none may
        self._last = "{"  # the last character outside of texts, white space aside

    def json(self, text: str, mark: str = "") -> int:
        """Return how much of the text belongs to the object, which begins with a brace.

        It ends before the mark or a beginning of it, too, but not within a text that begins where one may.
        """
        first = mark[:1]
        for at, char in enumerate(text):
            is_end = char == first and (not self._quote or self._is_spoilt)
            if is_end and mark.startswith(text[at : at + len(mark)]):
                return at
            self._step(char, '"')
            if not self.depth:
                return at + 1
        return len(text)

    def keywords(self, text: str) -> int:
        """Return how much of the text belongs to the keywords, including their closing bracket."""
        self.depth = self.depth or 1
        for at, char in enumerate(text):
            self._step(char, "\"'")
            if not self.depth:
                return at + 1
        return len(text)

    def _step(self, char: str, quotes: str) -> None:
        if self._quote:
            if self._is_escaped:
                self._is_escaped, self._num_quotes = False, 0
            elif char in self._quote:
                self._num_quotes += 1
                self._quote = self._quote if self._num_quotes < len(self._quote) else ""
            else:
                self._is_escaped, self._num_quotes = char == "\\", 0
            return
        if char in quotes:
            # JSON has one kind of quote, and no text that begins with three
            is_triple = len(quotes) > 1 and self._num_quotes == 2 and char == self._last
            self._quote, self._num_quotes = (char * 3, 0) if is_triple else (char, 1)
            self._is_spoilt |= self._last not in "{[,:"
        else:
            self._num_quotes = 0
            if char in "{[(":
                self.depth += 1
            elif char in "}])":
                self.depth -= 1
        if not char.isspace():
            self._last = char


def _as_json(keywords: str) -> str | None:
    """Return Python keywords and their closing bracket as a JSON object.

    Values may be written as JSON, too, so that `\\/` is a slash, and two surrogates are one character. The
    result is None if the values are not plain.
    """
    code = _ESCAPE.sub(lambda found: "/" if found[1] == "/" else found[0], keywords)
    try:
        with warnings.catch_warnings(action="ignore"):  # Python warns of a backslash that it would keep
            call = ast.parse(f"call({code}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            return None
        values = {
            str(each.arg): ast.literal_eval(_WithConstants().visit(each.value)) for each in call.keywords
        }
        return dumped(values)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


class _WithConstants(ast.NodeTransformer):
    """Replaces JSON's names of constants by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:  # ast.NodeTransformer requires this name
        return ast.Constant(_LITERALS[node.id]) if node.id in _LITERALS else node
