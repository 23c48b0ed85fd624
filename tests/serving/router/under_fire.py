"""Send requests through a router while something behind it is killed.

A tally holds whether each request was answered or told of the loss, and how soon.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx

from tests.patience import PATIENCE_S
from tests.serving.router.resumed import COMPLETIONS, Outcome, ask, ask_all, session
from tests.serving.server import Server
from tests.thorough import cases

NUM_CLIENTS, NUM_TOKENS = 24, cases(32, 96)
PROMPTS = ("348+275=", "One day, ", "What is 17 + 25?", "Tell me of the sea. ", "A fox ", "Once upon a time ")
PLAIN = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [  # half of them streams
    (COMPLETIONS, {"prompt": prompt} | PLAIN | (STREAMED if number % 2 == 0 else {}))
    for number, prompt in enumerate(PROMPTS)
]


@dataclass(slots=True)
class Tally:
    """What became of requests; `told_s` is from the kill to when each of those knew that was not answered."""

    outcomes: Counter[str] = field(default_factory=Counter)
    told_s: list[float] = field(default_factory=list)
    wrong: list[Outcome] = field(default_factory=list)  # answers that look whole and are not


def expected(url: str) -> list[Outcome]:
    """The whole answer to each request."""
    return asyncio.run(ask_all(url, REQUESTS))


async def send(
    http: aiohttp.ClientSession,
    url: str,
    number: int,
    whole: Sequence[Outcome],
    tally: Tally,
    grown: Callable[[], None] = lambda: None,
) -> bool:
    """Send one of the requests, tally how it ends, and return whether it was answered.

    It is whole, told (by an error), or broken (its connection); what looks whole and is not is wrong.
    """
    number %= len(REQUESTS)
    try:
        found = await ask(http, url, *REQUESTS[number], grown)
    except aiohttp.ClientError:
        tally.outcomes["broken"] += 1
        return False
    if found.status != 200 or any(isinstance(each, dict) and "error" in each for each in found.events):
        tally.outcomes["told"] += 1
        return False
    is_whole = found.is_like(whole[number])
    tally.outcomes["whole" if is_whole else "wrong"] += 1
    tally.wrong += [] if is_whole else [found]
    return True


def fire(url: str, whole: Sequence[Outcome], kill: Callable[[], None], tally: Tally, *, after: int) -> None:
    """Many requests at once; `kill` comes after so many pieces of answers."""

    async def run() -> None:
        num_pieces, is_time, killed_s = 0, asyncio.Event(), 0.0

        def grown() -> None:
            nonlocal num_pieces
            num_pieces += 1
            if num_pieces >= after:
                is_time.set()

        async def one(number: int) -> None:
            if not await send(http, url, number, whole, tally, grown):
                tally.told_s.append(max(0.0, time.monotonic() - killed_s) if killed_s else 0.0)

        async with session() as http:
            asking = [asyncio.ensure_future(one(number)) for number in range(NUM_CLIENTS)]
            await is_time.wait()
            await asyncio.to_thread(kill)
            killed_s = time.monotonic()
            await asyncio.gather(*asking)

    asyncio.run(run())


def router(replicas: Sequence[Server]) -> Server:
    """One in front of these, once all take requests."""
    options = [option for each in replicas for option in ("--replica", each.url)]
    found = Server(*options, verb="scripts.route")
    wait_ready(found.url, len(replicas))
    return found


def wait_ready(url: str, count: int) -> None:
    """Until the router sends requests to so many replicas."""
    wait(lambda: [each["state"] for each in fleet(url)["replicas"]] == ["ready"] * count)


def wait(holds: Callable[[], bool]) -> None:
    """Until it holds."""
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, "it never came to hold"
        time.sleep(0.02)


def fleet(url: str) -> dict[str, Any]:
    """What a router tells of itself."""
    found: dict[str, Any] = httpx.get(f"{url}/fleet", timeout=PATIENCE_S).json()
    return found


def figure(server: Server, name: str) -> int:
    """A figure of a server's metrics, over all labels."""
    lines = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return int(sum(float(each.rpartition(" ")[2]) for each in lines if each.startswith(name)))
