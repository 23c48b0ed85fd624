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

from benchmark.options import markdown
from benchmark.processes import started
from benchmark.serve.client import read_stream

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


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the form of a response that a schema holds whole."""
    return {"type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": schema}}


def field(name: str, value: Any) -> str:
    """Return a field of a request as JSON."""
    return f'"{name}": {json.dumps(value)}'


_PATTERNS = [{"type": "string", "pattern": f"^(a|b)*{number:03}(a|b){{9}}$"} for number in range(200)]
FORMS = {  # content -> field of the request; the first six are far beyond the caps
    "a nest of 500": f'"guided_json": {nested(500)}',
    "an enum of 100,000": field("guided_json", {"enum": [f"value {number}" for number in range(100_000)]}),
    "oneOf, 12 deep": field("guided_json", either(12)),
    "5,000 optional properties": field("guided_json", optional(5000)),
    "((a{99}){99}){99}": field("guided_regex", "((a{99}){99}){99}"),
    "not, if, uniqueItems, strict": field(
        "response_format", strict({"not": {}, "if": {}, "uniqueItems": True})
    ),
    "a nest of 31": f'"guided_json": {nested(31)}',
    "an enum of 1,000": field("guided_json", {"enum": [f"value {number}" for number in range(1000)]}),
    "500 optional properties": field("guided_json", optional(500)),
    "anyOf of 200 patterns": field("guided_json", {"anyOf": _PATTERNS}),
    "(a|b)*a(a|b){18}": field("guided_regex", "(a|b)*a(a|b){18}"),
    "[a-z]{1,30000}": field("guided_regex", "[a-z]{1,30000}"),
    "an endless nest": field("guided_grammar", 'root ::= "(" root ")" | "(" root "]" | "x"'),
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
            self._last_s = None
            async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
                response.raise_for_status()
                await read_stream(response, self._came)

    def _came(self, now_s: float) -> None:
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
        answer = await response.json()
    if response.status == 200:
        return f"answered, {answer['choices'][0]['finish_reason']}"
    return f"{response.status}: {answer['error']['message']}"


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


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start a server of the recipe, and measure it."""
    profile = [] if options.profile is None else ["--profile", options.profile]
    command = ["scripts.serve", str(options.recipe), *options.overrides, *profile, "--port", "0"]
    with started(*command, "server.spare_engine=false") as server:
        return {"rows": asyncio.run(measured(server.url, options.rounds))}


def print_table(result: Mapping[str, Any]) -> None:
    """Print Markdown rows."""
    rows = [
        (
            row["beside"].replace("|", "\\|"),
            f"{1e3 * row['longest_gap_s']:.0f}",
            f"{row['took_s']:.2f}" if row["ended"] else "",
            row["ended"] if len(row["ended"]) <= 100 else f"{row['ended'][:97]}...",
        )
        for row in result["rows"]
    ]
    print(markdown(("beside", "longest gap, ms", "it took, s", "how it ended"), rows))
