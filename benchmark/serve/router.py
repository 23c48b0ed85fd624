"""Measure what the router itself takes: latency, processor time of requests and pieces, memory of a stream.

In turns of the same run, the same requests are sent to a server, through two proxies and through the router
(bare_servers.py), in an order that alternates. "Added" is a way's latency less that of asking the server
itself. At last, streams are opened that do not end, and a line is fitted to the router's memory over the
number of open streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmark.options import markdown, medians
from benchmark.processes import ServerProcess, started
from benchmark.serve.bare_servers import DONE, END
from benchmark.serve.fleet import routed
from serving.router.replicas import address_of

WAYS = ("server", "bytes", "http", "router")
PROXIES = ("bytes", "http")
PARTS = tuple(f"{name}_{part}" for name in ("first", "whole") for part in ("p50", "p99"))
RATIOS = (*(f"added_{each}_ms" for each in PARTS), "request_us", "piece_us")
MOST_OPEN = 2**17  # streams at each replica, so that no request waits
SETTLE_S = 0.5  # seconds until a router has read what it was sent
EXTRAPOLATED = 10_000  # streams
RESET = struct.pack("ii", 1, 0)  # lingers for no second


class Asking:
    """A client's connection, on which it sends the same request again and again."""

    def __init__(self, url: str, asked: bytes) -> None:
        self._url, self._asked = url, asked

    async def __aenter__(self) -> Asking:
        self._reader, self._writer = await asyncio.open_connection(*address_of(self._url), limit=2**20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def ask(self) -> tuple[float, float]:
        """Return the seconds to the first event and to the end; raises OSError where that does not come."""
        began_s = time.perf_counter()
        self._writer.write(self._asked)
        try:
            await self._reader.readuntil(b"data: ")
            first_s = time.perf_counter() - began_s
            received = await self._reader.readuntil(b"\r\n" + END)
        except asyncio.IncompleteReadError as error:
            raise OSError(f"{self._url} gave no whole answer: {error.partial[-100:]!r}") from None
        whole_s = time.perf_counter() - began_s
        if not received.endswith(DONE + b"\r\n" + END):
            raise OSError(f"{self._url} gave no whole answer: {received[-100:]!r}")
        return first_s, whole_s


def request_of(prompt_bytes: int, *more: bytes) -> bytes:
    """Return a chat request of about this many bytes, with more headers."""
    content = [{"role": "user", "content": "x" * prompt_bytes}]
    body = json.dumps({"stream": True, "messages": content, "max_tokens": 8}).encode()
    lines = [
        b"POST /v1/chat/completions HTTP/1.1",
        *(b"host: localhost", b"accept: */*", b"user-agent: client", b"content-type: application/json"),
        *more,
        b"content-length: %d\r\n" % len(body),
        body,
    ]
    return b"\r\n".join(lines)


async def one_by_one(url: str, asked: bytes, count: int) -> dict[str, list[float]]:
    """Return the latencies of requests, one after the other on a kept connection."""
    async with Asking(url, asked) as client:
        for _ in range(1 + count // 10):  # these warm up
            await client.ask()
        firsts, wholes = zip(*[await client.ask() for _ in range(count)])
    return {"first": [*firsts], "whole": [*wholes]}


async def at_once(url: str, asked: bytes, share: int, clients: int) -> None:
    """Send a share of requests from each of several clients."""

    async def client() -> None:
        async with Asking(url, asked) as asking:
            for _ in range(share):
                await asking.ask()

    await asyncio.gather(*(client() for _ in range(clients)))


def processor_us(server: ServerProcess, options: argparse.Namespace) -> tuple[float, float]:
    """Return the processor time that a server takes for a request, and for each further piece of a stream."""
    before_s, share = server.cpu_s(), max(1, options.requests // options.clients)
    asyncio.run(at_once(server.url, request_of(options.prompt_bytes), share, options.clients))
    request_s, before_s = (server.cpu_s() - before_s) / (share * options.clients), server.cpu_s()
    asked = request_of(options.prompt_bytes, b"x-rhythm: 1")
    asyncio.run(at_once(server.url, asked, 1, options.clients))
    stream_s = (server.cpu_s() - before_s) / options.clients
    return 1e6 * request_s, 1e6 * (stream_s - request_s) / options.pieces


async def held_kib(router: ServerProcess, counts: Sequence[int]) -> list[int]:
    """Return the router's memory for each number of open streams."""
    asked = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-hold: 1\r\ncontent-length: 0\r\n\r\n"
    found, writers = list[int](), list[asyncio.StreamWriter]()
    for count in counts:
        while len(writers) < count:
            reader, writer = await asyncio.open_connection(*address_of(router.url))
            writers.append(writer)
            writer.write(asked)
            await reader.readuntil(b"data: ")
        await asyncio.sleep(SETTLE_S)
        found.append(router.resident_kib())
    for writer in writers:  # reset: a client that only ended its sending would still be answered
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
    return found


def turn(
    ways: Mapping[str, ServerProcess], options: argparse.Namespace, *, backwards: bool
) -> dict[str, float]:
    """Return the figures of one turn."""
    asked, figures = request_of(options.prompt_bytes), dict[str, float]()
    for way in WAYS[:: -1 if backwards else 1]:
        for name, took_s in asyncio.run(one_by_one(ways[way].url, asked, options.requests)).items():
            p50, p99 = np.percentile(took_s, [50, 99]).tolist()
            figures |= {f"{way}_{name}_p50_ms": 1e3 * p50, f"{way}_{name}_p99_ms": 1e3 * p99}
        request_us, piece_us = processor_us(ways[way], options)
        figures |= {f"{way}_request_us": request_us, f"{way}_piece_us": piece_us}
    for each in PARTS:
        for way in WAYS[1:]:
            figures[f"{way}_added_{each}_ms"] = figures[f"{way}_{each}_ms"] - figures[f"server_{each}_ms"]
    for over in PROXIES:
        for each in RATIOS:
            figures[f"router_over_{over}_{each}"] = figures[f"router_{each}"] / figures[f"{over}_{each}"]
    return figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return medians and spreads over turns, and memory by number of streams."""
    with ExitStack() as running:

        def start(*command: str) -> ServerProcess:
            return running.enter_context(started("benchmark.serve.bare_servers", *command, ready=""))

        lengths = (str(options.events), str(options.pieces), str(options.every_ms))
        servers = [start("answers", *lengths) for _ in range(options.replicas)]
        urls = [each.url for each in servers]
        proxies = {kind: start(kind, urls[0]) for kind in PROXIES}
        recipe = () if options.recipe is None else ("--recipe", options.recipe)
        router = running.enter_context(routed(urls, *recipe, "--most-open", str(MOST_OPEN)))
        ways = {"server": servers[0], **proxies, "router": router}
        turns = [turn(ways, options, backwards=number % 2 == 0) for number in range(1 + options.turns)][1:]
        kib = asyncio.run(held_kib(router, options.streams))
    spreads = {
        name: [round(pick(each[name] for each in turns), 2) for pick in (min, max)]
        for name in turns[0]
        if "_over_" in name
    }
    slope, base = np.polyfit(options.streams, kib, 1).tolist()
    return {
        **medians(turns),
        "spreads": spreads,
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
    heads = ("way", *(f"added {each.replace('_', ' ')}" for each in PARTS), "request", "piece")

    def row(way: str) -> tuple[str, ...]:
        added = "" if way == "server" else "added_"
        latencies = (f"{found[f'{way}_{added}{each}_ms']:.3f} ms" for each in PARTS)
        return (way, *latencies, *(f"{found[f'{way}_{each}_us']:.0f} µs" for each in ("request", "piece")))

    def ratios(over: str) -> tuple[str, ...]:
        names = [f"router_over_{over}_{each}" for each in RATIOS]
        shown = ("{:.2f} ({} to {})".format(found[name], *found["spreads"][name]) for name in names)
        return (f"router / {over}", *shown)

    print(markdown(heads, [*map(row, WAYS), *map(ratios, PROXIES)]))
    held = ", ".join(f"{kib / 1024:.1f} MiB at {count}" for count, kib in found["streams"].items())
    print(f"\nopen streams: {held}; {found['kib_a_stream']:.1f} KiB each,", end=" ")
    print(f"so {found['mib_extrapolated']:.0f} MiB at {EXTRAPOLATED:,} (extrapolated)")
