"""A real server whose port of pages is attacked stays ready, and its clients' streams are what they were."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import httpx
import pytest

from kv_cache.exchange.messages import HEAD, VERSION, Hello, NotSent, PagesWanted, Unfit, Welcome
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.serving.hostile_peer import AnswersPeer
from tests.serving.server import TINY, Server
from tests.serving.test_hostile_peers import BAD_WISHES, NO_WISHES, WISH

BODY = {
    "model": "tiny",
    "prompt": "Once upon a time",
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
}


def until_told(peer: AnswersPeer, count: int) -> Any:
    """The last of so many answers, or None where the connection ended."""
    until_s = time.monotonic() + PATIENCE_S
    while not peer.is_closed and len(peer.heard) < count:
        assert time.monotonic() < until_s
        peer.listen()
        time.sleep(0.001)
    return peer.heard[count - 1] if len(peer.heard) >= count else None


def greeted(port: int) -> AnswersPeer:
    """A peer that learned from refusals what it must say it is."""
    model, size, layout = "x", 1, ["x"]
    while True:
        peer = AnswersPeer(port, greets=False)
        peer.say(Hello(VERSION, model, size, layout, "tcp", b"", 2**26))
        told = until_told(peer, 1)
        if isinstance(told, Welcome):
            return peer
        peer.close()
        assert isinstance(told, Unfit)
        if found := re.match(r"the model is (.*) at the engine of prompts", told.why):
            model = found[1]
        elif found := re.match(r"cache.page_size is (\d+)", told.why):
            size = int(found[1])
        elif found := re.match(r"the number of layers is (\d+)", told.why):
            layout = ["x"] * int(found[1])
        elif found := re.match(r"a page of layer (\d+) is (.*) at the engine of prompts", told.why):
            layout[int(found[1])] = found[2]


def stream(server: Server) -> str:
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=BODY | {"stream": True}, timeout=PATIENCE_S
    ) as answer:
        return "".join(re.findall(r'"text":\s*"((?:[^"\\]|\\.)*)"', answer.read().decode()))


@pytest.mark.slow
def test_streams_go_on_while_the_port_of_pages_is_attacked() -> None:
    port = free_port()
    server = Server(TINY, f"server.pages_at=tcp://127.0.0.1:{port}").ready()
    is_over = threading.Event()
    try:
        engine, want = server.engine_pid, stream(server)
        found: list[str] = []

        def neighbour() -> None:
            while not is_over.is_set():
                found.append(stream(server))

        beside = threading.Thread(target=neighbour, daemon=True)
        beside.start()
        silent = [AnswersPeer(port, greets=False) for _ in range(80)]
        for each in silent[::5]:
            each.say(HEAD.pack(2**26, 0, 0) + b"\0" * 2**20)
        peer = greeted(port)
        for wish in (*BAD_WISHES, *NO_WISHES):
            count = len(peer.heard) + 1
            peer.say(wish if isinstance(wish, bytes) else PagesWanted(**(WISH | wish)))
            assert isinstance(until_told(peer, count), NotSent | None), wish
            assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).json()["status"] == "ready", wish
            if peer.is_closed:
                peer.close()
                peer = greeted(port)
        is_over.set()
        beside.join()
        assert found
        assert {*found} == {want}
        assert server.engine_pid == engine, "it was never started anew"
        for each in (*silent, peer):
            each.close()
    finally:
        is_over.set()
        server.close()
