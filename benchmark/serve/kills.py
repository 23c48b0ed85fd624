"""Measure how long streams pause when the engine behind them is killed, with real servers behind a router.

Two servers of a recipe answer many streams at once. Their engines are killed in turn, each when the clients
have received a drawn number of parts; every answer must be the one that is given without kills. A stream that
went on n times has paused in its n longest gaps between two parts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import aiohttp
import numpy as np

from benchmark.options import Column, table
from benchmark.processes import ServerProcess, started
from benchmark.run_record import percentiles
from benchmark.serve.client import StreamedAnswer, read_stream
from benchmark.serve.fleet import fleet, replicas_ready, routed

COLUMNS = (
    *(Column(each, each) for each in ("kills", "streams", "broken", "different")),
    Column("resumed", "went on"),
    Column("gap_p50_ms", "gap p50", "{:.0f} ms"),
    Column("gap_p99_ms", "p99", "{:.0f} ms"),
    Column("undisturbed_gap_p99_ms", "p99 without kills", "{:.0f} ms"),
)
_FEWEST, _MOST = 2, 8  # parts that each stream has received on average between two kills
_LONG_S = 600.0


async def ask_all(url: str, options: argparse.Namespace, grown: Callable[[], None]) -> list[StreamedAnswer]:
    """Return the answers of all streams, half of which are drawn; each of their parts calls `grown`."""
    shared = {
        "max_tokens": options.tokens, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    bodies = [
        shared | {"prompt": f"{number}: once upon a time", "temperature": number % 2, "seed": number}
        for number in range(options.streams)
    ]
    connections = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(_LONG_S)) as http:

        async def ask(body: Mapping[str, Any]) -> StreamedAnswer:
            async with http.post(f"{url}/v1/completions", json=body) as response:
                return await read_stream(response, grown)

        return await asyncio.gather(*map(ask, bodies))


class Killer:
    """Kills the servers' engines in turn, each when all are there, so that one can go on."""

    def __init__(self, servers: list[ServerProcess], options: argparse.Namespace) -> None:
        self._servers = servers
        self._random = np.random.default_rng(options.engines_killed)
        self._streams, self._most = options.streams, options.engines_killed
        self._killed: set[int] = set()  # processes that were killed
        self._num_parts, self._next = 0, self._draw()
        self.num_kills = 0

    def _draw(self) -> int:
        return int(self._random.integers(_FEWEST * self._streams, _MOST * self._streams))

    def grown(self) -> None:
        """Count a part, and kill an engine if it is time."""
        self._num_parts += 1
        if self._num_parts < self._next or self.num_kills == self._most:
            return
        engines = [each.engine() for each in self._servers]
        if self._killed.isdisjoint(engines):
            engine = engines[self.num_kills % len(engines)]
            self._killed.add(engine)
            os.kill(engine, signal.SIGKILL)
            self.num_kills += 1
            self._num_parts, self._next = 0, self._draw()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Kill engines under streams until there were as many kills as asked for."""
    with ExitStack() as running:
        command = ("scripts.serve", options.recipe, *options.overrides, "server.resume=64", "--port", "0")
        servers = [running.enter_context(started(*command)) for _ in range(2)]
        router = running.enter_context(routed([each.url for each in servers]))
        expected = asyncio.run(ask_all(router.url, options, lambda: None))
        killer, streams, num_different = Killer(servers, options), list[StreamedAnswer](), 0
        while killer.num_kills < options.engines_killed:
            answers = asyncio.run(ask_all(router.url, options, killer.grown))
            num_different += sum(one.text != other.text for one, other in zip(answers, expected))
            streams += answers
            asyncio.run(replicas_ready(router.url, len(servers)))
        reported = asyncio.run(fleet(router.url))
    resumed = [each for each in streams if each.usage.resumed]
    pauses = [gap for each in resumed for gap in np.sort(np.diff(each.part_s))[-each.usage.resumed :]]
    undisturbed = percentiles([gap for each in expected for gap in np.diff(each.part_s)])
    found = {
        "kills": killer.num_kills,
        "streams": len(streams),
        "broken": sum(not each.is_whole for each in streams),
        "different": num_different,
        "resumed": reported["resumed"],
        **{f"gap_{part}_ms": percentiles(pauses).get(part, 0.0) for part in ("p50", "p99")},
        "undisturbed_gap_p99_ms": undisturbed.get("p99", 0.0),
    }
    return {"kills": found}


def print_table(result: Mapping[str, Any]) -> None:
    """Print the figures as a Markdown row."""
    print(table(COLUMNS, [result["kills"]]))
