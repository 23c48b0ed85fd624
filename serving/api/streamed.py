"""Send a response in parts as they are made, to a client that may read slowly or disconnect.

Proxies end a connection on which nothing is sent for a minute or so, and a request may wait longer for its
first token. So a stream of events that has nothing to say for a while sends what its readers skip.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"  # a line of server-sent events that every reader skips
PATIENCE_S = 60.0  # total time that a client may make the server wait
SLOWEST_BYTES_S = 2**16  # each of these many bytes earns the client one more second
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """What a stream sends between two events after `every_s` of silence; 0: it stays silent.

    A part that ends with `event_end` completes an event.
    """

    every_s: float = 0.0
    sign: bytes = COMMENT
    event_end: bytes = b"\n\n"


_SILENT = KeepAlive()


class StreamedResponse(Response):
    """A response that sends parts as they come, and signs of life between events.

    `end` is called when nobody reads any more, for whatever reason. When `cut` returns, or the client reads
    too slowly, the connection is dropped with everything that was not read.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        end: Callable[[], None],
        cut: Callable[[], Awaitable[object]],
        media_type: str = EVENTS,
        keep_alive: KeepAlive = _SILENT,
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        if media_type == EVENTS:
            self.headers["cache-control"] = "no-cache"
            self.headers["x-accel-buffering"] = "no"
        self._parts = parts
        self._end = end
        self._cut = cut
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts."""
        pace = Pace(send, self._keep_alive.event_end)
        works = [self._send(pace), gone(receive), self._cut()]
        if self._keep_alive.every_s:
            works.append(self._stay_alive(pace))
        tasks = [asyncio.ensure_future(each) for each in works]
        try:
            ends: list[asyncio.Future[Any]] = [*tasks, pace.is_late]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            cut_off = scope.get("state", {}).get("cut_off")
            ended = [each for each in (tasks[0], *tasks[3:]) if each.done()]
            if ended:
                ended[0].result()
            elif (pace.is_late.done() or tasks[2].done()) and cut_off is not None:
                cut_off()  # otherwise what the client does not read would be kept in memory
                await tasks[1]
        finally:
            for task in tasks:
                task.cancel()
            pace.close()
            self._end()

    async def _send(self, pace: Pace) -> None:
        await pace.send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        more = True
        async with contextlib.aclosing(self._parts):
            async for part in self._parts:
                more = not part.endswith(DONE)  # the last event also ends the response
                if part:
                    await pace.send({"type": "http.response.body", "body": part, "more_body": more})
        if more:
            await pace.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stay_alive(self, pace: Pace) -> None:
        """Send a sign of life after each silence between two events, until this is cancelled."""
        every_s = self._keep_alive.every_s
        sign: Message = {"type": "http.response.body", "body": self._keep_alive.sign, "more_body": True}
        while True:
            silent_s = time.monotonic() - pace.sent_s
            if silent_s >= every_s and pace.is_between_events:
                await pace.send(sign)
                silent_s = 0.0
            await asyncio.sleep(every_s - silent_s if silent_s < every_s else every_s)


class Pace:
    """Sends messages one after the other, and measures how long the client made the server wait.

    `is_late` is done once that is too long. A timer looks for it, since a limit on each message would cost
    more than the message itself; it is exact, because the time left shrinks only while a message waits.
    """

    def __init__(self, send: Send, event_end: bytes = b"\n\n") -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._event_end = event_end
        self._left_s = PATIENCE_S
        self._in_turn = asyncio.Lock()  # parts and signs of life come from two tasks
        self.sent_s = time.monotonic()  # when a message was last sent
        self._began_s: float | None = None  # when the message began that is being sent
        self.is_between_events = False  # the head or an event is complete, and more is to come
        self.is_late: asyncio.Future[None] = self._loop.create_future()
        self._timer = self._loop.call_later(self._left_s, self._look)

    def close(self) -> None:
        """Look no longer."""
        self._timer.cancel()

    async def send(self, message: Message) -> None:
        """Send a message."""
        async with self._in_turn:
            self._began_s, self.is_between_events = time.monotonic(), False
            body = message.get("body", b"")
            self._left_s += len(body) / SLOWEST_BYTES_S  # now, since one message may be a long answer
            await self._send(message)
            self.sent_s = time.monotonic()
            self._left_s -= self.sent_s - self._began_s
            self._began_s = None
            self.is_between_events = message.get("more_body", True) and (
                not body or body.endswith(self._event_end)
            )

    def _look(self) -> None:
        """Say so if the client is too slow, or look again at the earliest time at which it can be."""
        waiting_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        if (left_s := self._left_s - waiting_s) > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif not self.is_late.done():
            self.is_late.set_result(None)


async def gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
