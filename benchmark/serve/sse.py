"""Decode the events that a server streams, and the parts of them that are counted."""

from __future__ import annotations

from typing import Any

import msgspec


class ChatDelta(msgspec.Struct):
    """The part of a message that a chunk of a chat adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    """One answer's part of a chunk; `text` of a completion, `delta` of a chat."""

    text: str | None = None
    delta: ChatDelta | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        if self.delta is None:
            return bool(self.text)
        given = self.delta
        return bool(given.content or given.reasoning_content or given.reasoning or given.tool_calls)


class Cached(msgspec.Struct):
    """Tokens of the prompt that were found in a cache."""

    cached_tokens: int | None = None


class TokenUsage(msgspec.Struct):
    """Tokens so far; in the last chunk, tokens of the whole answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Cached | None = None


class StreamChunk(msgspec.Struct):
    """One event's data. Other fields that servers send are ignored."""

    choices: list[Choice] | None = None
    usage: TokenUsage | None = None
    error: Any = None


read_chunk = msgspec.json.Decoder(StreamChunk).decode


class Events:
    """Splits bytes from the network into the data of events.

    An event ends with an empty line. Comments and fields other than `data` are ignored, and several lines of
    data are joined, as the standard for server-sent events has it.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that are complete by now; raises ValueError for one beyond 16 MiB."""
        text = self._rest + received
        if b"\r" in text:
            held = text.endswith(b"\r")  # the line feed may come next
            text = text.replace(b"\r\n", b"\n")
            text = text[:-1].replace(b"\r", b"\n") + b"\r" if held else text.replace(b"\r", b"\n")
        *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > 2**24:
            raise ValueError("an event of the stream is longer than 16 MiB")
        return [data for event in events if (data := _data(event))]


def _data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly every event has this form
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
