"""Send a client its answer, and signs of life while it waits for one that is streamed.

A stream that has had nothing but signs of life is not answered yet: it may still be answered by another
replica. What is a sign of life, and what an event that refuses the request, is known here for each API.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Message, Send

from serving.api.errors import anthropics_error, error_body
from serving.api.streamed import COMMENT, EVENTS, Pace
from serving.failures import EngineEnded
from serving.router.upstream import HeaderLines

MESSAGES = "/v1/messages"  # Anthropic's path, and the beginning of its others
WITH_DONE = ("/v1/chat/completions", "/v1/completions")  # the paths whose streams end with [DONE]
REFUSED = (429, 502, 503)  # statuses after which another replica may accept the request
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
STREAM_HEAD: HeaderLines = [
    (b"content-type", EVENTS.encode() + b"; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_ENDS = (b"\r\n\r\n", b"\n\n", b"\r\r")  # how an event ends
_END = re.compile(b"|".join(_ENDS))
# What a response of OpenAI's begins with, whether it is answered or fails; its JSON is one line
_OPENING = re.compile(rb"(?:event: response\.(?:created|in_progress)\ndata: [^\n]*\n\n){0,2}")
_LOSS = b'"%s"' % EngineEnded.code.encode()  # Within a string of an answer its quotes are escaped
_MOST_FIRST = 2**16  # bytes after which an event is taken to be part of an answer before its end
# How the two other APIs name what REFUSED names by status
_OVERLOADED = ("overloaded_error", "rate_limit_error")
_AGAIN = (*REFUSED, EngineEnded.code, "rate_limit_exceeded")


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a replica said that does not answer, and how that is passed on.

    An event that comes in no frame tells no status: 0. It `is_loss` where the replica says that its engine
    ended with the request, and `is_of_known` where it refuses what is known of the answer, not the request.
    """

    status: int
    pass_on: Callable[[], Awaitable[None]]
    is_loss: bool = False
    is_of_known: bool = False


def is_event_stream(headers: HeaderLines) -> bool:
    """Return whether a head announces a stream of events."""
    return any(name == b"content-type" and value.startswith(EVENTS.encode()) for name, value in headers)


def begun_with(received: bytes) -> tuple[bytes, bytes]:
    """Split the beginning of a stream into signs of life and the rest, which may be a part of an event."""
    at = 0
    while (end := _END.search(received, at)) and _is_sign(received[at : end.start()]):
        at = end.end()
    return received[:at], received[at:]


def has_event(received: bytes) -> bool:
    """Return whether this begins with a whole event, or with one that is long, behind an opening."""
    at = _opening_end(received)
    return len(received) - at > _MOST_FIRST or _END.search(received, at) is not None


def _opening_end(stream: bytes) -> int:
    """Return where the events end that say nothing yet of whether a request is answered; 0: it has none."""
    opening = _OPENING.match(stream)
    return 0 if opening is None else opening.end()


def whole_events(received: bytes) -> tuple[bytes, bytes]:
    """Split a part of a stream behind its last whole event; a very long event is not held back."""
    at = max(received.rfind(end) + len(end) if end in received else 0 for end in _ENDS)
    return (received[:at], received[at:]) if len(received) - at <= _MOST_FIRST else (received, b"")


def before_loss(events: bytes) -> bytes:
    """Return what comes before the event with which a server says that its engine ended; all without one."""
    named = events.find(_LOSS)
    if named < 0:
        return events
    at = max(events.rfind(end, 0, named) + len(end) if end in events[:named] else 0 for end in _ENDS)
    return events[:at] if tells_of_loss(first_data(events[at:])) else events


def _is_sign(event: bytes) -> bool:
    lines = [each for each in event.splitlines() if each and not each.startswith(b":")]
    return not lines or lines[0].replace(b" ", b"") == b"event:ping"


def refuses(stream: bytes) -> bool:
    """Return whether the first event of a stream behind its opening refuses; another replica may accept."""
    error = _error_in(first_data(stream))
    return _field(error, "type") in _OVERLOADED or any(code in _AGAIN for code in _codes(error))


def first_data(stream: bytes) -> bytes:
    """Return the data of the first event of a stream behind its opening; none where that is long."""
    event = _END.split(stream[_opening_end(stream) :], 1)[0]
    if len(event) > _MOST_FIRST:
        return b""
    return b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))


def tells_of_loss(body: bytes) -> bool:
    """Return whether an error says, as OpenAI's or Anthropic's, that the engine ended with the request."""
    return EngineEnded.code in _codes(_error_in(body))


def _error_in(body: bytes) -> Any:
    """Return what tells of an error in an answer or an event; None where nothing does."""
    if b'"error"' not in body:
        return None
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_response = _field(found, "type") == "response.failed"
    return _field(_field(found, "response") if is_response else found, "error")


def _codes(error: Any) -> tuple[Any, Any]:
    """Return the code of an error, and what its API has no code for."""
    return _field(error, "code"), _field(_field(error, "details"), "error_code")


def _field(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, dict) else None


def own_error(
    path: str, status: int, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    """Return the JSON of an error of the router's own, in the form of the API that the path belongs to."""
    if not path.startswith(MESSAGES):
        return error_body(status, message, param, code)
    return anthropics_error(status, message, None, code)


def error_event(path: str, error: bytes) -> bytes:
    """Return the JSON of an error as the last event of a stream."""
    name = b"" if path in WITH_DONE else b"event: error\n"
    return name + b"data: " + error.replace(b"\n", b" ") + b"\n\n"


class Reply:
    """The answer to one request.

    If it `is_stream`, its client gets a sign of life between two events after `every_s` of silence; 0: none.
    A client that reads too slowly is dropped by `cut_off`. The caller calls `end`.
    """

    def __init__(
        self, send: Send, path: str, every_s: float, cut_off: Callable[[], None], *, is_stream: bool
    ) -> None:
        self._pace = Pace(send)
        self._pace.is_late.add_done_callback(lambda _: cut_off())
        self._path = path
        self._every_s = every_s
        self._sign = _PING if path.startswith(MESSAGES) else COMMENT
        self._loop = asyncio.get_running_loop()
        self._in_turn = asyncio.Lock()
        self._sent_s = self._loop.time()
        self._is_between = True
        self._is_events = True  # the answer is a stream of events, or is expected to be one
        self.has_head = False  # the head is sent, so that no other status can be
        self._timer: asyncio.TimerHandle | None = None
        self._signing: asyncio.Task[None] | None = None
        if is_stream and every_s:
            self._timer = self._loop.call_later(every_s, self._look)

    @property
    def can_fail(self) -> bool:
        """Whether `error` can follow what is sent: nothing, or whole events of a stream that goes on."""
        return not self.has_head or (self._is_events and self._is_between)

    async def head(self, status: int, headers: HeaderLines) -> None:
        """Send a head, unless that of a stream has been sent."""
        if not self.has_head:
            self._is_events = is_event_stream(headers)
        async with self._in_turn:
            await self._head(status, headers)

    async def part(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the answer, whose head has been sent."""
        async with self._in_turn:
            await self._put({"type": "http.response.body", "body": body, "more_body": more})

    async def whole(self, status: int, headers: HeaderLines, body: bytes) -> None:
        """Send a whole answer, or what it says as the last event of a stream whose head has been sent."""
        if not self.has_head:
            await self.head(status, [*headers, (b"content-length", b"%d" % len(body))])
        elif status < 400 or not body.lstrip().startswith(b"{"):
            why = f"a replica answered with status {status}, and not by a stream or a reason"
            body = error_event(self._path, own_error(self._path, 502, why))
        else:
            body = error_event(self._path, body)
        await self.part(body, more=False)

    async def error(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Send an error of the router's own."""
        headers: HeaderLines = [(b"content-type", b"application/json")]
        if retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after_s))))
        await self.whole(status, headers, own_error(self._path, status, message, param, code))

    async def end(self) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            if self._signing is not None:
                await self._signing
        finally:
            self._pace.close()

    def _look(self) -> None:
        """Give a sign of life if one is due, and look again when the next one may be."""
        silent_s = self._loop.time() - self._sent_s
        if silent_s >= self._every_s and self._is_between and not self._in_turn.locked():
            self._signing = asyncio.ensure_future(self._give_sign())
            silent_s = 0.0
        wait_s = self._every_s - silent_s if silent_s < self._every_s else self._every_s
        self._timer = self._loop.call_later(wait_s, self._look)

    async def _give_sign(self) -> None:
        async with self._in_turn:
            if self._is_between and self._is_events:
                await self._head(200, STREAM_HEAD)
                await self._put({"type": "http.response.body", "body": self._sign, "more_body": True})

    async def _head(self, status: int, headers: HeaderLines) -> None:
        if not self.has_head:
            self.has_head = True
            await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def _put(self, message: Message) -> None:
        body = message.get("body", b"")
        self._is_between = False
        await self._pace.send(message)
        self._sent_s = self._loop.time()
        self._is_between = message.get("more_body", True) and (not body or body.endswith(_ENDS))
