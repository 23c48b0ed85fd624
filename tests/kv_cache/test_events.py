"""The events that an engine's cache publishes can be read by any client.

The tests read them by msgpack alone, over real sockets, in vLLM's layout.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from kv_cache import events
from kv_cache.events import PageEvents, prove_as_reader, replay_endpoint
from kv_cache.groups import WindowGroup
from kv_cache.page_keys import page_keys, short_key
from kv_cache.pages import PagePool
from kv_cache.prefix_cache import PrefixCache
from tests.patience import PATIENCE_S

PAGE, WAIT_MS = 4, int(1e3 * PATIENCE_S)
SECRET = b"a secret of an engine and its router"


class Engine:
    """A cache whose pages are published and released at once, and what publishes them."""

    def __init__(
        self, path: Path, num_pages: int = 64, windows: Sequence[int] = (), secret: bytes | None = None
    ) -> None:
        self.pool = PagePool(num_pages)
        self.groups = [
            WindowGroup(number, window, PAGE, 1, num_pages, PagePool(num_pages), None, num_pages, 0)
            for number, window in enumerate(windows, 1)
        ]
        self.cache = PrefixCache(self.pool, PAGE, beside=self.groups)
        self.endpoint = f"ipc://{path}/events"
        self.events = PageEvents(self.cache, PAGE, self.endpoint, secret=secret)
        self.cache.listener = self.events

    def compute(self, tokens: list[int], salt: str = "") -> list[int]:
        """Publish the pages of these tokens; their keys."""
        ids = np.array(tokens, dtype=np.int32)
        keys = page_keys(ids, PAGE, salt)
        found = self.cache.find(keys, ids, salt)
        self.cache.share(found)
        new = len(keys) - len(found)
        if new > self.pool.num_free:
            self.cache.evict(new - self.pool.num_free)
        pages = np.append(found, self.pool.take(new))
        standing = self.cache.publish(keys, ids, pages, len(found), salt)
        pages[len(found) :] = standing
        for group in self.groups:
            group.grow(np.array([0]), np.array([len(pages)]))
            group.publish(0, 0, pages, self.cache.is_cached(pages))
            group.clear(0)
        self.cache.release(pages)
        return [*map(short_key, keys)]

    def held(self) -> set[int]:
        return {short_key(self.cache.index.key(page)) for page in self.cache.index.names.tolist()}


class Reader:
    """Follows the events as vLLM's readers do, and asks again where a sequence is missing."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.live, self.again = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.live.connect(endpoint)
        self.live.subscribe(b"kv-events")
        self.again.connect(replay_endpoint(endpoint))
        self.pages: set[int] = set()
        self.batches: list[tuple[int, list[dict[str, object]]]] = []

    def ask(self, first: int) -> int:
        """All from this sequence on; returns the last."""
        self.again.send_multipart([b"", first.to_bytes(8, "big")])
        last = -1
        while True:
            assert self.again.poll(WAIT_MS), "no answer"
            empty, topic, number, batch = self.again.recv_multipart()
            assert (empty, topic) == (b"", b"kv-events")
            if int.from_bytes(number, "big", signed=True) == -1:
                return last
            last = int.from_bytes(number, "big")
            self.take(last, batch)

    def take(self, number: int, batch: bytes) -> None:
        _, found, *_ = msgspec.msgpack.decode(batch)
        self.batches.append((number, found))
        for event in found:
            match event["type"]:
                case "BlockStored":
                    self.pages |= {*event["block_hashes"]}
                case "BlockRemoved":
                    self.pages -= {*event["block_hashes"]}
                case "AllBlocksCleared":
                    self.pages.clear()

    def hear(self) -> int:
        assert self.live.poll(WAIT_MS), "no event"
        _, number, batch = self.live.recv_multipart()
        self.take(int.from_bytes(number, "big"), batch)
        return int.from_bytes(number, "big")

    def until(self, wanted: set[int]) -> None:
        """Ask until the pages are these; the publisher is some milliseconds behind."""
        until_s = time.monotonic() + PATIENCE_S
        while self.pages != wanted:
            assert time.monotonic() < until_s, f"{self.pages ^ wanted} differ"
            self.batches.clear()
            self.ask(0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    each = Engine(tmp_path)
    yield each
    each.events.close()


@pytest.fixture
def reader(engine: Engine) -> Iterator[Reader]:
    each = Reader(engine.endpoint)
    yield each
    each.context.destroy(linger=0)


def test_the_layout_is_vllms(engine: Engine, reader: Reader) -> None:
    keys = engine.compute(list(range(10)))
    more = engine.compute([*range(8), 20, 21, 22, 23])
    reader.until({*keys, *more})
    cleared, first, second = (event for _, batch in reader.batches for event in batch)
    assert cleared == {"type": "AllBlocksCleared"}
    assert first == {
        "type": "BlockStored",
        "block_hashes": keys,
        "parent_block_hash": None,
        "token_ids": list(range(8)),
        "block_size": PAGE,
    } | {name: first[name] for name in ("lora_id", "medium", "lora_name") if name in first}
    assert second["parent_block_hash"] == keys[-1]
    assert (second["block_hashes"], second["token_ids"]) == (more[2:], [20, 21, 22, 23])


@pytest.mark.parametrize("overflows", [False, True])
def test_pages_of_windows_have_events_of_their_own(
    tmp_path: Path, overflows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the list of all pages that replaces a queue which overflows."""
    monkeypatch.setattr(events, "MOST_QUEUED", 1 if overflows else 100)
    engine = Engine(tmp_path, windows=(6,))
    reader = Reader(engine.endpoint)
    keys = engine.compute(list(range(12)))
    engine.groups[0].evict(1)  # the last of a chain goes first
    known = {(None, key) for key in keys} | {(1, key) for key in keys[:2]}
    for _ in range(1000):
        reader.batches.clear()
        reader.ask(0)
        stored: list[dict[str, object]] = []
        held: set[tuple[object, object]] = set()
        for event in (event for _, batch in reader.batches for event in batch):
            group = event.get("group_idx")
            hashes = {(group, key) for key in event.get("block_hashes", [])}
            held = held | hashes if event["type"] == "BlockStored" else held - hashes
            stored += [event] * (group == 1 and event["type"] == "BlockStored")
        if held == known:
            break
    assert held == known
    assert {event["kv_cache_spec_kind"] for event in stored} == {"sliding_window"}
    assert {event["kv_cache_spec_sliding_window"] for event in stored} == {6}
    reader.context.destroy(linger=0)
    engine.events.close()


def test_who_is_there_hears_each_sequence_once(engine: Engine, reader: Reader) -> None:
    """A probe is computed until its event is heard: only then is the subscription known to be there."""
    number = 0
    while not reader.live.poll(50):
        engine.compute([number] * PAGE)
        number += 1
    heard = [reader.hear()]
    wanted = engine.compute(list(range(100, 140)))
    while not {*wanted} <= reader.pages:
        heard.append(reader.hear())
    assert heard == list(range(heard[0], heard[0] + len(heard)))


def test_a_late_reader_knows_all(engine: Engine, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the first batches are not kept any more, and pages were evicted."""
    monkeypatch.setattr(events, "MOST_BATCHES", 3)
    for number in range(60):
        engine.compute([number // 3, 1, 2, 3, number, 5, 6, 7])
        reader.ask(0)  # so that each is a batch of its own
    assert len(engine.held()) < 100
    reader.pages.clear()
    reader.batches.clear()
    reader.until(engine.held())
    ((number, snapshot),) = reader.batches
    assert number > 0
    assert snapshot[0] == {"type": "AllBlocksCleared"}


def test_nonsense_on_the_socket_ends_nothing(engine: Engine, reader: Reader) -> None:
    for frames in ([b""], [b"", b"x"], [b"", b"", b"", b""], [b"", (2**63).to_bytes(8, "big")]):
        reader.again.send_multipart(frames)
    keys = engine.compute(list(range(8)))
    assert reader.again.poll(WAIT_MS)
    while reader.again.recv_multipart()[2] != events.END:
        pass
    reader.until({*keys})


@pytest.mark.parametrize("endpoint", ["", "tcp://a", "tcp://a:0", "tcp://a:65535", "udp://a:1", "ipc://"])
def test_an_endpoint_is_checked(endpoint: str) -> None:
    with pytest.raises(ValueError, match="is no tcp://HOST:PORT"):
        replay_endpoint(endpoint)


def test_a_taken_endpoint_is_named(engine: Engine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot be published at {endpoint}: Address already in use"):
            PageEvents(engine.cache, PAGE, endpoint)


def test_who_lacks_the_secret_reads_nothing_and_cannot_ask(tmp_path: Path) -> None:
    """Neither without keys, nor with another secret, nor with the publisher's key and one of its own."""
    engine = Engine(tmp_path, 16, secret=SECRET)
    keys = engine.compute(list(range(12)))
    context, refusals = zmq.Context(), list[zmq.Socket[bytes]]()

    def connected(kind: int, prove: Callable[[zmq.Socket[bytes]], None]) -> zmq.Socket[bytes]:
        sock = context.socket(kind)
        sock.linger = 0
        prove(sock)
        if kind == zmq.SUB:
            sock.subscribe(b"")
        refusals.append(sock.get_monitor_socket(zmq.EVENT_DISCONNECTED, f"inproc://{len(refusals)}"))
        sock.connect(engine.endpoint if kind == zmq.SUB else replay_endpoint(engine.endpoint))
        return sock

    def with_own_key(sock: zmq.Socket[bytes]) -> None:
        prove_as_reader(sock, SECRET)
        sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()

    strangers = (lambda _: None, lambda sock: prove_as_reader(sock, b"b" * 32), with_own_key)
    refused = [connected(kind, prove) for kind in (zmq.SUB, zmq.DEALER) for prove in strangers]
    failed = refusals[:]
    for each in refused[3:]:
        each.send_multipart([b"", (0).to_bytes(8, "big")])
    reader = connected(zmq.DEALER, lambda sock: prove_as_reader(sock, SECRET))
    hears = connected(zmq.SUB, lambda sock: prove_as_reader(sock, SECRET))
    found: list[dict[str, object]] = []
    while not any("block_hashes" in each for each in found):  # the publisher's thread may not have it yet
        reader.send_multipart([b"", (0).to_bytes(8, "big")])
        assert reader.poll(1e3 * PATIENCE_S)
        while (frames := reader.recv_multipart())[2] != events.END:
            found += msgspec.msgpack.decode(frames[3])[1]
    assert found[-1]["block_hashes"] == keys
    number = 100
    until_s = time.monotonic() + PATIENCE_S
    while not hears.poll(50):  # ends when its subscription has come
        assert time.monotonic() < until_s, "its subscription never comes"
        engine.compute([number] * PAGE)
        number += 1
    for each in failed:
        assert each.poll(1e3 * PATIENCE_S)
    assert not any(each.poll(0) for each in refused)
    assert not any(each.poll(0) for each in refusals[len(failed) :])
    for each in (*refused, reader, hears):
        each.disable_monitor()
    engine.events.close()
    context.destroy(linger=0)


def test_who_says_too_much_is_cut_off_and_others_are_answered(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 16)
    engine.compute(list(range(12)))
    context = zmq.Context()
    loud, quiet = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    ended = loud.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    for each in (loud, quiet):
        each.linger = 0
        each.connect(f"{engine.endpoint}.replay")
    loud.send_multipart([b"", b"x" * 10**6])
    assert ended.poll(1e3 * PATIENCE_S)
    quiet.send_multipart([b"", (0).to_bytes(8, "big")])
    assert quiet.poll(1e3 * PATIENCE_S)
    engine.events.close()
    context.destroy(linger=0)


def test_who_asks_and_reads_nothing_is_sent_a_few_messages_and_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked, sent, answer = 200, list[bytes](), PageEvents._answer
    heard: list[bytes] = []

    def answered(publisher: PageEvents, frames: list[bytes]) -> None:
        answer(publisher, frames)
        heard.append(frames[0])

    def send(socket: zmq.Socket[bytes], frames: list[bytes], *args: int) -> object:
        result = zmq.Socket.send_multipart(socket, frames, *args)
        sent.append(frames[0])
        return result

    monkeypatch.setattr(PageEvents, "_answer", answered)
    monkeypatch.setattr(events, "_MOST_STALLED_S", PATIENCE_S)
    engine = Engine(tmp_path, 20_000)
    monkeypatch.setattr(engine.events._asked, "send_multipart", partial(send, engine.events._asked))
    keys = engine.compute(list(range(60_000)))  # whose batch is larger than the buffers of a socket
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.linger, deaf.rcvhwm = 0, 1
    deaf.connect(f"{engine.endpoint}.replay")
    for _ in range(num_asked):
        deaf.send_multipart([b"", (0).to_bytes(8, "big")])
    until_s = time.monotonic() + PATIENCE_S
    while len(heard) < num_asked:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert len(sent) < num_asked
    reader = Reader(engine.endpoint)
    reader.until({*keys})
    deaf.rcvtimeo = round(PATIENCE_S * 1000)
    while deaf.recv_multipart()[2] != events.END:
        pass  # it may read later
    reader.context.destroy(linger=0)
    context.destroy(linger=0)
    engine.events.close()


def test_an_answer_that_nobody_takes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST_UNREAD_AGAIN", 1)
    monkeypatch.setattr(events, "_MOST_STALLED_S", 0.0)
    engine = Engine(tmp_path, 20_000)
    for at in range(3):
        engine.compute(list(range(60_000 * at, 60_000 * (at + 1))))
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.linger, deaf.rcvhwm = 0, 1
    deaf.connect(f"{engine.endpoint}.replay")
    begun = list[bool]()
    monkeypatch.setattr(engine.events, "_send_again", partial(_noting, engine.events, begun))
    deaf.send_multipart([b"", (0).to_bytes(8, "big")])
    until_s = time.monotonic() + PATIENCE_S
    while not begun or engine.events._answers:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    context.destroy(linger=0)
    engine.events.close()


def _noting(publisher: PageEvents, begun: list[bool]) -> bool:
    if publisher._answers:
        begun.append(True)
    return PageEvents._send_again(publisher)
