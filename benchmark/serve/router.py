"""Measure what the router itself takes: processor time and latency of a request, memory of an open stream.

Servers that answer at once are behind it, so that nothing else takes time. In turns of the same run, requests
are sent to such a server, through a bare proxy on the router's HTTP server and client, and through the
router: one at a time for latency, several at once for processor time. The median of the turns counts. "Added"
is a way's latency less that of asking the server itself. Then streams are opened that do not end, and a line
is fitted to the router's memory over the number of open streams.

As a module this file is one of both bare servers: `python -m benchmark.serve.router answers EVENTS` or `proxy
URL`. The former implements only as much HTTP as it needs, and streams all its events in one write; to a
request with `x-hold` it sends only the first event. The latter knows no replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import aiohttp
import numpy as np
import uvloop
from starlette.types import Receive, Scope, Send

from benchmark.options import markdown
from benchmark.processes import ServerProcess, started
from benchmark.serve.fleet import routed
from serving.router.replicas import address_of
from serving.router.upstream import Upstream
from serving.server import SignalFreeServer, configuration, listener_at

WAYS = ("server", "proxy", "router")
MOST_OPEN = 2**17  # streams at each replica, so that no request waits
SETTLE_S = 0.5  # seconds until a router has read what it was sent
EXTRAPOLATED = 10_000  # streams
END = b"0\r\n\r\n"  # ends a chunked body
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
DONE = b"data: [DONE]\n\n"
LONGEST_HEAD = 2**16
MOST_CONNECTIONS = 2**14


def body_of(prompt_bytes: int) -> dict[str, Any]:
    """Return a chat request of about this many bytes."""
    return {"stream": True, "messages": [{"role": "user", "content": "x" * prompt_bytes}], "max_tokens": 8}


async def ask(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> float:
    """Return the seconds that one answer takes; raises OSError for an answer that is not whole."""
    began_s, received = time.perf_counter(), b""
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        received = await response.read()
    took_s = time.perf_counter() - began_s
    if not received.endswith(b"data: [DONE]\n\n"):
        raise OSError(f"{url} gave no whole answer: {received[-100:]!r}")
    return took_s


async def one_by_one(url: str, body: Mapping[str, Any], count: int) -> list[float]:
    """Return the time of each request, one after the other on a kept connection."""
    async with aiohttp.ClientSession() as http:
        for _ in range(1 + count // 10):  # these warm up
            await ask(http, url, body)
        return [await ask(http, url, body) for _ in range(count)]


async def at_once(url: str, body: Mapping[str, Any], count: int, clients: int) -> None:
    """Send the requests from several clients."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def client(share: int) -> None:
            for _ in range(share):
                await ask(http, url, body)

        await asyncio.gather(*(client(count // clients) for _ in range(clients)))


async def held_kib(router: ServerProcess, counts: Sequence[int]) -> list[int]:
    """Return the router's memory for each number of open streams."""
    host, port = router.url.removeprefix("http://").split(":")
    asked = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-hold: 1\r\ncontent-length: 0\r\n\r\n"
    found, writers = list[int](), list[asyncio.StreamWriter]()
    for count in counts:
        while len(writers) < count:
            reader, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            writer.write(asked)
            await reader.readuntil(b"data: ")
        await asyncio.sleep(SETTLE_S)
        found.append(router.resident_kib())
    for writer in writers:
        writer.transport.abort()
    return found


def turn(urls: Mapping[str, str], router: ServerProcess, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one turn."""
    body, figures = body_of(options.prompt_bytes), dict[str, float]()
    for way in WAYS:
        took_s = asyncio.run(one_by_one(urls[way], body, options.requests))
        p50, p99 = np.percentile(took_s, [50, 99]).tolist()
        figures |= {f"{way}_p50_ms": 1e3 * p50, f"{way}_p99_ms": 1e3 * p99}
    for each in ("p50", "p99"):
        for way in WAYS[1:]:
            figures[f"{way}_added_{each}_ms"] = figures[f"{way}_{each}_ms"] - figures[f"server_{each}_ms"]
    before_s = router.cpu_s()
    asyncio.run(at_once(urls["router"], body, options.requests, options.clients))
    num_sent = options.requests // options.clients * options.clients
    return figures | {"router_cpu_ms": 1e3 * (router.cpu_s() - before_s) / num_sent}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return medians over turns, and memory by number of streams."""
    with ExitStack() as running:

        def start(*command: str) -> ServerProcess:
            return running.enter_context(started(*command, ready=""))

        servers = [
            start("benchmark.serve.router", "answers", str(options.events)) for _ in range(options.replicas)
        ]
        proxy = start("benchmark.serve.router", "proxy", servers[0].url)
        recipe = () if options.recipe is None else ("--recipe", options.recipe)
        urls = [each.url for each in servers]
        router = running.enter_context(routed(urls, *recipe, "--most-open", str(MOST_OPEN)))
        ways = dict(zip(WAYS, (urls[0], proxy.url, router.url)))
        turns = [turn(ways, router, options) for _ in range(1 + options.turns)][1:]
        figures = {name: round(statistics.median(each[name] for each in turns), 4) for name in turns[0]}
        kib = asyncio.run(held_kib(router, options.streams))
    slope, base = np.polyfit(options.streams, kib, 1).tolist()
    return {
        **figures,
        "streams": dict(zip(map(str, options.streams), kib)),
        "kib_a_stream": round(slope, 2),
        "mib_extrapolated": round((base + slope * EXTRAPOLATED) / 1024, 1),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the router; raises ValueError for streams that give no slope."""
    if len(options.streams) < 2:
        raise ValueError(f"--streams is {options.streams[0]}; a slope needs two numbers, as in 500,1000")
    return {"router": measure(options)}


def print_table(result: Mapping[str, Any]) -> None:
    """Print the results in Markdown."""
    found = result["router"]
    columns = ("p50", "p99", "added_p50", "added_p99")
    rows = [(way, *(f"{found[f'{way}_{each}_ms']:.3f} ms" for each in columns)) for way in WAYS[1:]]
    first = (WAYS[0], *(f"{found[f'{WAYS[0]}_{each}_ms']:.3f} ms" for each in columns[:2]), "", "")
    print(markdown(("way", *columns), [first, *rows]))
    for each in ("p50", "p99"):
        over = found[f"router_added_{each}_ms"] / found[f"proxy_added_{each}_ms"]
        print(f"\nadded {each}, router / proxy {over:.2f}", end="")
    print(f"\nprocessor time {found['router_cpu_ms']:.3f} ms a request")
    held = ", ".join(f"{kib / 1024:.1f} MiB at {count}" for count, kib in found["streams"].items())
    print(f"open streams: {held}; {found['kib_a_stream']:.1f} KiB each,", end=" ")
    print(f"so {found['mib_extrapolated']:.0f} MiB at {EXTRAPOLATED:,} (extrapolated)")


def chunk(data: bytes) -> bytes:
    """Frame data as an HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


async def answer(num_events: int) -> None:
    """Answer each request at once, at a free port, until the process is ended."""
    whole = HEAD + b"".join(chunk(EVENT) for _ in range(num_events)) + chunk(DONE) + END

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                if head.startswith(b"get "):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                else:
                    writer.write(HEAD + chunk(EVENT) if b"x-hold:" in head else whole)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the peer has closed because it has all it wanted
        finally:
            writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0, limit=LONGEST_HEAD, backlog=2**12)
    announce(server.sockets[0].getsockname())
    await server.serve_forever()


async def proxy(url: str) -> None:
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
    kind, value = argv
    uvloop.run(proxy(value) if kind == "proxy" else answer(int(value)))


if __name__ == "__main__":
    serve_bare(sys.argv[1:])
