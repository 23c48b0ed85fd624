"""Run one of the servers beside which the router is measured.

`answers EVENTS PIECES EVERY_MS` is a replica that takes no time to compute: it answers at once, or sends a
stream's pieces at a fixed rhythm, and tells a router of tokens as real replicas do. It implements only as
much HTTP as it needs. `bytes URL` is the least that can be called a proxy: it passes bytes on to one server,
and knows only where answers end. `http URL` is the router's HTTP server and client without a router.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import cast

import httptools
import uvloop
from starlette.types import Receive, Scope, Send

from serving.continuation import FRAMES, NO_LOGPROBS, AnswerBegun, Grown, Over, framed
from serving.router.replicas import address_of
from serving.router.upstream import Upstream
from serving.server import SignalFreeServer, configuration, listener_at

END = b"0\r\n\r\n"  # ends a chunked body
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
DONE = b"data: [DONE]\n\n"
INFO = b'{"continuations":"bare"}'
NUM_PROMPT_TOKENS = 512
LONGEST_HEAD = 2**16
MOST_CONNECTIONS = 2**14
BACKLOG = 2**12


def chunk(data: bytes) -> bytes:
    """Frame data as an HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def parts_of(num_events: int, *, is_told: bool) -> list[bytes]:
    """Return an answer in its parts, the first of which has the head, for a router that is told of tokens."""
    if not is_told:
        head, events, last = HEAD % b"text/event-stream", [EVENT] * num_events, DONE
    else:
        ids = bytes(4 * NUM_PROMPT_TOKENS)
        begun = AnswerBegun("cmpl-1", 0, "bare", "", 0, 2**20, ids, 1, 2**20, True)
        head = HEAD % FRAMES.encode() + chunk(framed(begun))
        events = [framed(Grown([7], NO_LOGPROBS, 0, EVENT))] * num_events
        last = framed(Over(200, "", DONE))
    first, *others = map(chunk, events)
    return [head + first, *others, chunk(last) + END]


async def answer(num_events: int, num_pieces: int, every_ms: float) -> None:
    """Answer at a free port until the process is ended, at once, or by pieces to a request with `x-rhythm`.

    Of an answer to a request with `x-hold`, there is only the beginning.
    """
    at_once = {told: b"".join(parts_of(num_events, is_told=told)) for told in (False, True)}
    pieces = {told: parts_of(num_pieces, is_told=told) for told in (False, True)}

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                is_told = b"x-router-key:" in head
                if head.startswith(b"get "):
                    info = INFO if head.startswith(b"get /server_info") else b""
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(info), info))
                elif b"x-rhythm:" in head:
                    for piece in pieces[is_told]:
                        writer.write(piece)
                        await asyncio.sleep(1e-3 * every_ms)
                else:
                    writer.write(pieces[is_told][0] if b"x-hold:" in head else at_once[is_told])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the peer has closed because it has all it wanted
        finally:
            writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0, limit=LONGEST_HEAD, backlog=BACKLOG)
    announce(server.sockets[0].getsockname())
    await server.serve_forever()


class PassingClient(asyncio.Protocol):
    """A client of the proxy that passes on bytes, which sends a request when it has its answer."""

    def __init__(self, address: tuple[str, int], idle: list[PassingServer]) -> None:
        self._address, self._idle = address, idle
        self._unsent = bytearray()
        self._connecting: asyncio.Task[None] | None = None
        self.server: PassingServer | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if self.server is not None and self.server.transport is not None:
            self.server.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.server is None and self._idle:
            self.server = self._idle.pop()
            self.server.client = self
        if self.server is not None and self.server.transport is not None:
            self.server.transport.write(data)
            return
        self._unsent += data
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, server = await loop.create_connection(lambda: PassingServer(self._idle), *self._address)
        self.server, server.client, self._connecting = server, self, None
        assert server.transport is not None, "a connection that is made has a transport"
        server.transport.write(bytes(self._unsent))
        self._unsent.clear()


class PassingServer(asyncio.Protocol):
    """A connection to the server behind that proxy, kept for the next request at the end of an answer."""

    def __init__(self, idle: list[PassingServer]) -> None:
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self.client: PassingClient | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.client is not None and self.client.transport is not None:
            self.client.transport.write(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Handle the end of an answer."""
        if self.client is not None:
            self.client.server = None
        self.client = None
        self._idle.append(self)


async def pass_bytes(url: str) -> None:
    """Pass bytes on to one server, and its answers back."""
    idle = list[PassingServer]()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: PassingClient(address_of(url), idle), "127.0.0.1", 0, backlog=BACKLOG
    )
    announce(server.sockets[0].getsockname())
    await server.serve_forever()


async def pass_requests(url: str) -> None:
    """Pass requests on to one server, by the router's HTTP server and client."""
    upstream = Upstream(*address_of(url))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        headers = [each for each in scope["headers"] if each[0] not in (b"host", b"content-length")]
        answer = await upstream.ask(scope["method"], scope["path"], headers, body)
        kept = [each for each in answer.headers if each[0] != b"transfer-encoding"]
        await send({"type": "http.response.start", "status": answer.status, "headers": kept})
        while part := await answer.next():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        upstream.done(answer)

    with listener_at("127.0.0.1", 0) as listener:
        announce(listener.getsockname())
        await SignalFreeServer(configuration(app, MOST_CONNECTIONS)).serve([listener])


def announce(address: tuple[str, int]) -> None:
    """Report where the server listens, in the format of all servers of this project."""
    print(f"listening at http://{address[0]}:{address[1]}, bare", file=sys.stderr, flush=True)


def serve_bare(argv: list[str]) -> None:
    """Run the bare server that the arguments name."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    match argv:
        case ["answers", num_events, num_pieces, every_ms]:
            uvloop.run(answer(int(num_events), int(num_pieces), float(every_ms)))
        case ["bytes", url]:
            uvloop.run(pass_bytes(url))
        case ["http", url]:
            uvloop.run(pass_requests(url))


if __name__ == "__main__":
    serve_bare(sys.argv[1:])
