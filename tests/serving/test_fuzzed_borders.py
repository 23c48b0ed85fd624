"""Every place where a process believes bytes of another survives hostile ones.

Each border gets some hundred mutated messages, and 10,000 in a thorough run. What a message is allowed to do
is to be refused as the border refuses, or to end the connection on which it came.
"""

from __future__ import annotations

import asyncio
import io
import json
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from borders.refusal import BadRequest
from borders.shared_secret import Unproven, prove_as_dialler, prove_as_listener
from continuous_batching.request import Request, SamplingParams
from continuous_batching.routing.routing import Routing
from kv_cache.event_messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kv_cache.exchange import connection, prompt_source
from kv_cache.exchange.channel import Encrypted
from kv_cache.exchange.messages import VERSION, AllSent, Hello, NotSent, PagesWanted, PartTaken, Unwanted
from recipes.cluster.router_client import RouterClient
from serving.engine.messages import (
    Add,
    AddAccepted,
    Begun,
    Finish,
    Pause,
    QueueRefused,
    RecordTrace,
    SampleEnd,
    Stepped,
    StepTimes,
    decode_from_engine,
    decode_to_engine,
)
from serving.router.page_reader import PageReader
from serving.router.replicas import Unreadable, ask, figures_of, info_of, listed_of
from serving.router.upstream import Lost, Upstream
from tests.kv_cache import device
from tests.kv_cache.test_events import Engine
from tests.mutated import JSON_DEEP, Mutator, encoded
from tests.patience import PATIENCE_S
from tests.serving.hostile_peer import AnswersPeer, PromptsPeer, framed_body
from tests.serving.page_pair import Pair, alone, cache_of, prompts
from tests.serving.router.test_proxy import Stub
from tests.serving.test_hostile_peers import TOKENS, WISH, part_of
from tests.serving.test_page_credentials import OURS, tls
from tests.thorough import cases

FEW = cases(200, 10_000)


def tree_of(message: Any) -> Any:
    """A message as MessagePack reads it without types."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def frame_of(mutator: Mutator, messages: list[Any]) -> tuple[bytes, bool]:
    """A hostile frame, and whether it may be incomplete."""
    tree = mutator.message(tree_of(mutator.one_of(messages)))
    frame = framed_body(encoded(tree, msgspec.msgpack.encode))
    if mutator.random.random() < 0.2:
        return mutator.data(frame), True
    return frame, False


def test_an_engine_of_prompts_survives_what_engines_of_answers_say() -> None:
    mutator, pair = Mutator(1), Pair()
    layout = cache_of(pair.prompts).layout
    hello = Hello(VERSION, "the model", device.PAGE_SIZE, layout, "tcp", b"", 1 << 14)
    wish = PagesWanted(**(WISH | {"tokens": TOKENS * 2, "tenant": "t", "cache_salt": "s"}))
    said = [wish, wish, wish, hello, Unwanted(1), PartTaken()]
    num_said = 0
    while num_said < FEW:
        peers = [AnswersPeer(pair, greets=mutator.random.random() < 0.9) for _ in range(8)]
        for peer in peers:
            for _ in range(mutator.random.randint(1, 6)):
                frame, is_last = frame_of(mutator, said)
                peer.say(frame)
                num_said += 1
                if is_last:
                    break
            with suppress(OSError):
                peer.sock.shutdown(socket.SHUT_WR)
        pair.until(lambda peers=peers: all(peer.listen() and peer.is_closed for peer in peers))
        for peer in peers:
            peer.close()
    assert pair.serve(prompts(2)) == alone(prompts(2))
    assert pair.answers.scheduler.counters.arrived_pages
    pair.until(lambda: len(pair.server.links) == 1)
    pair.settle()
    assert not pair.server.unhandled._num_of
    assert not pair.sends._num_of
    pair.close()


def test_an_engine_of_answers_survives_what_engines_of_prompts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers stay what they are: the last part of the pages never comes."""
    monkeypatch.setattr(prompt_source, "LOST_S", 0.0)
    monkeypatch.setattr(prompt_source, "STALLED_S", 0.0)
    monkeypatch.setattr(connection, "MESSAGE_S", 0.05)
    mutator, num_said = Mutator(2), 0

    def lie(wish: PagesWanted) -> bytes:
        nonlocal num_said
        said = b""
        for _ in range(mutator.random.randint(1, 12)):
            num_said += 1
            good = part_of(wish, first_page=mutator.random.randint(0, 3))
            head, data = good[:12], good[12:]
            length = int.from_bytes(head[:4], "little")
            tree = mutator.message(
                mutator.one_of(
                    [msgspec.msgpack.decode(data[:length])] * 3
                    + [tree_of(AllSent(wish.number, 3)), tree_of(NotSent(wish.number, "why"))]
                )
            )
            body = encoded(tree, msgspec.msgpack.encode)
            num_bytes = mutator.one_of([0, 0, len(data) - length, len(data) - length + 1])
            said += framed_body(body, num_bytes) + data[length:][:num_bytes]
        return mutator.data(said) if mutator.random.random() < 0.3 else said

    liar = PromptsPeer(lie)
    pair = Pair(between=liar, most_wait_s=0.2)
    want = alone(prompts(4, shared=0))
    while num_said < FEW:
        requests = prompts(4, shared=0)
        for each in requests:
            each.cache_salt = str(num_said)
        assert pair.serve(requests) == want
    pair.settle()
    assert not pair.answers.scheduler.counters.arrived_pages
    pair.close()


def test_no_mutated_proof_is_one() -> None:
    """Of both sides; what is not changed where it counts is one."""
    assert OURS.secret is not None
    mutator = Mutator(3)
    for prove in (prove_as_listener, prove_as_dialler):
        for _ in range(FEW):
            said = mutator.data(b"cbproof1" + bytes(64) if prove is prove_as_listener else bytes(64))
            with pytest.raises((Unproven, EOFError)):
                prove(OURS.secret, lambda _: None, exactly(io.BytesIO(said)))


def exactly(file: io.BytesIO) -> Callable[[int], bytes]:
    def read(count: int) -> bytes:
        data = file.read(count)
        if len(data) < count:
            raise EOFError
        return data

    return read


@pytest.mark.parametrize("dials", [False, True])
def test_mutated_records_of_tls_are_damage(dials: bool) -> None:
    mutator, contexts = Mutator(4), tls()
    come, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts.dials.wrap_bio(come, going)
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    hello = going.read()
    for _ in range(FEW):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(mutator.data(hello))
            theirs.shutdown(socket.SHUT_WR)
            channel = Encrypted(ours, contexts, dials=dials)
            with pytest.raises(ConnectionError):
                channel.agree(lambda: None)


INFO: dict[str, Any] = {
    "page_size": 16,
    "num_slots": 8,
    "recipe": {
        "cache": {"events": "tcp://*:5557"},
        "server": {"pages_at": "tcp://x:7001", "prompt_replicas": ["tcp://y:1", "tcp://z:2"]},
    },
}
MODELS: dict[str, Any] = {"object": "list", "data": [{"id": "a"}, {"id": "b", "parent": "a"}, {"id": "c"}]}
METRICS = (
    b'# HELP cb_prompt_tokens_queued x\ncb_prompt_tokens_queued{a="b"} 3.0\ncb_requests_queued 1e1\n'
    b'cb_requests_running{model="x y"} 7\n'
)


@pytest.mark.parametrize("read", [info_of, listed_of])
def test_a_router_survives_what_replicas_say_of_themselves(read: Callable[[bytes], Any]) -> None:
    mutator = Mutator(5, JSON_DEEP)
    for _ in range(FEW):
        text = encoded(mutator.message(INFO if read is info_of else MODELS), msgspec.json.encode)
        if mutator.random.random() < 0.3:
            text = mutator.data(text)
        with suppress(Unreadable):
            found = read(text)
            json.dumps(found, default=str)


def test_a_router_survives_any_figures() -> None:
    mutator = Mutator(6)
    for _ in range(FEW):
        assert all(0 <= each <= 2**53 for each in figures_of(mutator.data(METRICS)).values())


def test_a_router_survives_any_http() -> None:
    """An answer of a replica is read within its bounds, or the replica is lost."""
    mutator = Mutator(7)
    good = [
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n3;a=b\r\nabc\r\n0\r\nx: y\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\nnone",
        b"HTTP/1.0 200 OK\r\n\r\n{}",
    ]

    async def test() -> None:
        async def script(writer: asyncio.StreamWriter) -> None:
            writer.write(mutator.data(mutator.one_of(good)))
            writer.write_eof()

        stub = Stub(script)
        server = Upstream("127.0.0.1", await stub.start())
        for _ in range(FEW):
            with suppress(Lost, Unreadable):
                status, body = await ask(server, "/ready", [], 100)
                assert 200 <= status < 1000
                assert len(body) <= 100
            server.lose("a test")
            for writer in stub.writers:
                writer.transport.abort()
            stub.writers.clear()
            await asyncio.sleep(0)
        await stub.close()

    asyncio.run(test())


BATCHES = [
    KVEventBatch(1.0, [AllBlocksCleared(), BlockStored([1, 2], None, [3, 4, 5, 6], 2)]),
    KVEventBatch(2.0, [BlockStored([2**63, 7], 2, [1, 2, 3, 4], 2), BlockRemoved([1, 9])]),
    KVEventBatch(3.0, [BlockRemoved([7])]),
]


def test_a_router_survives_any_events_of_pages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no event ends the reading of that replica's, and what was believed of it is forgotten."""
    mutator = Mutator(8)
    routing = Routing(2)

    async def test() -> None:
        for _ in range(FEW):
            reader = PageReader("tcp://127.0.0.1:9", "127.0.0.1", 1, routing)

            async def read_one(reader: PageReader = reader) -> None:
                for number in range(6):
                    tree = tree_of(mutator.one_of(BATCHES))
                    is_changed = mutator.random.random() < 0.4
                    batch = encoded(mutator.message(tree) if is_changed else tree, msgspec.msgpack.encode)
                    frames = [b"", number.to_bytes(8, "big"), batch]
                    if mutator.random.random() < 0.2:
                        frames = [mutator.data(each) for each in frames] * mutator.one_of([1, 1, 2])
                    if mutator.random.random() < 0.3:
                        reader._take_answer([b"", *frames])
                    else:
                        await reader._hear(frames)
                raise ValueError("the end of a test")

            async def nothing() -> None:
                pass

            monkeypatch.setattr(reader, "_read_one", read_one)
            monkeypatch.setattr(reader, "_ask", nothing)
            routing.tells[1] = True
            await reader._read()
            lines = [each.getMessage() for each in caplog.records]
            caplog.clear()
            assert all(each.isprintable() and len(each) < 1100 for each in lines)
            assert not routing.tells[1]
            assert len(routing.held) == 0
            reader.close()

    asyncio.run(test())


def test_an_engine_answers_no_wrong_question_about_its_pages(tmp_path: Path) -> None:
    """Who asks for events again gets batches or a snapshot, and what is no question gets nothing."""
    mutator, engine = Mutator(9), Engine(tmp_path, 16)
    engine.compute(list(range(12)))
    sent = list[list[bytes]]()
    engine.events.close()
    engine.events._asked = SimpleNamespace(send_multipart=lambda frames, _: sent.append(frames))
    for _ in range(FEW):
        frames = [b"who", b"", (3).to_bytes(8, "big")]
        frames[2] = mutator.data(frames[2])
        engine.events._answer(frames * mutator.one_of([1, 1, 1, 2]))
    assert sent


FLEET = {
    "waiting_tokens": 5,
    "replicas": [
        {
            "url": "http://a:1",
            "state": "ready",
            "leaves": False,
            "queued_tokens": 3,
            "requests": 1,
            "more": [],
        }
    ],
}


def test_who_scales_a_fleet_survives_what_its_router_says() -> None:
    mutator, said = Mutator(10, JSON_DEEP), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            body = encoded(mutator.message(FLEET), msgspec.json.encode)
            head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
            reply = head + body
            self.wfile.write(mutator.data(reply) if mutator.random.random() < 0.3 else reply)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        client = RouterClient(f"http://127.0.0.1:{server.server_port}", said.append)
        for _ in range(FEW):
            report = client.report()
            assert report is None or all(
                type(each.requests) is int and type(each.leaves) is bool for each in report.replicas.values()
            )
        server.shutdown()
        thread.join(PATIENCE_S)
    assert said
    assert all(each.isprintable() and len(each) < 1200 for each in said)


def test_neither_an_engine_nor_its_server_reads_what_the_other_never_says() -> None:
    """Of the socket between them, which only their user can open."""
    params = SamplingParams(max_tokens=5, logit_bias={3: 1.0}, stop_token_ids=(4,))
    request = Request("a", np.arange(9, dtype=np.int32), params)
    times = StepTimes(0.1, 0.1, 1, 1, 1)
    end = SampleEnd(1, "stop", None, 3, 0, 0, 0.1, None, 0.2, [])
    stepped = Stepped([1, 2], [5, 6], [None, None], [Begun(1, 0, [])], [end], times)
    mutator = Mutator(11)
    for decode, messages in (
        (decode_to_engine, [Add.of(1, request, 0.5), Finish(1, "stop"), RecordTrace(3)]),
        (decode_from_engine, [stepped, Pause(3.0), AddAccepted(1), QueueRefused(1, "why", 0.5)]),
    ):
        for _ in range(FEW):
            tree = mutator.message(tree_of(mutator.one_of(messages)))
            body = encoded(tree, msgspec.msgpack.encode)
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, BadRequest):
                decode(mutator.data(body) if mutator.random.random() < 0.3 else body)
