"""Requests and the router survive a server that goes away, or that says what was not expected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from serving.router import replicas as of_replicas
from serving.router.proxy import AGAIN_S, ClientWatch
from serving.router.resuming import MOST_LOSSES
from serving.router.upstream import Lost
from tests.patience import PATIENCE_S
from tests.serving.router.test_proxy import (
    EVENTS,
    WHOLE,
    Fleet,
    Script,
    Stub,
    chunk,
    error_of,
    hang,
    run,
    stream,
)
from tests.serving.router.waiting import end, until


def by_path(**scripts: Script) -> Callable[[Stub], Script]:
    """A server's answers by the end of the path, `other` where it is none of these."""

    def script_of(stub: Stub) -> Script:
        async def script(writer: asyncio.StreamWriter) -> None:
            path = stub.asked[writer].split()[1].decode().rpartition("/")[2]
            await (scripts.get(path) or scripts["other"])(writer)

        return script

    return script_of


def answer(body: bytes, status: int = 200) -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))

    return script


def test_who_drains_behind_a_closed_door_ends_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As uvicorn does at SIGTERM: it listens no more, and goes on with what it has."""
    monkeypatch.setattr(of_replicas, "POLL_S", 0.01)
    goes_on, asked = asyncio.Event(), list[asyncio.StreamWriter]()

    async def slow(writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        writer.write(EVENTS + chunk(WHOLE[0]))
        await goes_on.wait()
        writer.write(b"".join(map(chunk, WHOLE[1:])) + b"0\r\n\r\n")

    async def test() -> None:
        async with Fleet(slow) as fleet:
            (stub,), (replica,) = fleet.stubs, fleet.replicas
            assert stub is not None
            stub.script = by_path(
                ready=answer(b""),
                metrics=answer(b""),
                models=answer(b"", 404),
                server_info=answer(b"", 404),
                other=slow,
            )(stub)
            watching = asyncio.ensure_future(replica.watch(0))
            await until(lambda: replica.state == "ready")
            asking = asyncio.ensure_future(fleet.ask())
            await until(lambda: len(asked) == 1)
            await stub.stop_listening()
            for writer in {*stub.writers} - {*asked}:
                writer.transport.abort()
            await until(lambda: replica.state == "lost")
            goes_on.set()
            assert await asking == (200, b"".join(WHOLE))
            await end(watching)

    run(test)


def test_work_for_a_client_that_is_gone_is_cancelled_until_it_ends() -> None:
    """`asyncio.wait_for` before Python 3.12 swallows a cancellation that comes just as it ends."""

    async def test() -> None:
        state, num_cancelled = dict[str, Any](), 0
        watch = ClientWatch(state)
        asyncio.get_running_loop().call_soon(state["when_gone"])
        while num_cancelled < 2:
            try:
                await asyncio.sleep(2 * PATIENCE_S)
            except asyncio.CancelledError:
                num_cancelled += 1
            else:
                raise AssertionError(f"cancelled {num_cancelled} times")
        assert watch.is_gone
        watch.end()
        await asyncio.sleep(2 * AGAIN_S)  # is not cancelled

    run(test)


def test_who_stands_still_is_not_asked_again() -> None:
    """A connection that was kept is one more way to ask; but not to ask who is known to be lost."""

    async def test() -> None:
        async with Fleet(answer(b"{}"), answer(b"{}")) as fleet:
            assert await fleet.ask() == (200, b"{}")  # the first answers, whose connection is kept
            assert fleet.stubs[0] is not None
            assert fleet.stubs[1] is not None
            await fleet.ask()
            silent = asyncio.Event()

            async def stand_still(writer: asyncio.StreamWriter) -> None:
                silent.set()
                await asyncio.sleep(2 * PATIENCE_S)

            fleet.stubs[0].script = stand_still
            asking = asyncio.ensure_future(fleet.ask())
            await silent.wait()
            fleet.replicas[0].lose("no answer within 2 s")
            assert await asyncio.wait_for(asking, PATIENCE_S) == (200, b"{}")
            assert [len(each.bodies) for each in fleet.stubs if each] == [2, 2]

    run(test)


def test_a_request_that_ends_servers_is_not_sent_to_all_on_kept_connections() -> None:
    """Nobody listens there afterwards; where somebody does, it is sent once more, and on a new one."""

    def ends(stub: Stub) -> Script:
        async def script(_: asyncio.StreamWriter) -> None:
            await stub.stop_listening()
            for each in stub.writers:
                each.transport.abort()

        return script

    async def breaks(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def test() -> None:
        async with Fleet(*[answer(b"{}")] * 8) as fleet:
            stubs = [each for each in fleet.stubs if each]
            for _ in stubs:
                await fleet.ask()
            assert [len(each.bodies) for each in stubs] == [1] * 8
            for each in stubs:
                each.script = ends(each)
            status, body = await fleet.ask()
            assert (status, error_of(body)["code"]) == (502, "replica_lost")
            assert sum(len(each.bodies) for each in stubs) == 8 + 1 + MOST_LOSSES
        async with Fleet(answer(b"{}")) as fleet:
            (stub,) = (each for each in fleet.stubs if each)
            await asyncio.gather(*[fleet.ask() for _ in range(3)])
            assert len(stub.writers) == 3
            stub.script = breaks
            assert (await fleet.ask())[0] == 503
            assert len(stub.bodies) == 3 + 2

    run(test)


def test_a_kept_connection_that_was_just_closed_is_no_loss() -> None:
    async def test() -> None:
        async with Fleet(answer(b"{}")) as fleet:
            (stub,) = (each for each in fleet.stubs if each)
            await fleet.ask()

            async def closes(writer: asyncio.StreamWriter) -> None:
                stub.script = answer(b"{}")
                writer.close()

            stub.script = closes
            assert await fleet.ask() == (200, b"{}")
            assert (len(stub.writers), fleet.replicas[0].num_lost) == (2, 0)

    run(test)


def test_an_answer_that_ends_with_its_connection_is_not_whole_where_the_router_ends_that() -> None:
    """As one of HTTP/1.0, whose length nothing tells."""
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"

    async def ends(writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"{}")
        writer.close()

    async def stands_still(writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"{")
        await asyncio.sleep(2 * PATIENCE_S)

    async def test() -> None:
        async with Fleet(stands_still, ends) as fleet:
            lost = fleet.replicas[0]
            asking = asyncio.ensure_future(fleet.ask())
            await until(lambda: [each.status for each in lost.server._open] == [200])
            lost.lose("no answer within 2 s")
            assert await asking == (200, b"{}")
            assert lost.num_lost == 1

    run(test)


def test_who_is_silent_for_long_is_lost_with_what_came_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was on its way when the replica was given up is told at the next poll."""
    monkeypatch.setattr(of_replicas, "POLL_S", 0.01)
    monkeypatch.setattr(of_replicas, "_ANSWER_S", 0.1)

    async def stand_still(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * PATIENCE_S)

    async def test() -> None:
        async with Fleet(stand_still) as fleet:
            replica = fleet.replicas[0]
            watching = asyncio.ensure_future(replica.watch(0))
            await until(lambda: replica.state == "lost")
            with pytest.raises(Lost, match="the replica is lost"):
                await asyncio.wait_for(replica.server.ask("POST", "/v1/completions", [], b""), PATIENCE_S)
            await end(watching)

    run(test)


def test_who_tells_of_itself_late_alone_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that could be lost with it go on; here what is not late comes at once."""
    monkeypatch.setattr(of_replicas, "POLL_S", 0.01)
    monkeypatch.setattr(of_replicas, "_ANSWER_S", 0.01)
    late, asked = set[str](), list[str]()

    async def ask(_: Any, path: str, *__: Any) -> tuple[int, bytes]:
        asked.append(path)
        if path in late:
            await asyncio.sleep(2 * PATIENCE_S)
        return 200, b'{"data":[{"id":"tiny"}]}' if path == "/v1/models" else b"{}"

    monkeypatch.setattr(of_replicas, "ask", ask)

    async def test() -> None:
        async with Fleet(hang) as fleet:
            replica = fleet.replicas[0]
            watching = asyncio.ensure_future(replica.watch(0))
            await until(lambda: replica.state == "ready")
            late.update(("/v1/models", "/metrics"))
            before = asked.count("/metrics")
            await until(lambda: asked.count("/metrics") > before + 4)
            assert (replica.state, replica.listed.models) == ("ready", ("tiny",))
            late.add("/ready")
            await until(lambda: replica.state == "lost")
            await end(watching)

    run(test)


def test_a_file_is_not_posted_twice() -> None:
    """Where it is not known whether a replica took it, its client is told; else another takes it."""

    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()

    async def test() -> None:
        for script in (cut, half):
            async with Fleet(script, answer(b"{}")) as fleet:
                status, body = await fleet.ask("/v1/batches")
                assert (status, error_of(body)["code"]) == (502, "replica_lost")
                assert [len(each.bodies) for each in fleet.stubs if each] == [1, 0]
        async with Fleet(None, answer(b"{}")) as fleet:
            assert await fleet.ask("/v1/batches") == (200, b"{}")

    run(test)


def test_other_servers_streams_are_known_to_be_whole() -> None:
    """Written without a space; and not compressed, since the router asks for no such answer."""

    async def test() -> None:
        async with Fleet(stream(WHOLE[0], b"data:[DONE]\n\n")) as fleet:
            found = await fleet.ask(headers=[(b"accept-encoding", b"gzip")])
            assert found == (200, WHOLE[0] + b"data:[DONE]\n\n")
            assert fleet.stubs[0] is not None
            assert b"gzip" not in fleet.stubs[0].heads[0]
            assert fleet.figures.num_cut_off == 0

    run(test)


def test_a_server_whose_engine_ended_in_a_stream_is_a_loss() -> None:
    """It lives and says so, however its pieces come; a text that says the same is none."""
    ended = b'data: {"error":{"message":"it ended","type":"x","param":null,"code":"engine_lost"}}\n\n'
    said = b'data: {"choices":[{"text":"{\\"code\\":\\"engine_lost\\"}"}]}\n\n'
    done = b"data: [DONE]\n\n"

    async def test() -> None:
        for pieces in (
            (ended, done),
            (ended + done,),
            (said + ended, done),
            (ended[:9], ended[9:70], ended[70:]),
        ):
            async with Fleet(stream(WHOLE[0], *pieces)) as fleet:
                status, body = await fleet.ask()
                assert (status, error_of(body)["code"]) == (200, "replica_lost")
                told = WHOLE[0] + (said if said in pieces[0] else b"")
                assert body.startswith(told + b"data: ")
                assert body.count(b"data: ") == told.count(b"data: ") + 1
                assert fleet.figures.num_cut_off == 1
        async with Fleet(stream(said, said, done)) as fleet:
            assert await fleet.ask() == (200, said + said + done)
            assert fleet.figures.num_cut_off == 0

    run(test)


@pytest.mark.parametrize(
    "info", [b"<html>", b'{"recipe": {"cache": {"events": "tcp://127.0.0.1:9"}}, "page_size": 8}']
)
def test_a_server_that_says_odd_things_of_itself_is_sent_requests(
    info: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_replicas, "POLL_S", 0.01)
    odd = b"cb_prompt_tokens_queued NaN\ncb_requests_queued +Inf\ncb_requests_running what\n"

    async def test() -> None:
        async with Fleet(answer(b"")) as fleet:
            (stub,), (replica,) = fleet.stubs, fleet.replicas
            assert stub is not None
            stub.script = by_path(server_info=answer(info), metrics=answer(odd), other=answer(b"{}"))(stub)
            watching = asyncio.ensure_future(replica.watch(16))
            await until(lambda: len(stub.heads) >= 9)
            assert not watching.done()
            assert (replica.state, replica.reader) == ("ready", None)
            asked = [head.split()[1] for head in stub.heads]
            assert asked.count(b"/server_info") == 1, "and warned of once"
            assert await fleet.ask() == (200, b"{}")
            await end(watching)

    run(test)


def test_an_answer_without_a_body_is_whole() -> None:
    """`curl -I`: its head tells a length, and nothing follows."""

    async def head_only(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 77\r\n\r\n")

    async def test() -> None:
        async with Fleet(head_only) as fleet:
            server = fleet.replicas[0].server
            for _ in range(2):
                found = await server.ask("HEAD", "/v1/models", [], b"")
                assert await asyncio.wait_for(found.next(), PATIENCE_S) == b""
                server.done(found)

    run(test)
