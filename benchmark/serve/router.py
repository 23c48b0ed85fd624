"""Measure what the router itself takes: latency, and processor time of a request and of a piece of a stream.

In turns, the same requests are sent to a server that computes nothing, through the least proxy, and through
the router (bare_servers.py).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import aiohttp
import numpy as np

from benchmark.options import Column, in_turns, medians, named_rows, table
from benchmark.processes import ServerProcess, started
from benchmark.serve.fleet import ask, routed

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
    with ExitStack() as running:

        def start(*command: str) -> ServerProcess:
            return running.enter_context(started("benchmark.serve.bare_servers", *command, ready=""))

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
