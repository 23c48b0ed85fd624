"""Keep HTTP/1.1 connections from the router to one server, and return the bytes of its answers as they come.

A connection carries one request at a time and is kept for later ones. Responses are parsed by httptools, as
our own server parses requests; the events of a stream are not parsed. A request is sent again if the server
had closed the kept connection on which it was sent. `Lost` is raised where no connection can be made, an
answer is not HTTP, or the connection breaks before the answer is complete. Which server is asked, and what
follows a loss, is left to `proxy`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import anyio
import httptools

from serving.tls import Tls

HeaderLines = list[tuple[bytes, bytes]]
CONNECT_S = 2.0
_UNHEARD_S = 4  # connections end after this silence if the other machine is gone, or has started again
_MOST_OVERHEAD = 2**16  # bytes of a head, or between two pieces of a body (chunk sizes, trailers)
_MOST_UNREAD = 2**18  # unread bytes of an answer; beyond it, the sender waits
_MOST_IDLE = 256  # connections that are kept for later


class Lost(Exception):
    """There is no answer, or not the rest of it.

    `may_be_done` is False where nothing was sent, so that the server cannot have done what was asked.
    It `is_orderly` where the server said so and the request is not the cause.
    """

    def __init__(self, why: str, *, may_be_done: bool = True, is_orderly: bool = False) -> None:
        super().__init__(why)
        self.may_be_done = may_be_done
        self.is_orderly = is_orderly


class UpstreamAnswer(asyncio.Protocol):
    """A connection and the answer that arrives on it.

    `status` and `headers` are set once the answer's head is complete.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_given_up = False  # this side has ended it
        self._loop = asyncio.get_running_loop()
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, HeaderLines()
        self._head: asyncio.Future[None] = self._loop.create_future()
        self._parts: deque[bytes] = deque()
        self._num_unread = self._num_overhead = 0
        self._is_kept = False  # whether the connection stays open after the answer
        self._has_body = True
        self._news: asyncio.Future[None] | None = None
        self._is_whole, self._ends_with_connection, self._trouble = False, False, ""

    async def ask(self, head: bytes, body: bytes, *, has_body: bool = True) -> None:
        """Send a request, and wait for the head of its answer, which may be the whole answer; raises Lost."""
        assert self.transport is not None, "not connected"
        self._has_body = has_body
        if self.transport.is_closing():
            raise Lost("the connection was closed")
        self.transport.write(head + body)
        await self._head

    async def next(self) -> bytes:
        """Return the next bytes of the answer, b"" at its end; raises Lost."""
        while not self._parts:
            if self._is_whole:
                return b""
            if self._trouble:
                raise Lost(self._trouble)
            self._news = self._loop.create_future()
            await self._news
        found = b"".join(self._parts) if len(self._parts) > 1 else self._parts[0]
        self._parts.clear()
        if self._num_unread > _MOST_UNREAD and self.transport is not None:
            self.transport.resume_reading()
        self._num_unread = 0
        return found

    @property
    def is_read(self) -> bool:
        """Whether the answer is complete and `next` has returned all of it."""
        return self._is_whole and not self._parts

    @property
    def can_be_used_again(self) -> bool:
        """Whether another request may be sent on the connection."""
        is_open = self.transport is not None and not self.transport.is_closing()
        return is_open and self.is_read and self._is_kept

    def use_again(self) -> None:
        """Prepare the connection for another request."""
        self._reset()

    def fail(self, why: str) -> None:
        """End the connection, and tell whoever waits for the answer why."""
        self.is_given_up = True
        self._trouble = self._trouble or why
        if self.transport is not None:
            self.transport.abort()
        self._wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is no subclass of asyncio.Transport.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ends_with_connection and exc is None and not self.is_given_up:
            self._is_whole = True
        self._trouble = self._trouble or f"the connection ended{f': {exc}' if exc else ''}"
        self._wake()

    def data_received(self, data: bytes) -> None:
        self._num_overhead += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"its answer is not HTTP: {error}")
        except httptools.HttpParserUpgrade:
            self.fail("it switched to another protocol, which was not requested")
        if self._num_overhead > _MOST_OVERHEAD:
            self.fail(f"its answer has more than {_MOST_OVERHEAD} bytes beside the body")
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Handle the end of a head; an informational response (status below 200) is skipped."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self._num_overhead = 0
        self._is_kept = self._parser.should_keep_alive()
        names = {name for name, _ in self.headers}
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
        if not self._has_body:  # the parser does not know that, and may wait for a body
            self._is_whole, self._is_kept = True, False

    def on_body(self, body: bytes) -> None:
        """Handle some bytes of the answer."""
        self._parts.append(body)
        self._num_overhead = 0
        self._num_unread += len(body)
        if self._num_unread > _MOST_UNREAD and self.transport is not None:
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        """Handle the end of the answer."""
        if self.status >= 200:
            self._is_whole = True
            self._num_overhead = 0

    def _wake(self) -> None:
        if not self._head.done():
            if self.status >= 200:
                self._head.set_result(None)
            elif self._trouble:
                self._head.set_exception(Lost(self._trouble))
                self._head.exception()  # nobody may be waiting for the exception
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class Upstream:
    """Connections to one server at http://HOST:PORT, encrypted by `tls` if it is given."""

    def __init__(self, host: str, port: int, tls: Tls | None = None) -> None:
        self.host, self.port = host, port
        self._tls = tls
        self._idle: list[UpstreamAnswer] = []
        self._open: set[UpstreamAnswer] = set()

    async def ask(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        *,
        is_once: bool = False,
    ) -> UpstreamAnswer:
        """Send a request, and return its answer once there is a head.

        Raises Lost. The caller calls `done` when it has read the answer.

        A kept connection may just have been closed by the server; the request is then sent once more, on a
        new one, unless this side has ended it: a server that is lost is not asked a second time. Where none
        can be made then, the request may be what ended the server. A request that `is_once` uses a new
        connection of its own.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {path} HTTP/1.1\r\nhost: {host}:{self.port}\r\ncontent-length: {len(body)}".encode()
        ]
        head = b"\r\n".join([*lines, *(name + b": " + value for name, value in headers), b"", b""])
        has_body = method != "HEAD"
        kept = None if is_once else self._kept()
        if kept is not None:
            try:
                return await self._asked(kept, head, body, has_body=has_body)
            except Lost:
                if kept.is_given_up:
                    raise
        try:
            connected = await self._connected()
        except Lost as lost:
            lost.may_be_done = kept is not None
            raise
        return await self._asked(connected, head, body, has_body=has_body)

    def done(self, answer: UpstreamAnswer) -> None:
        """Release an answer that nobody reads any more."""
        self._open.discard(answer)
        if answer.can_be_used_again and len(self._idle) < _MOST_IDLE:
            answer.use_again()
            self._idle.append(answer)
        else:
            answer.fail("nobody reads it")

    def lose(self, why: str) -> None:
        """End all connections; whoever waits for an answer gets Lost."""
        for answer in [*self._open, *self._idle]:
            answer.fail(why)
        self._idle.clear()

    async def _asked(
        self, answer: UpstreamAnswer, head: bytes, body: bytes, *, has_body: bool
    ) -> UpstreamAnswer:
        """Send a request on a connection, and return it once its answer has a head; raises Lost."""
        self._open.add(answer)
        try:
            await answer.ask(head, body, has_body=has_body)
        except Lost:
            self._open.discard(answer)
            raise
        except BaseException:
            self._open.discard(answer)
            answer.fail("nobody waits for it")
            raise
        return answer

    def _kept(self) -> UpstreamAnswer | None:
        while self._idle:
            answer = self._idle.pop()
            if answer.transport is not None and not answer.transport.is_closing():
                return answer
        return None

    async def _connected(self) -> UpstreamAnswer:
        loop = asyncio.get_running_loop()
        try:
            with anyio.move_on_after(CONNECT_S) as limit:  # wait_for may swallow a cancellation before 3.12
                context = None if self._tls is None else self._tls.context
                _, answer = await loop.create_connection(UpstreamAnswer, self.host, self.port, ssl=context)
        except OSError as error:
            raise Lost(f"no connection: {error.strerror or error}", may_be_done=False) from None
        if limit.cancelled_caught:
            raise Lost(f"no connection within {CONNECT_S:g} s", may_be_done=False)
        assert answer.transport is not None, "a connection that is made has a transport"
        with suppress(AttributeError):
            answer.transport.set_write_buffer_limits(2**20)
            _notice_silence(answer.transport.get_extra_info("socket"))
        return answer


def _notice_silence(connection: socket.socket) -> None:
    """Let the system end a connection when the machine at its other end acknowledges nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {
        "TCP_KEEPIDLE": _UNHEARD_S // 2,
        "TCP_KEEPINTVL": _UNHEARD_S // 4,
        "TCP_KEEPCNT": 2,
    }.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
