"""A replica's bad answers end at most its own traffic: the router and its other replicas go on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from continuous_batching.routing.routing import Routing
from serving.router import proxy, upstream
from serving.router import replicas as of_replicas
from serving.router.membership import FleetMembers
from serving.router.models import LISTS_NOTHING
from serving.router.replicas import (
    MOST_INFO_BYTES,
    MOST_STATUS_BYTES,
    info_of,
    listed_of,
)
from tests.serving.router.test_lost_replicas import answer, by_path
from tests.serving.router.test_proxy import Script, Stub, run
from tests.serving.router.waiting import end, until

DEEP = b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"


def models(*names: str, adapters: tuple[str, ...] = ()) -> Script:
    parent = names[0] if names else ""
    data = [{"id": each} for each in names] + [{"id": each, "parent": parent} for each in adapters]
    return answer(json.dumps({"object": "list", "data": data}).encode())


GOOD = {
    "models": models("tiny"),
    "server_info": answer(b"{}"),
    "metrics": answer(b""),
    "other": answer(b"{}"),
}


def endless(head: bytes, part: bytes) -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(part)
            await writer.drain()

    return script


class Watched:
    """The members of a router that are stubs, watched as the router does."""

    are_there = True  # from the beginning

    def __init__(self, *scripts: dict[str, Script]) -> None:
        self.scripts = scripts

    async def __aenter__(self) -> Watched:
        self.stubs = [Stub(answer(b"")) for _ in self.scripts]
        for stub, scripts in zip(self.stubs, self.scripts):
            stub.script = by_path(**GOOD | scripts)(stub)
        self.urls = [f"http://127.0.0.1:{await each.start()}" for each in self.stubs]
        self.join(*(self.urls if self.are_there else ()))
        self.watching = asyncio.ensure_future(self.members.watch(16))
        return self

    def join(self, *urls: str) -> None:
        """Let these be the members, of which none is known to be ready."""
        self.routing = Routing(len(urls), tells=False)
        self.routing.is_open[:] = False
        self.members = FleetMembers(urls, self.routing, [])
        self.replicas = self.members.replicas

    async def __aexit__(self, *_: object) -> None:
        assert not self.watching.done(), self.watching.exception()
        await end(self.watching)
        for replica in self.replicas:
            replica.close()
        for stub in self.stubs:
            await stub.close()

    def says(self, number: int, **scripts: Script) -> None:
        """Let a replica answer otherwise."""
        self.stubs[number].script = by_path(**GOOD | scripts)(self.stubs[number])

    def is_sent(self) -> list[bool]:
        return [bool(each) for each in self.routing.is_open]


HEAD = b"HTTP/1.1 200 OK\r\n"
HEADER = b"a: " + b"x" * 1000 + b"\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LONG = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
LIES: dict[str, tuple[dict[str, Script], str]] = {
    "deep info": ({"server_info": answer(DEEP)}, "/server_info answers with lists or objects"),
    "deep models": ({"models": answer(DEEP)}, "/v1/models answers with lists or objects"),
    "long info": ({"server_info": answer(b" " * (MOST_INFO_BYTES + 1))}, "/server_info answers with more"),
    "models not yet": ({"models": answer(b"", 503)}, "/v1/models says 503"),
    "models too often": ({"models": answer(b"", 429)}, "/v1/models says 429"),
    "long ready": ({"ready": endless(CHUNKED, LONG)}, f"ready answers with more than {MOST_STATUS_BYTES}"),
    "endless head": ({"ready": endless(HEAD, HEADER)}, "bytes beside the body"),
    "endless name": ({"ready": endless(HEAD, b"x" * 4096)}, "bytes beside the body"),
    "endless going on": ({"ready": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100)}, "beside the body"),
    "endless trailer": ({"ready": endless(CHUNKED + b"0\r\n", HEADER)}, "bytes beside the body"),
    "other protocol": ({"ready": answer(b"", 101)}, "not HTTP"),
    "no HTTP": ({"ready": endless(b"", b"\0" * 100)}, "not HTTP"),
}  # fmt: skip


def test_a_path_that_was_not_found_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress knows no server for a moment; `/health` would then be asked of one that has `/ready`."""
    monkeypatch.setattr(of_replicas, "POLL_S", 0.01)
    monkeypatch.setattr(of_replicas, "_NO_READY_S", 0.1)

    async def test() -> None:
        async with Watched({"ready": answer(b"", 404)}) as fleet:
            await until(lambda: all(fleet.is_sent()))
            fleet.says(0, ready=answer(b"", 503))
            await until(lambda: not any(fleet.is_sent()))
            assert fleet.replicas[0].trouble == "/ready says 503"

    run(test)


def test_a_server_without_a_path_is_not_asked_for_it_at_every_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again after a while, and once it is not ready: another server may have taken its place."""
    monkeypatch.setattr(of_replicas, "POLL_S", 0.01)
    monkeypatch.setattr(of_replicas, "_ANSWER_S", 60.0)
    monkeypatch.setattr(of_replicas, "_NO_READY_S", 3600.0)

    async def test() -> None:
        async with Watched({"ready": answer(b"", 404)}) as fleet:
            asked = fleet.stubs[0].heads
            await until(lambda: sum(b"/health" in each for each in asked) > 9)
            assert sum(b"/ready" in each for each in asked) == 1
            fleet.says(0, ready=answer(b"", 503), health=answer(b"", 503))
            await until(lambda: fleet.replicas[0].trouble == "/ready says 503")

    run(test)


@pytest.mark.parametrize("lie", [*LIES])
def test_a_replica_whose_answers_cannot_be_read_gets_no_requests(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trouble names the answer; it gets some again once its answers can be read."""
    monkeypatch.setattr(of_replicas, "POLL_S", 0.01)
    monkeypatch.setattr(of_replicas, "_ANSWER_S", 60.0)
    scripts, words = LIES[lie]

    async def test() -> None:
        async with Watched(scripts, {}) as fleet:
            liar = fleet.replicas[0]
            await until(lambda: fleet.is_sent() == [False, True] and bool(liar.trouble))
            assert words in liar.trouble
            assert liar.state in ("not ready", "lost")
            fleet.says(0)
            await until(lambda: fleet.is_sent() == [True, True])

    run(test)


def test_a_defect_in_reading_one_replica_is_logged_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(of_replicas, "POLL_S", 0.01)

    def figures(text: bytes) -> dict[bytes, int]:
        return {} if text != b"bad" else {b"": 1 // 0}

    monkeypatch.setattr(of_replicas, "figures_of", figures)

    async def test() -> None:
        async with Watched({"metrics": answer(b"bad")}, {}) as fleet:
            await until(lambda: fleet.is_sent()[1] and "ZeroDivisionError" in fleet.replicas[0].trouble)
            asked = len(fleet.stubs[0].heads)
            await until(lambda: len(fleet.stubs[0].heads) > asked + 9)
        lines = [each for each in caplog.records if each.exc_info]
        assert len(lines) == 1, "once, with its traceback"

    run(test)


@pytest.mark.parametrize(
    "info",
    [
        {"num_slots": -5}, {"page_size": 2**63},
        {"recipe": {"cache": {"events": "tcp://127.0.0.1:5\0"}}}, {"recipe": {"cache": {"events": "hello"}}},
        {"recipe": {"cache": {"events": "tcp://" + "x" * 2000}}},
        {"recipe": {"server": {"pages_at": "tcp://x:1\r\nX-Evil: 1"}}},
        {"recipe": {"server": {"pages_at": "tcp://x:1\n"}}},
        {"recipe": {"server": {"prompt_replicas": ["tcp://x:1\r\nX-Evil: 1"]}}},
    ],
    ids=repr,
)  # fmt: skip
def test_nothing_is_believed_of_what_is_out_of_bounds(info: dict[str, Any]) -> None:
    fields = {"num_slots": 7, "page_size": 16}
    read = info_of(json.dumps(fields | info).encode())
    good = {name: getattr(read, name) for name in fields if name not in info}
    assert good.items() <= fields.items(), "a bad field costs that field alone"
    (field,) = read.not_understood
    assert field.startswith(("num_slots: ", "page_size: ", "recipe.cache.", "recipe.server."))


def test_the_names_of_a_model_are_those_that_are_no_adapters() -> None:
    text = b'{"data": [{"id": "a", "parent": "tiny"}, {"id": "tiny", "x": [10e999]}, {"id": "alias"}]}'
    listed = listed_of(text)
    assert (listed.models, listed.adapters) == (("tiny", "alias"), ("a",))
    assert listed.entries["tiny"] == b'{"id": "tiny", "x": [10e999]}', "as it is"
    assert listed_of(b'{"data": [{"id": "m", "parent": null, "root": "/path", "x": [1]}]}').models == ("m",)
    for other in (
        b"{}",
        b"",
        b"<html>",
        b"\xff",
        b'{"data": [{"id": 3}]}',
        b'{"data": []}',
        b'{"data": [3]}',
    ):
        assert listed_of(other) == LISTS_NOTHING


def test_the_answer_to_an_order_to_end_a_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_whole` reads what a replica answers to an abort, or with a refusal."""

    class Endless:
        async def next(self) -> bytes:
            return b"x" * 2**20

    with pytest.raises(upstream.Lost, match="it answered with more than"):
        asyncio.run(proxy._whole(Endless()))
