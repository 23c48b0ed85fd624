"""A client gets whole answers or errors through a router, whatever its replicas do.

The replicas are scripted servers on real sockets.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from borders.field_types import LONGEST_NAME
from continuous_batching.routing.routing import Routing
from continuous_batching.routing.splitting import Split, Splitting
from serving.api import streamed
from serving.api.access import AccessControl, BodyMemory
from serving.api.api_keys import ANYBODY, ApiKeys
from serving.router import proxy
from serving.router.fair_turns import ModelTurns
from serving.router.fleet_figures import FleetFigures
from serving.router.prompts import OWN_LIMIT, Prompts
from serving.router.proxy import ClientWatch, Proxy
from serving.router.replicas import FleetReplica
from serving.router.server import _serve
from serving.router.upstream import Upstream
from serving.server import SignalFreeServer, configuration, listener_at
from tests.patience import PATIENCE_S
from tests.serving.router.waiting import close_all
from tests.thorough import cases

EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = [b'data: {"a":1}\n\n', b'data: {"b":2}\n\n', b"data: [DONE]\n\n"]
Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream(*events: bytes, ends: bool = True) -> Script:
    """These events, and then the stream's proper end, or nothing."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS)
        for event in events:
            writer.write(chunk(event))
            await writer.drain()
            await asyncio.sleep(0.01)
        if ends:
            writer.write(b"0\r\n\r\n")
        else:
            writer.transport.abort()

    return script


def whole(status: int, body: bytes, length: int | None = None) -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        size = len(body) if length is None else length
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        if size > len(body):
            writer.transport.abort()

    return script


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(2 * PATIENCE_S)


class Stub:
    """A server that answers each request by its script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.heads: list[bytes] = []
        self.asked: dict[asyncio.StreamWriter, bytes] = {}  # the last head of each connection
        self.bodies: list[bytes] = []
        self.num_closed = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def stop_listening(self) -> None:
        """Accept no more, and let what has been accepted become connections before the server is closed.

        Of a server that is closed in between, asyncio leaves such a connection open for good.
        """
        for listener in self.server.sockets:
            asyncio.get_running_loop().remove_reader(listener)
        await close_all()
        self.server.close()

    async def close(self) -> None:
        """End with all connections."""
        await self.stop_listening()
        for writer in self.writers:
            writer.transport.abort()
        await close_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        answering: asyncio.Task[None] | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                self.asked[writer] = head
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(size))
                answering = asyncio.ensure_future(self.script(writer))
                asked = asyncio.ensure_future(reader.read(0)) if self.script is not hang else None
                if self.script is hang:
                    await reader.read(1)  # returns when the other side goes away
                    raise asyncio.IncompleteReadError(b"", 1)
                await answering
                if asked is not None:
                    await asked
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_closed += 1
        finally:  # Also where the loop ends first: what stays open is another test's warning
            if answering is not None:
                answering.cancel()
            writer.close()


class Fleet:
    """A proxy in front of stubs; None in the place of a script: nobody listens there."""

    def __init__(self, *scripts: Script | None) -> None:
        self.stubs = [each and Stub(each) for each in scripts]
        self.split: Split = "always"
        self.keep_alive_s = 0.0
        self.most_open = 100
        self.parts: list[bytes] = []  # what the last client has received
        self.num_cut = 0  # connections to clients that were broken
        self.reads = True  # clients read what they are sent

    async def __aenter__(self) -> Fleet:
        self.routing = Routing(len(self.stubs), "round_robin")
        ports = [9 if stub is None else await stub.start() for stub in self.stubs]
        self.replicas = [
            FleetReplica(number, f"http://127.0.0.1:{port}", Upstream("127.0.0.1", port), self.routing, [])
            for number, port in enumerate(ports)
        ]
        turns = ModelTurns(lambda turn: self.most_open)
        self.figures = FleetFigures(self.routing, self.replicas, turns)
        self.splitting = Splitting(self.routing, self.split)
        self.proxy = Proxy(
            self.routing,
            self.replicas,
            Prompts(),
            turns,
            self.figures,
            self.splitting,
            keep_alive_s=self.keep_alive_s,
        )
        self.turns = turns
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.routing.requests.tolist() == [0] * len(self.stubs), "a request was left behind"
        assert [each.num_open for each in self.replicas] == [0] * len(self.stubs)
        for replica in self.replicas:
            replica.server.lose("the test is over")
        for stub in filter(None, self.stubs):
            await stub.close()

    async def ask(
        self,
        path: str = "/v1/chat/completions",
        session: str = "",
        leaves_after: int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        **fields: Any,
    ) -> tuple[int, bytes]:
        """Status and body; the client goes away after so many pieces."""
        received = asyncio.Queue[dict[str, Any]]()
        asked = {"messages": [{"role": "user", "content": "x" * 600}], "stream": True} | fields
        body = json.dumps(asked).encode()
        received.put_nowait({"type": "http.request", "body": body})
        status, parts = 0, list[bytes]()
        self.parts = parts

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            if not self.reads:
                await asyncio.Event().wait()
            if message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
            if leaves_after is not None and len(parts) >= leaves_after:
                leave()

        def cut_off() -> None:
            self.num_cut += 1
            asyncio.get_running_loop().call_soon(leave)

        state: dict[str, Any] = {"cut_off": cut_off}

        def leave() -> None:
            """As the server's protocol tells of it."""
            state.get("when_gone", lambda: None)()

        if session:
            headers = [*headers, (b"x-session-id", session.encode())]
        headers = [*headers, (b"x-prompt-replica", b"tcp://a-client-knows-better:1")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
        }
        if leaves_after == 0:
            asyncio.get_running_loop().call_later(0.05, leave)
        await self.proxy(scope | {"headers": headers, "state": state}, received.get, send)
        return status, b"".join(parts)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def error_of(body: bytes) -> dict[str, Any]:
    error = json.loads(body.rstrip().rpartition(b"data: ")[2])["error"]
    assert isinstance(error, dict)
    return error


def test_a_stream_is_passed_on_byte_for_byte() -> None:
    async def test() -> None:
        async with Fleet(stream(*WHOLE)) as fleet:
            for _ in range(3):  # all on one connection
                assert await fleet.ask() == (200, b"".join(WHOLE))
            assert fleet.stubs[0] is not None
            assert fleet.stubs[0].num_closed == 0

    run(test)


def test_a_stream_that_ends_early_never_looks_whole() -> None:
    """Neither where the connection breaks, nor where it ends as if all had been said."""

    async def test() -> None:
        for ends in (False, True):
            async with Fleet(stream(WHOLE[0], b'data: {"cut', ends=ends)) as fleet:
                status, body = await fleet.ask()
                assert (status, body.startswith(WHOLE[0])) == (200, True)
                assert b"[DONE]" not in body
                assert body.count(WHOLE[0]) == 1
                assert b"cut" not in body, "no reader gets half an event"
                assert error_of(body)["code"] == "replica_lost"
                assert fleet.figures.num_cut_off == 1

    run(test)


def test_responses_end_without_done() -> None:
    async def test() -> None:
        event = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
        async with Fleet(stream(event)) as fleet:
            assert await fleet.ask("/v1/responses") == (200, event)
        async with Fleet(stream(event, ends=False)) as fleet:
            assert b"\nevent: error\ndata: {" in (await fleet.ask("/v1/responses"))[1]

    run(test)


def test_what_has_not_begun_goes_to_another() -> None:
    """No connection; a refusal; a stream that breaks, or an answer that is cut, before anything is sent."""

    async def test() -> None:
        for first in (None, whole(503, b"{}"), stream(ends=False), whole(200, b'{"half', 100)):
            async with Fleet(first, stream(*WHOLE)) as fleet:
                assert await fleet.ask() == (200, b"".join(WHOLE))
                assert [len(stub.bodies) for stub in fleet.stubs if stub][-1] == 1
                assert fleet.figures.num_again == 1

    run(test)


def test_who_was_unavailable_is_asked_once_more() -> None:
    """Both engines die while a request waits for its turn at one and then at the other: the first is back."""

    def refusing(statuses: list[int]) -> Script:
        async def script(writer: asyncio.StreamWriter) -> None:
            await (whole(statuses.pop(0), b"{}") if statuses else stream(*WHOLE))(writer)

        return script

    async def test() -> None:
        async with Fleet(refusing([503]), refusing([503])) as fleet:
            assert await fleet.ask() == (200, b"".join(WHOLE))
            assert sum(len(stub.bodies) for stub in fleet.stubs if stub) == 3
        for status, times in ((503, 2), (429, 1)):
            async with Fleet(refusing([status] * 9), refusing([status] * 9)) as fleet:
                assert (await fleet.ask())[0] == status
                assert [len(stub.bodies) for stub in fleet.stubs if stub] == [times, times]

    run(test)


def test_where_nobody_can_answer_the_client_is_told() -> None:
    async def test() -> None:
        async with Fleet(None, None) as fleet:
            status, body = await fleet.ask()
            assert status == 503
            assert "no replica" in error_of(body)["message"]
        refusal = b'{"error":{"message":"full"}}'
        async with Fleet(whole(429, refusal), whole(429, refusal)) as fleet:
            assert await fleet.ask() == (429, refusal), "as the replica said it"

    run(test)


def test_a_wrong_request_is_not_tried_again() -> None:
    async def test() -> None:
        async with Fleet(whole(400, b"{}"), whole(200, b"{}")) as fleet:
            assert await fleet.ask() == (400, b"{}")
            assert fleet.stubs[1] is not None
            assert not fleet.stubs[1].bodies

    run(test)


def test_a_client_that_goes_away_ends_its_request() -> None:
    async def test() -> None:
        async with Fleet(hang) as fleet:
            assert await fleet.ask(leaves_after=0) == (0, b"")
            assert fleet.stubs[0] is not None
            while not fleet.stubs[0].num_closed:
                await asyncio.sleep(0.01)

    run(test)


def begun(head: bytes, part: bytes) -> Script:
    """An answer that never goes on."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(head + chunk(part))
        await writer.wait_closed()

    return script


@pytest.mark.parametrize(
    ("script", "path", "is_told"),
    [
        (begun(EVENTS, WHOLE[0]), "/v1/chat/completions", True),
        (begun(EVENTS, WHOLE[0]), "/v1/messages", True),
        (hang, "/v1/completions", True),
        (
            begun(EVENTS.replace(b"text/event-stream", b"text/plain"), b"a long answer"),
            "/v1/completions",
            False,
        ),
    ],
)
def test_who_is_answered_as_the_router_ends_is_told(
    script: Script, path: str, *, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_MOST_WHOLE_BYTES", 4)

    async def test() -> None:
        async with Fleet(script) as fleet:
            asking = asyncio.ensure_future(fleet.ask(path))
            stub = fleet.stubs[0]
            assert stub is not None
            while not (stub.bodies if script is hang else fleet.parts):
                await asyncio.sleep(0.01)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            if is_told:
                assert error_of(fleet.parts[-1])["message"] == "the server is shutting down"
                assert b"[DONE]" not in fleet.parts[-1]
            else:
                assert fleet.parts == [b"a long answer"], "an error would be taken for its end"

    run(test)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_wait(first: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # not as under nohup

    async def test() -> None:
        request = asyncio.ensure_future(asyncio.Event().wait())
        state = SimpleNamespace(tasks={request})
        server: Any = SimpleNamespace(should_exit=False, force_exit=False, server_state=state)

        async def serve(_: object) -> None:
            while not server.should_exit:
                await asyncio.sleep(0.01)

        server.serve = serve
        app: Any = SimpleNamespace(is_draining=False)
        turns: Any = SimpleNamespace(num_open=1, num_waiting=0, fill=lambda: None)
        fleet: Any = SimpleNamespace(replicas=[])
        listener: Any = None
        drain_s = 2 * PATIENCE_S
        serving = asyncio.ensure_future(_serve(app, server, listener, fleet, turns, (), drain_s, ""))
        await asyncio.sleep(0)
        os.kill(os.getpid(), first)
        while not app.is_draining:
            await asyncio.sleep(0.01)
        assert not server.should_exit
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        assert server.force_exit
        assert request.cancelled()

    run(test)


def test_who_reads_too_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """And holds its turn no longer, whatever its replica still sends."""
    monkeypatch.setattr(streamed, "PATIENCE_S", 0.05)

    async def test() -> None:
        async with Fleet(stream(*WHOLE)) as fleet:
            fleet.reads = False
            await fleet.ask()
            assert (fleet.num_cut, fleet.turns.num_open) == (1, 0)

    run(test)


def test_the_router_s_own_limits_on_bodies_are_told() -> None:
    """No framework is behind its access control that would answer what refuses a body."""

    async def test() -> None:
        async with Fleet(stream(*WHOLE)) as fleet:
            for memory, status, retry in ((1000, 413, None), (15, 429, b"1")):
                parts: list[Any] = [{"type": "http.request", "body": b"x" * 10, "more_body": True}] * 3
                sent: list[Any] = []

                async def receive(parts: list[Any] = parts) -> Any:
                    return parts.pop()

                async def send(message: Any, sent: list[Any] = sent) -> None:
                    sent.append(message)

                guarded = AccessControl(
                    *(fleet.proxy, ApiKeys({}), 25, BodyMemory(memory, OWN_LIMIT), lambda _: None),
                    is_local=False,
                    limit=OWN_LIMIT,
                )
                scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
                await guarded(scope, receive, send)
                assert (sent[0]["status"], dict(sent[0]["headers"]).get(b"retry-after")) == (status, retry)
                assert f"({OWN_LIMIT})" in error_of(sent[1]["body"])["message"]
                assert fleet.stubs[0] is not None
                assert not fleet.stubs[0].heads

    run(test)


def test_a_replica_that_is_lost_tells_all_its_clients() -> None:
    """As where it stands still: its connections do not end by themselves."""

    async def test() -> None:
        async def begins(writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS + chunk(WHOLE[0]))
            await asyncio.sleep(2 * PATIENCE_S)

        async with Fleet(begins) as fleet:
            asking = [asyncio.ensure_future(fleet.ask()) for _ in range(3)]
            while fleet.replicas[0].num_open < 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            fleet.replicas[0].lose("no answer within 2 s")
            for status, body in await asyncio.gather(*asking):
                if status == 200:
                    assert error_of(body)["code"] == "replica_lost"
                else:
                    assert status == 503
            assert not fleet.routing.is_open[0]

    run(test)


def test_a_drained_replica_gets_nothing_and_a_session_stays() -> None:
    async def test() -> None:
        async with Fleet(stream(*WHOLE), stream(*WHOLE), stream(*WHOLE)) as fleet:
            for each in fleet.replicas:
                each.state = "ready"
            for _ in range(4):
                await fleet.ask(session="a")
            sent = [each.num_sent for each in fleet.replicas]
            assert sorted(sent) == [0, 0, 4]
            home = sent.index(4)
            fleet.replicas[home].drain(True)
            for _ in range(3):
                await fleet.ask(session="a")
            assert fleet.replicas[home].num_sent == 4
            fleet.replicas[home].drain(False)
            assert fleet.routing.is_open.all()

    run(test)


def test_names_of_any_length_are_kept_as_short_ones() -> None:
    """Thousands of tenants and sessions are remembered."""

    async def test() -> None:
        async with Fleet(stream(*WHOLE)) as fleet:
            for last in "ab":
                await fleet.ask(session="s" * 5000 + last, user="u" * 5000 + last)
            [tenant] = fleet.turns.of("")._served
            assert tenant == "u" * LONGEST_NAME
            sessions = [*fleet.routing._sessions]
            assert len(sessions) == 2, "each is itself"
            assert max(map(len, sessions)) < LONGEST_NAME

    run(test)


def test_where_requests_went_is_told_with_what_spoke_for_it() -> None:
    async def test() -> None:
        async with Fleet(whole(503, b"{}"), stream(*WHOLE)) as fleet:
            await fleet.ask()
            await fleet.ask("/v1/models")  # no prompt
            second, first = fleet.figures.as_json(ANYBODY)["choices"]
            tokens = first["prompt_tokens"]
            assert tokens > 100
            assert first == {
                "replica": fleet.replicas[0].url, "prompt_tokens": tokens, "hit_tokens": 0,
                "best_hit_tokens": 0, "queued_tokens": 0, "requests": 0, "is_again": False,
                "prompt_at": None, "cost_here": None, "cost_there": None,
            }  # fmt: skip
            assert (second["replica"], second["is_again"]) == (fleet.replicas[1].url, True)
            fleet.replicas[0].forget()
            told = fleet.figures.as_json(ANYBODY)
            assert [each["url"] for each in told["replicas"]] == [second["replica"]]
            assert told["choices"] == [second, first], "also of what has gone"

    run(test)


ENDED, UNKNOWN, REFUSED = whole(200, b'{"aborted":1}'), whole(404, b"{}"), whole(401, b'{"key":0}')


@pytest.mark.parametrize(
    ("scripts", "status"),
    [
        ((UNKNOWN, ENDED, UNKNOWN), 200),
        ((None, ENDED), 200),
        ((UNKNOWN, UNKNOWN), 404),
        ((UNKNOWN, None), 404),
        ((UNKNOWN, REFUSED), 401),
        ((REFUSED, UNKNOWN), 401),
        ((None, None), 503),
    ],
)
def test_an_abort_is_answered_by_the_replica_that_has_the_request(
    scripts: tuple[Script | None, ...], status: int
) -> None:
    """Where none has it, the client is told why."""

    async def test() -> None:
        async with Fleet(*scripts) as fleet:
            found, body = await fleet.ask("/abort/cmpl-1")
            assert (found, status != 200 or json.loads(body) == {"aborted": 1}) == (status, True)
            for stub in filter(None, fleet.stubs):
                assert all(each.startswith(b"POST /abort/cmpl-1 HTTP/1.1") for each in stub.heads)
            assert not any(each.num_sent for each in fleet.replicas), "it counts as no request"

    run(test)


HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.parametrize("num_bytes", cases([10, 10**6], [0, 10, 10**5, 10**6]))
def test_work_for_a_client_that_goes_is_cancelled_whatever_it_has_sent(num_bytes: int) -> None:
    """Of a long body uvicorn stops to read, and would not see the end of the connection."""

    async def test() -> None:
        works, ended = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive()).get("more_body"):
                pass
            watch = ClientWatch(scope["state"])
            works.set()
            try:
                await asyncio.sleep(2 * PATIENCE_S)
            except asyncio.CancelledError:
                assert watch.is_gone
                ended.set()
            finally:
                watch.end()

        server = SignalFreeServer(configuration(app, 16))
        with listener_at("127.0.0.1", 0) as listener:
            serving = asyncio.ensure_future(server.serve([listener]))
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(HEAD % num_bytes)
            await asyncio.sleep(0.05)  # the application waits for the body
            writer.write(bytes(num_bytes))
            await works.wait()
            assert not ended.is_set()
            writer.transport.abort()
            await ended.wait()
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
