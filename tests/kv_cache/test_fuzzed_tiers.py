"""A store of pages that lies, or whose folder others write to, costs misses and nothing else.

Each border gets some hundred mutated entries or answers, and 10,000 in a thorough run.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from kv_cache.tier.disk import DiskStore
from kv_cache.tier.lookup import Sought
from kv_cache.tier.page_tier import PageReads, StoreHealth, TierCounters
from kv_cache.tier.store import HEAD_BYTES, StoreFailed, WrongEntry, content_of, entry_of
from tests.kv_cache.test_tier_stores import ONE, key
from tests.mutated import Mutator
from tests.patience import PATIENCE_S
from tests.serving.page_pair import Listener
from tests.thorough import cases

FEW = cases(300, 10_000)
SIZE = 1000


def path_of(folder: Path, number: int) -> Path:
    name = key(number).hex()
    return folder / ONE.hex()[:16] / name[:2] / name


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_link(path: Path) -> None:
    target = path.parent / "elsewhere"
    target.write_bytes(entry_of(b"c" * SIZE, key(1), ONE))
    path.symlink_to(target)


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("make", [make_pipe, make_folder, make_device, make_link, make_huge])
def test_what_is_no_file_of_a_page_is_a_miss(make: Callable[[Path], None], tmp_path: Path) -> None:
    """At once, and without reading it; the others are found."""
    store = DiskStore(tmp_path, 1 << 20, ONE, SIZE + HEAD_BYTES)
    path = path_of(tmp_path, 1)
    path.parent.mkdir(exist_ok=True)
    make(path)
    entry = entry_of(b"d" * SIZE, key(2), ONE)
    assert store.write(key(2), entry)
    assert store.read([key(1), key(2)]) == [b"", entry]
    store.remove([key(1)])
    store.close()


def test_an_entry_of_who_lacks_the_secret_is_not_used() -> None:
    secret, content = b"s" * 32, b"c" * SIZE
    assert content_of(entry_of(content, key(1), ONE, secret), key(1), ONE, SIZE, secret) == content
    for other in (None, b"t" * 32):
        with pytest.raises(WrongEntry, match="not signed with our secret"):
            content_of(entry_of(content, key(1), ONE, other), key(1), ONE, SIZE, secret)
    with pytest.raises(WrongEntry, match="checksum"):
        content_of(entry_of(content, key(1), ONE, secret), key(1), ONE, SIZE)


class LyingServer(Listener):
    """A Redis server, of which each answer is what `lie` makes."""

    def __init__(self, lie: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._lie = lie
        self.start()

    def serve(self, sock: socket.socket) -> None:
        self.run(self._answer, sock)

    def _answer(self, sock: socket.socket) -> None:
        with suppress(OSError), sock:
            while data := sock.recv(1 << 16):
                said = self._lie(data)
                sock.sendall(said)
                if not said:
                    return


# What a server says, and what none does
ANSWERS = (
    b"$5\r\nhello\r\n", b"$-1\r\n", b"+OK\r\n", b":1\r\n", b"*2\r\n$1\r\na\r\n:3\r\n", b"-ERR no\r\n",
    b"-LOADING it loads\r\n", b"$0\r\n\r\n", b"*1\r\n" * 5000, b"$99999999999999999999\r\nx", b":x\r\n",
    b"$x\r\n", b"*-5\r\n", b"%1\r\n+a\r\n+b\r\n", b"_\r\n", b",nan\r\n", b"(" + b"9" * 5000 + b"\r\n",
    b"\xff" * 40 + b"\r\n", b">1\r\n+x\r\n", b"~1\r\n:1\r\n", b"=8\r\ntxt:abcd\r\n", b"#t\r\n",
    b"!3\r\nERR\r\n", b"%1\r\n+proto\r\n:3\r\n",
)  # fmt: skip


@pytest.mark.slow
def test_a_server_that_lies_is_a_miss() -> None:
    """Each lie fails that call, or is no entry, or is refused; a lookup ends, and so does the next."""
    mutator, redis = Mutator(2), pytest.importorskip("kv_cache.tier.redis_store")

    def lie(_: bytes) -> bytes:
        said = mutator.one_of(ANSWERS) * mutator.random.choice((1, 1, 3))
        return mutator.data(said) if mutator.random.random() < 0.5 else said

    server = LyingServer(lie)
    store = redis.RedisStore(f"redis://127.0.0.1:{server.port}", 10**6, ONE, 0.01)
    for number in range(FEW):
        with suppress(StoreFailed):
            assert all(each is None or isinstance(each, bytes) for each in store.read([key(1), key(2)]))
        with suppress(StoreFailed):
            store.write(key(number), b"x")
        with suppress(StoreFailed):
            store.remove([key(number)])
    store.close()
    server.close()


def test_a_lie_ends_no_thread_of_a_tier(tmp_path: Path) -> None:
    """The thread that reads goes on after anything that a store says."""

    class Store(DiskStore):
        said: bytes | None = None

        def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
            return [self.said for _ in keys]

    mutator, store, counters = Mutator(3), Store(tmp_path, 1 << 20, ONE), TierCounters()
    right = entry_of(b"c" * SIZE, key(1), ONE)
    reads = PageReads(store, StoreHealth("a test"), counters, ONE, [SIZE], PATIENCE_S, lambda _: None)
    for _ in range(FEW):
        store.said = mutator.data(right)
        is_right = store.said == right
        lookup = reads.begin(Sought([key(1)]))
        assert lookup is not None
        while not reads.is_over(lookup):
            time.sleep(0)
        assert list(lookup.contents.values()) == [b"c" * SIZE] * is_right
    assert counters.refused
    assert not counters.late
    reads.close(PATIENCE_S)
    store.close()
