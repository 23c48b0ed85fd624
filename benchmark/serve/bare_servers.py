"""Provide bare servers for measuring the router alone: one that answers at once, and pass-throughs.

    python -m benchmark.serve.bare_servers answers [ANSWER_EVENTS]
    python -m benchmark.serve.bare_servers passes http://127.0.0.1:PORT
    python -m benchmark.serve.bare_servers passes_asgi http://127.0.0.1:PORT

The first two implement only as much HTTP as they need; the last one has the router's HTTP server and client,
and nothing between them. The server streams all its events in one write; to a request with `x-hold` it sends
only the first event. A pass-through reads no body and knows no replicas: it asks on kept connections and
passes on what comes until the answer's end.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Awaitable, Callable

import uvloop
from starlette.types import Receive, Scope, Send

from serving.router.replicas import address_of
from serving.router.upstream import Upstream
from serving.server import SignalFreeServer, configuration, listener_at

END = b"0\r\n\r\n"  # ends a chunked body
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
DONE = b"data: [DONE]\n\n"
LONGEST_HEAD = 2**16
MOST_CONNECTIONS = 2**14
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    """Frame data as an HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


async def request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read a head and its body; raises IncompleteReadError where the connection ends."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    return head, await reader.readexactly(int(length)) if length else b""


def answers(num_events: int) -> Serve:
    """Return the handler of the answering server."""
    whole = HEAD + b"".join(chunk(EVENT) for _ in range(num_events)) + chunk(DONE) + END

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, _ = await request(reader)
            if head.startswith(b"GET "):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            elif b"x-hold:" in head.lower():
                writer.write(HEAD + chunk(EVENT))
            else:
                writer.write(whole)

    return serve


def passes(url: str) -> Serve:
    """Return the handler of the pass-through to one server."""
    host, port = address_of(url)
    kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await request(reader)
            asked, asking = kept.pop() if kept else await asyncio.open_connection(host, port)
            asking.write(head + body)
            last = b""
            while not last.endswith(END):
                part = await asked.read(2**16)
                if not part:
                    asking.close()
                    return
                writer.write(part)
                await writer.drain()
                last = (last + part)[-len(END) :]
            kept.append((asked, asking))

    return serve


async def listen_asgi(url: str) -> None:
    """Run the pass-through on the router's HTTP server."""
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
        tell(listener.getsockname())
        await SignalFreeServer(configuration(app, MOST_CONNECTIONS)).serve([listener])


def tell(address: tuple[str, int]) -> None:
    """Report where the server listens, in the format of all servers of this project."""
    print(f"listening at http://{address[0]}:{address[1]}, bare", file=sys.stderr, flush=True)


async def listen(serve: Serve) -> None:
    """Listen at a free port, until the process is ended."""

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the peer has closed because it has all it wanted
        finally:
            writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0, limit=LONGEST_HEAD, backlog=2**12)
    tell(server.sockets[0].getsockname())
    await server.serve_forever()


def main(argv: list[str]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kind, value = argv
    if kind == "passes_asgi":
        uvloop.run(listen_asgi(value))
    else:
        uvloop.run(listen(answers(int(value)) if kind == "answers" else passes(value)))


if __name__ == "__main__":
    main(sys.argv[1:])
