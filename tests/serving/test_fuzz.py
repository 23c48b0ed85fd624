"""No request is answered by a defect, and none keeps others waiting.

FUZZ_INPUTS=10000 FUZZ_STALL_S=1 python -m pytest -s tests/serving/test_fuzz.py
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.patience import PATIENCE_S
from tests.serving.described import check
from tests.serving.server import Server, defects
from tests.thorough import cases

NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS", cases("200", "2000")))
STALL_S = float(os.environ.get("FUZZ_STALL_S", PATIENCE_S))  # a machine at rest is asked for 1
# fmt: off
WORDS = [
    b"GET", b"POST", b"OPTIONS", b"HTTP/1.1", b" ", b"\r\n", b"\r\n\r\n", b":", b"/v1/completions",
    b"/health", b"content-length: 5", b"content-length: 99999999999", b"transfer-encoding: chunked",
    b"5\r\nhello\r\n0\r\n\r\n", b"host: localhost", b"expect: 100-continue", b"upgrade: websocket",
    b"connection: upgrade", b"\x00", b"\xff", b"authorization: Bearer a", b"content-type: application/json",
    b'{"prompt":', b"[[", b"NaN", b"%00%ff", b"\n",
]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 129, 2**31, 2**63, 2**64, -(2**70), 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "a", "\x00", "\ud800", "é" * 300, "<|user|>", "1+1=",
    [], {}, [[]], [None], [1, 2], ["a"], [[1]], {"a": 1}, [{"role": "user", "content": "1+1="}],
    [{"role": "user"}], [{}], {"5": 1}, {"x": 1}, {"include_usage": True},
]
# fmt: on


class Watch:
    """Asks for /health all the while; `longest_s` is the longest that an answer took."""

    def __init__(self, url: str) -> None:
        self.longest_s = 0.0
        self._url = url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S, trust_env=False) as client:
            while not self._ended.wait(cases(0.2, 0.02)):
                start_s = time.monotonic()
                assert client.get("/health").status_code == 200
                self.longest_s = max(self.longest_s, time.monotonic() - start_s)


@pytest.fixture(scope="module")
def server(shared: Server) -> Iterator[Server]:
    since = len(shared.log)
    with Watch(shared.url) as watch:
        yield shared
    body = {"prompt": "348+275="}
    assert httpx.post(f"{shared.url}/v1/completions", json=body, timeout=PATIENCE_S).json()["usage"]
    assert not defects(shared, since)
    print(f"longest wait for /health: {watch.longest_s:.3f} s")
    assert watch.longest_s <= STALL_S


WHOLE = {"max_tokens": 2, "prompt": "1+", "messages": [{"role": "user", "content": "1+"}], "tokens": [5, 6]}
WHOLE |= {"max_output_tokens": 2, "input": "1+"}


def random_body(draw: random.Random, names: list[str]) -> str:
    """A body of a route's fields, with values of any kind; now and then, no JSON."""
    body = {name: value for name, value in WHOLE.items() if name in names}
    body |= {draw.choice(names): draw.choice(VALUES) for _ in range(draw.randint(0, 2))}
    said = json.dumps(body)
    if draw.random() < 0.2:
        at = draw.randrange(len(said))
        said = (
            said[:at] + draw.choice(["", "\x00", "[" * 2000, '"', "}", "1e999", "9" * 5000]) + said[at + 1 :]
        )
    return said


def fuzz_bodies(server: Server, num_inputs: int, seed: int) -> Counter[int]:
    """How many bodies got which status."""
    draw, statuses = random.Random(seed), Counter[int]()
    schemas = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE_S).json()["components"]["schemas"]
    routes = {"/v1/completions": "CompletionBody", "/v1/chat/completions": "ChatBody"}
    routes |= {"/v1/responses": "ResponsesBody", "/tokenize": "TokenizeBody", "/detokenize": "DetokenizeBody"}
    routes |= {"/v1/messages": "MessagesBody", "/v1/messages/count_tokens": "CountBody"}
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        for _ in range(num_inputs):
            path, name = draw.choice(list(routes.items()))
            content = random_body(draw, [*schemas[name]["properties"], "tools", "x"])
            response = client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code < 500, (path, content, response.text)
            statuses[response.status_code] += 1
    return statuses


def fuzz_bytes(server: Server, num_inputs: int, seed: int) -> Counter[bytes]:
    """How many random bytes, at the socket itself, got which first line."""
    draw, answers = random.Random(seed), Counter[bytes]()
    place = urlsplit(server.url)
    for _ in range(num_inputs):
        data = b"".join(draw.choice(WORDS) for _ in range(draw.randint(1, 30)))
        if draw.random() < 0.6:
            data = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + data
        if draw.random() < 0.3:
            data += draw.randbytes(draw.randint(1, 300))
        with socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                answer = b""
                while piece := connection.recv(65536):
                    answer += piece
            except ConnectionError:
                answer = b"closed"
        assert b"HTTP/1.1 5" not in answer, data
        answers[answer[:12]] += 1
    return answers


def fuzz_schema(server: Server, num_inputs: int) -> Counter[int]:
    """How many requests that schemathesis made of our OpenAPI got which status."""
    import schemathesis  # these take a second to import
    from schemathesis.specs.openapi.schemas import OpenApiSchema

    description = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE_S).json()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    assert isinstance(schema, OpenApiSchema)
    operations = [result.ok() for result in schema.get_all_operations()]
    statuses = Counter[int]()
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        for operation in operations:
            strategy = operation.as_strategy()

            @given(case=strategy)
            @settings(
                max_examples=max(1, num_inputs // len(operations)),
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def ask(case: Any) -> None:
                body = case.body if isinstance(case.body, (dict, list)) else None
                if isinstance(body, dict):
                    body = {**body, "max_tokens": 2} if "prompt" in body or "messages" in body else body
                response = client.request(case.method, case.formatted_path, json=body)
                assert response.status_code < 500, (case, response.text)
                check(description, case.method, case.operation.path, response)
                statuses[response.status_code] += 1

            ask()
    return statuses


@pytest.mark.timeout(3600)
def test_many_inputs(server: Server) -> None:
    statuses = fuzz_bodies(server, NUM_INPUTS // 2, seed=0)
    print(statuses, fuzz_bytes(server, NUM_INPUTS // 4, seed=0), fuzz_schema(server, NUM_INPUTS // 4))
    assert statuses[200] > NUM_INPUTS / 25
    assert statuses[400] > NUM_INPUTS / 25
