"""Requests that are framed otherwise than HTTP/1.1 has it, or that never come whole."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

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
        client.settimeout(60)
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
