"""Offer a server several times the requests that it takes, for minutes, and report what became of all.

Many more clients than `server.max_requests` ask for streams of mixed lengths, some of several samples; who is
refused comes again when the server has said. The server measures its own time for each refusal, from the
request's head to the end of the response. Reported beside it: answers that did not come to their ends, the
growth of memory, and pages that are held when all have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmark.options import Column, table
from benchmark.processes import ServerProcess, started
from benchmark.run_record import percentiles
from benchmark.serve.client import read_stream
from benchmark.workloads.synthetic import lengths

_PATH = "/v1/completions"
_REFUSED = rf"POST {_PATH} 429 ([\d.]+) ms"
_TIMES = 10  # so many times more clients than samples are accepted
_PROMPT_TOKENS = "lognormal:60:1"
_VOCABULARY = 300  # below which the ids of prompts are
_SAMPLE_S = 1.0  # seconds between two readings of memory
_SEVERAL = 8  # every so many requests, one asks for two samples
_IDLE_S = 60.0  # seconds in which pages are given back after the last answer
_LONG_S = 3600.0  # seconds that an answer may take
_AGAIN_S = 1.0  # seconds after which to come again where the server does not say
COLUMNS = (
    *(Column(each, each) for each in ("clients", "accepted", "whole", "refused", "failed")),
    Column("refusal_p50_ms", "refusal p50", "{:.1f} ms"),
    Column("refusal_p99_ms", "p99", "{:.1f} ms"),
    Column("refusal_most_ms", "most", "{:.1f} ms"),
    Column("refusal_client_p99_ms", "p99 for clients", "{:.1f} ms"),
    Column("server_mib", "server", "{:.0f} MiB"),
    Column("server_growth_mib_per_min", "it grows a minute", "{:+.2f} MiB"),
    Column("engine_mib", "engine", "{:.0f} MiB"),
    Column("engine_growth_mib_per_min", "it grows a minute", "{:+.2f} MiB"),
    Column("left", "pages and samples left"),
)
_LEFT = re.compile(r"^cb_(?:kv_pages_used|kv_page_leak_total|samples_open)\S* (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class LoadOutcome:
    """What became of all requests so far."""

    accepted: int = 0
    whole: int = 0  # accepted answers that came to their ends with all of their tokens
    refused: int = 0
    failed: int = 0  # requests that got another response, or none
    refusal_s: list[float] = field(default_factory=list)  # how long each took for its client


class PatientClient:
    """Asks for one answer after the other until the time is over."""

    def __init__(self, http: aiohttp.ClientSession, number: int, options: argparse.Namespace) -> None:
        self._http = http
        self._random = np.random.default_rng([0, number])
        self._draws = lengths(_PROMPT_TOKENS), options.output_tokens
        self._numbers = itertools.count(number)

    async def ask_until(self, end_s: float, most_tokens: int, found: LoadOutcome) -> None:
        """Ask until the loop's clock shows `end_s`; the last answer is read to its end."""
        loop = asyncio.get_running_loop()
        while loop.time() < end_s:
            body = self._body(most_tokens)
            pause_s = await self._ask(body, found)
            while pause_s and loop.time() < end_s:
                await asyncio.sleep(pause_s * self._random.uniform(1.0, 1.5))
                pause_s = await self._ask(body, found)

    def _body(self, most_tokens: int) -> dict[str, Any]:
        num_prompt, num_output = (int(draw(self._random, 1)[0]) for draw in self._draws)
        num_prompt = min(num_prompt, most_tokens // 2)
        return {
            "prompt": self._random.integers(0, _VOCABULARY, num_prompt).tolist(),
            "max_tokens": min(num_output, most_tokens - num_prompt),
            "n": 1 + (next(self._numbers) % _SEVERAL == 0),
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip

    async def _ask(self, body: Mapping[str, Any], found: LoadOutcome) -> float:
        """Read one response; return the seconds after which to come again, or 0."""
        start_s, is_accepted = time.perf_counter(), False
        try:
            async with self._http.post(_PATH, json=body) as response:
                if response.status == 429:
                    await response.read()
                    found.refusal_s.append(time.perf_counter() - start_s)
                    found.refused += 1
                    return float(response.headers.get("retry-after", _AGAIN_S))
                if response.status != 200:
                    found.failed += 1
                    return 0.0
                found.accepted += 1
                is_accepted = True
                answer = await read_stream(response)
                has_all = answer.usage.completion_tokens == body["max_tokens"] * body["n"]
                found.whole += answer.is_whole and has_all
                return 0.0
        except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError):
            found.failed += not is_accepted  # one that was accepted is counted, and is not whole
            return _AGAIN_S


async def memory(server: ServerProcess, found: list[tuple[float, int, int]]) -> None:
    """Note the time, and the memory of the server and of its engine in KiB, for ever."""
    while True:
        found.append((time.monotonic(), *server.resident_kib()))
        await asyncio.sleep(_SAMPLE_S)


async def load(server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    """Run all clients for the time asked for, and return the figures."""
    found, held = LoadOutcome(), list[tuple[float, int, int]]()
    reading = asyncio.ensure_future(memory(server, held))
    limits = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(_LONG_S)
    async with aiohttp.ClientSession(server.url, connector=limits[0], timeout=limits[1]) as http:
        async with http.get("/v1/models") as response:
            most_tokens = (await response.json())["data"][0]["max_model_len"]
        end_s = asyncio.get_running_loop().time() + 60 * options.minutes
        clients = [PatientClient(http, number, options) for number in range(_TIMES * options.accepted)]
        await asyncio.gather(*(each.ask_until(end_s, most_tokens, found) for each in clients))
        reading.cancel()
        left = await _left(http)
    took_s = [float(each) / 1e3 for each in server.said(_REFUSED)]
    refusal_ms = percentiles(took_s)
    later = np.array(held[len(held) // 2 :])
    growth = [steady_slope(later[:, 0] / 60, each / 2**10) for each in later[:, 1:].T]
    return {
        "clients": len(clients),
        **{name: getattr(found, name) for name in ("accepted", "whole", "refused", "failed")},
        "refusal_p50_ms": refusal_ms.get("p50", 0.0),
        "refusal_p99_ms": refusal_ms.get("p99", 0.0),
        "refusal_most_ms": round(1e3 * max(took_s, default=0.0), 3),
        "refusal_client_p99_ms": percentiles(found.refusal_s).get("p99", 0.0),
        "server_mib": round(later[-1, 1] / 2**10, 1),
        "server_growth_mib_per_min": round(growth[0], 2),
        "engine_mib": round(later[-1, 2] / 2**10, 1),
        "engine_growth_mib_per_min": round(growth[1], 2),
        "left": left,
    }


def steady_slope(at: NDArray[np.float64], memory: NDArray[np.float64]) -> float:
    """Return the growth of memory by the median over all pairs of readings (Theil and Sen).

    A leak raises every pair. A heap that meets its largest batch raises only the pairs around that moment.
    """
    first, second = np.triu_indices(len(at), 1)
    return (
        float(np.median((memory[second] - memory[first]) / (at[second] - at[first]))) if len(first) else 0.0
    )


async def _left(http: aiohttp.ClientSession) -> int:
    """Return the pages held and the samples open once the server has told that there are none, or late."""
    until_s = time.monotonic() + _IDLE_S
    while True:
        async with http.get("/metrics") as response:
            left = int(sum(float(each) for each in _LEFT.findall(await response.text())))
        if not left or time.monotonic() > until_s:
            return left
        await asyncio.sleep(_SAMPLE_S)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the options describe."""
    limits = f"server.max_requests={options.accepted}", "--log-requests"
    command = ("scripts.serve", options.recipe, *options.overrides, *limits, "--port", "0")
    with started(*command) as server:
        return {"overload": asyncio.run(load(server, options))}


def print_table(result: Mapping[str, Any]) -> None:
    """Print the figures as one row."""
    print(table(COLUMNS, [result["overload"]]))
