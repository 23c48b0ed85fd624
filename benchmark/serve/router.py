"""Measure what the router itself takes: processor time and latency of a request, memory of an open stream.

Servers that answer at once are behind it, so that nothing else takes time. In turns of the same run, requests
are sent to such a server, through two bare pass-throughs (benchmark/serve/bare_servers.py: one that copies
bytes, one on the router's HTTP server and client) and through the router: one at a time for latency, several
at once for processor time. The median of the turns counts. "Added" is a way's latency less that of asking the
server itself. Then streams are opened that do not end, and a line is fitted to the router's memory over the
number of open streams.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import aiohttp
import numpy as np

from benchmark.options import add_json, show
from benchmark.run_clock import RunClock
from benchmark.serve.fleet import ready
from benchmark.serve.running import Running, started
from recipes.assembly import versions
from recipes.schema.numbers import MOST_COUNT, whole, wholes

WAYS = ("server", "bytes", "http", "router")
MOST_OPEN = 2**17  # streams at each replica, so that no request waits
SETTLE_S = 0.5  # seconds until a router has read what it was sent
EXTRAPOLATED = 10_000  # streams


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


async def held_kib(router: Running, counts: Sequence[int]) -> list[int]:
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


def turn(urls: Mapping[str, str], router: Running, options: argparse.Namespace) -> dict[str, float]:
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

        def start(*command: str) -> Running:
            return running.enter_context(started(*command))

        servers = [
            start("benchmark.serve.bare_servers", "answers", str(options.events))
            for _ in range(options.replicas)
        ]
        as_bytes = start("benchmark.serve.bare_servers", "passes", servers[0].url)
        as_http = start("benchmark.serve.bare_servers", "passes_asgi", servers[0].url)
        behind = [argument for each in servers for argument in ("--replica", each.url)]
        recipe = () if options.recipe is None else ("--recipe", options.recipe)
        router = start("scripts.route", *behind, *recipe, "--port", "0", "--most-open", str(MOST_OPEN))
        asyncio.run(ready(router.url, len(servers)))
        urls = dict(zip(WAYS, (servers[0].url, as_bytes.url, as_http.url, router.url)))
        turns = [turn(urls, router, options) for _ in range(1 + options.turns)][1:]
        figures = {name: round(statistics.median(each[name] for each in turns), 4) for name in turns[0]}
        kib = asyncio.run(held_kib(router, options.streams))
    slope, base = np.polyfit(options.streams, kib, 1).tolist()
    return {
        **figures,
        "streams": dict(zip(map(str, options.streams), kib)),
        "kib_a_stream": round(slope, 2),
        "mib_extrapolated": round((base + slope * EXTRAPOLATED) / 1024, 1),
    }


def print_table(result: Mapping[str, Any]) -> None:
    """Print the results in Markdown."""
    found = result["router"]
    print("| way | p50 | p99 | added p50 | added p99 |")
    print("|---|---|---|---|---|")
    for way in WAYS:
        times = [f"{found[f'{way}_{each}_ms']:.3f} ms" for each in ("p50", "p99")]
        added = ["" if way == "server" else f"{found[f'{way}_added_{p}_ms']:.3f} ms" for p in ("p50", "p99")]
        print(f"| {way} | {' | '.join(times + added)} |")
    for each in ("p50", "p99"):
        over = {way: found[f"router_added_{each}_ms"] / found[f"{way}_added_{each}_ms"] for way in WAYS[1:3]}
        print(f"\nadded {each}, router / bytes {over['bytes']:.2f}, router / http {over['http']:.2f}", end="")
    print(f"\nprocessor time {found['router_cpu_ms']:.3f} ms a request")
    held = ", ".join(f"{kib / 1024:.1f} MiB at {count}" for count, kib in found["streams"].items())
    print(f"open streams: {held}; {found['kib_a_stream']:.1f} KiB each,", end=" ")
    print(f"so {found['mib_extrapolated']:.0f} MiB at {EXTRAPOLATED:,} (extrapolated)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `router`."""
    for name, default, meaning in (
        ("replicas", 2, "servers behind the router"),
        ("turns", 5, "of which the median counts, after one that warms up"),
        ("requests", 500, "of each way in a turn"),
        ("clients", 16, "at once, where processor time is measured"),
        ("events", 9, "of each answer"),
        ("prompt-bytes", 2000, "of each prompt"),
    ):
        said = f"{meaning} (default: {default})"
        parser.add_argument(f"--{name}", type=whole(1, MOST_COUNT), default=default, metavar="N", help=said)
    parser.add_argument("--recipe", help="by whose template and tokenizer the router reads prompts")
    said = "open at once, for memory (default: 500,1000,2000,4000); two files of the router each"
    counts = wholes(1, MOST_COUNT)
    parser.add_argument("--streams", type=counts, default=[500, 1000, 2000, 4000], metavar="N,N", help=said)
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    if len(options.streams) < 2:
        raise ValueError(f"--streams is {options.streams[0]}; a slope needs two numbers, as in 500,1000")
    clock = RunClock()
    found = measure(options)
    described = {"benchmark": "router", "machine": versions.describe(), "clock": clock.read()}
    show({**described, "router": found}, options, print_table)
