"""Run one of the servers beside which the router is measured.

`answers EVERY_MS` is a replica that computes nothing: it sends the first token of an answer at once and the
others at a rhythm, and tells a router of tokens as real replicas do. It implements only as much HTTP as it
needs. `bytes URL` is the least that can be called a proxy: it copies bytes to one server and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable

import uvloop

from serving.continuation import FRAMES, NO_LOGPROBS, AnswerBegun, Grown, Over, framed
from serving.router.replicas import address_of

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
DONE = b"data: [DONE]\n\n"
INFO = b'{"continuations":"bare"}'
NUM_PROMPT_TOKENS = 512
Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    """Frame data as an HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def parts_of(num_events: int, *, is_told: bool) -> list[bytes]:
    """Return an answer in its parts, the first of which has the head, for a router that is told of tokens."""
    if not is_told:
        head, event, last = HEAD % b"text/event-stream", EVENT, DONE
    else:
        ids = bytes(4 * NUM_PROMPT_TOKENS)
        begun = AnswerBegun("cmpl-1", 0, "bare", "", 0, 2**20, ids, 1, 2**20, True)
        head = HEAD % FRAMES.encode() + chunk(framed(begun))
        event, last = framed(Grown([7], NO_LOGPROBS, 0, EVENT)), framed(Over(200, "", DONE))
    first, *others = [chunk(event)] * num_events
    end = chunk(last) + b"0\r\n\r\n"
    return [head + first, *others, end] if others else [head + first + end]


def answers(every_ms: float) -> Connected:
    """Return what answers the requests of a connection."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length or 0))
            if head.startswith(b"get "):
                info = INFO if head.startswith(b"get /server_info") else b""
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(info), info))
                continue
            first, *others = parts_of(json.loads(body)["max_tokens"], is_told=b"x-router-key:" in head)
            writer.write(first)
            for part in others:
                await asyncio.sleep(1e-3 * every_ms)
                writer.write(part)

    return connected


def passes(url: str) -> Connected:
    """Return what copies a connection's bytes to a connection of its own to a server, and back."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(*address_of(url))
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer))

    return connected


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write what is read until nothing comes any more."""
    try:
        while data := await reader.read(2**16):
            writer.write(data)
    finally:
        writer.close()


async def serve(connected: Connected) -> None:
    """Serve connections at a free port, which is said in the format of this project's servers."""

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the peer has all it wanted
            await connected(reader, writer)
        writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"listening at http://{host}:{port}, bare", file=sys.stderr, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    kind, given = sys.argv[1:]
    uvloop.run(serve(answers(float(given)) if kind == "answers" else passes(given)))
