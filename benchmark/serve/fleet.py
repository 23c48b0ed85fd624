"""Compare a router that knows cached pages with one that sends in turn, in front of real servers.

Several servers of a recipe are started on this machine, and in front of them the router, with each of its
routes in turn. Sessions of several turns, half of which share one system prompt, ask through it; each turn
includes the conversation before it. The servers' caches are not cleared between the routes: each round has
conversations of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmark.options import markdown
from benchmark.processes import ServerProcess, started
from benchmark.serve.client import chunks

WORDS = (
    *("the", "fox", "lamp", "river", "stone", "wind", "little", "green"),
    *("house", "bread", "song", "night", "star", "cloud", "road", "tree"),
)


WAYS = ("prefix", "round_robin")
READY_S = 300.0


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The load of a round."""

    sessions: int
    concurrent: int  # sessions at once
    systems: int  # system prompts; every other session has the first
    system_words: int
    turn_words: int
    answer_tokens: int
    think_s: float  # seconds between an answer and the next turn


@dataclass(slots=True)
class Found:
    """The results of a round."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: int = 0
    ttft_s: list[float] = field(default_factory=list)


@contextmanager
def routed(urls: Sequence[str], *flags: str) -> Iterator[ServerProcess]:
    """Start a router in front of servers, and yield it once it sends requests to all of them."""
    behind = [argument for url in urls for argument in ("--replica", url)]
    with started("scripts.route", *behind, *flags, "--port", "0", ready="") as router:
        asyncio.run(replicas_ready(router.url, len(urls)))
        yield router


async def replicas_ready(url: str, num_replicas: int) -> None:
    """Wait until all replicas behind a router take requests."""
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        if [each["state"] for each in (await fleet(url))["replicas"]] == ["ready"] * num_replicas:
            return
        await asyncio.sleep(0.1)
    raise OSError(f"{url} was not ready within {READY_S:g} s")


async def ask(
    http: aiohttp.ClientSession, url: str, messages: Sequence[Mapping[str, str]], tokens: int, found: Found
) -> str:
    """Return the text of an answer, whose figures are added to `found`."""
    body = {
        "messages": list(messages), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    start_s, first_s, text, is_whole = time.perf_counter(), None, "", False
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        async for now_s, chunk in chunks(response):
            if chunk is None:
                is_whole = True
                continue
            if first_s is None and chunk.choices:
                first_s = now_s - start_s
            text += "".join(each.delta.content or "" for each in chunk.choices or [] if each.delta)
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                found.prompt_tokens += chunk.usage.prompt_tokens or 0
                found.cached_tokens += chunk.usage.prompt_tokens_details.cached_tokens or 0
    if is_whole and first_s is not None:
        found.ttft_s.append(first_s)
    else:
        found.failed += 1
    return text


async def serve(url: str, load: FleetLoad, seed: int) -> Found:
    """Run all sessions of a round, a number of them at once."""
    random, found = np.random.default_rng(seed), Found()

    def words(count: int) -> str:
        return " ".join(random.choice(WORDS, count))

    systems = [words(load.system_words) for _ in range(load.systems)]
    waiting = []
    for number in range(load.sessions):
        which = 0 if number % 2 == 0 else int(random.integers(0, load.systems))
        turns = [words(load.turn_words) for _ in range(int(random.integers(1, 6)))]
        waiting.append((systems[which], turns))
    waiting.reverse()

    async def sessions(http: aiohttp.ClientSession) -> None:
        while waiting:
            system, turns = waiting.pop()
            messages = [{"role": "system", "content": system}]
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                answer = await ask(http, url, messages, load.answer_tokens, found)
                messages.append({"role": "assistant", "content": answer})
                await asyncio.sleep(load.think_s)

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(sessions(http) for _ in range(load.concurrent)))
    return found


async def fleet(url: str) -> dict[str, Any]:
    """Return a router's description of its fleet."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/fleet") as response:
        reported: dict[str, Any] = await response.json()
        return reported


def measure(options: argparse.Namespace, load: FleetLoad) -> dict[str, Any]:
    """Measure each route in turns.

    The figures are tokens found, also relative to the best replica, the replicas' load, and first tokens.
    """
    with ExitStack() as running:
        urls = [
            running.enter_context(
                started(
                    "scripts.serve", options.recipe, *options.overrides, "--port", "0",
                    "server.spare_engine=false",
                    f"cache.events=tcp://127.0.0.1:{options.events_port + 10 * number}",
                )
            ).url
            for number in range(options.replicas)
        ]  # fmt: skip
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(1 + options.rounds):
            for way in WAYS:
                with routed(urls, "--recipe", options.recipe, *options.overrides, "--route", way) as router:
                    found = asyncio.run(serve(router.url, load, seed=2 * number + WAYS.index(way)))
                    rounds[way].append(figures(found, asyncio.run(fleet(router.url))))
        return {way: medians(each[1:]) for way, each in rounds.items()}


def figures(found: Found, reported: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of one round."""
    loads = [each["prompt_tokens"] - each["hit_tokens"] for each in reported["replicas"]]
    # A router knows no best replica without page events.
    is_known = reported["route"] == "prefix"
    of_best = {"of_best": found.cached_tokens / max(1, reported["best_hit_tokens"])} if is_known else {}
    p50, p99 = np.percentile(found.ttft_s, [50, 99]).tolist()
    return {
        "found": found.cached_tokens / max(1, found.prompt_tokens),
        "sent_max_over_mean": max(each["sent"] for each in reported["replicas"])
        / statistics.mean(each["sent"] for each in reported["replicas"]),
        "computed_max_over_mean": max(loads) / statistics.mean(loads),
        "ttft_p50_ms": 1e3 * p50,
        "ttft_p99_ms": 1e3 * p99,
        "requests": len(found.ttft_s),
        "failed": found.failed,
        **of_best,
    }


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over rounds."""
    return {name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the routes under the load that the options describe."""
    names = ("sessions", "concurrent", "systems", "system_words", "turn_words", "answer_tokens", "think_s")
    load = FleetLoad(**{name: getattr(options, name) for name in names})
    return {"fleet": measure(options, load)}


def print_table(result: Mapping[str, Any]) -> None:
    """Print a Markdown row for each route."""
    heads = ("route", "tokens found", "of the best known", "requests", "computed", "TTFT p50", "p99")
    rows = [
        (
            way,
            f"{row['found']:.2f}",
            f"{row['of_best']:.3f}" if "of_best" in row else "",
            *(f"{row[name]:.2f}" for name in ("sent_max_over_mean", "computed_max_over_mean")),
            *(f"{row[name]:.0f} ms" for name in ("ttft_p50_ms", "ttft_p99_ms")),
        )
        for way, row in result["fleet"].items()
    ]
    print(markdown(heads, rows))
    print("\nrequests, and prompt tokens that were computed: the most of a replica / the mean")
