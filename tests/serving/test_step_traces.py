"""An operator records a trace of the next steps of a server, whose answers go on meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server, started

pytestmark = pytest.mark.in_order  # the first test is of a server that has recorded nothing yet
OPERATOR, OTHER = {"authorization": "Bearer gateway"}, {"authorization": "Bearer other"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("traces")
    (folder / "keys").write_text("gateway *\nother team\n")
    (folder / "keys").chmod(0o600)
    server = started((TINY, f"server.profile={folder / 'written'}", "--api-keys", str(folder / "keys")))
    yield server
    assert server.close() == 0


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=OPERATOR) as client:
        yield client


def answer(http: httpx.Client, num_tokens: int) -> str:
    asked = {"prompt": "1+1=", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    text: str = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    return text


def test_a_trace_of_some_steps(http: httpx.Client) -> None:
    assert "no trace was begun" in http.post("/stop_profile").json()["error"]["message"]
    before = answer(http, 8)
    begun = http.post("/start_profile", json={"num_steps": 3})
    assert begun.json()["num_steps"] == 3
    again = http.post("/start_profile")
    assert (again.status_code, "a trace is being recorded" in again.text) == (400, True)
    assert answer(http, 8) == before, "the trace ends by itself after three of these steps"
    path = Path(http.post("/stop_profile").json()["path"])
    assert str(path.parent) == begun.json()["folder"]
    assert json.loads(path.read_text())["traceEvents"]


def test_a_trace_that_is_ended_early(http: httpx.Client) -> None:
    assert http.post("/start_profile").json()["num_steps"] == 10, "as clients of vLLM ask, without a body"
    answer(http, 2)
    assert Path(http.post("/stop_profile").json()["path"]).exists()


def test_a_folder_that_is_gone(http: httpx.Client) -> None:
    folder = Path(http.post("/start_profile", json={"num_steps": 1}).json()["folder"])
    answer(http, 2)
    http.post("/stop_profile")
    folder.rename(folder.with_name("moved"))
    folder.write_text("")
    http.post("/start_profile")
    failed = http.post("/stop_profile")
    assert (failed.status_code, "the trace could not be recorded" in failed.text) == (500, True)
    assert answer(http, 2), "the engine lives"
    folder.unlink()


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_only_operators_record(http: httpx.Client, path: str) -> None:
    refused = http.post(path, headers=OTHER)
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    assert http.post("/start_profile", json={"num_steps": 0}).status_code == 400
    assert http.post("/start_profile", json={"steps": 5}).status_code == 400
    assert http.post(path, headers={"origin": "http://evil.example"}).status_code == 403, (
        "a page in a browser"
    )


def test_without_a_folder_there_are_no_such_routes(shared: Server) -> None:
    assert httpx.post(f"{shared.url}/start_profile", timeout=PATIENCE_S).status_code == 404
