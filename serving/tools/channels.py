"""Define the format of models whose answers have channels (gpt-oss; the format is called harmony), and split
such answers into reasoning, text and tool calls.

An answer consists of messages: reasoning, text and calls. Each is `start` ROLE `channel` NAME `message` TEXT
and one of `ends`; the prompt ends with the first `start` and ROLE. A call names its function behind
`recipient`, before or after the channel's name. The grammar of what a model must write (definitions.py)
follows from the same definition.

As in parsing.py, every decision depends on the text so far and never on how it was cut. A message ends only
at an end mark, as in openai-harmony: any other mark within it is part of its text. A message with a malformed
head, or to a recipient that is none of the tools, is content, exactly as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serving.tools.formats import LONGEST_ID, MOST_SPACE
from serving.tools.parsing import CallDelta, Parsed, slices


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFormat:
    """The marks, all control tokens except `recipient`, and the names of the channels."""

    start: str
    channel: str
    constrain: str  # precedes the type of a call's arguments
    message: str
    ends: tuple[str, ...]  # the answer goes on after the first; the others end it

    role: str = "assistant"
    thoughts: str = "analysis"
    notes: str = "commentary"  # the channel of text between calls, and of the calls
    answer: str = "final"
    recipient: str = " to=functions."
    type: str = "json"
    id_length: int = LONGEST_ID

    @property
    def marks(self) -> tuple[str, ...]:
        """The control tokens."""
        return (self.start, self.channel, self.constrain, self.message, *self.ends)

    @property
    def begin(self) -> str:
        """The text that a prompt ends with."""
        return self.start + self.role

    @property
    def goes_on(self) -> str:
        """The text between two messages, of which the first is no call."""
        return self.ends[0] + self.begin

    def head(self, channel: str) -> str:
        """Return the text between `begin` and the content of a message on this channel."""
        return self.channel + channel + self.message

    def call_heads(self, name: str) -> tuple[str, ...]:
        """Return the possible heads of a call of this function.

        Models write some of them, and chat templates the others.
        """
        to, end = self.recipient + name, self.type + self.message
        behind, before = self.channel + self.notes + to, to + self.channel + self.notes
        return tuple(
            each + between + end for each in (behind, before) for between in (f" {self.constrain}", " ")
        )


HARMONY = ChannelFormat(
    start="<|start|>",
    channel="<|channel|>",
    constrain="<|constrain|>",
    message="<|message|>",
    ends=("<|end|>", "<|return|>", "<|call|>"),
)
NAME = "harmony"  # the value of `server.tool_format` and `server.reasoning` in a recipe


def with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as gpt-oss's template reads it, with its reasoning as `thinking`.

    In a message that calls, `thinking` contains everything that was said before the call.
    """
    thoughts, content = message.get("reasoning_content"), message.get("content", "")
    if thoughts is None:
        return dict(message)
    if "tool_calls" not in message:
        return {**message, "thinking": thoughts}
    return {**message, "content": "", "thinking": "\n".join(each for each in (thoughts, content) if each)}


def check_marks(form: ChannelFormat | None, control: Collection[str], path: str | Path) -> None:
    """Raise ValueError where the tokenizer in `path`, with these control tokens, lacks one of the marks."""
    missing = [] if form is None else [each for each in form.marks if each not in control]
    if missing:
        raise ValueError(
            f"server.reasoning is {NAME}, and the tokenizer in {path} has no control token {missing[0]};"
            " serve a model that writes on channels, such as gpt-oss, or set server.reasoning to none"
        )


LONGEST_HEAD = 256  # most characters of a head; a longer one is content
Kind = Literal["thought", "text", "as it is", "call"]
Place = Literal["between", "head", "thought", "text"]


class ChannelParser:
    """Parses one answer; `prompt` is the text before it, from the last `start` mark on.

    `num_calls` is the number of calls that have begun.
    """

    def __init__(self, form: ChannelFormat, names: Collection[str], prompt: str = "") -> None:
        self._form = form
        self._names = names
        self._head = _head_pattern(form)
        self._held = ""
        self._kind: Kind | None = None  # kind of the message whose text is arriving
        self._name = ""  # name of the function whose arguments follow
        self._place = self._between
        self._begin_anew(0)
        self.push(prompt)
        self._begin_anew(len(self._held))

    def _begin_anew(self, num_held: int) -> None:
        """Start the answer after what the prompt leaves open, which is not reported."""
        self._num_silent = num_held
        self._ended: list[bool] = []
        self._has_said: set[bool] = set()  # whether earlier messages had reasoning (True) and content (False)
        self._says: set[bool] = set()  # the same for this message
        self.num_calls = 0

    @property
    def place(self) -> Place:
        """The place where the text so far ends."""
        if self._kind is not None:
            return "thought" if self._kind == "thought" else "text"
        return "between" if self._place == self._between else "head"

    @property
    def num_held(self) -> int:
        """The number of characters of the answer so far that are not decided."""
        return max(0, len(self._held) - self._num_silent)

    @property
    def are_thoughts(self) -> list[bool]:
        """Whether each message so far, including the open one, is only reasoning."""
        return [*self._ended, self._kind == "thought"]

    def push(self, text: str) -> Parsed:
        """Add text, and return what is certain with it."""
        parsed = Parsed()
        for piece in slices(text):
            self._held += piece
            while self._held and self._place(parsed):
                pass
        return parsed

    def finish(self, *, is_ended: bool = False) -> Parsed:
        """Return the rest when no more text comes; whether the model has ended it, or it was cut.

        A head whose text never came yields nothing, or a call without arguments where the model has ended it.
        """
        parsed, held = Parsed(), self._held[self._num_silent :]
        is_call = self._place == self._before_arguments and not held.rpartition(self._form.message)[2].strip()
        if is_call and is_ended:
            self._call(parsed, "{}")
        is_head = is_call or (
            self._place == self._in_head
            and (self._form.begin.startswith(self._held) or self._head.fullmatch(self._held) is not None)
        )
        if not is_head and (self._kind is not None or held.strip()):
            self._say(parsed, held)
        self._held, self._num_silent = "", 0
        return parsed

    def _between(self, parsed: Parsed) -> bool:
        """Look for the next message; like the method of every place, returns whether anything was decided."""
        begun = self._held.lstrip()
        marks = (self._form.start, self._form.channel)
        if begun.startswith(marks):
            self._held, self._place = begun, self._in_head
            return True
        if any(mark.startswith(begun) for mark in marks):
            return False
        return self._open("as it is", 0)

    def _in_head(self, parsed: Parsed) -> bool:
        form, held = self._form, self._held
        at = held.find(form.message)
        if not self._may_be_head(held if at < 0 else held[: at + len(form.message)]):
            return self._open("as it is", 0)
        if at < 0:
            return False
        found = self._head.fullmatch(held[:at])
        if found is None:
            return self._open("as it is", 0)
        to = found["before"] if found["before"] is not None else found["behind"]
        if to is None:
            is_thought = found["channel"] == form.thoughts
            return self._open("thought" if is_thought else "text", at + len(form.message))
        prefix = form.recipient.split("=")[1]
        self._name = to.removeprefix(prefix)
        if not to.startswith(prefix) or self._name not in self._names:
            return self._open("as it is", 0)
        self._place = self._before_arguments
        return True

    def _may_be_head(self, held: str) -> bool:
        """Return whether the text is the beginning of a head, or may become one."""
        form = self._form
        if len(held) > LONGEST_HEAD + len(form.message) or any(end in held for end in form.ends):
            return False
        if form.begin.startswith(held) or held.startswith(form.channel):
            return True
        rest = held.removeprefix(form.begin).lstrip()
        openings = (form.channel, form.message, "to=")
        return held.startswith(form.begin) and any(
            rest.startswith(each) or each.startswith(rest) for each in openings
        )

    def _before_arguments(self, parsed: Parsed) -> bool:
        at = self._held.index(self._form.message) + len(self._form.message)
        rest = self._held[at:].lstrip()
        num_spaces = len(self._held) - at - len(rest)
        is_empty = rest.startswith(self._form.ends)
        if num_spaces <= MOST_SPACE and not is_empty and any(end.startswith(rest) for end in self._form.ends):
            return False
        if num_spaces > MOST_SPACE or not (is_empty or rest[0] == "{"):
            return self._open("as it is", 0)
        self._call(parsed, "{}" if is_empty else "")
        return self._open("call", at + num_spaces)

    def _call(self, parsed: Parsed, arguments: str) -> None:
        parsed.add(CallDelta(self.num_calls, self._name, arguments))
        self.num_calls += 1

    def _open(self, kind: Kind, at: int) -> bool:
        """Begin the text of a message at this position."""
        self._held = self._held[max(at, self._num_silent) :]
        self._num_silent, self._kind, self._place = 0, kind, self._in_text
        return True

    def _in_text(self, parsed: Parsed) -> bool:
        held, ends = self._held, self._form.ends
        found = [(at, end) for end in ends if (at := held.find(end)) >= 0]
        if not found:
            sizes = range(min(max(map(len, ends)) - 1, len(held)), 0, -1)
            kept = next((size for size in sizes if any(end.startswith(held[-size:]) for end in ends)), 0)
            self._say(parsed, held[: len(held) - kept])
            self._held = held[len(held) - kept :]
            return False
        at, end = min(found)
        self._say(parsed, held[:at] + (end if self._kind == "as it is" else ""))
        self._held = held[at + len(end) :]
        self._ended.append(self._kind == "thought")
        self._has_said |= self._says
        self._says = set()
        self._kind, self._place = None, self._between
        return True

    def _say(self, parsed: Parsed, text: str) -> None:
        """Report text of this message; the texts of several messages are separated by line breaks."""
        if not text:
            return
        if self._kind == "call":
            parsed.add(CallDelta(self.num_calls - 1, arguments=text))
            return
        is_thought = self._kind == "thought"
        if is_thought in self._has_said - self._says:
            text = "\n" + text
        self._says.add(is_thought)
        (parsed.think if is_thought else parsed.say)(text)


def _head_pattern(form: ChannelFormat) -> re.Pattern[str]:
    """Return a pattern for a head up to `message`; its parts may be missing or, at an answer's end, cut."""
    start, role, channel, constrain = map(re.escape, (form.start, form.role, form.channel, form.constrain))
    space, to = r"\s{0,8}", r"to=(?P<{}>[^\s<]*)"
    return re.compile(
        f"(?:{start}{role})?(?:{space}{to.format('before')})?{space}"
        f"(?:{channel}(?P<channel>\\w*)(?:{space}{to.format('behind')})?)?{space}"
        f"(?:{constrain})?{space}[\\w./-]*{space}"
    )
