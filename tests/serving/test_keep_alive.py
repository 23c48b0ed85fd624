"""A stream's head comes at once, and comments come while its request waits; clients see only the answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from serving.api.streamed import COMMENT, DONE, KeepAlive, StreamedResponse
from tests.patience import PATIENCE_S
from tests.serving.faults import Served, ask, events

pytestmark = pytest.mark.in_order

ONE_SLOT = ("scheduler.num_slots=1", "server.step_timeout_s=300", "server.spare_engine=false")
LONG = {"prompt": "One day", "max_tokens": 1500, "ignore_eos": True, "stream": True}
SHORT = {"temperature": 0, "stream": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "One day", "max_tokens": 12, "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 12},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*ONE_SLOT, "server.keep_alive_s=0.02") as served:
        yield served


@pytest.fixture(scope="module")
def silent() -> Iterator[Served]:
    """A server that waits for the engine's word however long a step takes."""
    with Served(*ONE_SLOT, "server.keep_alive_s=0", "scheduler.max_waiting_requests=2") as silent:
        yield silent


@contextlib.contextmanager
def stopped_engine(served: Served) -> Iterator[Any]:
    """An engine in a step that does not end, until the value is called."""
    pid = served.llm.engine.pid
    assert pid is not None

    def go_on() -> None:
        os.kill(pid, signal.SIGCONT)

    os.kill(pid, signal.SIGSTOP)
    try:
        yield go_on
    finally:
        go_on()


@contextlib.asynccontextmanager
async def client(served: Served) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(sock_connect=PATIENCE_S, sock_read=PATIENCE_S)
    async with aiohttp.ClientSession(served.url, timeout=timeout) as session:
        yield session


async def comments(response: aiohttp.ClientResponse, number: int) -> None:
    """Read so many comments, each of which comes alone."""
    for _ in range(number):
        assert await response.content.readexactly(len(COMMENT)) == COMMENT


def kinds(stream: bytes) -> list[str]:
    """What the events of a stream are, without the ids and times that differ each time."""
    lines = [each for each in stream.decode().split("\n\n") if each and not each.startswith(":")]
    return [each.partition("data: ")[0] + each[-40:].partition('"text"')[2] for each in lines]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_waits_says_so_and_is_the_same_stream(served: Served, path: str) -> None:
    body = BODIES[path] | SHORT

    async def run() -> None:
        async with client(served) as session:
            alone = await (await session.post(path, json=body)).read()
            assert alone.count(b"data: ") > 3
            with stopped_engine(served) as go_on:
                async with session.post(path, json=body) as response:
                    assert response.status == 200
                    assert response.headers["content-type"].startswith("text/event-stream")
                    await comments(response, 3)
                    go_on()
                    told = await response.read()
            assert kinds(told) == kinds(alone)
            assert b"\n\n\n" not in told

    before = served.held()
    asyncio.run(run())
    served.settle(before)


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(served: Served) -> None:
    aborted = served.llm.stats.aborts["disconnect"]

    async def run() -> None:
        async with client(served) as session, session.post("/v1/completions", json=LONG) as holder:
            await holder.content.readuntil(b"\n\n")
            for number in (1, 2):
                async with session.post("/v1/completions", json=LONG | {"n": number}) as response:
                    await comments(response, 1)
                    response.close()
                while served.llm.num_requests > 1:
                    await asyncio.sleep(0.01)
            async with session.post("/v1/completions", json=LONG | {"max_tokens": 2}) as response:
                await comments(response, 1)
                holder.close()  # the next in the queue has its slot
                last = [each async for each in events(response)][-1]
                assert last["choices"][0]["finish_reason"] == "length"

    before = served.held()
    asyncio.run(run())
    served.settle(before)
    assert served.llm.stats.aborts["disconnect"] == aborted + 3


def test_what_the_queue_refuses_has_a_status(silent: Served) -> None:
    """A stream's head is sent when its request is in the queue, and not before."""

    async def run() -> None:
        async with client(silent) as session, session.post("/v1/completions", json=LONG) as holder:
            await holder.content.readuntil(b"\n\n")
            async with session.post("/v1/completions", json=LONG | {"n": 2}) as waiting:
                assert waiting.status == 200
                refused = await ask(session, "", prompt="One day")
                assert (refused.status, "queue" in str(refused.error)) == (429, True)
                schema = {"regex": "["}
                refused = await ask(session, "", prompt="One day", structured_outputs=schema)
                assert refused.status == 400

    before = silent.held()
    asyncio.run(run())
    silent.settle(before)


def test_a_stream_whose_engine_is_lost_ends_with_an_error_event(served: Served) -> None:
    """Also one that has had nothing but comments."""

    async def run() -> None:
        async with client(served) as session, session.post("/v1/completions", json=LONG) as holder:
            await holder.content.readuntil(b"\n\n")
            chat = BODIES["/v1/chat/completions"] | SHORT
            response = BODIES["/v1/responses"] | SHORT
            async with (
                session.post("/v1/chat/completions", json=chat) as one,
                session.post("/v1/responses", json=response) as two,
            ):
                assert (one.status, two.status) == (200, 200)
                await comments(one, 1)
                pid = served.llm.engine.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                (error,) = [each async for each in events(one)]
                assert error["error"]["code"] == "engine_lost"
                kinds = [each["type"] async for each in events(two)]
                assert kinds == ["response.created", "response.in_progress", "response.failed"]

    asyncio.run(run())
    served.settle()


class Sent:
    """What a response sends; `part` lets it go on with its next part."""

    def __init__(self, every_s: float, *parts: bytes) -> None:
        self.bodies: list[bytes] = []
        self.news = asyncio.Condition()
        self._next = asyncio.Semaphore(0)
        self._parts = parts
        response = StreamedResponse(
            self._made(), lambda: None, asyncio.Event().wait, keep_alive=KeepAlive(every_s)
        )
        self.sending = asyncio.ensure_future(response({"type": "http"}, self._receive, self._send))

    async def _made(self) -> AsyncGenerator[bytes, None]:
        for part in self._parts:
            await self._next.acquire()
            yield part

    async def _receive(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        async with self.news:
            if message["type"] == "http.response.body":
                self.bodies.append(message["body"])
            self.news.notify_all()

    async def until(self, number: int, body: bytes) -> None:
        async with self.news:
            await self.news.wait_for(lambda: self.bodies.count(body) >= number)

    def part(self) -> None:
        self._next.release()


def test_a_comment_never_comes_within_an_event_nor_behind_the_last() -> None:
    async def run() -> list[bytes]:
        sent = Sent(0.001, b"data: a", b"b\n\n", b"", DONE)
        await sent.until(2, COMMENT)
        sent.part()
        await sent.until(1, b"data: a")
        num_sent = len(sent.bodies)
        await asyncio.sleep(0.1)  # many times the silence after which a comment is due
        assert len(sent.bodies) == num_sent
        sent.part()
        await sent.until(1, b"b\n\n")
        await sent.until(4, COMMENT)
        sent.part()
        sent.part()
        await sent.sending
        await asyncio.sleep(0.05)
        return sent.bodies

    bodies = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert [each for each in bodies if each != COMMENT] == [b"data: a", b"b\n\n", DONE], "nothing is empty"
    assert bodies[-1] == DONE
