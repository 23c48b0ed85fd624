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
from functools import partial
from typing import Any

import aiohttp
import numpy as np

from benchmark.options import Column, in_turns, medians, named_rows, table
from benchmark.processes import ServerProcess, started
from benchmark.serve.client import StreamedAnswer, read_stream

WORDS = (
    *("the", "fox", "lamp", "river", "stone", "wind", "little", "green"),
    *("house", "bread", "song", "night", "star", "cloud", "road", "tree"),
)

Messages = list[dict[str, str]]
Answer = tuple[StreamedAnswer, float]  # The second is the seconds until its first event
WAYS = ("prefix", "round_robin")
READY_S = 300.0
SYSTEMS = 6  # system prompts; every other session has the first
SYSTEM_WORDS, TURN_WORDS = 120, 20  # words of each system prompt, and of each turn
ANSWER_TOKENS = 16
THINK_S = 0.2  # seconds between turns
COLUMNS = (
    Column("name", "route"),
    Column("found", "tokens found", "{:.2f}"),
    Column("of_best", "of the best known", "{:.3f}"),
    Column("sent_max_over_mean", "requests", "{:.2f}"),
    Column("computed_max_over_mean", "computed", "{:.2f}"),
    Column("ttft_p50_ms", "TTFT p50", "{:.0f} ms"),
    Column("ttft_p99_ms", "p99", "{:.0f} ms"),
)


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


async def ask(http: aiohttp.ClientSession, url: str, messages: Messages, tokens: int) -> Answer:
    """Return an answer, and the seconds until its first event, which count where it is whole."""
    body = {
        "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    start_s = time.perf_counter()
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        answer = await read_stream(response)
    return answer, answer.first_s - start_s


async def serve(url: str, load: argparse.Namespace, seed: int) -> list[Answer]:
    """Run all sessions of a round, a number of them at once; half of them have the first system prompt."""
    random, found = np.random.default_rng(seed), list[Answer]()

    def words(count: int) -> str:
        return " ".join(random.choice(WORDS, count))

    systems = [words(SYSTEM_WORDS) for _ in range(SYSTEMS)]
    waiting = []
    for number in range(load.sessions):
        which = 0 if number % 2 == 0 else int(random.integers(0, SYSTEMS))
        turns = [words(TURN_WORDS) for _ in range(int(random.integers(1, 6)))]
        waiting.append((systems[which], turns))
    waiting.reverse()

    async def sessions(http: aiohttp.ClientSession) -> None:
        while waiting:
            system, turns = waiting.pop()
            messages = [{"role": "system", "content": system}]
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                found.append(await ask(http, url, messages, ANSWER_TOKENS))
                messages.append({"role": "assistant", "content": found[-1][0].text})
                await asyncio.sleep(THINK_S)

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(sessions(http) for _ in range(load.concurrent)))
    return found


async def fleet(url: str) -> dict[str, Any]:
    """Return a router's description of its fleet."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/fleet") as response:
        reported: dict[str, Any] = await response.json()
        return reported


def run(options: argparse.Namespace) -> dict[str, Any]:
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
        ways = {way: partial(one_round, way, urls, options) for way in WAYS}
        return {"fleet": {way: medians(each) for way, each in in_turns(ways, options.rounds).items()}}


def one_round(way: str, urls: Sequence[str], options: argparse.Namespace, number: int) -> dict[str, float]:
    """Return the figures of one round by one route, whose conversations no other round has."""
    with routed(urls, "--recipe", options.recipe, *options.overrides, "--route", way) as router:
        found = asyncio.run(serve(router.url, options, seed=2 * number + WAYS.index(way)))
        return figures(found, asyncio.run(fleet(router.url)))


def figures(found: Sequence[Answer], reported: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of one round."""
    whole_s = [first_s for answer, first_s in found if answer.is_whole]
    usages = [answer.usage for answer, _ in found if answer.usage.cached_tokens is not None]
    num_cached = sum(each.cached_tokens or 0 for each in usages)
    sent = [each["sent"] for each in reported["replicas"]]
    loads = [each["prompt_tokens"] - each["hit_tokens"] for each in reported["replicas"]]
    # A router knows no best replica without page events.
    is_known = reported["route"] == "prefix"
    of_best = {"of_best": num_cached / max(1, reported["best_hit_tokens"])} if is_known else {}
    p50, p99 = np.percentile(whole_s, [50, 99]).tolist()
    return {
        "found": num_cached / max(1, sum(each.prompt_tokens or 0 for each in usages)),
        "sent_max_over_mean": max(sent) / statistics.mean(sent),
        "computed_max_over_mean": max(loads) / statistics.mean(loads),
        "ttft_p50_ms": 1e3 * p50,
        "ttft_p99_ms": 1e3 * p99,
        "requests": len(whole_s),
        "failed": len(found) - len(whole_s),
        **of_best,
    }


def print_table(result: Mapping[str, Any]) -> None:
    """Print a row for each route."""
    print(table(COLUMNS, named_rows(result["fleet"])))
    print("\nrequests, and prompt tokens that were computed: the most of a replica / the mean")
