"""A stream that waits says so through the router, and is answered by another replica as long as it waits."""

from __future__ import annotations

import asyncio
import json

import pytest

from serving.api.streamed import COMMENT
from serving.router.reply import begun_with, has_event, own_error, refuses
from tests.serving.router.test_proxy import (
    EVENTS,
    WHOLE,
    Fleet,
    chunk,
    error_of,
    hang,
    run,
    stream,
    whole,
)
from tests.serving.router.waiting import until

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
SIGNS = [COMMENT, b": ping - 2026\r\n\r\n", b"\n\n", PING, b":\n\n"]
LOST_ENGINE = b'data: {"error":{"message":"lost","type":"service_unavailable_error","code":503}}\n\n'
FAILED = (
    b"event: response.failed\n"
    b'data: {"type":"response.failed",'
    b'"response":{"error":{"code":"server_error","details":{"error_code":503}}}}\n\n'
)
OPENING = b"".join(
    b'event: %s\ndata: {"type":"%s","response":{"error":null}}\n\n' % (kind, kind)
    for kind in (b"response.created", b"response.in_progress")
)
OVERLOADED = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"full"}}\n\n'
WRONG = b'data: {"error":{"message":"wrong","type":"invalid_request_error","code":400}}\n\n'
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def replica(fleet: Fleet, number: int) -> list[bytes]:
    stub = fleet.stubs[number]
    assert stub is not None
    return stub.bodies


def test_what_has_had_only_signs_of_life_goes_to_another() -> None:
    """Where the replica is lost, or its stream ends, also within a comment."""

    async def test() -> None:
        for begun in (SIGNS, [*SIGNS, b": kee"], [*SIGNS, b'data: {"a'], []):
            for ends in (False, True):
                async with Fleet(stream(*begun, ends=ends), stream(COMMENT, *WHOLE)) as fleet:
                    status, body = await fleet.ask()
                    signs = b"".join(SIGNS) if begun else b""
                    assert (status, body) == (200, signs + COMMENT + b"".join(WHOLE))
                    assert fleet.figures.num_again == 1
                    assert fleet.figures.num_cut_off == 0

    run(test)


@pytest.mark.parametrize(
    ("path", "refusal"),
    [
        *[(CHAT, LOST_ENGINE), (RESPONSES, FAILED), (MESSAGES, OVERLOADED)],
        *[
            (RESPONSES, OPENING + FAILED),
            (RESPONSES, OPENING.replace(b"null", b'"%s"' % (b"x" * 40_000)) + FAILED),
        ],
    ],
    ids=["chat", "response", "message", "opened response", "long opening"],
)
def test_a_stream_whose_first_event_refuses_it_goes_to_another(path: str, refusal: bytes) -> None:
    event = b'event: x\ndata: {"type":"x"}\n\n'
    good = WHOLE if path == CHAT else [event]

    async def test() -> None:
        async with Fleet(stream(COMMENT, refusal, b"data: [DONE]\n\n"), stream(*good)) as fleet:
            assert await fleet.ask(path) == (200, COMMENT + b"".join(good))
            assert [len(replica(fleet, number)) for number in (0, 1)] == [1, 1]
        async with Fleet(stream(COMMENT, refusal), stream(refusal)) as fleet:
            done = b"data: [DONE]\n\n" if path == CHAT else b""
            assert await fleet.ask(path) == (200, COMMENT + refusal + done), "as the last replica said it"
        async with Fleet(stream(good[0], refusal), stream(*good)) as fleet:
            assert refusal in (await fleet.ask(path))[1], "what has begun is told"
            assert not replica(fleet, 1)

    run(test)


def test_a_wrong_request_is_not_tried_again_where_its_head_was_sent() -> None:
    async def test() -> None:
        async with Fleet(stream(COMMENT, WRONG, WHOLE[-1]), stream(*WHOLE)) as fleet:
            assert await fleet.ask() == (200, COMMENT + WRONG + WHOLE[-1])
            assert not replica(fleet, 1)

    run(test)


@pytest.mark.parametrize(
    ("path", "begins"), [(CHAT, b"data: {"), (RESPONSES, b"event: error\n"), (MESSAGES, b"event: error\n")]
)
def test_a_refusal_behind_a_head_is_an_event(path: str, begins: bytes) -> None:
    refusal = b'{"error":{\n"message":"no","code":429}}'

    async def test() -> None:
        for second in (whole(429, refusal), whole(400, refusal)):
            async with Fleet(stream(COMMENT, ends=False), second) as fleet:
                status, body = await fleet.ask(path)
                assert (status, body.startswith(COMMENT + begins), body.endswith(b"}\n\n")) == (
                    200,
                    True,
                    True,
                )
                assert error_of(body)["message"] == "no"
        async with Fleet(stream(COMMENT, ends=False), None) as fleet:
            _, body = await fleet.ask(path)
            assert "no replica" in error_of(body)["message"]
            assert (b'"type":"error"' in body) == (path == MESSAGES)
        async with Fleet(stream(COMMENT, ends=False), whole(500, b"<html>")) as fleet:
            assert "status 500" in error_of((await fleet.ask(path))[1])["message"]

    run(test)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, None, "invalid_request_error"),
        (413, None, "request_too_large"),
        (499, "aborted", "invalid_request_error"),
        (502, "replica_lost", "api_error"),
        (503, None, "overloaded_error"),
    ],
)
def test_an_error_of_the_routers_own_is_told_as_a_server_tells_it(
    status: int, code: str | None, kind: str
) -> None:
    """Anthropic's form has no code: it stands in the details."""
    error = json.loads(own_error(MESSAGES, status, "why", code=code))["error"]
    details = {} if code is None else {"details": {"error_code": code}}
    assert error == {"type": kind, "message": "why"} | details


@pytest.mark.parametrize(("path", "sign"), [(CHAT, COMMENT), (RESPONSES, COMMENT), (MESSAGES, PING)])
def test_the_router_itself_says_that_a_stream_waits(path: str, sign: bytes) -> None:
    """For a replica that says nothing, and for a turn."""

    async def test() -> None:
        fleet = Fleet(hang)
        fleet.keep_alive_s = 0.01
        async with fleet:
            asking = asyncio.ensure_future(fleet.ask(path, leaves_after=4))
            await until(lambda: len(fleet.parts) >= 3)
            assert fleet.replicas[0].num_open == 1
            assert await asking == (200, sign * 4), "the client has left"
            await until(lambda: fleet.stubs[0] is not None and fleet.stubs[0].num_closed == 1)
        fleet = Fleet(stream(*WHOLE))
        fleet.keep_alive_s, fleet.most_open = 0.01, 0
        async with fleet:
            asking = asyncio.ensure_future(fleet.ask(path))
            await until(lambda: len(fleet.parts) >= 3)
            assert not replica(fleet, 0)
            fleet.most_open = 1
            fleet.turns.fill()
            status, body = await asking
            assert (status, body.replace(sign, b"")) == (200, b"".join(WHOLE))

    run(test)


def test_the_router_says_nothing_within_an_event_nor_behind_the_last() -> None:
    half, rest, last = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS + chunk(WHOLE[0][:5]))
        await half.wait()
        writer.write(chunk(WHOLE[0][5:] + WHOLE[1][:5]))
        await rest.wait()
        writer.write(chunk(WHOLE[1][5:]))
        await last.wait()
        writer.write(chunk(WHOLE[2]) + b"0\r\n\r\n")

    async def test() -> None:
        fleet = Fleet(slow)
        fleet.keep_alive_s = 0.01
        async with fleet:
            asking = asyncio.ensure_future(fleet.ask())
            await until(lambda: fleet.parts.count(COMMENT) >= 2)  # nothing of the first event is sent on yet
            half.set()
            await until(lambda: WHOLE[0] in fleet.parts)
            num_parts = len(fleet.parts)  # the second event is held back until it is whole
            await until(lambda: fleet.parts[num_parts:].count(COMMENT) >= 2)
            rest.set()
            await until(lambda: WHOLE[1] in fleet.parts)
            num_parts = len(fleet.parts)
            await until(lambda: fleet.parts[num_parts:].count(COMMENT) >= 2)
            last.set()
            status, body = await asking
            assert (status, body.replace(COMMENT, b"")) == (200, b"".join(WHOLE))
            assert body.endswith(WHOLE[2])
            assert b"" not in fleet.parts[:-1]

    run(test)


def test_a_prompt_waits_until_its_stream_has_an_event() -> None:
    goes_on, ends = asyncio.Event(), asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS + chunk(COMMENT))
        await goes_on.wait()
        writer.write(chunk(WHOLE[0]))
        await ends.wait()
        writer.write(chunk(WHOLE[2]) + b"0\r\n\r\n")

    async def test() -> None:
        async with Fleet(slow) as fleet:
            asking = asyncio.ensure_future(fleet.ask())
            await until(lambda: COMMENT in fleet.parts)
            assert fleet.routing.queued_tokens[0] > 100, "its head says nothing about its prompt"
            goes_on.set()
            await until(lambda: WHOLE[0] in fleet.parts)
            assert fleet.routing.queued_tokens[0] == 0
            ends.set()
            assert (await asking)[0] == 200

    run(test)


def test_signs_are_told_from_events_wherever_the_bytes_are_cut() -> None:
    signs = b"".join(SIGNS)
    for event in (WHOLE[0], b"event: message_start\r\ndata: {}\r\n\r\n", b": note\ndata: {}\n\n"):
        received = signs + event
        for cut in range(len(received) + 1):
            passed, rest = begun_with(received[:cut])
            assert passed + rest == received[:cut]
            assert signs.startswith(passed)
            more, rest = begun_with(rest + received[cut:])
            assert (passed + more, rest) == (signs, event)
            assert has_event(rest)
    assert not has_event(b": keep-ali")
    said = b"event: response.output_text.delta\ndata: {}\n\n"
    num_ready = [has_event((OPENING + said)[:cut]) for cut in range(len(OPENING + said) + 1)].count(True)
    assert num_ready == 1, "what begins an answer is sent on with what it says"
    assert has_event(OPENING * 2), "an opening without an end is not held back"
    assert has_event(b"data: " + b"x" * 2**17), "a long event is not held back until its end"


@pytest.mark.parametrize(
    "event",
    [WRONG, WHOLE[0], b"data: [DONE]\n\n", b'data: {"error"\n\n', b'data: {"error":3}\n\n',
     b'data: ["error"]\n\n', b'data: {"error":{"code":{}}}\n\n', FAILED.replace(b"503", b"500"),
     WHOLE[0] + LOST_ENGINE, OPENING, OPENING + WHOLE[0] + FAILED,
     b'data: {"error":' + b"[" * 30_000 + b"\n\n",
     b'data: {"choices":[{"text":"\\"error\\" 503"}]}\n\n'],
)  # fmt: skip
def test_what_refuses_no_request_is_an_answer(event: bytes) -> None:
    assert not refuses(event)
    for refusal in (LOST_ENGINE, FAILED, OVERLOADED, OPENING + FAILED):
        assert refuses(refusal + event)
