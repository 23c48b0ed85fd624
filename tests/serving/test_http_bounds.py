"""A client's request is bounded before it is decoded.

A refusal is sent so that the client can read it.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
import uvicorn
from starlette.exceptions import HTTPException
from uvicorn.server import ServerState

from borders.refusal import abbreviate_json
from serving.api import access, protocol
from serving.api.access import MOST_CONTAINERS, check_size
from tests.each_of import each_of
from tests.patience import PATIENCE_S
from tests.serving.faults import Served
from tests.serving.test_connections import connected, request
from tests.serving.test_faults import SMALL
from tests.serving.test_fuzz import STALL_S

MOST = 300_000  # values, as by default
LISTS = b'{"prompt":[' + b",".join([b"[]"] * 690_000) + b"]}"
LONG: dict[str, object] = {"prompt": "One day", "max_tokens": 60, "ignore_eos": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = b"content-length: 2\r\n\r\n{}"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "PROBE_S", 0.05)
        with Served(*SMALL, "server.spare_engine=false", "server.max_bodies_mib=16") as served:
            yield served


def raw_answer(served: Served, data: bytes, *, ends: bool = True) -> bytes:
    """Return what the server answers once all is sent; a reset is an error here.

    Who has ended its sending is first told to continue where the answer takes longer than PROBE_S.
    """
    with connected(served) as client:
        client.settimeout(PATIENCE_S)
        client.sendall(data)
        if ends:
            client.shutdown(socket.SHUT_WR)
        told = b"".join(iter(lambda: client.recv(1 << 16), b""))
    return told.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")


TOO_MANY = {  # bodies of megabytes, which are made when they are tried
    "lists": lambda: LISTS,
    "objects": lambda: b'{"messages":[' + b",".join([b"{}"] * 690_000) + b"]}",
    "texts": lambda: b'{"prompt":[' + b",".join([b'""'] * 690_000) + b"]}",
    "numbers": lambda: b'{"stop_token_ids":[' + b",".join([b"5"] * 1_000_000) + b"]}",
    "names": lambda: (
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % at for at in range(310_000)) + b"}}"
    ),
    "one name": lambda: b'{"prompt":"a",' + b",".join([b'"n":1'] * 310_000) + b"}",
    "depth": lambda: b'{"prompt":' + b"[" * 300_000,
    "backslashes": lambda: b'{"prompt":[' + b'"\\\\",' * 400_000 + b"[]]}",
    "lists behind a quote": lambda: b'{"a":"\\"",' + b'"b":[],' * (MOST_CONTAINERS + 1) + b'"c":1}',
}


@each_of("name", TOO_MANY)
def test_too_many_values_are_counted_before_any_is_made(name: str) -> None:
    with pytest.raises(HTTPException, match="the body holds") as caught:
        check_size(TOO_MANY[name](), MOST)
    assert caught.value.status_code == 413


MESSAGE = b'{"role":"user","content":"a"}'
NOT_TOO_MANY = {
    "numbers": lambda: b'{"prompt":[' + b",".join([b"31999"] * (MOST - 8)) + b"]}",
    "brackets in a text": lambda: b'{"prompt":"' + b"[,{," * 400_000 + b'"}',
    "quotes in a text": lambda: b'{"prompt":"' + b'\\",[{\\\\' * 250_000 + b'"}',
    "messages": lambda: b'{"messages":[' + b",".join([MESSAGE] * (MOST_CONTAINERS - 8)) + b"]}",
}


@pytest.mark.parametrize("name", NOT_TOO_MANY)
def test_what_stands_in_a_text_is_no_value(name: str) -> None:
    check_size(NOT_TOO_MANY[name](), MOST)


def test_the_count_is_that_of_a_parser() -> None:
    def values(given: Any) -> int:
        if isinstance(given, list):
            return 1 + sum(map(values, given))
        return 1 + sum(map(values, given.values())) if isinstance(given, dict) else 1

    for given in ([[]] * 30, {"a": [1, 'x",[{', {"b\\": []}], "\\": "\\\\"}, ["\\", '"', '\\"[,'] * 9):
        found = values(given)
        check_size(json.dumps(given).encode(), 2 * found + 2)
        with pytest.raises(HTTPException):
            check_size(json.dumps(given).encode(), found // 4)


def test_a_body_with_too_many_values_is_not_decoded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    class Spy:
        @staticmethod
        def loads(text: str) -> Any:
            decoded.append(len(text))
            return json.loads(text)

    monkeypatch.setattr(access, "json", Spy)
    waits: list[float] = []
    statuses: list[int] = []

    def post() -> None:
        headers = {"content-type": "application/json"}
        answer = httpx.post(
            served.url + "/v1/completions", content=LISTS, headers=headers, timeout=PATIENCE_S
        )
        statuses.append(answer.status_code)

    posts = [threading.Thread(target=post) for _ in range(6)]
    for each in posts:
        each.start()
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S, trust_env=False) as client:
        while any(each.is_alive() for each in posts):
            start_s = time.monotonic()
            assert client.get("/health").status_code == 200
            waits.append(time.monotonic() - start_s)
    assert statuses == [413] * 6
    assert not decoded
    print(f"longest wait for /health: {max(waits):.3f} s")
    assert max(waits) <= STALL_S
    small = httpx.post(
        served.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=PATIENCE_S
    )
    assert small.status_code == 200
    assert len(decoded) == 1


def test_other_encodings_than_utf_8_are_refused(served: Served) -> None:
    content = json.dumps({"prompt": "a", "max_tokens": 1}).encode("utf-16")
    headers = {"content-type": "application/json"}
    assert (
        httpx.post(
            served.url + "/v1/completions", content=content, headers=headers, timeout=PATIENCE_S
        ).status_code
        == 400
    )


def test_a_short_text_of_many_tokens_is_not_answered_at_any_length(served: Served) -> None:
    answer = httpx.post(served.url + "/tokenize", json={"prompt": "7" * 350_000}, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert "a response may hold 300000 (server.max_body_values)" in answer.json()["error"]["message"]
    assert (
        httpx.post(served.url + "/tokenize", json={"prompt": "777"}, timeout=PATIENCE_S).json()["count"] >= 3
    )


def test_a_message_quotes_what_it_can_show_and_writes_no_more() -> None:
    class Counted(dict[str, int]):
        num_read = 0

        def items(self) -> Any:
            for pair in super().items():
                Counted.num_read += 1
                yield pair

    assert abbreviate_json(Counted({str(index): 1 for index in range(9000)})).endswith("...")
    assert Counted.num_read < 100
    for given in ("a" * 58, "a" * 59, "a" * 10**6, [1] * 20, [1] * 10**6, [["a" * 9]] * 9):
        whole = json.dumps(given)
        assert abbreviate_json(given) == (whole if len(whole) <= 60 else whole[:57] + "...")


@pytest.mark.parametrize("stream", [True, False])
def test_who_asks_and_ends_its_sending_is_answered(served: Served, stream: bool) -> None:
    asked = request(LONG | {"stream": stream})
    answer = raw_answer(served, asked)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    assert b'"finish_reason":"length"' in answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\nhost: localhost\r\nhost: evil.example\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (HEAD + b"content-encoding: gzip\r\n" + BODY, 415),
        (HEAD + b"content-encoding: gzip\r\ncontent-encoding: identity\r\n" + BODY, 415),
        (HEAD + b"content-encoding: Identity\r\n" + BODY, 400),  # its body is refused
        (HEAD + b"expect: 200-ok\r\n" + BODY, 417),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: gzip\r\n\r\n", 400),
        (HEAD + b"content-length: +2\r\n\r\n{}", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400),
        (HEAD.replace(b"\r\n", b"\n") + b"\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
        (b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"BREW /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"DELETE /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
        (b"GET http://localhost/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),
    ],
)  # fmt: skip
def test_each_mistake_has_its_status(served: Served, data: bytes, status: int) -> None:
    assert raw_answer(served, data).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 300_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 5_000_000, 431),
        (HEAD + b"content-length: 9000000\r\nconnection: close\r\n\r\n" + b"x" * 9_000_000, 413),
        (b"no HTTP\r\n\r\n" + b"x" * 5_000_000, 400),
        (b"GET /health HTTP/1.1\r\n\r\n" + b"x" * 5_000_000, 400),
    ],
    ids=["header", "endless header", "body", "no HTTP", "no host"],
)
def test_a_refusal_can_be_read_after_all_was_sent(served: Served, data: bytes, status: int) -> None:
    with connected(served) as client:
        client.settimeout(PATIENCE_S)
        client.sendall(data)  # raises where the server resets
        answer = client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        while piece := client.recv(1 << 16):
            answer += piece
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == status


@pytest.mark.parametrize(("num_bytes", "status"), [(32_500, 200), (33_250, 431)])
def test_a_head_has_one_bound_in_any_pieces(served: Served, num_bytes: int, status: int) -> None:
    """Whatever the system joins of them."""
    head = b"GET /health?%b HTTP/1.1\r\nhost: localhost\r\na: %b\r\nconnection: close\r\n\r\n"
    head %= b"a" * num_bytes, b"b" * num_bytes
    for size in (1_000, 4_096, len(head)):
        with connected(served) as client:
            client.settimeout(PATIENCE_S)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for at in range(0, len(head), size):
                client.sendall(head[at : at + size])
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 %d " % status), size


@pytest.mark.parametrize(("num_bytes", "is_refused"), [(30_000, False), (40_000, True)])
def test_white_space_counts_which_the_parser_drops(num_bytes: int, is_refused: bool) -> None:
    async def written() -> bytes:
        async def app(scope: object, receive: object, send: object) -> None:
            """Answer nothing."""

        config = uvicorn.Config(app)
        config.load()
        parsed = protocol.Protocol(config, ServerState(), {}, most_connections=1)
        transport = MagicMock()
        transport.is_closing.return_value, transport.get_extra_info.return_value = False, None
        parsed.connection_made(transport)
        head = b"GET / HTTP/1.1\r\nhost: a\r\n" + 2 * (b"a: " + b" " * num_bytes + b"b\r\n")
        for at in range(0, len(head), 1_000):
            parsed.data_received(head[at : at + 1_000])
        parsed.connection_lost(None)
        return b"".join(each.args[0] for each in transport.write.call_args_list)

    assert asyncio.run(written()).startswith(b"HTTP/1.1 431 ") == is_refused


def test_a_refused_body_that_was_announced_is_not_waited_for(served: Served) -> None:
    announced = HEAD + b"expect: 100-continue\r\ncontent-length: 9000000\r\n\r\n"
    answer = raw_answer(served, announced, ends=False)  # ends, because the server closes
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


def test_bodies_of_all_connections_together_are_bounded(served: Served) -> None:
    body = json.dumps({"prompt": "a" * 1_500_000}).encode()
    asked = HEAD + b"content-length: %d\r\n\r\n" % len(body)
    waiting = [connected(served) for _ in range(12)]  # 11 of them fit
    for client in waiting:
        client.sendall(asked + body[:-1])
    refused, *others = select.select(waiting, [], [], 60)[0]
    assert not others
    answer = refused.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1\r\n" in answer
    assert b"server.max_bodies_mib" in answer
    for client in waiting:
        if client is not refused:
            client.sendall(body[-1:])
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 "), "it is too long as a prompt"
        client.close()
    assert raw_answer(served, asked + body).startswith(b"HTTP/1.1 400 "), "what was read is forgotten"
