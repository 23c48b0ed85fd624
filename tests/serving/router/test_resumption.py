"""`kill -9` of replicas and of their engines, at drawn tokens: no client notices anything.

Two real replicas and a router; each answer is compared with what one replica alone answered. Where no answer
was open at what was killed, nothing went on, and the same is done again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.serving.router.resumed import CHAT, COMPLETIONS, Outcome, ask_all, asked, lasting
from tests.serving.router.under_fire import fleet, router, wait_ready
from tests.serving.server import Server
from tests.thorough import cases

AGENT = "recipes/tiny/agent.yaml"
NUM_TOKENS = cases(48, 256)
NUM_STREAMS = cases(14, 64)
NUM_KILLS = cases(2, 20)
OPTIONS = ("server.resume=64",)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(cases(600, 86_400))]


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Server]]:
    """Two, each of which a test may replace by another at the same port."""
    servers = [Server(AGENT, *OPTIONS, port=free_port()) for _ in range(2)]
    for each in servers:
        each.ready()
    yield servers
    for each in servers:
        each.process.kill()
        each.wait()


def requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """So many of every kind, most of them streams, whose usage is told; and four that last longer."""
    kinds, found = asked(NUM_TOKENS), lasting(4)
    for number in range(count):
        path, fields = kinds[number % len(kinds)]
        is_stream = number // len(kinds) % 3 != 1
        shown = {"stream": True} if is_stream else {}
        if is_stream and path in (COMPLETIONS, CHAT):
            shown["stream_options"] = {"include_usage": True}
        found.append((path, fields | shown))
    return found


class Killer:
    """Kills replicas in turn, each at a drawn number of parts of answers that clients have received.

    The other one is ready then: an answer that finds neither for too long is cut off, as it should be.
    """

    def __init__(self, front: Server, replicas: list[Server], kills: int) -> None:
        self._front, self._replicas = front, replicas
        self._draw = random.Random(kills)
        self._left, self._num_parts, self._next = kills, 0, 0
        self._after = self._draw.randrange(20, 120)
        self._killed: set[int] = set()
        self.num_killed = 0

    def grown(self) -> None:
        self._num_parts += 1
        if not self._left or self._num_parts < self._after:
            return
        victim = self._replicas[self._next]
        ready = (httpx.get(f"{each.url}/ready", timeout=PATIENCE_S) for each in self._replicas)
        known = (each["state"] for each in fleet(self._front.url)["replicas"])
        if any(each.status_code != 200 for each in ready) or any(each != "ready" for each in known):
            return  # the one that was killed before has not come back yet, or the router does not know it
        pid = victim.engine_pid
        if pid in self._killed:
            return  # the line that names the next engine has not been read yet
        os.kill(pid, signal.SIGKILL)
        self._killed.add(pid)
        self.num_killed += 1
        self._left -= 1
        self._next = 1 - self._next
        self._after = self._num_parts + self._draw.randrange(20, 120)


def check(found: list[Outcome], expected: list[Outcome]) -> None:
    for number, (one, other) in enumerate(zip(found, expected)):
        assert one.is_like(other), (number, one.status, one.events[-1], other.events[-1])


def test_engines_are_killed_and_every_answer_is_as_it_would_have_been(replicas: list[Server]) -> None:
    front, sent = router(replicas), requests(NUM_STREAMS)
    expected = asyncio.run(ask_all(replicas[0].url, sent))
    assert {each.status for each in expected} == {200}
    num_killed = num_resumed = 0
    while num_killed < NUM_KILLS or not num_resumed:
        wait_ready(front.url, 2)
        killer = Killer(front, replicas, max(1, NUM_KILLS - num_killed))
        found = asyncio.run(ask_all(front.url, sent, killer.grown))
        num_killed += killer.num_killed
        num_resumed += sum(each.num_resumed for each in found)
        check(found, expected)
    figures = fleet(front.url)
    print(f"{num_killed} kills under {NUM_STREAMS} answers: {figures['resumed']} went on")
    assert figures["cut_off"] == figures["known_answer_bytes"] == figures["open"] == 0
    front.close()


@pytest.mark.parametrize("signal_sent", cases([signal.SIGTERM], [signal.SIGTERM, signal.SIGKILL]))
def test_a_server_that_ends_hands_its_answers_over(
    replicas: list[Server], signal_sent: signal.Signals
) -> None:
    """Of two, once 30 parts of answers have come; what has not ended within server.drain_s is not cut off."""
    front, sent = router(replicas[:1]), [(p, f) for p, f in requests(9) if f.get("stream")]
    expected = asyncio.run(ask_all(replicas[0].url, sent))
    port = free_port()
    httpx.post(f"{front.url}/fleet/add?http://127.0.0.1:{port}", timeout=PATIENCE_S).raise_for_status()
    while not fleet(front.url)["resumed"]:
        leaving, num_parts = Server(AGENT, *OPTIONS, "server.drain_s=0", port=port).ready(), 0
        wait_ready(front.url, 2)

        def grown(leaving: Server = leaving) -> None:
            nonlocal num_parts
            num_parts += 1
            if num_parts == 30:
                os.kill(leaving.process.pid, signal_sent)

        check(asyncio.run(ask_all(front.url, sent, grown)), expected)
        assert leaving.wait() == (0 if signal_sent == signal.SIGTERM else -signal_sent)
    front.close()
