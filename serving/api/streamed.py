"""Send a response in parts as they are made, to a client that may read slowly or disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
PATIENCE_S = 60.0  # total time that a client may make the server wait
SLOWEST_BYTES_S = 2**16  # each of these many bytes earns the client one more second
EVENTS = "text/event-stream"


class StreamedResponse(Response):
    """A response that sends parts as they come.

    `end` is called when nobody reads any more, for whatever reason. When `cut` returns, or the client reads
    too slowly, the connection is dropped with everything that was not read.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        end: Callable[[], None],
        cut: Callable[[], Awaitable[object]],
        media_type: str = EVENTS,
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        if media_type == EVENTS:
            self.headers["cache-control"] = "no-cache"
            self.headers["x-accel-buffering"] = "no"
        self._parts = parts
        self._end = end
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts."""
        tasks = [asyncio.ensure_future(each) for each in (self._send(send), gone(receive), self._cut())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            cut_off = scope.get("state", {}).get("cut_off")
            is_slow = tasks[0].done() and isinstance(tasks[0].exception(), _TooSlow)
            if tasks[0].done() and not is_slow:
                tasks[0].result()
            elif (is_slow or tasks[2].done()) and cut_off is not None:
                cut_off()  # otherwise what the client does not read would be kept in memory
                await tasks[1]
        finally:
            for task in tasks:
                task.cancel()
            self._end()

    async def _send(self, send: Send) -> None:
        pace = _Pace(send)
        await pace.send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        more = True
        async with contextlib.aclosing(self._parts):
            async for part in self._parts:
                more = not part.endswith(DONE)  # the last event also ends the response
                await pace.send({"type": "http.response.body", "body": part, "more_body": more})
        if more:
            await pace.send({"type": "http.response.body", "body": b"", "more_body": False})


class _TooSlow(Exception):
    """The client has kept the server waiting for too long."""


class _Pace:
    """Sends messages, and measures how long the client made the server wait."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._left_s = PATIENCE_S

    async def send(self, message: Message) -> None:
        """Send a message; raises _TooSlow."""
        start_s = time.monotonic()
        with anyio.move_on_after(
            self._left_s
        ) as limit:  # wait_for would start another task, and cost a turn of the loop
            await self._send(message)
        if limit.cancelled_caught:
            raise _TooSlow
        num_bytes = len(message.get("body", b""))
        self._left_s += num_bytes / SLOWEST_BYTES_S - (time.monotonic() - start_s)


async def gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
