"""The server sends the answers and errors that /openapi.json describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from serving.api.openapi import ANSWERS
from tests.each_of import each_of
from tests.patience import PATIENCE_S
from tests.serving.described import check
from tests.serving.server import TINY, Server

ASKED = [{"role": "user", "content": "What is 12+30?"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
SHORT = {"max_tokens": 4}
STREAMS = [{}, {"stream": True, "stream_options": {"include_usage": True}}]
COMPLETIONS: list[dict[str, Any]] = [
    {"logprobs": 2, "prompt_logprobs": 1, "n": 2, "temperature": 1, "service_tier": "auto"},
    *({"echo": True, "logprobs": 1, "return_token_ids": True, **each} for each in STREAMS),
    {"stream": True},
]
CHATS: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0, "return_token_ids": True},
    *({"tools": [TOOL], "tool_choice": "required", "max_tokens": 60, **each} for each in STREAMS),
    {"max_tokens": 60, **STREAMS[1]},
]
RESPONSES: list[dict[str, Any]] = [
    {"input": "What is 12+30?", "max_output_tokens": 60},
    {"input": "a", "max_output_tokens": 2, "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    {"input": "What is 12+30?", "max_output_tokens": 60, "stream": True},
]


class Checked:
    """Asks a server, and holds each answer to its description."""

    def __init__(self, server: Server) -> None:
        self._url = server.url
        self.description = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE_S).json()

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        response = httpx.request(method, self._url + path, json=body, timeout=PATIENCE_S, **options)
        check(self.description, method, path.partition("?")[0], response)
        return response


@pytest.fixture(scope="module")
def asks(shared: Server) -> Checked:
    return Checked(shared)


@pytest.fixture(scope="module")
def agents(agent: Server) -> Checked:
    return Checked(agent)


@each_of("body", COMPLETIONS)
def test_completions(asks: Checked, body: dict[str, Any]) -> None:
    answer = asks.ask("POST", "/v1/completions", {"prompt": "1+", **SHORT, **body})
    assert answer.status_code == 200


@each_of("body", CHATS)
def test_chats(agents: Checked, body: dict[str, Any]) -> None:
    answer = agents.ask("POST", "/v1/chat/completions", {"messages": ASKED, **SHORT, **body})
    assert answer.status_code == 200


@each_of("body", RESPONSES)
def test_responses(agents: Checked, body: dict[str, Any]) -> None:
    assert agents.ask("POST", "/v1/responses", body).status_code == 200


def test_vectors_and_scores(pooled: Server) -> None:
    asks = Checked(pooled)
    for encoding in ("float", "base64"):
        body = {"input": ["a", "b"], "encoding_format": encoding}
        assert asks.ask("POST", "/v1/embeddings", body).status_code == 200
    for path in ("/score", "/v1/score"):
        assert asks.ask("POST", path, {"text_1": "a", "text_2": ["b", "c"]}).status_code == 200
    for path, shown in (("/rerank", True), ("/v1/rerank", False), ("/v2/rerank", True)):
        body = {"query": "a", "documents": ["b", "c"], "return_documents": shown}
        assert asks.ask("POST", path, body).status_code == 200


def test_what_operators_ask(asks: Checked) -> None:
    paths = ["/health", "/ready", "/version", "/server_info", "/v1/models", "/v1/models/tiny", "/metrics"]
    for path in (*paths, "/tokenizer_info", "/history"):
        assert asks.ask("GET", path).status_code == 200
    tokens = asks.ask("POST", "/tokenize", {"prompt": "a", "return_token_strs": True}).json()["tokens"]
    assert asks.ask("POST", "/detokenize", {"tokens": tokens}).status_code == 200
    assert asks.ask("GET", "/experts").status_code == 404
    assert asks.ask("POST", "/abort/nothing").status_code == 404
    assert asks.ask("GET", "/v1/models/other").status_code == 404


@pytest.fixture
def batching(tmp_path: Path) -> Iterator[Checked]:
    keys = f"server.profile={tmp_path / 'traces'}", "server.weights_root=recipes/tiny"
    server = Server(TINY, *keys, "--batches", str(tmp_path / "batches")).ready()
    yield Checked(server)
    assert server.close() == 0


def test_files_batches_traces_and_orders(batching: Checked) -> None:
    asks = batching
    for path in ("/pause", "/resume", "/sleep", "/wake"):
        assert asks.ask("POST", path).status_code == 200
    assert asks.ask("POST", "/update_weights", {"path": "weights", "version": "1"}).status_code == 200
    assert asks.ask("POST", "/update_weights", {"path": "draft"}).status_code == 400
    assert asks.ask("POST", "/start_profile", {"num_steps": 1}).status_code == 200
    assert asks.ask("POST", "/start_profile").status_code == 400
    assert asks.ask("POST", "/stop_profile").status_code == 200
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1+", **SHORT}}
    files = {"file": ("asked.jsonl", json.dumps(line).encode())}
    file = asks.ask("POST", "/v1/files", files=files, data={"purpose": "batch"}).json()
    assert asks.ask("GET", "/v1/files").json()["data"] == [file]
    assert asks.ask("GET", f"/v1/files/{file['id']}").json() == file
    assert asks.ask("GET", f"/v1/files/{file['id']}/content").status_code == 200
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = asks.ask("POST", "/v1/batches", body).json()
    assert asks.ask("GET", f"/v1/batches/{batch['id']}").json()["id"] == batch["id"]
    assert asks.ask("GET", "/v1/batches").json()["data"]
    asks.ask("POST", f"/v1/batches/{batch['id']}/cancel")
    spare = asks.ask("POST", "/v1/files", files=files, data={"purpose": "batch"}).json()
    assert asks.ask("DELETE", f"/v1/files/{spare['id']}").json()["deleted"]
    for query in ("limit=0", "limit=a", "order=x"):
        assert asks.ask("GET", f"/v1/files?{query}").status_code == 400
    paths = asks.description["paths"].items()
    described = {(method.upper(), path) for path, operations in paths for method in operations}
    assert described == {*ANSWERS}, "every path has its answers, and every answer its path"


def test_what_is_wrong_is_a_400_in_the_described_form(asks: Checked) -> None:
    mixed = {"messages": [], "prompt": "a", "temperature": "hot"}
    wrong = ({}, [], 1, "a", {"nothing": 1}, {"prompt": 5}, mixed)
    for path, operations in asks.description["paths"].items():
        assert not [each for each in operations.values() if "422" in each["responses"]]
        if "post" in operations and "requestBody" in operations["post"]:
            for body in wrong:
                response = asks.ask("POST", path, body)
                assert response.status_code == 400, (path, body)
            response = asks.ask("POST", path, content=b"{", headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"


def test_every_schema_is_one_and_every_reference_leads_to_one(asks: Checked) -> None:
    schemas = asks.description["components"]["schemas"]
    assert not [name for name in schemas if "ValidationError" in name]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    said = json.dumps(asks.description)
    for name in schemas:
        assert said.count(f'"#/components/schemas/{name}"') >= 1, name
