"""Refusals: what clients rely on to know what to do next."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.each_of import each_of
from tests.lazy import openai
from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server

pytestmark = pytest.mark.in_order

COMPLETION = {"prompt": "One day", "max_tokens": 4}
LONG = {"prompt": "One day", "max_tokens": 200, "ignore_eos": True, "stream": True}
KEY = {"authorization": "Bearer secret"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """What OpenAI's clients read."""
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] in (response.status_code, "context_length_exceeded", "aborted")
    return error


def refused(http: httpx.Client, body: Any, path: str = "/v1/completions") -> dict[str, Any]:
    """A request that cannot be served as it is."""
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    return error_of(response)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/completions", 400),
        ("GET", "/v2", 404),
        ("DELETE", "/health", 405),
        ("POST", "/abort/x", 404),
    ],
)
def test_every_refusal_has_openais_shape(http: httpx.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    assert error_of(response)["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@each_of(
    "fields, param, message",
    [
        (
            {"prompt": [5, -1]},
            "prompt",
            "prompt[1] is -1; it must be a token id, an integer from 0 to 2147483647",
        ),
        ({"user": "a" * 1025}, "user", "user: string should have at most 1024 characters"),
        ({"best_of": 1000, "n": 2}, "best_of", "best_of is 1000; it must be an integer from 1 to 128"),
        ({"temprature": 1}, "temprature", 'unknown field "temprature"; did you mean temperature?'),
        ({"stop": 5}, "stop", "stop: input should be a valid string or a valid list"),
        (
            {"early_stopping": 5},
            "early_stopping",
            "early_stopping: input should be a valid boolean or 'never'",
        ),
        ({"logit_bias": {"a": "x", "b": "x"}}, "logit_bias", "logit_bias: input should be a valid number"),
    ],
)
def test_a_refusal_is_of_a_field_that_was_sent(
    http: httpx.Client, fields: dict[str, Any], param: str, message: str
) -> None:
    error = refused(http, COMPLETION | fields)
    assert (error["param"], error["message"]) == (param, message)


def test_a_refusal_names_no_field_where_none_is_at_fault(http: httpx.Client) -> None:
    error = refused(http, {}, "/tokenize")
    assert (error["param"], error["message"]) == (None, "exactly one of prompt and messages must be given")


def test_the_engine_s_refusal_names_the_field_too(http: httpx.Client) -> None:
    error = refused(http, {"prompt": [5, 1024]})
    assert error["param"] == "prompt"
    assert error["message"].endswith("holds the token id 1024; the model's go from 0 to 1023")


def test_a_chat_is_told_of_its_own_log_probabilities(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "top_logprobs": 21}
    error = refused(http, body, "/v1/chat/completions")
    assert (error["param"], error["message"]) == (
        "top_logprobs",
        "top_logprobs is 21; it must be an integer from 0 to 20",
    )


def test_an_unknown_route_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no /v1/moderations"):
        client.moderations.create(model="tiny", input="a")


@each_of("path", ["/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/"])
def test_a_base_address_that_is_a_little_wrong_is_told_the_path(http: httpx.Client, path: str) -> None:
    response = http.post(path, json={})
    assert response.status_code == 404
    assert error_of(response)["message"] == f"there is no {path}; did you mean /v1/chat/completions?"


@each_of("body", [b"", b"{", b"[]", b"null", b'"a"', b'{"a":1}' * 2, b"[" * 9999, b"\xff"])
def test_what_is_no_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "JSON" in error_of(response)["message"]
    if body == b"{":
        assert error_of(response)["message"].startswith("the body is not JSON: ")
        assert error_of(response)["message"].endswith(" at character 2")
    untyped = http.post("/v1/completions", content=json.dumps(COMPLETION))
    assert "Content-Type: application/json" in error_of(untyped)["message"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """With a key and a small queue; what follows leads it from its start to its end."""
    server = Server(TINY, "server.max_requests=2", environment={"API_KEY": "secret"})
    yield server
    assert server.close() == 0


@pytest.fixture
def guest(guarded: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, headers=KEY, timeout=PATIENCE_S) as client:
        yield client


def test_a_server_that_starts_is_alive_and_not_ready(guest: httpx.Client) -> None:
    assert guest.get("/health").json()["status"] == "starting"
    assert guest.get("/ready").status_code == 503
    response = guest.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert error_of(response)["message"].startswith("the engine is starting")


def test_a_missing_or_wrong_key_is_refused(guarded: Server) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
        response = httpx.get(f"{guarded.url}/v1/models", headers=headers, timeout=PATIENCE_S)
        assert response.status_code == 401
        assert error_of(response)["type"] == "authentication_error"
    assert httpx.get(f"{guarded.url}/health", timeout=PATIENCE_S).status_code == 200
    for headers, status in (
        ({"x-api-key": "secret"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "secret", "authorization": "Bearer wrong"}, 401),
    ):
        response = httpx.get(f"{guarded.url}/v1/models", headers=headers, timeout=PATIENCE_S)
        assert response.status_code == status
    messages = httpx.post(f"{guarded.url}/v1/messages", json={}, timeout=PATIENCE_S)
    assert messages.json()["error"]["type"] == "authentication_error"
    assert messages.json()["type"] == "error"
    wrong = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_full_server_says_when_to_come_again(guarded: Server, guest: httpx.Client) -> None:
    guarded.ready()
    for never in ({"n": 3}, {"prompt": ["a"] * 3}, {"prompt": ["a", "b"], "best_of": 2}):
        # However often it comes, and so not with 429, after which a client would come again for ever
        assert "at once; the server takes 2" in refused(guest, COMPLETION | never)["message"]
    with guest.stream("POST", "/v1/completions", json=LONG | {"n": 2, "max_tokens": 1500}) as running:
        lines = running.iter_lines()  # kept: a response whose iterator is gone is closed
        next(lines)
        response = guest.post("/v1/completions", json=COMPLETION)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert error_of(response)["type"] == "rate_limit_error"
        # Its head alone is refused: the body that it announces is never sent.
        with socket.create_connection(("127.0.0.1", guarded.port), PATIENCE_S) as unsaid:
            head = "POST /v1/messages HTTP/1.1\r\nhost: localhost\r\nx-api-key: secret\r\n"
            unsaid.sendall(f"{head}content-type: application/json\r\ncontent-length: 999\r\n\r\n".encode())
            assert unsaid.recv(1 << 16).startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert guest.get("/v1/models").status_code == 200, "only answers need room"
    patient = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="secret", max_retries=5)
    with patient:  # comes again when it was told to
        assert patient.completions.create(model="tiny", prompt="1+1=", temperature=0).choices[0].text == "2"
