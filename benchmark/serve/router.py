"""Measure what the router itself takes: latency, and processor time of a request and of a piece of a stream.

In turns, the same requests are sent to a server that computes nothing, through the least proxy, and through
the router. `python -m benchmark.serve.router` runs one of the former two: `answers EVERY_MS` is a replica
that sends the first token of an answer at once and the others at a rhythm, and tells a router of tokens as
real replicas do, with only as much HTTP as it needs; `bytes URL` is the least that can be called a proxy,
which copies bytes to one server and back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import uvloop

from benchmark.options import Column, in_turns, medians, named_rows, table
from benchmark.processes import ServerProcess, started
from benchmark.serve.fleet import ask, routed
from serving.continuation import FRAMES, NO_LOGPROBS, AnswerBegun, Grown, Over, framed
from serving.router.replicas import address_of

COLUMNS = (
    Column("name", "way"),
    Column("first_p50_ms", "first event p50", "{:.3f} ms"),
    Column("first_p99_ms", "p99", "{:.3f} ms"),
    Column("request_us", "a request", "{:.0f} µs"),
    Column("piece_us", "a piece", "{:.0f} µs"),
)
TIMES = ("request_us", "piece_us")
CLIENTS = 16  # So many ask at once where processor time is measured
PROMPT_BYTES = 2000
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
DONE = b"data: [DONE]\n\n"
INFO = b'{"continuations":"bare"}'
NUM_PROMPT_TOKENS = 512
Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def asked(url: str, tokens: int, clients: int, share: int) -> list[float]:
    """Send a share of requests from each of several clients at once; return the seconds to first events.

    Raises OSError for an answer that is not whole.
    """
    messages, first_s = [{"role": "user", "content": "x" * PROMPT_BYTES}], list[float]()

    async def client() -> None:
        for _ in range(share):
            answer, took_s = await ask(http, url, messages, tokens)
            if not answer.is_whole:
                raise OSError(f"{url} gave no whole answer: {answer.text[-100:]!r}")
            first_s.append(took_s)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(client() for _ in range(clients)))
    return first_s


def one_turn(server: ServerProcess, options: argparse.Namespace, number: int) -> dict[str, float]:
    """Return the latency of requests one by one, and the processor time of requests and pieces at once."""
    send = partial(asked, server.url)
    first_s = asyncio.run(send(1, 1, options.requests))
    p50, p99 = np.percentile(first_s, [50, 99]).tolist()
    share, before_s = max(1, options.requests // CLIENTS), server.cpu_s()
    asyncio.run(send(1, CLIENTS, share))
    request_s, before_s = (server.cpu_s() - before_s) / (share * CLIENTS), server.cpu_s()
    asyncio.run(send(options.pieces, CLIENTS, 1))
    stream_s = (server.cpu_s() - before_s) / CLIENTS
    piece_s = (stream_s - request_s) / (options.pieces - 1)
    latencies = {"first_p50_ms": 1e3 * p50, "first_p99_ms": 1e3 * p99}
    return {**latencies, "request_us": 1e6 * request_s, "piece_us": 1e6 * piece_s}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of each way over the turns, and how many times a proxy's time the router takes."""
    with contextlib.ExitStack() as running:

        def start(*command: str) -> ServerProcess:
            return running.enter_context(started("benchmark.serve.router", *command, ready=""))

        servers = [start("answers", str(options.every_ms)) for _ in range(options.replicas)]
        proxy = start("bytes", servers[0].url)
        router = running.enter_context(routed([each.url for each in servers]))
        ways = {"server": servers[0], "bytes": proxy, "router": router}
        each_turn = {name: partial(one_turn, each, options) for name, each in ways.items()}
        turns = in_turns(each_turn, options.turns)
    ratios = {
        name: [round(ours[name] / bare[name], 2) for ours, bare in zip(turns["router"], turns["bytes"])]
        for name in TIMES
    }
    return {"ways": {name: medians(each) for name, each in turns.items()}, "router_over_bytes": ratios}


def print_table(result: Mapping[str, Any]) -> None:
    """Print a row for each way, and how many times a proxy's processor time the router takes."""
    print(table(COLUMNS, named_rows(result["ways"])))
    for name, ratios in result["router_over_bytes"].items():
        said = f"{statistics.median(ratios):.2f} ({min(ratios)} to {max(ratios)})"
        print(f"\nrouter / bytes, a {name.removesuffix('_us')}: {said}", end="")
    print()


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
