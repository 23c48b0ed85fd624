"""Requests that are framed otherwise than HTTP/1.1 has it, or that never come whole."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import Response

from serving.api.access import AccessControl, BodyMemory
from serving.api.api_keys import ApiKeys
from serving.metrics.server_stats import TRACE_HEADERS
from tests.pairs import pairs
from tests.patience import PATIENCE_S
from tests.serving.faults import Served
from tests.serving.test_connections import connected
from tests.serving.test_faults import SMALL

BODY = b'{"prompt":[1],"max_tokens":1}'
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*SMALL, "server.spare_engine=false") as served:
        yield served


def post(*headers: bytes, body: bytes = BODY, version: bytes = b"1.1") -> bytes:
    first = (b"POST /v1/completions HTTP/" + version, b"host: localhost", b"content-type: application/json")
    return b"\r\n".join([*first, *headers, b"connection: close", b"", body])


def answer(served: Served, data: bytes) -> bytes:
    """All that the server sends to a client that then sends no more."""
    with connected(served) as client:
        client.settimeout(PATIENCE_S)
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (post(b"content-length: 100"), 400, "ended before"),
        (post(b"transfer-encoding: chunked", body=CHUNKS[:9]), 400, "ended before"),
        (post(b"transfer-encoding: chunked", body=CHUNKS[:-2]), 400, "ended before"),
        (b"GET /health HTTP/1.1\r\nhost: local", 400, "ended before"),
        (post(b"transfer-encoding: chunked", body=CHUNKS, version=b"1.0"), 400, "Content-Length"),
        (post(b"content-length: %d" % len(BODY), version=b"2.0"), 505, "HTTP/2.0"),
        (b"GET /health\r\n\r\n", 505, "HTTP/0.9"),
        (b"GET http://evil.example/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 403, "localhost"),
        (b"GET http://evil.example/health HTTP/1.0\r\n\r\n", 403, "localhost"),
    ],
)
def test_it_is_refused_with_a_reason(served: Served, data: bytes, status: int, said: str) -> None:
    head, _, body = answer(served, data).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert said in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("host", [b"localhost", b"127.0.0.1:80", b"[::1]:8000"])
def test_a_host_in_the_first_line_counts(served: Served, host: bytes) -> None:
    data = b"GET http://%b/health HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n" % host
    assert answer(served, data).startswith(b"HTTP/1.1 200 ")


def test_an_old_client_is_not_told_to_continue(served: Served) -> None:
    data = post(b"expect: 100-continue", b"content-length: %d" % len(BODY), version=b"1.0")
    assert answer(served, data).startswith(b"HTTP/1.1 200 ")


def test_who_asks_nothing_gets_nothing(served: Served) -> None:
    assert answer(served, b"") == b""


def answers_to(served: Served, data: bytes, *, ends: bool) -> list[tuple[int, str]]:
    """The statuses and errors of all answers on a connection, which the server closes."""
    with connected(served) as client:
        client.sendall(data)
        if ends:
            client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    parts = answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 ")[1:]
    errors = [re.search(rb'"message":"([^"]*)"', each) for each in parts]
    return [(int(part[:3]), error[1].decode() if error else "") for part, error in zip(parts, errors)]


GET = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
ASK = b'{"prompt":[1],"max_tokens":8,"ignore_eos":true%b}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def asked(more: bytes = b"") -> bytes:
    body = ASK % more
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


BEFORE = {"get": GET, "gets": GET * 3, "whole": asked(), "stream": asked(b',"stream":true')}
BEHIND = {
    "no HTTP": (b"no HTTP\r\n\r\n", 400),
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", 400),
    "long head": (b"GET /version HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 70_000 + b"\r\n\r\n", 431),
    "version": (GET.replace(b"1.1", b"2.0"), 505),
    "chunk": (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\nno chunk\r\n", 400),
    "lengths": (HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400),
}


@pytest.mark.parametrize(("first", "second", "ends"), pairs([*BEFORE], [*BEHIND], [False, True]))
def test_what_came_whole_is_answered_before_what_is_refused(
    served: Served, first: str, second: str, ends: bool
) -> None:
    before, (behind, status) = BEFORE[first], BEHIND[second]
    found = answers_to(served, before + behind + GET, ends=ends)
    whole = before.count(b"HTTP/1.1")
    assert [each for each, _ in found] == [200] * whole + [status]
    assert found[-1][1]


@pytest.mark.parametrize("before", [GET, asked()], ids=len)
@pytest.mark.parametrize("behind", [asked()[:-1], asked()[:9]], ids=len)
def test_a_request_that_is_cut_short_behind_another_is_told_so(
    served: Served, before: bytes, behind: bytes
) -> None:
    (first, _), (second, said) = answers_to(served, before + behind, ends=True)
    assert (first, second) == (200, 400)
    assert "ended before it was complete" in said


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("Authorization", "Bearer a", "Bearer b"),
        ("Content-Type", "application/json", "text/plain"),
        ("Expect", "100-continue", "100-continue"),
        ("Host", "localhost", "localhost"),
        ("Transfer-Encoding", "chunked", "chunked"),
        ("X-Tenant", "a", "b"),
        ("Origin", "http://a.example", "http://b.example"),
        ("Content-Length", "2", "3"),
        ("Content-Length", "2", "2"),
    ],
)
def test_a_header_that_says_one_thing_is_not_said_twice(
    served: Served, name: str, first: str, second: str
) -> None:
    lines = {"Host": "localhost", "Content-Type": "application/json"}
    others = [f"{key}: {value}" for key, value in lines.items() if key != name]
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", *others, f"{name}: {first}", f"{name}: {second}"])
    ((status, said),) = answers_to(served, head.encode() + b"\r\n\r\n{}", ends=True)
    assert status == 400
    assert name in ("Content-Length", "Transfer-Encoding") or f"one {name} header, and this has 2" in said


def test_two_names_of_a_request_are_none() -> None:
    """They are labels: a proxy may have added one, and neither is chosen."""
    found: list[dict[str, str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append({**TRACE_HEADERS.get(), "id": scope["state"]["request_id"]})
        await Response()(scope, receive, send)

    async def ask(*headers: tuple[bytes, bytes]) -> None:
        async def send(message: Any) -> None:
            """Nobody reads it."""

        scope = {"type": "http", "method": "GET", "path": "/version", "raw_path": b"/version"}
        guarded = AccessControl(app, ApiKeys({}), 1000, BodyMemory(1000), lambda _: None, is_local=False)
        await guarded(scope | {"headers": [*headers]}, send, send)

    one, other = (b"traceparent", b"00-a"), (b"traceparent", b"00-b")
    name, second = (b"x-request-id", b"mine"), (b"x-request-id", b"yours")
    asyncio.run(ask(one, name))
    asyncio.run(ask(one, other, name, second))
    assert (found[0]["traceparent"], found[0]["id"]) == ("00-a", "mine")
    assert "traceparent" not in found[1]
    assert found[1]["id"] not in ("mine", "yours")
