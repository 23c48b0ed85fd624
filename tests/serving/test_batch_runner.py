"""Lines of batches run beside other requests, and each ends with an answer or an error.

Batches take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from continuous_batching.request import Request, SamplingParams
from serving.answers.answers import AnswerStream
from serving.api import batch_runner as runner
from serving.api.api_keys import ANYBODY, ApiKeys, Client, Rights
from serving.api.app import application
from serving.api.batch_runner import PRIORITY, Batches
from serving.async_llm import AsyncLLM
from serving.batches import store as kept_batches
from serving.batches.lines import (
    MOST_LINES,
    LineCheck,
    WrongLine,
    expired,
    num_samples,
    read_line,
    split_lines,
)
from serving.batches.store import WINDOW_S, BatchStore, StoredBatch
from serving.engine.messages import SampleEnd
from serving.failures import EngineEnded, Failure, Overloaded, PartlyOverloaded, SetAside, Unavailable
from serving.text.tokenizer import TextOptions
from tests.each_of import each_of
from tests.patience import PATIENCE_S
from tests.serving.server import TINY

URL = "/v1/completions"


def line(name: str, **fields: Any) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": {}, **fields}).encode()


@given(st.binary().map(lambda data: data.replace(b"x", b"\n")))
def test_lines_are_the_file_again(content: bytes) -> None:
    try:
        lines = split_lines(content)
    except ValueError:
        assert not content.strip()
        return
    assert b"".join(text for _, text in lines) == content
    assert all(text.strip() for _, text in lines)
    whole = content.splitlines()
    assert all(whole[number - 1].strip() in text for number, text in lines)
    assert len(lines) == sum(bool(each.strip()) for each in whole)


@each_of(
    "content, said",
    [
        (b"\n" * 10 * MOST_LINES, "more than 50,000 lines"),  # the last line break begins another line
        (b"a\r\n" + b"\r\n" * (10 * MOST_LINES - 1), "more than 50,000 lines"),
        (b"a\n" * (MOST_LINES + 1), "more than 50,000 lines"),
        (b"\n" * 1000, "no line"),
    ],
)
def test_lines_are_bounded_also_where_they_are_blank(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        split_lines(content)


def test_lines_keep_their_numbers_ends_and_the_blank_ones_beside_them() -> None:
    found = split_lines(b"\n \r\na\r\r\n\nb\n\r\n\t\nc")
    assert found == [(3, b"\n \r\na\r\r\n\n"), (6, b"b\n\r\n\t\n"), (9, b"c")]
    assert len(split_lines(b"a\n" * MOST_LINES)) == MOST_LINES


@each_of(
    "text, name, reason",
    [
        (b"{", None, "it is not JSON: Input data was truncated"),
        (b'"\xff"', None, "it is no request of a batch: Expected `object`, got `str`"),
        (b'{"custom_id": "a"}', "a", "it is no request of a batch: Object missing required field `method`"),
        (line("a", more=1), "a", "it is no request of a batch: Object contains unknown field `more`"),
        (line(""), None, "custom_id has 0 characters; it must have 1 to 1024"),
        (
            line("a", custom_id=3),
            None,
            "it is no request of a batch: Expected `str`, got `int` - at `$.custom_id`",
        ),
        (line("a", method="GET"), "a", 'method is "GET"; it must be "POST"'),
        (
            line("a", url="/abort/x"),
            "a",
            'url is "/abort/x"; it must be the batch\'s endpoint, /v1/completions',
        ),
        (line("a", body=[]), "a", "it is no request of a batch: Expected `object`, got `array`"),
        (line("a", body=None), "a", "it is no request of a batch: Expected `object`, got `null`"),
        (line("b" * 1025, more=1), None, "it is no request of a batch: Object contains unknown field"),
        (
            line("a", body={"stream": True}),
            "a",
            "stream is set in body; a batch has no streams: leave it out",
        ),
        (
            line("a", body={"priority": 9}),
            "a",
            "priority is set in body; a batch goes behind all other requests",
        ),
        (line("a", body={"x": 0})[:-1] + b" " * 70_000 + b"}", "a", "it is longer than 65536 bytes"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(text: bytes, name: str | None, reason: str) -> None:
    with pytest.raises(WrongLine) as told:
        read_line(text, URL, 2**16)
    assert str(told.value).startswith(reason)
    assert told.value.custom_id == name


def test_a_body_goes_on_as_it_was_written() -> None:
    body = b'{"a": 1.10, "b": "\\u00e4",  "a": 12345678901234567890123}'
    text = b'{"custom_id": "a", "method": "POST", "url": "u", "body": %s}\n' % body
    assert bytes(read_line(text, "u", 999).body) == body


def test_an_id_is_that_of_one_line() -> None:
    check = LineCheck(URL, 999)
    assert check(1, line("a")) is None
    assert check(2, line("b")) is None
    told = json.loads(check(3, line("a")) or b"")
    assert told["custom_id"] == "a"
    assert told["error"] == {
        "code": "invalid_request",
        "message": 'line 3: custom_id "a" is that of line 1; each needs its own',
    }
    assert json.loads(expired(1, line("a")))["error"]["code"] == "batch_expired"


class Bench:
    """Batches beside an engine and a server that a test plays; `answer` gets what a line asks."""

    def __init__(self, folder: Path, answer: Callable[[Scope, bytes], Any], most_bytes: int = 2**24) -> None:
        self.store = BatchStore(folder, most_bytes)
        server = SimpleNamespace(max_body_mib=1.0, batch_requests=3)
        self.llm: Any = SimpleNamespace(
            recipe=SimpleNamespace(server=server),
            facts=SimpleNamespace(num_slots=8),
            accepts=True,
            num_client_slots=0,
        )
        self.keys = ApiKeys({})
        self.batches = Batches(self.store, self.llm, lambda name: self.keys.of_lasting(name))
        self.batches.app = self.app
        self.answer = answer
        self.running: list[str] = []
        self.most = 0

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a line, and notes how many are answered at a time."""
        body = (await receive())["body"]
        self.running.append(scope["path"])
        self.most = max(self.most, len(self.running))
        try:
            status, told = await self.answer(scope, body)
        finally:
            self.running.pop()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": told})

    def add(self, *names: str, owner: str = "") -> StoredBatch:
        return self.add_lines([line(each) for each in names], owner)

    def add_lines(self, lines: Sequence[bytes], owner: str = "") -> StoredBatch:
        file = self.store.add_file(owner, "a", split_lines(b"\n".join(lines)))
        return self.store.add_batch(owner, file, URL, {})

    async def until_end(self, batch: StoredBatch) -> tuple[StoredBatch, list[Any]]:
        """The batch and its answers, by their lines."""
        running = asyncio.ensure_future(self.batches.run())
        try:
            while (found := await self.found(batch)).status in ("validating", "in_progress", "cancelling"):
                assert not running.done()
                await asyncio.sleep(0.01)
            query = "SELECT text FROM answers WHERE batch = ? ORDER BY number"
            rows = await self.batches.call(lambda store: store._db.execute(query, (batch.id,)).fetchall())
            return found, [json.loads(text) for (text,) in rows]
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def found(self, batch: StoredBatch) -> StoredBatch:
        found = await self.batches.call(lambda store: store.batch(batch.id, batch.owner))
        assert found is not None
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_S", "_AGAIN_S", "_PAUSE_S"):
        monkeypatch.setattr(runner, name, 0.005)


def test_so_many_lines_run_at_a_time_and_below_all_others(tmp_path: Path) -> None:
    clients: list[Client] = []
    three_run = asyncio.Event()

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        clients.append(scope["state"]["client"])
        is_right = len(clients) % 3
        if len(bench.running) == 3:
            three_run.set()
        await asyncio.wait_for(three_run.wait(), PATIENCE_S)
        await asyncio.sleep(0.005)  # more might begin meanwhile
        return (200, b'{"a": 1}') if is_right else (400, b'{"error": 1}')

    bench = Bench(tmp_path, answer)
    found, told = asyncio.run(bench.until_end(bench.add(*map(str, range(20)))))
    assert (found.status, found.total, found.completed, found.failed) == ("completed", 20, 14, 6)
    assert [each["custom_id"] for each in told] == [*map(str, range(20))]
    assert {each["response"]["status_code"] for each in told} == {200, 400}
    assert bench.most == 3
    assert {each.priority_for(None) for each in clients} == {PRIORITY}


@each_of(
    "body, count",
    [
        ({}, 1),
        ({"n": 4}, 4),
        ({"n": 2, "best_of": 5, "prompt": "a"}, 5),
        ({"n": 2, "beam_width": 8}, 8),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"input": ["a", "b"]}, 2),
        ({"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, 1),
        ({"n": None, "best_of": None}, 1),
        ({"n": "4"}, 1),
        ({"n": 10**9}, 1),
        ({"prompt": []}, 1),
    ],
)
def test_samples_of_a_line_are_counted(body: dict[str, Any], count: int) -> None:
    assert num_samples(line("a", body=body)) == count


def test_so_many_samples_run_at_a_time(tmp_path: Path) -> None:
    """A line with more of them runs alone, and is not passed over for others."""
    order: list[int] = []
    running: list[int] = []
    most = 0

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        nonlocal most
        count = json.loads(body).get("n", 1)
        order.append(count)
        running.append(count)
        most = max(most, sum(running) if len(running) > 1 else 0)
        await asyncio.sleep(0.005)  # more might begin meanwhile
        assert count <= 3 or running == [count]
        running.remove(count)
        return 200, b"{}"

    bench = Bench(tmp_path, answer)
    counts = [1, 2, 2, 16, 1, 1, 3, 1, 16, 2]
    batch = bench.add_lines([line(str(at), body={"n": count}) for at, count in enumerate(counts)])
    bench.add(*map(str, range(40)))
    found, _ = asyncio.run(bench.until_end(batch))
    assert found.completed == len(counts)
    assert most == 3
    assert order[:20].count(16) == 2, "each batch has every other turn"


def test_lines_leave_the_slots_that_others_ask_for(tmp_path: Path) -> None:
    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        assert len(bench.running) + bench.llm.num_client_slots <= bench.llm.facts.num_slots
        await asyncio.sleep(0.005)
        if len(bench.running) == 1:
            bench.llm.num_client_slots -= 1  # a client's request has ended
        return 200, b"{}"

    bench = Bench(tmp_path, answer)
    bench.llm.num_client_slots = 7
    found, told = asyncio.run(bench.until_end(bench.add(*map(str, range(8)))))
    assert found.completed == 8, told
    assert 1 <= bench.most <= 3


@pytest.mark.parametrize("why", ["its answer is not stored", "it is tried again"])
def test_a_line_that_waits_outside_the_engine_stops_no_larger_one(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        is_stuck = json.loads(body).get("is_stuck", False)
        return (429 if is_stuck and why == "it is tried again" else 200), body

    def refuse(self: BatchStore, **given: Any) -> None:
        if b"is_stuck" in given["text"]:
            raise runner.sqlite3.OperationalError("database or disk is full")
        keep(self, **given)

    keep = BatchStore.answer
    monkeypatch.setattr(BatchStore, "answer", refuse)
    bench = Bench(tmp_path, answer)
    bench.add_lines([line("stuck", body={"is_stuck": True})])
    others = bench.add_lines([line(str(at), body={"n": 16 if at == 2 else 1}) for at in range(6)])
    found, _ = asyncio.run(asyncio.wait_for(bench.until_end(others), PATIENCE_S))
    assert found.completed == 6


@pytest.mark.parametrize("why", ["their answers are not stored", "they are tried again"])
def test_no_more_lines_wait_outside_the_engine_than_may_run(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a full store would have a whole batch computed, and held in memory."""
    begun: set[bytes] = set()
    num_turns = 0

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        nonlocal num_turns
        begun.add(body)
        num_turns += 1
        return (200 if why == "their answers are not stored" or num_turns > 60 else 503), b"{}"

    def refuse(self: BatchStore, **given: Any) -> None:
        nonlocal num_turns
        num_turns += 1
        if num_turns <= 60:
            raise runner.sqlite3.OperationalError("database or disk is full")
        if len(most_begun) == 0:
            most_begun.append(len(begun))
        keep(self, **given)

    most_begun: list[int] = []
    keep = BatchStore.answer
    monkeypatch.setattr(BatchStore, "answer", refuse)
    bench = Bench(tmp_path, answer)
    batch = bench.add_lines([line(str(at), body={"prompt": str(at)}) for at in range(9)])
    found, _ = asyncio.run(asyncio.wait_for(bench.until_end(batch), PATIENCE_S))
    assert (found.completed, most_begun) == (9, [3])


def test_what_is_not_the_line_s_fault_is_tried_again(tmp_path: Path) -> None:
    """As while an adapter is loaded again, or where an operator's order ends it: no engine was lost."""
    told: list[int] = []
    failures = [
        Unavailable("the adapter is being loaded again"),
        SetAside("an order"),
        EngineEnded("it ended"),
    ]

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        told.append((429, 503, 503, 503, 429, 503, 503, 503, 200)[len(told)])
        if told[-1] == 503:
            scope["state"]["failure"] = failures[len(told) % 3]
        return told[-1], b"{}"

    bench = Bench(tmp_path, answer)
    found, _ = asyncio.run(bench.until_end(bench.add("a")))
    assert (found.completed, found.failed, len(told)) == (1, 0, 9)


@pytest.mark.parametrize("failure", [EngineEnded("it ended"), PartlyOverloaded("it waited", 1.0)])
def test_a_line_that_may_be_the_cause_itself_is_given_up(tmp_path: Path, failure: Failure) -> None:
    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        scope["state"]["failure"] = failure
        return failure.status, b'{"error": "lost"}'

    bench = Bench(tmp_path, answer)
    found, told = asyncio.run(asyncio.wait_for(bench.until_end(bench.add("a")), PATIENCE_S))
    assert (found.status, found.failed) == ("completed", 1)
    assert told[0]["response"]["body"] == {"error": "lost"}


@pytest.mark.parametrize("failure", [EngineEnded("it ended"), SetAside("an order")])
def test_the_server_tells_a_lost_engine_from_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    """Clients are told the same status for either."""

    async def ask(*_: Any, **__: Any) -> None:
        raise failure

    llm, keys = AsyncLLM(TINY), ApiKeys({})
    monkeypatch.setattr(llm, "ask", ask)
    batches = Batches.of(tmp_path, llm, keys)
    application(llm, "m", keys, is_local=True, batches=batches)
    told = asyncio.run(runner.asked(batches.app, URL, b'{"prompt": "a"}', ANYBODY, "name"))
    assert (told[0], told[2]) == (503, failure)


@pytest.mark.parametrize("url", [URL, "/v1/embeddings"])
@pytest.mark.parametrize(
    ("queue_s", "is_of_batch", "timeout_s", "failure"),  # of each sample of each prompt
    [
        ([[None], [None]], True, None, Overloaded),
        ([[None], [0.5]], True, None, PartlyOverloaded),
        ([[0.5], [0.5]], True, None, None),
        ([[None, 0.5], [None, None, 0.5]], True, None, None),
        ([[None], [None]], True, 9.0, Overloaded),
        ([[None], [None]], True, 3.0, None),
        ([[None], [None]], False, None, None),
    ],
)
def test_a_line_that_only_waited_for_the_engine_has_no_answer_yet(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    queue_s: list[list[float | None]],
    is_of_batch: bool,
    timeout_s: float | None,
    failure: type[Failure] | None,
) -> None:
    async def ask(*_: Any, **__: Any) -> list[AnswerStream]:
        answers = list[AnswerStream]()
        for at, samples in enumerate(queue_s):
            params, prompt = SamplingParams(max_tokens=9), np.array([301])
            request, *more = (Request(f"{at}-{each}", prompt, params) for each in range(len(samples)))
            request.followers, request.timeout_s = more, timeout_s
            answers.append(AnswerStream(request, llm.text, TextOptions(), num_answers=1, max_unread_tokens=9))
            answers[-1].is_of_batch = is_of_batch
            for index, each in enumerate(samples):
                answers[-1].finish(index, SampleEnd(at, "timeout", None, 0, 0, 0, each, None, None, []))
        return answers

    llm, keys = AsyncLLM(TINY, "model.pooling=last", "scheduler.max_queue_wait_s=4"), ApiKeys({})
    monkeypatch.setattr(llm, "ask", ask)
    batches = Batches.of(tmp_path, llm, keys)
    application(llm, "m", keys, is_local=True, batches=batches)
    body = b'{"prompt": ["a", "b"]}' if url == URL else b'{"input": ["a", "b"]}'
    status, text, told = asyncio.run(runner.asked(batches.app, url, body, ANYBODY, "name"))
    if failure is not None:
        assert (status, type(told)) == (429, failure), text
    else:
        assert status == (200 if url == URL else 500), text


def test_a_defect_is_the_answer_to_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        raise ZeroDivisionError

    bench = Bench(tmp_path, answer)
    _, told = asyncio.run(bench.until_end(bench.add("a")))
    assert told[0]["response"]["status_code"] == 500
    assert "a defect of the server" in told[0]["response"]["body"]["error"]["message"]
    assert "ZeroDivisionError" in caplog.text


def test_what_cannot_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        asked.append(body)
        return 200, b"{}"

    def refuse(self: BatchStore, **given: Any) -> None:
        refused.append(given["number"])
        if len(refused) == 3:
            raise ValueError("a defect")
        if len(refused) < 6:
            raise runner.sqlite3.OperationalError("database or disk is full")
        keep(self, **given)

    asked: list[bytes] = []
    refused: list[int] = []
    keep = BatchStore.answer
    monkeypatch.setattr(BatchStore, "answer", refuse)
    bench = Bench(tmp_path, answer)
    found, _ = asyncio.run(bench.until_end(bench.add("a")))
    assert (found.status, found.completed) == ("completed", 1)
    assert len(asked) == 2, "again after the defect, and not where the disk was full"
    assert "is stored again in" in caplog.text
    assert "ValueError: a defect" in caplog.text


def test_a_batch_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_run = asyncio.Event()

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        if len(bench.running) == 3:
            monkeypatch.setattr(runner.time, "time", lambda: batch.made_s + WINDOW_S)
            three_run.set()
        await asyncio.wait_for(three_run.wait(), PATIENCE_S)
        return 200, b"{}"

    bench = Bench(tmp_path, answer)
    batch = bench.add("a", "b", "c", "d", "e")
    found, told = asyncio.run(bench.until_end(batch))
    assert (found.status, found.completed, found.failed) == ("expired", 3, 2)
    assert [each["error"] and each["error"]["code"] for each in told] == [None] * 3 + ["batch_expired"] * 2


def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        await bench.batches.call(lambda store: store.cancel(batch))
        return 200, b"{}"

    bench = Bench(tmp_path, answer)
    batch = bench.add("a", "b", "c", "d", "e")
    found, told = asyncio.run(bench.until_end(batch))
    assert found.status == "cancelled"
    assert 1 <= len(told) <= 3
    assert len(told) == found.completed < found.total == 5


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_batch_ends_while_the_engine_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """As while it sleeps: its lines would be tried again for ever."""

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        bench.llm.accepts = False
        if end == "expired":
            monkeypatch.setattr(runner.time, "time", lambda: batch.made_s + WINDOW_S)
        else:
            await bench.batches.call(lambda store: store.cancel(batch))
        return 503, b"{}"

    bench = Bench(tmp_path, answer)
    batch = bench.add("a")
    found, told = asyncio.run(asyncio.wait_for(bench.until_end(batch), PATIENCE_S))
    assert (found.status, found.completed) == (end, 0)
    assert [each["error"]["code"] for each in told] == ["batch_expired"] * (end == "expired")


def test_a_line_that_is_no_longer_accepted_is_answered_so(tmp_path: Path) -> None:
    """As after a restart with a smaller server.max_body_mib."""

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        bench.llm.recipe.server.max_body_mib = 0.001
        return 200, b"{}"

    bench = Bench(tmp_path, answer)
    bench.llm.recipe.server.batch_requests = 1
    batch = bench.add("a", "b" * 1024, "c")
    found, told = asyncio.run(asyncio.wait_for(bench.until_end(batch), PATIENCE_S))
    assert (found.status, found.completed, found.failed) == ("completed", 2, 1)
    assert (told[1]["custom_id"], told[1]["error"]["code"]) == ("b" * 1024, "invalid_request")
    assert told[1]["error"]["message"].startswith("line 2: it is longer than 1048 bytes")


@pytest.mark.parametrize("fault", [ValueError("a defect"), runner.sqlite3.OperationalError("disk I/O error")])
@pytest.mark.parametrize("name", ["begin", "next_line"])
def test_what_fails_lets_its_batch_alone_pause(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    fault: Exception,
) -> None:
    """For longer than the other one takes."""
    monkeypatch.setattr(runner, "_PAUSE_S", PATIENCE_S)

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        return 200, b"{}"

    def failing(self: BatchStore, **given: Any) -> Any:
        if given["batch"].id == first.id:
            raise fault
        return right(self, **given)

    right = getattr(BatchStore, name)
    monkeypatch.setattr(BatchStore, name, failing)
    bench = Bench(tmp_path, answer)
    first, second = bench.add("a"), bench.add("b")
    found, _ = asyncio.run(asyncio.wait_for(bench.until_end(second), PATIENCE_S))
    assert found.completed == 1
    assert f"{first.id} pauses for" in caplog.text
    assert caplog.text.count(" pauses for") == 1


def test_nobody_wakes_for_a_batch_that_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a batch that cannot be ended would have turn after turn."""
    monkeypatch.setattr(runner, "_PAUSE_S", PATIENCE_S)

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        return 200, b"{}"

    def end(self: BatchStore, *given: Any) -> None:
        raise runner.sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(BatchStore, "end", end)
    bench = Bench(tmp_path, answer)
    bench.add("a")

    async def turns() -> None:
        batches = bench.batches
        for _ in range(9):
            batches._woken.clear()
            assert await batches._turn()
            await asyncio.gather(*(task for each in batches._active for task in each.tasks))
        assert not batches._woken.is_set()

    asyncio.run(turns())
    assert caplog.text.count(" pauses for") == 1


@pytest.mark.parametrize("reserve_bytes", [2**24, 2**15])
@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_batch_ends_in_a_full_store(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    end: str,
    reserve_bytes: int,
) -> None:
    """A small reserve has no room for what is said of the lines that did not begin."""
    monkeypatch.setattr(kept_batches, "_RESERVE_BYTES", reserve_bytes)
    attempts: list[int] = []

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        return 200, b'"%s"' % (b"a" * 2**18)

    def keep(self: BatchStore, **given: Any) -> None:
        attempts.append(given["number"])
        if len(attempts) == 5 and end == "cancelled":
            self.cancel(batch)
        elif len(attempts) == 5:
            monkeypatch.setattr(runner.time, "time", lambda: batch.made_s + WINDOW_S)
        kept(self, **given)

    kept = BatchStore.answer
    monkeypatch.setattr(BatchStore, "answer", keep)
    bench = Bench(tmp_path, answer, most_bytes=160 * 2**10)
    names = [f"{number:01000}" for number in range(60)]
    batch = bench.add(*names)
    found, told = asyncio.run(asyncio.wait_for(bench.until_end(batch), PATIENCE_S))
    assert (found.status, found.completed) == (end, 0)
    assert "is stored again in" in caplog.text
    is_told = end == "expired" and reserve_bytes == 2**24
    assert [each["custom_id"] for each in told] == names * is_told
    assert ("get no answer: database or disk is full" in caplog.text) == (end == "expired" and not is_told)


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_batch_that_has_no_room_to_begin_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Not even its rows: those of other batches fill the rest of what answers may take."""
    monkeypatch.setattr(kept_batches, "_RESERVE_BYTES", 2**16)

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        raise AssertionError("no line begins")

    def fill() -> None:
        for size in (2**12, 2**4):
            with contextlib.suppress(runner.sqlite3.OperationalError):
                while True:
                    with bench.store._reserve_transaction(has_answers=True):
                        bench.store._add_file("file-" + uuid.uuid4().hex, "", "batch", "a" * size, 0)

    async def stop() -> StoredBatch:
        ending = asyncio.ensure_future(bench.until_end(batch))
        await asyncio.sleep(0.05)
        assert (await bench.found(batch)).status == "validating"
        if end == "cancelled":
            await bench.batches.call(lambda store: store.cancel(batch))
        else:
            monkeypatch.setattr(runner.time, "time", lambda: batch.made_s + WINDOW_S)
        return (await asyncio.wait_for(ending, PATIENCE_S))[0]

    bench = Bench(tmp_path, answer, most_bytes=2**18)
    batch = bench.add_lines([line(str(number), more=1) for number in range(500)])
    fill()
    found = asyncio.run(stop())
    assert (found.status, found.completed) == (end, 0)


class Broken:
    """A connection to a database whose disk takes no write."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def execute(self, query: str, *values: Any) -> Any:
        """Read, and write nothing."""
        if query.split()[0] not in ("SELECT", "PRAGMA", "ROLLBACK"):
            raise runner.sqlite3.OperationalError("disk I/O error")
        return self._given.execute(query, *values)


def test_who_ends_batches_in_the_moment_of_a_wake_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a line ends just then: the server would wait for its batches for ever."""

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        return 200, b"{}"

    async def turn() -> float:
        turns.append(1)
        return PATIENCE_S

    turns: list[int] = []
    batches = Bench(tmp_path, answer).batches
    monkeypatch.setattr(batches, "_turn_or_pause", turn)

    async def end() -> bool:
        running = asyncio.ensure_future(batches.run())
        for _ in range(9):  # it waits by then
            await asyncio.sleep(0)
        batches.wake()
        running.cancel()
        for _ in range(9):
            await asyncio.sleep(0)
        return running.cancelled()

    assert asyncio.run(end())
    assert len(turns) == 1


def test_clients_are_told_of_a_disk_that_takes_no_write(tmp_path: Path) -> None:
    llm, keys = AsyncLLM(TINY), ApiKeys({})
    batches = Batches.of(tmp_path, llm, keys)
    store = batches._store
    file = store.add_file("", "a", [(1, line("a"))])
    read = store.add_file("", "b", [(1, line("b"))])
    batch = store.add_batch("", read, URL, {})
    store._db = cast(Any, Broken(store._db))
    body = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h"}
    form = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"{}")}}

    async def ask() -> list[httpx.Response]:
        app = httpx.ASGITransport(application(llm, "m", keys, is_local=False, batches=batches))
        async with httpx.AsyncClient(transport=app, base_url="http://a") as client:
            return [
                await client.delete(f"/v1/files/{file.id}"),
                await client.post("/v1/files", **cast(Any, form)),
                await client.post("/v1/batches", json=body),
                await client.post(f"/v1/batches/{batch.id}/cancel"),
                await client.get(f"/v1/batches/{batch.id}"),
            ]

    *failed, found = asyncio.run(ask())
    assert found.status_code == 200
    for each in failed:
        assert (each.status_code, "retry-after" in each.headers) == (503, True), each.text
        assert "batches fails: disk I/O error; send" in each.json()["error"]["message"]


def test_batches_take_turns(tmp_path: Path) -> None:
    order: list[str] = []

    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        await asyncio.sleep(0)
        return 200, b"{}"

    bench = Bench(tmp_path, answer)
    bench.llm.recipe.server.batch_requests = 1
    kept = BatchStore.answer

    def note(self: BatchStore, **given: Any) -> None:
        order.append(given["batch"].id)
        kept(self, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchStore, "answer", note)
        long, short = bench.add(*map(str, range(30))), bench.add("a", "b", "c")
        asyncio.run(bench.until_end(long))
    assert [*map(order.count, (long.id, short.id))] == [30, 3]
    assert order.index(short.id) <= 2
    assert len(order) - order[::-1].index(short.id) <= 8


def test_a_batch_waits_for_the_key_that_it_was_made_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
        owners.append(scope["state"]["client"].owner)
        return 200, b"{}"

    owners: list[str] = []
    bench = Bench(tmp_path, answer)
    first = ApiKeys({"one": Rights(), "two": Rights("t", 3)})
    two = first.client("Bearer two")
    assert two is not None
    theirs, mine = bench.add("a", owner=two.lasting), bench.add("b")
    asyncio.run(bench.until_end(mine))
    assert owners == [""]
    assert f"{theirs.id} waits: the server does not have the key" in caplog.text
    assert caplog.text.count(theirs.id) == 1
    again = Bench(tmp_path, answer)
    again.keys = ApiKeys({"two": Rights("t", 3), "three": Rights()})
    found, _ = asyncio.run(again.until_end(theirs))
    assert found.completed == 1
    assert owners == ["", "key 1"]


def test_a_key_lasts_whatever_stands_beside_it() -> None:
    one = ApiKeys({"one": Rights(), "two": Rights()}, share_prefixes=True).client("Bearer two")
    other = ApiKeys({"two": Rights("tenant")}).client("Bearer two")
    assert one is not None
    assert other is not None
    assert one.lasting == other.lasting != ""
    assert ApiKeys({}).of_lasting("") is ANYBODY
    assert ApiKeys({}).of_lasting(one.lasting) is ApiKeys({"one": Rights()}).of_lasting("") is None
