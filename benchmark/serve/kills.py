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
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmark.options import markdown
from benchmark.processes import ServerProcess, started
from benchmark.serve.client import chunks
from benchmark.serve.fleet import fleet, replicas_ready, routed

_READY = r"ready after .*, process (\d+)"
_FEWEST, _MOST = 2, 8  # parts that each stream has received on average between two kills
_LONG_S = 600.0


@dataclass(slots=True)
class Stream:
    """One answer as its client received it."""

    text: str = ""
    is_whole: bool = False
    num_resumed: int = 0
    gaps_s: list[float] = field(default_factory=list)


async def ask(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], grown: Callable[[], None]
) -> Stream:
    """Return a stream's answer; `grown` is called with each of its parts."""
    found, last_s = Stream(), 0.0
    async with http.post(f"{url}/v1/completions", json=body) as response:
        async for now_s, chunk in chunks(response):
            if now_s != last_s:  # events of one part come at one time
                found.gaps_s += [now_s - last_s] if last_s else []
                last_s = now_s
                grown()
            if chunk is None:
                found.is_whole = True
                continue
            found.text += "".join(each.text or "" for each in chunk.choices or ())
            found.num_resumed = found.num_resumed if chunk.usage is None else chunk.usage.resumed
    return found


async def ask_all(url: str, options: argparse.Namespace, grown: Callable[[], None]) -> list[Stream]:
    """Return the answers of all streams, half of which are drawn."""
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
        return await asyncio.gather(*(ask(http, url, body, grown) for body in bodies))


class Killer:
    """Kills the servers' engines in turn, each when all are there, so that one can go on."""

    def __init__(self, servers: list[ServerProcess], options: argparse.Namespace) -> None:
        self._servers = servers
        self._random = np.random.default_rng(options.engines_killed)
        self._streams, self._most = options.streams, options.engines_killed
        self._killed: set[str] = set()  # processes that were killed
        self._num_parts, self._next = 0, self._draw()
        self.num_kills = 0

    def _draw(self) -> int:
        return int(self._random.integers(_FEWEST * self._streams, _MOST * self._streams))

    def grown(self) -> None:
        """Count a part, and kill an engine if it is time."""
        self._num_parts += 1
        if self._num_parts < self._next or self.num_kills == self._most:
            return
        engines = [each.said(_READY)[-1] for each in self._servers]
        if self._killed.isdisjoint(engines):
            engine = engines[self.num_kills % len(engines)]
            self._killed.add(engine)
            os.kill(int(engine), signal.SIGKILL)
            self.num_kills += 1
            self._num_parts, self._next = 0, self._draw()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Kill engines under streams until there were as many kills as asked for; return what became of them."""
    with ExitStack() as running:
        command = ("scripts.serve", options.recipe, *options.overrides, "server.resume=64", "--port", "0")
        servers = [running.enter_context(started(*command)) for _ in range(2)]
        router = running.enter_context(routed([each.url for each in servers]))
        expected = asyncio.run(ask_all(router.url, options, lambda: None))
        killer, streams, num_different = Killer(servers, options), list[Stream](), 0
        while killer.num_kills < options.engines_killed:
            found = asyncio.run(ask_all(router.url, options, killer.grown))
            num_different += sum(one.text != other.text for one, other in zip(found, expected))
            streams += found
            asyncio.run(replicas_ready(router.url, len(servers)))
        reported = asyncio.run(fleet(router.url))
    pauses = [gap for each in streams for gap in sorted(each.gaps_s)[-each.num_resumed :] if each.num_resumed]
    return {
        "kills": killer.num_kills,
        "streams": len(streams),
        "broken": sum(not each.is_whole for each in streams),
        "different": num_different,
        "resumed": reported["resumed"],
        "gap_p50_ms": _percentile(pauses, 50),
        "gap_p99_ms": _percentile(pauses, 99),
        "undisturbed_gap_p99_ms": _percentile([gap for each in expected for gap in each.gaps_s], 99),
    }


def _percentile(seconds: list[float], percent: int) -> float:
    return round(1e3 * float(np.percentile(seconds, percent)), 1) if seconds else 0.0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the options describe."""
    return {"kills": measure(options)}


def print_table(result: Mapping[str, Any]) -> None:
    """Print the figures as a Markdown row."""
    found = result["kills"]
    heads = ("kills", "streams", "broken", "different", "went on", "gap p50", "p99", "p99 without kills")
    names = ("gap_p50_ms", "gap_p99_ms", "undisturbed_gap_p99_ms")
    counts = (str(found[each]) for each in ("kills", "streams", "broken", "different", "resumed"))
    print(markdown(heads, [(*counts, *(f"{found[each]:.0f} ms" for each in names))]))
