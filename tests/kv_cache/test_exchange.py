"""The parts of the page exchange between two engines work one by one.

These are the ring of a window, messages, addresses and shared memory.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from kv_cache.exchange import transports
from kv_cache.exchange.channel import Plain
from kv_cache.exchange.connection import Connection, Wake
from kv_cache.exchange.messages import (
    HEAD,
    LONGEST_MESSAGE,
    VERSION,
    Damaged,
    Hello,
    PageIdentity,
    PagePart,
    PagesWanted,
    Said,
    address_of_pages,
    framed,
    lengths_of,
    unframed,
)
from kv_cache.exchange.prompt_source import PromptSource
from kv_cache.exchange.transports import Ring, SharedMemory, Tcp
from tests.patience import PATIENCE_S
from tests.thorough import cases


def test_a_ring_never_gives_out_what_is_taken_and_gives_out_all_that_is_free() -> None:
    for seed in range(cases(200, 5000)):
        random = np.random.default_rng(seed)
        size = int(random.integers(4, 40))
        ring, taken, largest = Ring(size), deque[tuple[int, int]](), max(1, size // 2)
        for _ in range(60):
            count = int(random.integers(1, largest + 1))
            at = ring.take(count)
            if at is None:
                assert taken, "an empty ring has room for each part that fits"
                ring.give_back()
                taken.popleft()
                continue
            assert at >= 0
            assert at + count <= size
            assert all(at + count <= start or stop <= at for start, stop in taken), (seed, at, count, taken)
            taken.append((at, at + count))
    with pytest.raises(ValueError, match="never taken"):
        Ring(4).give_back()


def read(frame: bytes) -> Said:
    """What a receiver makes of a frame."""
    length, num_bytes, check = lengths_of(frame[: HEAD.size])
    if length > len(frame) - HEAD.size:
        raise Damaged("it would wait for more, and get what comes next")
    return unframed(frame[HEAD.size :][:length], num_bytes, check)


def test_a_message_that_was_changed_anywhere_is_none() -> None:
    message = PagesWanted(3, b"\1\0\0\0" * 4, "salt", 1, 2.5, 7, "tenant")
    frame = framed(message)
    assert read(frame) == message
    for at in range(len(frame)):
        wrong = bytearray(frame)
        wrong[at] ^= 4
        with pytest.raises(Damaged):
            read(bytes(wrong))
    with pytest.raises(Damaged, match="was announced"):
        lengths_of(HEAD.pack(LONGEST_MESSAGE + 1, 0, 0))


def test_a_name_in_shared_memory_is_gone_once_it_was_reached() -> None:
    window = SharedMemory().expose(1 << 12)
    name = window.description.decode()
    reach = SharedMemory().reach(window.description, 1 << 12)
    window.reached()
    assert not os.path.exists(f"/dev/shm/{name}")
    assert reach.put(100, np.arange(50, dtype=np.uint8)) is None
    assert window.memory[100:150].tolist() == list(range(50))
    with pytest.raises(ValueError, match="not on this machine"):
        SharedMemory().reach(window.description, 1 << 12)
    forgotten = SharedMemory().expose(1 << 12)
    name = forgotten.description.decode()
    del forgotten
    assert not os.path.exists(f"/dev/shm/{name}")


def test_windows_that_a_killed_process_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_FOLDER", tmp_path)
    left, link, waiting = (tmp_path / f"pages-{each * 32}" for each in "abc")
    of_others, elsewhere = tmp_path / "pages-of-others", tmp_path / "elsewhere"
    for file in (left, waiting, of_others, elsewhere):
        file.write_bytes(b"page")
    link.symlink_to(elsewhere)
    for file, age_s in ((left, 90), (link, 90), (waiting, 30), (of_others, 90)):
        os.utime(file, (time.time() - age_s,) * 2, follow_symlinks=False)
    SharedMemory().expose(1 << 12).close()
    assert {*tmp_path.iterdir()} == {link, waiting, of_others, elsewhere}
    os.utime(waiting, (time.time() - 90,) * 2)
    monkeypatch.setattr(transports.os, "geteuid", lambda: os.getuid() + 1)
    SharedMemory().expose(1 << 12).close()
    assert waiting.exists(), "it is another user's"


def test_only_a_window_is_opened_and_only_of_its_size() -> None:
    for name in (b"../etc/passwd", b"pages-" + b"z" * 32, b"", "pages-é".encode()):
        with pytest.raises(ValueError, match="no name of one"):
            SharedMemory().reach(name, 10)
    window = SharedMemory().expose(1 << 12)
    with pytest.raises(ValueError, match="has not the 8192 bytes"):
        SharedMemory().reach(window.description, 8192)


def test_a_window_for_which_there_is_no_memory_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    token = transports.secrets.token_hex
    monkeypatch.setattr(transports.secrets, "token_hex", lambda n: made.append(token(n)) or made[-1])
    monkeypatch.setattr(transports.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        SharedMemory().expose(1 << 12)
    assert made
    assert not os.path.exists(f"/dev/shm/pages-{made[0]}")


def test_bytes_over_the_socket_go_behind_their_message() -> None:
    data = np.arange(9, dtype=np.uint8)
    assert Tcp().reach(b"", 100).put(3, data) is data


@pytest.mark.parametrize("offset", [-1, 90, 1 << 40])
def test_a_part_outside_of_the_window_ends_the_connection(offset: int) -> None:
    connection = Connection(lambda _: None, lambda _: None)
    connection.window = np.zeros(100, dtype=np.uint8)
    assert len(connection.part(PagePart(1, 0, 0, 1, 80, 20, 0))) == 20
    with pytest.raises(Damaged, match="window of 100"):
        connection.part(PagePart(1, 0, 0, 1, offset, 20, 0))


def test_a_connection_that_ended_before_it_was_made_is_none() -> None:
    reasons: list[str] = []
    connection = Connection(lambda _: None, reasons.append)
    connection.end("nobody wants it")
    connection.end("again")
    ours, theirs = socket.socketpair()
    connection.start(ours)
    assert theirs.recv(1) == b""
    assert reasons == ["nobody wants it"]
    theirs.close()


def test_a_thread_that_is_about_to_wait_sees_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file that gets the socket's number would keep it waiting for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    number, taken = ours.fileno(), list[int]()
    connection = Connection(lambda _: None, lambda _: None)
    take = Plain.take

    def ended_between(channel: Plain, room: memoryview) -> int | None:
        count = take(channel, room)
        if connection.is_open:
            connection.end("this engine ends")
            taken.extend(os.pipe())
        return count

    monkeypatch.setattr(Plain, "take", ended_between)
    connection.greeted()
    before = {*threading.enumerate()}
    connection.start(ours)
    for thread in {*threading.enumerate()} - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert taken
    assert number not in taken
    assert ours.fileno() == -1, "it is closed by the last thread"
    theirs.close()
    for each in taken:
        os.close(each)


def hello(**changes: object) -> Hello:
    fields = {"version": VERSION, "model": "m", "page_size": 16, "layout": ["a", "b"], "transport": "tcp"}
    return Hello(**(fields | {"window": b"", "window_bytes": 1} | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"model": "n"}, "the model is m at the engine of prompts and n at the one of answers"),
        ({"long_factors": True}, "is False at the engine of prompts and True at the one of answers"),
        ({"page_size": 8}, "cache.page_size is 16 at the engine of prompts and 8 at the one of answers"),
        ({"layout": ["a"]}, "the number of layers is 2"),
        ({"layout": ["a", "c"]}, "a page of layer 1 is b at"),
        ({"version": 1}, f"the version of the messages is {VERSION}"),
    ],
)
def test_what_differs_is_named(changes: dict[str, object], words: str | None) -> None:
    difference = PageIdentity("m", 16, ["a", "b"]).difference(hello(**changes))
    assert difference is None if words is None else words in str(difference)


def test_addresses() -> None:
    assert address_of_pages("tcp://[::1]:80") == ("::1", 80)
    for wrong in ("ipc://x", "tcp://host", "tcp://:1", "tcp://host:99999", "host:1"):
        with pytest.raises(ValueError, match=r"is no tcp://HOST:PORT"):
            address_of_pages(wrong)


@pytest.mark.parametrize("way", ["nobody listens", "it is silent and goes"])
def test_an_engine_that_is_never_reached_leaves_no_name_in_shared_memory(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    token = transports.secrets.token_hex
    monkeypatch.setattr(transports.secrets, "token_hex", lambda n: made.append(token(n)) or made[-1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        if way == "nobody listens":
            listener.close()
        source = PromptSource(
            endpoint, PageIdentity("m", 16, []), Wake(), transport="shared_memory", window_bytes=1 << 12
        )
        assert source.want(b"", "", 0, 1.0) is not None
        if way != "nobody listens":
            peer, _ = listener.accept()
            assert peer.recv(HEAD.size)
            peer.close()
        assert source.came.get(timeout=PATIENCE_S).message is None
    assert made or way == "nobody listens"
    assert not [each for each in made if os.path.exists(f"/dev/shm/pages-{each}")]


@pytest.mark.parametrize("way", ["a name that cannot be one", "no thread"])
def test_an_engine_that_cannot_even_be_dialled_is_lost(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    endpoint = "tcp://prompts..example:29502" if way == "a name that cannot be one" else "tcp://127.0.0.1:1"
    source = PromptSource(endpoint, PageIdentity("m", 16, []), Wake())
    with monkeypatch.context() as patch:
        if way == "no thread":
            patch.setattr(threading.Thread, "start", start)
        asked = source.want(b"", "", 0, 1.0)
        assert asked is not None
    came = source.came.get(timeout=PATIENCE_S)
    assert (came.connection, came.message) == (asked[0], None)
    assert not asked[0].is_open
    assert source.want(b"", "", 0, 1.0) is None, "it is not asked again at once"
