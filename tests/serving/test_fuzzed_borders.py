"""Every place where a process believes bytes of another survives hostile ones.

Each border gets some hundred mutated messages, and 10,000 in a thorough run. What a message is allowed to do
is to be refused as the border refuses, or to end the connection on which it came.
"""

from __future__ import annotations

import io
import json
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from borders.shared_secret import Unproven, prove_as_dialler, prove_as_listener
from kv_cache.exchange import connection, prompt_source
from kv_cache.exchange.channel import Encrypted
from kv_cache.exchange.messages import AllSent, Hello, NotSent, PagesWanted, PartTaken, Unwanted
from serving.router.replicas import Unreadable, figures_of, info_of, listed_of
from tests.kv_cache import device
from tests.mutated import JSON_DEEP, Mutator, encoded
from tests.serving.hostile_peer import AnswersPeer, PromptsPeer, framed_body
from tests.serving.page_pair import Pair, alone, cache_of, prompts
from tests.serving.test_hostile_peers import TOKENS, WISH, part_of
from tests.serving.test_page_credentials import OURS, tls
from tests.thorough import cases

FEW = cases(300, 10_000)


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
    hello = Hello(1, "the model", device.PAGE_SIZE, layout, "tcp", b"", 1 << 14)
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
    liar.close()


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
