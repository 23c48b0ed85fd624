"""Define the format of models whose answers have channels (gpt-oss; the format is called harmony).

The parser of what the model writes (channel_parsing.py) and the grammar of what it must write
(channel_grammar.py) follow from this one definition. An answer consists of messages: reasoning, text and
calls. Each is `start` ROLE `channel` NAME `message` TEXT and one of `ends`; the prompt ends with the first
`start` and ROLE. A call names its function behind `recipient`, before or after the channel's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.tools.formats import LONGEST_ID


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
