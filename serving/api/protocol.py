"""Bound how much of a request is read before its path is known, and for how long.

uvicorn's parser limits neither the size of a request's first line and headers nor how slowly they arrive: a
client could fill the memory with a header that never ends, or hold connections that never send a request.
This module also closes refused connections so that their clients can read the reason.

A proxy that forwards a request and this server must not read two different requests from the same bytes
(request smuggling). So a head that can be read in two ways is refused; none of its readings is chosen.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from typing import Any, cast

import httptools
from starlette.responses import Response
from uvicorn._types import ASGI3Application, HTTPScope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from serving.api.errors import error_response

Headers = list[tuple[bytes, bytes]]  # the names are in lower case

# Each of these headers carries one value that decides what is done and for whom. Other headers are lists
# (connection, content-encoding, tracestate), are checked by the parser (content-length), or have no meaning
# here.
SINGLE = (
    *(b"authorization", b"content-type", b"expect", b"host", b"transfer-encoding", b"x-tenant"),
    *(b"origin", b"access-control-request-method", b"x-api-key"),
)
_ABSOLUTE = re.compile(rb"[^/?#]+://([^/?#]*)")  # a target that includes scheme and host


def take_host(headers: Headers, target: bytes) -> None:
    """Replace the Host header by the host that the target names, if it names one."""
    if absolute := _ABSOLUTE.match(target):
        headers[:] = [each for each in headers if each[0] != b"host"] + [(b"host", absolute[1])]


def head_refusal(headers: Headers, version: str) -> tuple[int, str] | None:
    """Return the status and the reason to refuse a request with this head, or None to accept it."""
    if version not in ("1.0", "1.1"):
        return 505, f"this server speaks HTTP/1.1, not HTTP/{version}"
    names = [name for name, _ in headers]
    if b"host" not in names and version == "1.1":
        return 400, "a request has one Host header, and this has none"
    for name in SINGLE:
        if (number := names.count(name)) > 1:
            title = "-".join(word.capitalize() for word in name.decode().split("-"))
            return 400, f"a request has one {title} header, and this has {number}; send one"
    if b"transfer-encoding" in names and version == "1.0":
        return 400, "HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1"
    if dict(headers).get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        return 400, "the only Transfer-Encoding is chunked; send the body without another"
    return None


MOST_HEAD_BYTES = 64 * 1024
MOST_HEADERS = 100
MOST_DELAYED_BYTES = 2**16  # bytes that are not delayed until the next turn, since they would fill the memory
MOST_WAITING = 64  # pipelined requests that may wait on one connection
MOST_WAITING_BYTES = 2**20  # bytes of the bodies of waiting requests
LINGER_S = 2.0  # time that a refused client has to read why, while what it still sends is discarded
PROBE_S = 0.5  # interval between checks whether a client that has ended its sending still reads
WHOLE_S = 60.0  # time from a request's first byte, or a connection's start, to the request's last byte

_TOO_MANY = (
    f"at most {MOST_WAITING} requests and {MOST_WAITING_BYTES} bytes may wait on one connection behind"
    " another request; wait for its answer, or use more connections"
)
# A client of HTTP/1.1 ignores it at any time before the response.
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_CLOSE = 7  # TCP_CLOSE in Linux: the connection was reset
_TOO_LARGE = f"path and headers may be {MOST_HEAD_BYTES} bytes and {MOST_HEADERS} headers; shorten them"


def _nobody_asks() -> None:
    pass


def _application(response: Response) -> ASGI3Application:
    """Return a response as the application that it is; starlette and uvicorn only spell the types apart."""
    return cast(ASGI3Application, response)


class ResponseTransport:
    """A transport that delays what is written until the next turn of the event loop.

    A head then goes out with the first piece of its body, since a client that is woken for the head alone
    costs more than the head. And all streams that a step of the engine has brought tokens are written one
    after the other: work of one kind after work of another, stream by stream, takes longer.

    Where a client `still_sends`, `close` first ends only our sending direction for a while; otherwise the
    system would answer the remaining bytes with a reset, and the client would lose a response that it has
    not read.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, still_sends: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._delayed = b""
        self._still_sends = still_sends
        self.is_lingering = False  # bytes that arrive now are to be discarded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write the data in the next turn, or now if it is long."""
        if not self._delayed:
            self._loop.call_soon(self.flush)
        self._delayed += data
        if len(self._delayed) > MOST_DELAYED_BYTES:
            self.flush()

    def close(self) -> None:
        """Close the connection when everything is written."""
        self.flush()
        if self._transport.is_closing() or not self._still_sends():
            self._transport.close()
        elif not self.is_lingering:
            self.is_lingering = True
            self._transport.resume_reading()
            if self._transport.can_write_eof():  # a direction of TLS cannot end alone
                self._transport.write_eof()
            self._loop.call_later(LINGER_S, self._transport.close)

    def is_closing(self) -> bool:
        """Return whether nothing more can be sent."""
        return self.is_lingering or self._transport.is_closing()

    def flush(self) -> None:
        """Write what was delayed now."""
        if self._delayed and not self.is_closing():
            delayed, self._delayed = self._delayed, b""
            self._transport.write(delayed)


class Protocol(HttpToolsProtocol):
    """One of at most `most_connections` connections.

    An application may call `scope["state"]["cut_off"]` to drop the connection at once, with everything that
    its client has not read. A callback that the application puts into `scope["state"]["when_gone"]`, once it
    has the body, is called when the client disconnects before its answer is complete.
    """

    _in_request = False
    _in_head = False
    # Whether the parser reported a request's beginning, or its body, in the current bytes.
    _has_reported = False
    _is_refused = False
    _lingers = False  # the client may still send the rest of what was refused
    _num_head_bytes = 0
    _num_unreported = 0  # those of them of which the parser has reported nothing yet
    _due: asyncio.TimerHandle | None = None
    # The next check for a reader, after the client ended its sending.
    _probe: asyncio.TimerHandle | None = None
    # The request that is being answered, or was last; other requests may wait behind it.
    _answered: RequestResponseCycle | None = None

    def __init__(self, *arguments: Any, most_connections: int, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._most_connections = most_connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle a new connection."""
        self._responses = ResponseTransport(cast(asyncio.Transport, transport), self.loop, self._still_sends)
        super().connection_made(cast(asyncio.Transport, self._responses))
        self._start_timer()
        if len(self.connections) > self._most_connections:
            self._refuse(
                503,
                f"there are {self._most_connections} connections already; try again later",
                lingers=False,  # lingering would keep a file descriptor open
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        self._stop_timer()
        if self._probe is not None:
            self._probe.cancel()
        self._drop_requests()
        super().connection_lost(exc)

    def _drop_requests(self) -> None:
        """Tell every unanswered request that its client has disconnected."""
        self.pipeline.clear()
        for cycle in (self._answered, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                when_gone: Callable[[], None] = cycle.scope.get("state", {}).get("when_gone", _nobody_asks)
                when_gone()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and count those of an unfinished head or trailer.

        The parser reports nothing on them before they end.
        """
        if self._is_refused or self._responses.is_lingering:
            return
        self._has_reported = False
        self._unset_keepalive_if_required()
        try:
            self._read(data)
        # HttpParserUpgrade here means CONNECT
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse(400, "the request is not valid HTTP/1.1; send it as RFC 9112 defines")
        if self._in_request and not self._has_reported:
            self._num_unreported += len(data)
            self._count(len(data))
        if self.pipeline and not self.transport.is_closing():
            self._listen_on()
        is_idle = self.cycle is None or (self.cycle.response_complete and not self.pipeline)
        if is_idle and self._due is None and self.timeout_keep_alive_task is None:
            self._start_timer()  # only a line break between requests came, or the rest of a refused request

    # uvicorn annotates None, but asyncio's transports read the result
    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's sending.

        Complete requests are answered, unless the client is gone.
        """
        self._responses.flush()
        if self._in_request and not self._responses.is_closing():
            self._refuse(400, "the request ended before it was complete; send it again", lingers=False)
        last = self.cycle
        if not self._responses.can_write_eof():  # a connection with TLS ends in both directions
            return False
        if last is None or last.more_body or last.response_complete or self._responses.is_closing():
            return False  # the transport then closes itself
        last.keep_alive = False
        self._stop_timer()
        self._probe = self.loop.call_later(PROBE_S, self._look_for_reader, True)
        return True

    def _look_for_reader(self, is_first: bool = False) -> None:
        """Check whether a client that has ended its sending still reads.

        A client that only ended its sending and one that is gone look the same until something is sent: the
        system of the latter answers with a reset. Before the response has begun, "100 Continue" is sent to
        find out.
        """
        answered = self._answered
        if self._responses.is_closing() or answered is None:
            return
        accepted = self._responses.get_extra_info("socket")
        if accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self._responses.abort()
            return
        if is_first and not answered.response_started and answered.scope["http_version"] == "1.1":
            self._responses.write(_CONTINUE)
        self._probe = self.loop.call_later(PROBE_S, self._look_for_reader)

    def on_message_begin(self) -> None:
        """Handle the first byte of a request."""
        super().on_message_begin()
        self.scope["state"]["cut_off"] = self.transport.abort
        self._in_request, self._in_head, self._has_reported = True, True, True
        self._num_head_bytes = self._num_unreported = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        """Handle a piece of the path."""
        super().on_url(url)
        self._report(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header; trailers after a body are no headers, and never replace one."""
        self._report(len(name) + len(value))
        if not self._in_head:
            return
        super().on_header(name, value)
        if len(self.headers) > MOST_HEADERS:
            self._refuse(431, _TOO_LARGE)

    def on_headers_complete(self) -> None:
        """Handle the end of the head."""
        self._in_head = False
        if self._is_refused or self.parser.should_upgrade():
            return
        version = self.parser.get_http_version()
        if refused := head_refusal(self.headers, version):
            self._refuse(*refused)
            return
        take_host(self.headers, self.url)
        # A client of HTTP/1.0 would take "100 Continue" for the response.
        self.expect_100_continue &= version == "1.1"
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handle a piece of the body."""
        self._has_reported, self._num_head_bytes, self._num_unreported = True, 0, 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a request."""
        if self.parser.should_upgrade():
            return  # only the head is complete
        self._in_request = False
        self._stop_timer()
        if not self._is_refused:
            super().on_message_complete()
            # Reading pauses on a long body; without resuming it, a disconnect would go unnoticed.
            self.flow.resume_reading()

    def _report(self, num_bytes: int) -> None:
        """Count bytes that the parser reports, in place of as many that came while it reported nothing."""
        self._num_head_bytes -= min(self._num_unreported, num_bytes)
        self._has_reported, self._num_unreported = True, 0
        self._count(num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MOST_HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)

    def _read(self, data: bytes) -> None:
        """Parse bytes, and ignore requests to upgrade to another protocol.

        The parser stops after the head of such a request and would take the body for the next request. No
        other protocol is spoken here, so the head is parsed again without its Upgrade header.
        """
        rest = memoryview(data)
        while not self._is_refused:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                rest = rest[stop.args[0] :]
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            lines = [method + b" " + self.url + b" HTTP/" + version]
            lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            # uvicorn's parser has this leniency too.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _refuse(self, status: int, message: str, *, lingers: bool = True) -> None:
        if self._is_refused:
            return
        self._is_refused = True
        answered, response = self._answered, error_response(status, message)
        if answered is not None and answered.response_complete:
            answered = None
        if answered is not None and not (answered is self.cycle and answered.more_body):
            self._refuse_in_turn(response, lingers)
            return
        if answered is None or not answered.response_started:
            lines = [STATUS_LINE[status].rstrip(), b"connection: close"]
            lines += [name + b": " + value for name, value in response.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
            self._drop_requests()
            self._stop_timer()
            self._lingers = lingers
        self.transport.close()

    def _refuse_in_turn(self, response: Response, lingers: bool) -> None:
        """Answer the last request with this refusal, once those before it are answered, and read no more."""
        # The head of the last request is incomplete.
        if not self.pipeline or not self.pipeline[0][0].more_body:
            self.cycle = self._nothing()
            self.pipeline.appendleft((self.cycle, _application(response)))
        self._refuse_last(response, lingers)

    def _refuse_last(self, response: Response, lingers: bool) -> None:
        self._is_refused, self._lingers = True, lingers
        self.cycle.keep_alive = self.cycle.more_body = False
        self.cycle.body.clear()
        self.pipeline[0] = self.cycle, _application(response)

    def _nothing(self) -> RequestResponseCycle:
        """Return a request cycle for a request of which nothing is known."""
        scope = cast(HTTPScope, {"type": "http", "method": "GET", "http_version": "1.1", "headers": []})
        return RequestResponseCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=False,
            on_response=self.on_response_complete,
        )

    def _still_sends(self) -> bool:
        return self._lingers or (self.cycle is not None and self.cycle.more_body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _listen_on(self) -> None:
        """Go on reading although requests wait; uvicorn would stop, and would not notice a disconnect."""
        self.flow.resume_reading()
        num_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if len(self.pipeline) > MOST_WAITING or num_bytes > MOST_WAITING_BYTES:
            self._refuse_last(error_response(413, _TOO_MANY), lingers=True)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._due = self.loop.call_later(WHOLE_S, self._late)

    def _stop_timer(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _late(self) -> None:
        """Close a connection whose request has not arrived, unless an earlier request is being answered."""
        answers = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if answers or self.pipeline:
            self._start_timer()
        elif self._in_head or (self.cycle is not None and not self.cycle.response_started):
            self._refuse(408, f"the request was not complete within {WHOLE_S:g} s; send it again")
        else:
            self.transport.close()
