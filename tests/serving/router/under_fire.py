"""Send requests through a router while something behind it is killed.

A tally holds whether each request was answered or told of the loss, and how soon.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx

from tests.patience import PATIENCE_S
from tests.serving.server import Server
from tests.thorough import cases

PROMPTS = ["348+275=", "One day, ", "What is 17 + 25?", "Tell me of the sea. ", "A fox ", "Once upon a time "]
NUM_CLIENTS, NUM_TOKENS = 24, cases(32, 96)


@dataclass(slots=True)
class Tally:
    """What became of requests; `told_s` is from the kill to when each of those knew that was not answered."""

    outcomes: Counter[str] = field(default_factory=Counter)
    told_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # answers that look whole and are not


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended for its client: whole, told (by an error), or broken (its connection)."""

    outcome: str
    text: str
    ended_s: float


def body_of(prompt: str, *, is_stream: bool) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if is_stream else {})


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    prompt: str,
    *,
    is_stream: bool,
    begun: Callable[[], None] = lambda: None,
) -> Answer:
    """One request."""
    received = b""
    try:
        async with http.post(f"{url}/v1/completions", json=body_of(prompt, is_stream=is_stream)) as response:
            async for part in response.content.iter_any():
                received += part
                begun()
    except aiohttp.ClientError:
        # Nothing of what has arrived may say that it is all
        outcome = "wrong" if b"[DONE]" in received else "broken"
        return Answer(outcome, received.decode(), time.monotonic())
    now_s = time.monotonic()
    if response.status != 200:
        told = json.loads(received)["error"]["message"]
        return Answer("told", told, now_s)
    if not is_stream:
        found = json.loads(received)
        is_whole = found["usage"]["completion_tokens"] == NUM_TOKENS
        return Answer("whole" if is_whole else "wrong", found["choices"][0]["text"], now_s)
    events = [line[6:] for line in received.decode().split("\n\n") if line]
    chunks = [json.loads(each) for each in events if each != "[DONE]"]
    if any("error" in each for each in chunks):
        return Answer("told", "", now_s)
    text = "".join(choice["text"] for each in chunks for choice in each["choices"])
    # A stream that ends as streams do, without its last event: who does not look for it believes in it
    num_tokens = sum((each.get("usage") or {"completion_tokens": 0})["completion_tokens"] for each in chunks)
    is_whole = events.count("[DONE]") == 1 and events[-1] == "[DONE]" and num_tokens == NUM_TOKENS
    return Answer("whole" if is_whole else "wrong", text, now_s)


def expected(url: str) -> dict[str, str]:
    """The whole answer to each prompt."""

    async def answers() -> dict[str, str]:
        async with aiohttp.ClientSession() as http:
            found = [await ask(http, url, prompt, is_stream=False) for prompt in PROMPTS]
        assert {each.outcome for each in found} == {"whole"}
        return {prompt: each.text for prompt, each in zip(PROMPTS, found)}

    return asyncio.run(answers())


def fire(url: str, whole: dict[str, str], kill: Callable[[], None], tally: Tally, *, after: int) -> None:
    """Many requests at once, half of them streams; `kill` comes after so many pieces of answers."""

    async def run() -> None:
        num_pieces, is_time = 0, asyncio.Event()

        def begun() -> None:
            nonlocal num_pieces
            num_pieces += 1
            if num_pieces >= after:
                is_time.set()

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as http:
            asking = [
                asyncio.ensure_future(
                    ask(http, url, PROMPTS[n % len(PROMPTS)], is_stream=n % 2 == 0, begun=begun)
                )
                for n in range(NUM_CLIENTS)
            ]
            await is_time.wait()
            await asyncio.to_thread(kill)
            killed_s = time.monotonic()
            for number, answer in enumerate(await asyncio.gather(*asking)):
                outcome = answer.outcome
                if outcome == "whole" and answer.text != whole[PROMPTS[number % len(PROMPTS)]]:
                    outcome = "wrong"
                tally.outcomes[outcome] += 1
                if outcome == "wrong":
                    tally.wrong.append(answer.text)
                elif outcome != "whole":
                    tally.told_s.append(max(0.0, answer.ended_s - killed_s))

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
