"""Clients that read a byte at a time, or leave in every way: what they held is free again."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from serving import server as serving_server
from serving.api import writer
from serving.api.api_keys import ApiKeys, Rights
from serving.api.app import application
from serving.async_llm import AsyncLLM
from serving.engine.messages import Ready
from tests.patience import PATIENCE_S
from tests.serving.faults import Served
from tests.serving.server import TINY
from tests.serving.test_connections import connected, request
from tests.serving.test_faults import SMALL
from tests.serving.test_supervisor import FACTS
from tests.thorough import cases

LONG: dict[str, Any] = {"prompt": "One day", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_LAST_S", 0.5)
        patch.setattr(serving_server, "_SENT_BYTES", 2**12)
        limits = ("server.max_unread_tokens=32", "server.spare_engine=false")
        with Served(*SMALL, *limits) as served:
            yield served


def pages(served: Served) -> dict[str, float]:
    """Of the metrics: those that nobody uses, and those in use."""
    values = {}
    for line in httpx.get(served.url + "/metrics", timeout=PATIENCE_S).text.splitlines():
        if line.startswith("cb_kv_pages_") and "{" in line:
            values[line.removeprefix("cb_kv_pages_").partition("{")[0]] = float(line.split()[-1])
    return {"idle": values["free"] + values["cached"], "used": values["used"]}


def at_rest(served: Served) -> dict[str, float]:
    """The pages, once a beat of the engine has told that nobody uses any."""
    served.settle()
    until_s = time.monotonic() + PATIENCE_S
    while (found := pages(served))["used"]:
        assert time.monotonic() < until_s, found
        time.sleep(0.05)
    return found


def test_who_reads_a_byte_at_a_time_is_cut_off_and_holds_no_page(served: Served) -> None:
    before, cut = at_rest(served), served.llm.stats.aborts["slow_reader"]
    with served.five_checks():
        clients = [connected(served, room_bytes=2048) for _ in range(3)]
        for client in clients:
            client.sendall(request(LONG | {"stream": True, "logprobs": 5}))
        until_s = time.monotonic() + PATIENCE_S
        while served.llm.stats.aborts["slow_reader"] < cut + len(clients):
            assert time.monotonic() < until_s, served.llm.stats.aborts
            for client in clients:
                assert len(client.recv(1)) == 1
            time.sleep(0.02)
        for client in clients:
            client.close()
    assert at_rest(served) == before


def leave(served: Served, how: str, draw: random.Random) -> None:
    """Ask for much, and end the connection in this way."""
    body = LONG | {
        "stream": draw.random() < 0.5,
        "n": draw.choice((1, 1, 3)),
        "prompt": "a" * draw.choice((3, 90)),
    }
    with connected(served) as client:
        if how == "timeout":
            client.sendall(request(body | {"timeout_s": 0.05}))
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                continue
            return
        whole = request(body)
        client.sendall(whole[: draw.randrange(len(whole))] if how == "part" else whole)
        if how == "garbage":
            client.sendall(b"no HTTP\r\n\r\n")
        if how == "half-close":
            client.shutdown(socket.SHUT_WR)
        if draw.random() < 0.5:
            time.sleep(draw.uniform(0, 0.1))  # it may have begun
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


WAYS = ("close", "reset", "half-close", "part", "garbage", "timeout")


@pytest.mark.parametrize("number", cases((60,), (60, 3000)))
def test_no_page_is_lost_however_clients_leave(served: Served, number: int) -> None:
    before, draw = at_rest(served), random.Random(0)
    with served.five_checks(neighbours=1), ThreadPoolExecutor(16) as clients:
        works = [(WAYS[at % len(WAYS)], random.Random(draw.random())) for at in range(number)]
        for _ in clients.map(lambda work: leave(served, *work), works):
            continue
    assert at_rest(served) == before


@pytest.mark.parametrize(
    ("state", "silent_s", "health", "said", "ready"),
    [
        ("starting", -1e6, 200, "starting", 503),
        ("ready", -1e6, 200, "ready", 200),
        ("ready", 1e6, 200, "slow", 200),
        ("lost", -1e6, 503, "lost", 503),
        ("draining", -1e6, 200, "draining", 503),
        ("dead", -1e6, 503, "dead", 503),
    ],
)
def test_a_probe_is_answered_in_every_state(
    state: Any, silent_s: float, health: int, said: str, ready: int
) -> None:
    """Without a key, by GET and HEAD, and never as a request in the metrics."""

    async def run() -> None:
        llm = AsyncLLM(TINY)
        if state not in ("starting", "dead"):
            llm.engine._begin(Ready(FACTS), 0.0)
            llm.engine.silence.heard_s = time.monotonic() - silent_s
        llm.engine.become(state)
        app = application(llm, "tiny", ApiKeys({"one": Rights()}), is_local=False)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            for path, status in (("/health", health), ("/ready", ready)):
                answer = await client.get(path)
                assert answer.status_code == status
                assert (await client.head(path)).status_code == status
                if path == "/health":
                    assert json.loads(answer.text)["status"] == said
            assert (await client.get("/live")).status_code == 401
            assert (await client.get("/metrics")).status_code == 401
        assert not llm.stats.responses["503"]

    asyncio.run(run())
