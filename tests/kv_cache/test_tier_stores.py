"""Pages in a folder and in a real server: found by whoever asks, bounded, and whole or not there."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_cache.tier.disk import INCOMING, DiskStore
from kv_cache.tier.store import HEAD_BYTES, PageStore, StoreFailed, content_of, entry_of
from tests.kv_cache import redis_server
from tests.patience import PATIENCE_S
from tests.test_imports import ROOT
from tests.thorough import cases

Open = Callable[..., PageStore]
ONE, OTHER = b"1" * 32, b"2" * 32  # identities
SIZE = 1000


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def entry(number: int, size: int = SIZE) -> bytes:
    return b"%d" % (number % 10) * size


@pytest.fixture(params=["disk", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens stores of one folder, or one server, as engines do that share it."""
    if request.param == "disk":
        yield lambda most, identity=ONE: DiskStore(tmp_path / "pages", most, identity)
        return
    with redis_server.server(tmp_path) as (url, _):
        from kv_cache.tier.redis_store import RedisStore

        yield lambda most, identity=ONE: RedisStore(url, most, identity, PATIENCE_S)


def held(store: PageStore, count: int = 200) -> list[int]:
    """Which pages are there; none is used by that but those that are."""
    return [number for number in range(count) if store.read([key(number)]) != [None]]


def test_what_one_engine_keeps_another_finds(opened: Open) -> None:
    one, two = opened(10**6), opened(10**6)
    assert one.write(key(1), entry(1))
    assert one.write(key(2), entry(2))
    assert two.read([key(1), key(3), key(2)]) == [entry(1), None, entry(2)]
    assert not two.write(key(1), entry(7)), "it is there"
    assert one.read([key(1)]) == [entry(1)]
    one.remove([key(1), key(3)])
    assert two.read([key(1), key(2)]) == [None, entry(2)]
    assert two.write(key(1), entry(5))
    assert one.read([key(1)]) == [entry(5)]


def test_those_used_longest_ago_make_room(opened: Open) -> None:
    store = opened(10 * SIZE)
    for number in range(9):
        store.write(key(number), entry(number))
    assert store.read([key(0)]) != [None]
    for number in range(9, 12):
        assert store.write(key(number), entry(number))
    left = held(store)
    assert {0, 9, 10, 11} <= {*left}, "the last that were used stay"
    assert 1 not in left
    assert len(left) <= 10


def test_files_from_before_the_clock_was_set_back_make_room_first(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10 * SIZE, ONE)
    for number in range(9):
        store.write(key(number), entry(number))
    ahead_s = time.time() + 3600.0
    for file in tmp_path.glob("*/*/*"):
        os.utime(file, (ahead_s, ahead_s))
    assert store.read([key(0)]) != [None]
    for number in range(9, 13):
        assert store.write(key(number), entry(number))
    assert {0, 9, 10, 11, 12} <= {*held(store)}


def test_the_bound_holds_for_all_engines_and_models_together_while_they_write(opened: Open) -> None:
    most = 20 * SIZE
    stores = [opened(most, identity) for identity in (ONE, OTHER, ONE)]

    def fill(number: int) -> None:
        for each in range(number, 90, 3):
            stores[number].write(key(each), entry(each, SIZE - each))

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_S)
    assert not any(each.is_alive() for each in threads)
    views = [opened(most, identity) for identity in (ONE, OTHER)]
    total = sum(len(view.read([key(number)])[0] or b"") for view in views for number in range(90))
    assert most // 2 < total <= most


def test_a_smaller_bound_holds_from_the_first_page_on(opened: Open) -> None:
    store = opened(100 * SIZE)
    for number in range(50):
        store.write(key(number), entry(number))
    smaller = opened(10 * SIZE)
    smaller.write(key(60), entry(60))
    assert len(held(smaller)) <= 10


def test_a_folder_holds_no_more_than_its_bound_at_any_time(tmp_path: Path) -> None:
    most, store = 10 * SIZE, DiskStore(tmp_path, 10 * SIZE, ONE)
    for number in range(60):
        store.write(key(number), entry(number, 100 + 13 * number))
        files = [path for path in tmp_path.rglob("*") if path.is_file() and len(path.name) == 64]
        assert sum(path.stat().st_size for path in files) <= most
    assert files


def test_files_of_pages_are_for_their_owner_alone_and_others_are_left(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "notes").write_bytes(bytes(5000))
    store = DiskStore(folder, 3 * SIZE, ONE)
    for number in range(9):
        store.write(key(number), entry(number))
    assert (folder / "notes").stat().st_size == 5000
    made = [path for path in folder.rglob("*") if path.name != "notes"]
    assert not any(path.stat().st_mode & 0o077 for path in made)


@pytest.mark.parametrize("what", ["all in it", "the folder", "pages", "the lock"])
def test_a_folder_that_is_emptied_is_filled_again_by_one_writer_at_a_time(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, folder, write = 10 * SIZE, tmp_path / "pages", os.write
    stores = [DiskStore(folder, most, ONE)]
    for number in range(9):
        assert stores[0].write(key(number), entry(number))
    if what == "the lock":
        (folder / "lock").unlink()
    for each in folder.iterdir() if what in ("all in it", "pages") else ():
        if each.is_dir():
            shutil.rmtree(each)
        elif what == "all in it":
            each.unlink()
    if what == "the folder":
        shutil.rmtree(folder)
    stores.append(DiskStore(folder, most, OTHER))
    num_locked = 0

    def locked(file: int, data: bytes) -> int:
        nonlocal num_locked
        with (folder / "lock").open("rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        num_locked += 1
        return write(file, data)

    monkeypatch.setattr(os, "write", locked)
    for number in range(10, 30):
        assert stores[number % 2].write(key(number), entry(number))
        assert stores[number % 2].read([key(number)]) == [entry(number)]
        stores[0].remove([key(30)])
    assert num_locked == 20
    made = [path for path in folder.rglob("*") if path.is_file() and len(path.name) == 64]
    assert most // 2 < sum(path.stat().st_size for path in made) <= most
    assert not any(path.stat().st_mode & 0o077 for path in folder.rglob("*"))


def test_a_lock_that_is_deleted_while_it_is_opened_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write, num_opened = DiskStore(tmp_path, 10 * SIZE, ONE), os.write, 0
    open_lock = store._open_lock

    def opened() -> int:
        nonlocal num_opened
        num_opened += 1
        file = open_lock()
        if num_opened < 3:
            (tmp_path / "lock").unlink()
        return file

    def locked(file: int, data: bytes) -> int:
        with (tmp_path / "lock").open("rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return write(file, data)

    monkeypatch.setattr(store, "_open_lock", opened)
    monkeypatch.setattr(os, "write", locked)
    (tmp_path / "lock").unlink()
    assert store.write(key(1), entry(1))
    assert num_opened == 3


def test_the_files_of_a_folder_without_its_lock_are_counted(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10 * SIZE, ONE)
    for number in range(9):
        assert store.write(key(number), entry(number))
    (tmp_path / "lock").unlink()
    for number in range(9, 13):
        assert store.write(key(number), entry(number))
    assert len(held(store)) <= 10


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        DiskStore(tmp_path / "file", SIZE, ONE)


def test_a_disk_that_fails_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, 10 * SIZE, ONE)

    def full(file: int, data: bytes) -> int:
        assert store.read([key(1)]) == [None], "it is not found before it is whole"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreFailed, match="No space left"):
        store.write(key(1), entry(1))
    monkeypatch.undo()
    assert store.read([key(1)]) == [None]
    assert store.write(key(1), entry(1))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_smaller_than_the_bound_keeps_what_was_used_last(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a page that it does not hold at all leaves nothing behind."""
    store, write = DiskStore(tmp_path, 100 * SIZE, ONE), os.write
    disk = 10 * SIZE + len(b"the lock")

    def bounded(file: int, data: bytes) -> int:
        room = disk - sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        if room <= 0:
            raise OSError(number, os.strerror(number))
        return write(file, data[:room])

    monkeypatch.setattr(os, "write", bounded)
    for each in range(25):
        assert store.write(key(each), entry(each))
        assert store.read([key(0)]) == [entry(0)], "it is used again and again"
    with pytest.raises(StoreFailed, match=re.escape(os.strerror(number))):
        store.write(key(30), entry(3, 11 * SIZE))
    assert not (tmp_path / INCOMING).exists()
    assert store.write(key(31), entry(31)), "nothing is counted of what was not written"


def test_a_disk_on_which_deleting_makes_no_room_keeps_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attempt shows it: others can still read the rest, and a write that succeeds ends it."""
    store = DiskStore(tmp_path, 100 * SIZE, ONE)
    for each in range(20):
        store.write(key(each), entry(each))

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def num_kept() -> int:
        return sum(found is not None for found in store.read([key(each) for each in range(20)]))

    monkeypatch.setattr(os, "write", full)
    counts = list[int]()
    for each in range(20, 25):
        with pytest.raises(StoreFailed, match="No space left"):
            store.write(key(each), entry(each))
        counts.append(num_kept())
    assert counts == [17] * 5
    monkeypatch.undo()
    assert store.write(key(25), entry(25))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreFailed, match="No space left"):
        store.write(key(26), entry(26))
    assert num_kept() < 17, "room is made again"
    assert int.from_bytes((tmp_path / "lock").read_bytes(), "little") == sum(
        path.stat().st_size for path in tmp_path.rglob("*") if len(path.name) == 64
    )


WRITER = """
import itertools, sys
from pathlib import Path
from kv_cache.tier.disk import DiskStore
from kv_cache.tier.store import entry_of
from tests.kv_cache.test_tier_stores import BIG, CONTENT, ONE, key
from tests.kv_cache.test_tier_stores import opened_by
store = opened_by(sys.argv[1], BIG)
print("writing", flush=True)
for number in itertools.count(int(sys.argv[2])):
    store.write(key(number), entry_of(CONTENT, key(number), ONE))
    if number % 4 == 0:
        store.remove([key(number - 3)])
    print(number, flush=True)
"""
CONTENT = bytes(range(256)) * 2**10
BIG = 8 * (len(CONTENT) + HEAD_BYTES)


def opened_by(place: str, most: int) -> PageStore:
    if not place.startswith("unix://"):
        return DiskStore(Path(place), most, ONE)
    from kv_cache.tier.redis_store import RedisStore

    return RedisStore(place, most, ONE, PATIENCE_S)


def killed_while_writing(place: str, rounds: int) -> None:
    """Engines are killed at any moment; what another then finds is whole, and the bound holds."""
    first = 0
    for turn in range(rounds):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, place, str(first)], cwd=ROOT, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            for _ in range(2 + 5 * turn % 13):
                line = writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split()
        last = int((rest or [line])[-1])
        store = opened_by(place, BIG)
        found = 0
        for number in range(first, last + 2):
            (entry,) = store.read([key(number)])
            if entry is not None:
                assert content_of(entry, key(number), ONE, len(CONTENT)) == CONTENT
                found += len(entry)
        assert 0 < found <= BIG
        for number in range(last + 2, last + 12):  # there is room for so many again: nothing is lost
            assert store.write(key(number), entry_of(CONTENT, key(number), ONE))
        kept = sum(len(store.read([key(number)])[0] or b"") for number in range(first, last + 12))
        assert BIG // 2 < kept <= BIG
        store.close()
        first = last + 20


@pytest.mark.slow
def test_an_engine_that_is_killed_leaves_no_half_of_a_page_in_a_folder(tmp_path: Path) -> None:
    killed_while_writing(str(tmp_path / "pages"), cases(2, 50))


@pytest.mark.slow
def test_an_engine_that_is_killed_leaves_no_half_of_a_page_in_a_server(tmp_path: Path) -> None:
    with redis_server.server(tmp_path) as (url, _):
        killed_while_writing(url, cases(2, 50))


def test_what_was_being_written_is_not_there_and_gives_way_to_the_next(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10 * SIZE, ONE)
    (tmp_path / INCOMING).write_bytes(entry(1)[: SIZE // 2])
    assert held(store) == []
    assert store.write(key(1), entry(1))
    assert held(store) == [1]
    assert not (tmp_path / INCOMING).exists()


def test_half_a_page_of_a_killed_writer_is_gone_with_the_next_start(tmp_path: Path) -> None:
    """Where nothing new is written, too: no total counts it, so that it would exceed the bound for ever."""
    DiskStore(tmp_path, 2 * SIZE, ONE).close()
    (tmp_path / INCOMING).write_bytes(entry(1))
    store = DiskStore(tmp_path, 2 * SIZE, ONE)
    assert not (tmp_path / INCOMING).exists()
    store.close()


def test_a_server_that_lets_pages_go_by_itself_is_as_good(tmp_path: Path) -> None:
    with redis_server.server(tmp_path) as (url, _):
        import redis

        from kv_cache.tier.redis_store import RedisStore

        store = RedisStore(url, 5 * SIZE, ONE, PATIENCE_S)
        for number in range(5):
            store.write(key(number), entry(number))
        redis.Redis.from_url(url).delete(*(f"cb-pages:{ONE.hex()[:16]}:{key(at).hex()}" for at in (0, 1, 2)))
        for number in (0, 7, 8, 9):
            assert store.write(key(number), entry(number))
        assert {0, 7, 8, 9} <= {*held(store)}
        redis.Redis.from_url(url).flushall()
        assert store.write(key(1), entry(1))
        assert held(store) == [1]


def test_a_server_that_is_full_gone_or_wants_a_password_fails(tmp_path: Path) -> None:
    with redis_server.server(tmp_path, "--requirepass", "secret", "--maxmemory", "3mb") as (url, process):
        from kv_cache.tier.redis_store import RedisStore

        with pytest.raises(StoreFailed, match=r"authenticated|Authentication"):
            RedisStore(url, 10**9, ONE, PATIENCE_S).read([key(1)])
        store = RedisStore(url, 10**9, ONE, PATIENCE_S, "secret")
        store.write(key(1), entry(1))
        refused = []
        for number in range(2, 100):
            try:
                store.write(key(number), entry(number, 2**17))
            except StoreFailed as error:
                refused.append(str(error))
        assert len(refused) > 50
        assert "memory" in refused[0]
        assert store.read([key(1)]) == [entry(1)], "what is there can still be read"
        process.kill()
        process.wait()
        with pytest.raises(StoreFailed):
            store.read([key(1)])


def test_a_server_whose_memory_is_full_is_still_read(tmp_path: Path) -> None:
    """It cannot note that a page was used."""
    with redis_server.server(tmp_path) as (url, _):
        import redis

        from kv_cache.tier.redis_store import RedisStore

        store, operator = RedisStore(url, 10**9, ONE, PATIENCE_S), redis.Redis.from_url(url)
        assert store.write(key(1), entry(1))
        operator.config_set("maxmemory", 1)  # byte, as if others had filled the rest
        with pytest.raises(StoreFailed, match="memory"):
            store.write(key(2), entry(2))
        assert store.read([key(1), key(2)]) == [entry(1), None]
        store.remove([key(1)])
        assert store.read([key(1)]) == [None]
        operator.close()
        store.close()
