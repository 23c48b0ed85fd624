"""Clients that do not read, do not write, leave in any way, or are too many cost nobody else."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import httpx
import pytest

from serving import async_llm
from serving import server as serving_server
from serving.api import protocol, writer
from serving.api.api_keys import ApiKeys, Rights
from serving.api.app import application
from serving.async_llm import AsyncLLM, ServerLimits
from serving.engine.messages import Ready
from tests.patience import PATIENCE_S
from tests.serving.faults import Served
from tests.serving.server import TINY, Server
from tests.serving.test_faults import SMALL
from tests.serving.test_supervisor import FACTS
from tests.thorough import cases, first_quick

# Slots and pages for all: nobody waits, and nobody is preempted
ROOM = ("scheduler.num_slots=256", "scheduler.max_batch_tokens=512", "cache.num_pages=6144")
# The longest answer that is read here has as many: a busy machine that holds up the event loop cuts off none
LIMITS = ("server.max_unread_tokens=120", "server.spare_engine=false")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_LAST_S", 0.5)
        patch.setattr(serving_server, "_SENT_BYTES", 2**12)
        with Served(*SMALL, *ROOM, *LIMITS) as served:
            yield served


def connected(served: Served, room_bytes: int = 0) -> socket.socket:
    """A client, with so much room for what it does not read."""
    port = int(served.url.rpartition(":")[2])
    client = socket.socket()
    client.settimeout(PATIENCE_S)
    if room_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
    client.connect(("127.0.0.1", port))
    return client


def request(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(data) + data
    )


def test_what_is_written_in_one_turn_leaves_together_unless_it_is_long() -> None:
    transport, long = mock.Mock(spec=asyncio.Transport), b"x" * (protocol.MOST_DELAYED_BYTES + 1)
    transport.is_closing.return_value = False

    async def work() -> None:
        responses = protocol.ResponseTransport(transport, asyncio.get_running_loop(), lambda: False)
        responses.write(b"head, ")
        responses.write(b"first piece")
        assert not transport.write.called
        await asyncio.sleep(0)
        responses.write(long)
        assert transport.write.call_count == 2
        responses.write(b"rest")
        responses.close()

    asyncio.run(work())
    assert [each.args for each in transport.write.call_args_list] == [
        (b"head, first piece",),
        (long,),
        (b"rest",),
    ]


def test_who_sends_a_line_between_requests_is_not_kept_for_ever(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.five_checks(neighbours=0), connected(served) as client:
        client.sendall(request({"prompt": "1+1=", "max_tokens": 1}))
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
        monkeypatch.setattr(protocol, "WHOLE_S", 0.1)
        client.sendall(b"\r\n")
        assert client.recv(1 << 16) == b"", "closed, and nothing said"


LONG: dict[str, object] = {"prompt": "One day", "max_tokens": 1500, "ignore_eos": True}
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
LARGE = request({"prompt": "a" * 3 * 2**19})


@pytest.mark.parametrize(
    "behind", first_quick(1, [request({"prompt": "1+1="})[:-3], LARGE, GET * 500]), ids=len
)
def test_who_goes_away_with_requests_waiting_is_noticed(served: Served, behind: bytes) -> None:
    gone = served.llm.stats.aborts["disconnect"]
    with served.five_checks(neighbours=0):
        clients = [connected(served) for _ in range(8)]
        for client in clients:
            client.sendall(request(LONG) + behind)
        until_s = time.monotonic() + PATIENCE_S
        while served.llm.num_requests < 8:
            assert time.monotonic() < until_s, "they do not come in"
            time.sleep(0.01)
        for client in clients:
            client.close()
        until_s = time.monotonic() + PATIENCE_S
        while served.llm.stats.aborts["disconnect"] < gone + 8:
            assert time.monotonic() < until_s, "the engine works for nobody"
            assert served.llm.num_requests, "it has worked for nobody"
            time.sleep(0.01)


@pytest.mark.parametrize("behind", first_quick(1, [LARGE, GET * 500]), ids=len)
def test_too_much_behind_a_request_is_refused_in_its_turn(served: Served, behind: bytes) -> None:
    with served.five_checks(neighbours=0), connected(served) as client:
        client.sendall(request(LONG | {"max_tokens": 120}) + behind)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        first, _, rest = answer.partition(b"}HTTP/1.1 ")
        assert first.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"completion_tokens":120' in first
        assert (b"HTTP/1.1 " + rest).count(b"HTTP/1.1 413 ") == 1
        assert b"may wait on one connection" in rest.rpartition(b"HTTP/1.1 ")[2]


def test_who_sends_only_a_head_holds_a_place_for_a_while_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = served.llm
    one = dataclasses.replace(llm.recipe.server, max_requests=1)
    monkeypatch.setattr(llm, "limits", ServerLimits(one, llm.stats.rejected))
    whole = request({"prompt": "1+1=", "max_tokens": 1})
    head, _, body = whole.partition(b"\r\n\r\n")

    def entering() -> int:
        until_s = time.monotonic() + PATIENCE_S
        while not llm.limits.num_entering:
            assert time.monotonic() < until_s, "its head has not come"
            time.sleep(0.01)
        return llm.limits.num_entering

    monkeypatch.setattr(async_llm, "BODY_S", PATIENCE_S)
    with served.five_checks(neighbours=0), connected(served) as slow, connected(served) as other:
        slow.sendall(head + b"\r\n\r\n")
        assert entering() == 1
        other.sendall(whole)
        assert other.recv(1 << 16).startswith(b"HTTP/1.1 429 ")
        slow.sendall(body)
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
        assert not llm.limits.num_entering
        monkeypatch.setattr(async_llm, "BODY_S", 0.01)
        slow.sendall(head + b"\r\n\r\n")
        answer, until_s = b"HTTP/1.1 429 ", time.monotonic() + PATIENCE_S
        while answer.startswith(b"HTTP/1.1 429 "):
            assert time.monotonic() < until_s, "the place is held for ever"
            other.sendall(whole)
            answer = other.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", cases((4,), (4, 200)))
def test_who_does_not_read_is_cut_off(served: Served, number: int) -> None:
    body = {"prompt": "One day", "max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 5}
    cut = served.llm.stats.aborts["slow_reader"]
    with served.five_checks():
        clients = [connected(served, room_bytes=4096) for _ in range(number)]
        for client in clients:
            client.sendall(request(body))
        until_s = time.monotonic() + PATIENCE_S
        while served.llm.stats.aborts["slow_reader"] < cut + number:
            assert time.monotonic() < until_s, served.llm.stats.aborts
            time.sleep(0.05)
        until_s = time.monotonic() + PATIENCE_S
        while served.held()["connections"] > 4:  # those of the neighbours
            assert time.monotonic() < until_s, "a socket lingers"
            time.sleep(0.05)
        for client in clients:
            client.close()


def test_who_sends_half_a_request_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with served.five_checks():
        monkeypatch.setattr(protocol, "WHOLE_S", 2.0)
        clients = {}
        for sent in (b"", b"POST /v1/comp", request({"prompt": "1+1="})[:-3]):
            for _ in range(8):
                client = connected(served)
                client.sendall(sent)
                clients[client] = sent
        for client, sent in clients.items():
            answer = b"".join(iter(lambda: client.recv(4096), b""))  # noqa: B023 - used at once
            assert answer.startswith(b"HTTP/1.1 408 " if sent else b"")
            assert bool(answer) == bool(sent)
            client.close()


def test_who_is_gone_without_a_word_is_noticed_by_the_system(served: Served) -> None:
    async def options() -> list[int]:
        (connection,) = served.connections
        accepted = connection.transport.get_extra_info("socket")
        names = socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE
        alive = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        return [alive, *(accepted.getsockopt(socket.IPPROTO_TCP, name) for name in names)]

    with served.five_checks(neighbours=0), connected(served):
        until_s = time.monotonic() + PATIENCE_S
        while not served.connections:
            assert time.monotonic() < until_s
        assert served.call(options()) == [1, 60_000, 30]


def leave(served: Served, how: str, draw: random.Random) -> None:
    """Ask for much, and end the connection in this way."""
    body = LONG | {
        "max_tokens": 900,
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
        if how == "reads":
            client.sendall(request(body | {"stream": True}))
            for _ in range(draw.randrange(8)):
                client.recv(1 << 10)
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


WAYS = ("close", "reset", "half-close", "part", "garbage", "timeout", "reads")


@pytest.mark.parametrize("number", cases((60,), (60, 3000)))
def test_no_page_is_lost_however_clients_leave(served: Served, number: int) -> None:
    draw = random.Random(0)
    with served.five_checks(neighbours=1), ThreadPoolExecutor(16) as clients:
        works = [(WAYS[at % len(WAYS)], random.Random(draw.random())) for at in range(number)]
        for _ in clients.map(lambda work: leave(served, *work), works):
            continue


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


@pytest.mark.slow
def test_more_connections_than_descriptors() -> None:
    """They are refused before the last descriptor is taken, and the server goes on."""
    server = Server(TINY, limits={resource.RLIMIT_NOFILE: 160}).ready()
    port = int(server.url.rpartition(":")[2])
    clients = []
    for _ in range(220):
        client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        clients.append(client)
    refused = 0
    for client in clients:
        client.setblocking(False)
    until_s = time.monotonic() + PATIENCE_S
    while refused < 220 - 96:
        assert time.monotonic() < until_s, refused
        refused = 0
        for client in clients:
            try:
                refused += client.recv(4096, socket.MSG_PEEK).startswith(b"HTTP/1.1 503")
            except BlockingIOError:
                continue
        time.sleep(0.05)
    assert refused == 220 - 96
    for client in clients:
        client.close()
    server.wait_until("/ready", 200)
    assert server.close() == 0
