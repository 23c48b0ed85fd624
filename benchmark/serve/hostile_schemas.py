"""Measure how long hostile schemas delay a client that streams a free answer beside them.

A server of the recipe is started, and a client streams one answer after the other without a constraint.
Meanwhile each schema is sent, alone, and is answered or refused. The result is the longest time between two
events of the free client, from when the schema was sent until SETTLE_S after its answer; for comparison, it
is also measured with no other request, and beside a request without a constraint.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from benchmark.options import add_json, show
from benchmark.run_clock import RunClock
from benchmark.serve.fleet import ready
from benchmark.serve.running import started
from benchmark.serve.sse import Events
from recipes.assembly import versions
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import MOST_COUNT, whole

SETTLE_S = 0.3
ALONE_S = 5.0
LONGEST_S = 300.0  # seconds of one answer; more is a failure of the run
TOKENS = 64  # tokens of an answer to a schema
FREE_TOKENS = 1000  # tokens of one answer of the free client; gaps are within answers
PROMPT = "Who are you?"


def nested(levels: int) -> str:
    """Return nested objects as JSON, which Python's encoder could not write for many levels."""
    begin, end = '{"type": "object", "properties": {"a": ', '}, "required": ["a"]}'
    return begin * levels + '{"type": "integer"}' + end * levels


def either(levels: int) -> dict[str, Any]:
    """Return a schema of nested alternatives: each is one of two, to a depth."""
    schema: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string"}}}
    for level in range(levels):
        schema = {"oneOf": [schema, {"type": "object", "properties": {f"y{level}": schema}}]}
    return schema


def optional(count: int) -> dict[str, Any]:
    """Return a schema of optional properties."""
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}}


def schema(value: Any) -> str:
    """Return the request's field for a JSON schema."""
    return f'"guided_json": {json.dumps(value)}'


def regex(text: str) -> str:
    """Return the request's field for a regular expression."""
    return f'"guided_regex": {json.dumps(text)}'


_PATTERNS = [{"type": "string", "pattern": f"^(a|b)*{number:03}(a|b){{9}}$"} for number in range(200)]
FORMS = {  # content -> field of the request; the first six are far beyond the caps
    "a nest of 500": f'"guided_json": {nested(500)}',
    "an enum of 100,000": schema({"enum": [f"value {number}" for number in range(100_000)]}),
    "oneOf, 12 deep": schema(either(12)),
    "5,000 optional properties": schema(optional(5000)),
    "((a{99}){99}){99}": regex("((a{99}){99}){99}"),
    "not, if, uniqueItems": schema({"not": {}, "if": {}, "uniqueItems": True}),
    "a nest of 31": f'"guided_json": {nested(31)}',
    "an enum of 1,000": schema({"enum": [f"value {number}" for number in range(1000)]}),
    "500 optional properties": schema(optional(500)),
    "anyOf of 200 patterns": schema({"anyOf": _PATTERNS}),
    "(a|b)*a(a|b){18}": regex("(a|b)*a(a|b){18}"),
    "[a-z]{1,30000}": regex("[a-z]{1,30000}"),
    "an endless nest": '"guided_grammar": ' + json.dumps('root ::= "(" root ")" | "(" root "]" | "x"'),
}


class FreeClient:
    """A client that streams one answer after the other, and records when its events come."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url
        self._last_s: float | None = None  # time of the event before, in the same answer
        self.gaps: list[tuple[float, float]] = []  # when each gap ended, and its length, in seconds

    async def stream(self) -> None:
        """Stream until cancelled."""
        body = {"prompt": PROMPT, "max_tokens": FREE_TOKENS, "ignore_eos": True, "stream": True}
        while True:
            self._last_s, events = None, Events()
            async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for received in response.content.iter_any():
                    now_s = time.perf_counter()
                    if not [data for data in events.feed(received) if data != b"[DONE]"]:
                        continue
                    if self._last_s is not None:
                        self.gaps.append((now_s, now_s - self._last_s))
                    self._last_s = now_s

    def longest_s(self, since_s: float) -> float:
        """Return the longest gap that ended since then, including one that still lasts."""
        ended = [gap for at_s, gap in self.gaps if at_s >= since_s]
        lasting = [] if self._last_s is None else [time.perf_counter() - self._last_s]
        return max([*ended, *lasting], default=0.0)


async def answered(http: aiohttp.ClientSession, url: str, form: str) -> str:
    """Return how a request with this field ended."""
    asked = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1, "seed": 1})
    body, headers = f"{asked[:-1]}, {form}}}" if form else asked, {"Content-Type": "application/json"}
    async with http.post(f"{url}/v1/completions", data=body, headers=headers) as response:
        told = await response.json()
    if response.status == 200:
        return f"answered, {told['choices'][0]['finish_reason']}"
    return f"{response.status}: {told['error']['message']}"


async def measured(url: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each form, of the round with the longest gap."""
    limit = aiohttp.ClientTimeout(total=LONGEST_S)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        client = FreeClient(http, url)
        streaming = asyncio.create_task(client.stream())
        await asyncio.sleep(2)  # lets work that happens only once end
        rows = []
        async with aiohttp.ClientSession(timeout=limit) as other:
            for name, form in {"nobody": None, "a request without a form": "", **FORMS}.items():
                found = []
                for _ in range(rounds):
                    since_s = time.perf_counter()
                    ended = "" if form is None else await answered(other, url, form)
                    took_s = time.perf_counter() - since_s
                    await asyncio.sleep(ALONE_S if form is None else SETTLE_S)
                    found.append((client.longest_s(since_s), took_s, ended))
                gap_s, took_s, ended = max(found)
                rows.append({"beside": name, "longest_gap_s": gap_s, "took_s": took_s, "ended": ended})
                if streaming.done():
                    await streaming
        streaming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await streaming
    return rows


def print_table(result: Mapping[str, Any]) -> None:
    """Print Markdown rows."""
    print("| beside | longest gap, ms | it took, s | how it ended |\n|---|---|---|---|")
    for row in result["rows"]:
        took = f"{row['took_s']:.2f}" if row["ended"] else ""
        ended = row["ended"] if len(row["ended"]) <= 100 else f"{row['ended'][:97]}..."
        beside = row["beside"].replace("|", "\\|")
        print(f"| {beside} | {1e3 * row['longest_gap_s']:.0f} | {took} | {ended} |")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `schemas`."""
    add_recipe(parser)
    parser.add_argument(
        "--rounds",
        type=whole(1, MOST_COUNT),
        default=3,
        metavar="N",
        help="how often each form comes, of which the longest gap is told (default: 3)",
    )
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    clock = RunClock()
    profile = [] if options.profile is None else ["--profile", options.profile]
    command = ["scripts.serve", str(options.recipe), *options.overrides, *profile, "--port", "0"]
    with started(*command, "server.spare_engine=false") as server:
        asyncio.run(ready(server.url, 0))
        rows = asyncio.run(measured(server.url, options.rounds))
    described = {"benchmark": "schemas", "machine": versions.describe(), "clock": clock.read()}
    show(described | {"rows": rows}, options, print_table)
