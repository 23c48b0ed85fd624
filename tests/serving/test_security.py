"""Hostile requests: each gets its own refusal, and nobody else notices."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from serving.api.access import MOST_CONTAINERS
from tests.each_of import each_of
from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server, defects

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SUM = {"prompt": "348+275=", "max_tokens": 8, "temperature": 0}
CANARY = "canary4711"
CLIENT = httpx.Client(timeout=PATIENCE_S, trust_env=False)


@pytest.fixture(scope="module")
def server(shared: Server) -> Iterator[Server]:
    since = len(shared.log)
    yield shared
    CLIENT.close()
    answer = httpx.post(shared.url + COMPLETIONS, json=SUM, timeout=PATIENCE_S).json()
    assert answer["choices"][0]["text"] == "623", "it does not serve any more"
    assert not defects(shared, since)


def ask(server: Server, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    return CLIENT.post(
        server.url + path, content=content, headers={"content-type": "application/json"} | headers
    )


def refused(response: httpx.Response, status: int = 400) -> str:
    """The message of a refusal, which is OpenAI's shape and one line."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) <= 500
    assert not re.search(r'Traceback|File "|\.py', error["message"])
    return str(error["message"])


def raw_answer(server: Server, data: bytes, *, ends: bool = True) -> bytes:
    """Return what the server answers to some bytes until it hangs up; `ends` closes our sending side."""
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        except OSError:  # it hung up before it had heard all
            return b""
    # Who has ended its sending is first told so where the answer takes longer than PROBE_S
    return answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize("name", ["prompt", "tenant", "user", "cache_salt", "stop", "model", "x\\ud800"])
def test_half_a_surrogate_pair_is_refused(server: Server, name: str) -> None:
    body = {"prompt": "1+1=", "max_tokens": 2}
    content = json.dumps(body)[:-1] + f', "{name}": "a\\ud800"}}'
    refused(ask(server, COMPLETIONS, content), 404 if name == "model" else 400)
    for message in ('{"role": "user", "content": "\\ud800"}', '{"role": "user", "\\ud800": "a"}'):
        refused(ask(server, CHAT, f'{{"messages": [{message}]}}'))


@pytest.mark.parametrize("depth", [100, 900, 5_000, 300_000])
def test_nesting_is_refused_at_any_depth(server: Server, depth: int) -> None:
    status = 400 if depth <= MOST_CONTAINERS else 413  # else it is not even decoded
    for name in ("prompt", "stop", "tools", "logit_bias"):
        refused(
            ask(server, COMPLETIONS, f'{{"prompt": "a", "{name}": ' + "[" * depth + "]" * depth + "}"), status
        )
    lists = "[" * depth + "]" * depth
    refused(ask(server, CHAT, f'{{"messages": {lists}}}'), status)
    refused(ask(server, CHAT, f'{{"messages": [{{"role": "user", "content": {lists}}}]}}'), status)


@each_of(
    "body, said",
    [
        ({"n": 129}, "n is 129; it must be an integer from 1 to 128"),
        ({"best_of": 129}, "best_of is 129"),
        ({"logprobs": 21}, "logprobs is 21; it must be an integer from 0 to 20"),
        ({"stop": ["a"] * 17}, "stop has 17 strings; it must have at most 16"),
        ({"stop": "a" * 1025}, "stop has 1025 characters in one string"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids: it has 1025 tokens"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "it has 1025 tokens"),
        ({"logit_bias": {"99999": 1}}, "99999"),
        ({"logit_bias": {"5": 101}}, "it must be a number from -100 to 100"),
        ({"tenant": "a" * 1025}, "at most 1024 characters"),
        ({"prompt": ["a"] * 1025}, "prompt asked for 1025 samples at once; the server takes 64"),
        ({"prompt": ["a"] * 9, "n": 128}, "prompt and n asked for 1152 samples at once"),
        ({"prompt": [99_999]}, "99999"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [5] * 5000}, "length is 2048 tokens. However, the prompt alone holds 5000 tokens"),
        ({"prompt": "a" * 100_000}, "the prompt alone holds 100000 characters"),
        ({"prompt": [1, "a"]}, "a list of token ids"),
        ({"prompt": [[1], [True]]}, "a list of token ids"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds is not supported as vLLM has it"),
        ({"chat_template": "{{ 1 }}"}, "chat_template is not supported as vLLM has it"),
        ({"chat_template_kwargs": {"chat_template": "x", "tokenize": False}}, "unknown field"),  # a chat's
        ({"allowed_token_ids": [5] * (2**18 + 1)}, "it has 262145 tokens; it must have at most 262144"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids holds the token id 99999"),
        ({"bad_words": ["a"] * 129}, "bad_words has 129 strings; it must have at most 128"),
        ({"truncate_prompt_tokens": 2049}, "or from 1 to 2048"),
        ({"metadata": {"a" * 65: "x"}}, "metadata is not supported; only up to 16 strings"),
        ({"response_format": {"type": "regex", "pattern": "(a+)+$"}}, 'response_format has no "pattern"'),
        ({"guided_regex": "a" * 32769}, "guided_regex is 32769; it must be of at most 32768 characters"),
        ({"b" * 100_000: 1}, "unknown field"),
        ({"tools": [{"type": "function"}]}, "unknown field"),
        ({"repetition_penalty": [1.0]}, "repetition_penalty"),
    ],
)
def test_limits(server: Server, body: dict[str, Any], said: str) -> None:
    assert said in refused(ask(server, COMPLETIONS, {"prompt": "1+1=", "max_tokens": 2} | body))


def test_a_chat_brings_no_template_and_no_place_to_fetch_from(server: Server) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    for kwargs in ({"chat_template": "x"}, {"messages": []}, {"documents": []}, {"raise_exception": 1}):
        body = {"messages": messages, "chat_template_kwargs": kwargs}
        assert "which the server gives the template" in refused(ask(server, CHAT, body))
    for name in ("chat_template", "documents", "tokenizer"):
        assert name in refused(ask(server, CHAT, {"messages": messages, name: "{{ 1 }}"}))
    image = [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}]
    assert "this model reads text" in refused(
        ask(server, CHAT, {"messages": [{"role": "user", "content": image}]})
    )


def test_a_body_that_is_too_long_is_not_read(server: Server) -> None:
    long = b'{"prompt": "' + b"a" * 2**21 + b'"}'
    assert "2097152 bytes" in refused(ask(server, COMPLETIONS, long), 413)
    pieces = (long[at : at + 65536] for at in range(0, len(long), 65536))
    refused(httpx.post(server.url + COMPLETIONS, content=pieces, timeout=PATIENCE_S), 413)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
    assert b" 413 " in raw_answer(server, head + b"9" * 17 + b"\r\n\r\n")
    assert b" 400 " in raw_answer(server, head + b"9" * 40 + b"\r\n\r\n")
    assert b" 400 " in raw_answer(server, head + b"-1\r\n\r\n")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 1_000_000,  # which never ends
    ],
    ids=["many headers", "long header", "long path", "endless header"],
)
def test_a_long_head_is_refused(server: Server, head: bytes) -> None:
    answer = raw_answer(server, head)
    assert answer.startswith(b"HTTP/1.1 431 ") or not answer  # the answer may be lost where it hung up first
    if b"\r\n\r\n" in head:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 431


POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = b"Connection: close\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
INNER = b"GET /server_info HTTP/1.1\r\nhost: localhost\r\nx-request-id: inner\r\n\r\n"


@pytest.mark.parametrize("upgrade", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_a_request_for_another_protocol_is_answered_in_this_one(
    server: Server, upgrade: bytes, is_chunked: bool
) -> None:
    def post(content: bytes, *headers: bytes) -> bytes:
        framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content) if is_chunked else content
        size = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % len(content)
        return POST + b"".join(headers) + size + b"\r\n\r\n" + framed

    body, since = json.dumps(SUM).encode(), len(server.log)
    keeps = upgrade is H2C
    answer = raw_answer(server, post(body, upgrade) + (post(body, upgrade) + LAST) * keeps, ends=False)
    assert answer.count(b"HTTP/1.1 200 OK") == (3 if keeps else 1)
    assert answer.count(b'"text":"623"') == (2 if keeps else 1)
    answer = raw_answer(server, post(INNER, upgrade) + LAST, ends=False)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"inner" not in answer
    assert answer.count(b"HTTP/1.1 200 OK") == keeps
    assert not [line for line in server.log[since:] if "WARNING" in line]


def test_a_body_that_comes_after_its_head_is_no_request(server: Server) -> None:
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S) as connection:
        connection.sendall(POST + H2C + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(INNER))
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n", "it waits for the body"
        connection.sendall(INNER + LAST)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert b"inner" not in answer


def test_nobody_else_gets_another_protocol(server: Server) -> None:
    get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    answer = raw_answer(server, get + H2C + b"\r\n" + LAST, ends=False)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    for path in (b"localhost:80", b"/health"):
        answer = raw_answer(server, b"CONNECT " + path + b" HTTP/1.1\r\nhost: localhost\r\n\r\n" + INNER)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"inner" not in answer


def test_a_large_body_in_one_piece_with_the_next_head_is_no_long_head(server: Server) -> None:
    body = json.dumps({"prompt": "a" * 200_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    one = head + b"content-length: %d\r\n\r\n" % len(body) + body
    last = one.replace(b"localhost", b"localhost\r\nconnection: close")
    assert raw_answer(server, one + one + last, ends=False).count(b"HTTP/1.1 400") == 3


def test_headers_behind_a_body_stand_for_none_before_it(server: Server) -> None:
    body = json.dumps({"prompt": "1+1=", "max_tokens": 1}).encode()
    answer = raw_answer(
        server,
        b"POST /v1/completions HTTP/1.1\r\nhost: evil.example\r\nx-request-id: head\r\nconnection: close\r\n"
        b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        b"%x\r\n%s\r\n0\r\nhost: localhost\r\nx-request-id: trailer\r\n\r\n" % (len(body), body),
        ends=False,
    )
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"x-request-id: head\r\n" in answer


def test_headers_behind_a_body_that_do_not_end_are_cut_off(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head + b"1\r\n{\r\n0\r\na: ")
        try:
            for _ in range(64):
                connection.sendall(b"b" * 2**18)
            answer = connection.recv(65536)
        except ConnectionError:  # it hung up before it had heard all
            return
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_a_server_for_this_machine_answers_to_no_other_name(server: Server) -> None:
    for host in ("evil.example", "[::1", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b"):
        answer = raw_answer(
            server, f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()
        )
        assert answer.startswith(b"HTTP/1.1 403 "), host
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000"):
        answer = raw_answer(
            server, f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()
        )
        assert answer.startswith(b"HTTP/1.1 200 "), host


def test_a_slash_too_many_is_no_redirection(server: Server) -> None:
    refused(httpx.get(server.url + "/health/", timeout=PATIENCE_S), 404)
    refused(httpx.get(server.url + "/../../etc/passwd", timeout=PATIENCE_S), 404)
    refused(httpx.get(server.url + "/%2e%2e/%2e%2e/etc/passwd", timeout=PATIENCE_S), 404)
    refused(httpx.get(server.url + "/v1/models/..%2f..%2fetc%2fpasswd", timeout=PATIENCE_S), 404)
    refused(ask(server, "/abort/%00%0aforged", ""), 404)
    assert not [line for line in server.log if line.startswith("forged")]


def test_who_opens_the_server_without_keys_is_warned(tmp_path: Path) -> None:
    server = Server(TINY, "--host", "0.0.0.0")
    try:
        assert any("anyone who reaches 0.0.0.0 may send requests" in line for line in server.log)
        port = urlsplit(server.url).port
        url, headers = f"http://127.0.0.1:{port}/v1/models", {"host": "a.example"}
        assert httpx.get(url, headers=headers, timeout=PATIENCE_S).status_code == 200
    finally:
        assert server.close() == 0
