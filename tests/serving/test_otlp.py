"""Spans as a collector gets them: over OTLP, from a running server, read by OpenTelemetry's own messages."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server
from tests.thorough import cases

messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Keeps the spans that are sent to it."""

    def __init__(self) -> None:
        self.spans: queue.Queue[Any] = queue.Queue()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in messages.ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {each.key: each.value.string_value for each in resource.resource.attributes}
                    assert names["service.name"] == "continuous-batching"
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            collector.spans.put(span)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing, on this process's stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def ask(server: Server, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def values(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


def test_each_request_is_one_span_of_its_client_s_trace(collector: Collector) -> None:
    server = Server(TINY, "--otlp-endpoint", collector.url).ready()
    before_ns, began_s = time.time_ns(), time.monotonic()
    first = ask(server, {"prompt": "348+275=", "n": 2}, traceparent=f"00-{TRACE}-{PARENT}-01")
    after_ns, took_s = time.time_ns(), time.monotonic() - began_s
    second = ask(server, {"prompt": "canary-51c0", "max_tokens": 3})
    assert server.close() == 0  # which sends what has not been sent
    spans = [collector.spans.get_nowait() for _ in range(collector.spans.qsize())]
    by_answer = {values(span)["gen_ai.response.id"]: span for span in spans}
    assert len(spans) == 2
    assert set(by_answer) == {first["id"], second["id"]}
    span = by_answer[first["id"]]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    slack_ns = 60 * 10**9  # the clock of the day may be set meanwhile
    assert before_ns - slack_ns <= span.start_time_unix_nano <= after_ns + slack_ns
    assert span.start_time_unix_nano <= span.end_time_unix_nano <= after_ns + slack_ns
    told = values(span)
    assert told["gen_ai.usage.input_tokens"] == first["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == first["usage"]["completion_tokens"]
    assert told["gen_ai.latency.e2e"] <= took_s
    alone = by_answer[second["id"]]
    assert not alone.parent_span_id
    assert alone.trace_id != span.trace_id
    assert b"canary" not in b"".join(each.SerializeToString() for each in spans)


@pytest.mark.slow
@pytest.mark.parametrize("is_silent", cases((True,), (False, True)))
def test_a_collector_that_is_not_there_harms_nobody(is_silent: bool) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if is_silent:
            listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = Server(TINY, "--otlp-endpoint", endpoint).ready()
        for _ in range(3):
            assert ask(server, {"prompt": "348+275=", "temperature": 0})["choices"][0]["text"] == "623"
        started_s = time.monotonic()
        assert server.close() == 0
        print(f"ended within {time.monotonic() - started_s:.1f} s")
