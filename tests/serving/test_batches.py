"""OpenAI's client gets files of requests answered, each once, whatever becomes of the server."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.api.batches import MOST_OPEN, BatchBody, created
from serving.batches.store import BatchStore
from serving.failures import Overloaded
from tests.lazy import openai
from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server
from tests.thorough import cases

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
KEYS = {"authorization": "Bearer first"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Server]:
    (folder / "keys").write_text("first\nsecond\n")
    options = ["--batches", str(folder / "kept"), "--api-keys", str(folder / "keys")]
    few = ("server.batch_requests=4", "server.max_batch_file_mib=1", "server.max_body_mib=0.01")
    server = Server(TINY, *options, *few).ready()
    yield server
    assert server.close() == 0


def client_of(server: Server, key: str = "first") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


@pytest.fixture
def client(served: Server) -> Iterator[openai.OpenAI]:
    with client_of(served) as client:
        yield client


def chat(number: int, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"What is {number}+{number}?"}], "temperature": 0}
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body} | fields


def written(*lines: object) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def until_end(client: openai.OpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    until_s = time.monotonic() + PATIENCE_S
    while (found := client.batches.retrieve(batch.id)).status in ("validating", "in_progress", "cancelling"):
        assert time.monotonic() < until_s, found
        time.sleep(0.05)
    return found


def read(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_file_of_requests_becomes_a_file_of_answers(client: openai.OpenAI) -> None:
    content = written(*map(chat, range(12)), chat(12, body={"messages": [], "foo": 1})) + b"no JSON"
    file = client.files.create(file=("asked.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.object) == (
        len(content),
        "asked.jsonl",
        "batch",
        "file",
    )
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    made = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
    )
    assert (made.status, made.input_file_id, made.metadata) == ("validating", file.id, {"a": "b"})
    batch = until_end(client, made)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 14, "completed": 12, "failed": 2}
    answers = read(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"r{number}" for number in range(12)]
    alone = client.chat.completions.create(model="tiny", **chat(7)["body"])
    told = answers[7]["response"]
    assert told["status_code"] == 200
    assert told["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert told["body"]["usage"]["completion_tokens"] == alone.usage.completion_tokens
    refused, unread = read(client, batch.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("r12", 400)
    assert refused["response"]["body"]["error"]["param"] == "foo"
    assert (unread["custom_id"], unread["response"]) == (None, None)
    assert unread["error"]["code"] == "invalid_request"
    assert unread["error"]["message"].startswith("line 14: it is not JSON")
    assert [each.id for each in client.batches.list(limit=1)][:1] == [batch.id]
    outputs = [each.id for each in client.files.list(purpose="batch_output")]
    assert {batch.output_file_id, batch.error_file_id} <= {*outputs}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.retrieve(file.id)
    assert len(read(client, batch.output_file_id)) == 12


def test_a_key_does_not_see_what_another_s_keeps(served: Server, client: openai.OpenAI) -> None:
    file = client.files.create(file=io.BytesIO(written(chat(1))), purpose="batch")
    batch = until_end(
        client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    )
    with client_of(served, "second") as other:
        assert [*other.files.list()] == [*other.batches.list()] == []
        for name in (file.id, batch.output_file_id or ""):
            for ask in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    ask(name)
        for ask_batch in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask_batch(batch.id)
        with pytest.raises(openai.BadRequestError, match="input_file_id names no file of requests"):
            other.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def test_a_cancelled_batch_ends(client: openai.OpenAI) -> None:
    long = [
        chat(number, url=PLAIN, body={"prompt": "One day", "max_tokens": 30, "ignore_eos": True})
        for number in range(200)  # of which four run at a time
    ]
    file = client.files.create(file=("long.jsonl", written(*long)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=PLAIN, completion_window="24h")
    with pytest.raises(openai.ConflictError, match="cancel that first"):
        client.files.delete(file.id)
    while not (client.batches.retrieve(batch.id).request_counts or batch.request_counts).completed:
        time.sleep(0.05)
    assert client.batches.cancel(batch.id).status == "cancelling"
    found = until_end(client, batch)
    assert found.status == "cancelled"
    assert found.cancelled_at is not None
    assert found.request_counts is not None
    assert 0 < found.request_counts.completed < 200
    assert len(read(client, found.output_file_id)) == found.request_counts.completed
    assert client.batches.cancel(batch.id).status == "cancelled"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"endpoint": "/abort/x"}, 'endpoint is "/abort/x"; it must be "/v1/completions" or'),
        ({"input_file_id": "no"}, 'input_file_id names no file of requests: "no"'),
        ({"completion_window": "1h"}, "completion_window: input should be '24h'"),
        ({"extra_body": {"foo": 1}}, 'unknown field "foo"'),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 9}}, "output_expires_after is not"),
        ({"metadata": {"a": "b" * 600}}, "metadata is not supported; only up to 16 strings"),
    ],
)
def test_a_wrong_batch_is_refused(client: openai.OpenAI, fields: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"input_file_id": "a", "endpoint": CHAT, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**{**asked, **fields})
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("form", "status", "said"),
    [
        ({"data": {"purpose": "batch"}, "files": {"file": ("a", b"\n \n")}}, 400, "file holds no line"),
        ({"data": {"purpose": "batch"}, "files": {"file": ("a", b"{}\n" * 50_001)}}, 400, "more than 50,000"),
        ({"data": {"purpose": "vision"}, "files": {"file": ("a", b"{}")}}, 400, 'purpose is "vision"'),
        ({"files": {"file": ("a", b"{}")}}, 400, 'purpose is ""; it must be "batch"'),
        ({"files": {"purpose": (None, b"batch")}}, 400, "file is missing"),
        ({"files": {"a": (None, b"b"), "file": ("a", b"{}")}}, 400, "a is not supported"),
        ({"json": {"purpose": "batch"}}, 400, "the body must be a form with a file"),
        ({"data": {"purpose": "batch"}, "files": {"file": ("a", b" " * 2**20)}}, 413, "max_batch_file_mib"),
    ],
)
def test_a_wrong_upload_is_refused(served: Server, form: dict[str, Any], status: int, said: str) -> None:
    answer = httpx.post(f"{served.url}/v1/files", headers=KEYS, timeout=PATIENCE_S, **form)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text


def test_half_a_surrogate_pair_is_not_kept(served: Server, client: openai.OpenAI) -> None:
    """Which OpenAI's client cannot send, and which would break each list that holds it."""
    file = client.files.create(file=io.BytesIO(written(chat(1))), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for metadata in ({"a": "\ud83d"}, {"\ud83d": "a"}):
        body = json.dumps(asked | {"metadata": metadata})
        sent = KEYS | {"content-type": "application/json"}
        answer = httpx.post(f"{served.url}/v1/batches", content=body, headers=sent, timeout=PATIENCE_S)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith("metadata is not Unicode text")
    assert file.id not in [each.input_file_id for each in client.batches.list()]


def test_a_key_has_so_many_open_batches(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 2**24)
    body = BatchBody(
        input_file_id=store.add_file("me", "a", [(1, b"{}")]).id, endpoint=CHAT, completion_window="24h"
    )
    for _ in range(MOST_OPEN):
        created(store, "me", body)
    with pytest.raises(Overloaded, match="100 batches of this key have not ended; try again later"):
        created(store, "me", body)
    store.end(store.open_batches()[0], "cancelled", lambda *_: None)
    assert created(store, "me", body).owner == "me"
    store.close()


def test_bodies_of_other_paths_stay_small(served: Server) -> None:
    answer = httpx.post(
        f"{served.url}{PLAIN}", headers=KEYS, json={"prompt": "a" * 20_000}, timeout=PATIENCE_S
    )
    assert answer.status_code == 413
    assert "server.max_body_mib" in answer.text


@pytest.mark.slow
def test_after_kills_of_the_server_each_line_is_answered_once(tmp_path: Path) -> None:
    num_lines, num_kills = cases((40, 1), (1000, 5))
    answered_once(tmp_path, num_lines, num_kills)


def answered_once(folder: Path, num_lines: int, num_kills: int, seed: int = 0) -> None:
    """A batch whose server is killed at random moments, and started again."""
    draw = random.Random(seed)
    options = ["--batches", str(folder)]
    server = Server(TINY, *options).ready()
    client = client_of(server)
    file = client.files.create(file=("a", written(*map(chat, range(num_lines)))), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    for kill in range(num_kills):
        least = num_lines * kill // (num_kills + 1) + draw.randrange(num_lines // (num_kills + 2))
        while client.batches.retrieve(batch.id).request_counts.completed < least:
            time.sleep(0.002)
        server.process.kill()
        server.wait()
        server = Server(TINY, *options).ready()
        client = client_of(server)
    batch = until_end(client, batch)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    answers = read(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"r{number}" for number in range(num_lines)]
    assert len({each["id"] for each in answers}) == num_lines
    assert all(each["response"]["status_code"] == 200 for each in answers)
    right = sum(
        f"={2 * number}" in each["response"]["body"]["choices"][0]["message"]["content"]
        for number, each in enumerate(answers)
    )
    assert right >= 0.9 * num_lines, "answers are those of their own lines"
    assert server.close() == 0
