"""A store of batches goes on where it was, at whichever statement its server is killed."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serving.batches import store as batch_store
from serving.batches.store import OPEN, BatchStore, InUse, StoredBatch, StoredFile
from tests.thorough import cases

MOST_BYTES = 2**24
ME = "me"


class Killed(BaseException):
    """The process ends here."""


class Mortal(sqlite3.Connection):
    """A connection that dies before, or after, one of its statements, and does nothing more."""

    left = 10**9
    dies_after = False

    def _live(self, work: Any) -> Any:
        if self.left == 0:
            raise Killed
        self.left -= 1
        if self.left or self.dies_after:
            done = work()
            if self.left:
                return done
        raise Killed

    def execute(self, *arguments: Any) -> Any:
        return self._live(lambda: super(Mortal, self).execute(*arguments))

    def executemany(self, *arguments: Any) -> Any:
        return self._live(lambda: super(Mortal, self).executemany(*arguments))


def opened(folder: Path, left: int = 10**9, *, dies_after: bool = False) -> BatchStore:
    kind = type("Doomed", (Mortal,), {"left": left, "dies_after": dies_after})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=kind))
        return BatchStore(folder, MOST_BYTES)


class Drive:
    """Calls the store at random, and remembers what it was told for certain."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.kept: dict[tuple[str, int], bytes] = {}  # answers
        self.files: dict[str, bytes] = {}
        self.ended: dict[str, str] = {}

    def live(self, folder: Path) -> None:
        """Call a store until it dies."""
        store = opened(folder, self.draw.randint(1, 80), dies_after=self.draw.random() < 0.5)
        while True:
            self.step(store)

    def step(self, store: BatchStore) -> None:
        """One call."""
        files = store.files(ME, after=None, most=100, is_ascending=True, purpose=None)
        inputs = [each for each in files if each.purpose == "batch"]
        batches = store.open_batches()
        kind = self.draw.choice(("upload", "create", "begin", "answer", "answer", "answer", "cancel", "end"))
        if kind == "upload" or not inputs:
            lines = [(number, b"%d\n" % number) for number in range(1, self.draw.randint(2, 6))]
            file = store.add_file(ME, "a", lines)
            self.files[file.id] = b"".join(text for _, text in lines)
        elif kind == "create" or not batches:
            store.add_batch(ME, self.draw.choice(inputs), "/v1/completions", {"a": "b"})
        else:
            self.work(store, self.draw.choice(batches), kind)

    def work(self, store: BatchStore, batch: StoredBatch, kind: str) -> None:
        """What the server does with an open batch."""
        found = None
        if batch.status == "validating" and kind != "cancel":
            store.begin(batch, lambda number, _: b"bad" if number == 2 else None)
        elif kind == "cancel":
            store.cancel(batch)
        elif batch.status == "cancelling":
            store.end(batch, "cancelled", lambda *_: None)
            self.ended[batch.id] = "cancelled"
        elif (found := store.next_line(batch, 0)) is None or (kind == "end" and self.draw.random() < 0.2):
            status: Any = "completed" if found is None else "expired"
            store.end(batch, status, lambda number, _: b"late %d" % number)
            self.ended[batch.id] = status
        else:
            text = self.draw.randbytes(4)
            store.answer(batch, found[0], text, is_error=self.draw.random() < 0.3)
            self.kept[batch.id, found[0]] = text

    def check(self, store: BatchStore) -> None:
        """What the store tells is what it was told, and adds up."""
        rows = store._db.execute("SELECT batch, number, is_error, text FROM answers").fetchall()
        answers = {(batch, number): text for batch, number, _, text in rows}
        assert len(answers) == len(rows)
        assert self.kept.items() <= answers.items()
        for file_id, content in self.files.items():
            file = store.file(file_id, ME)
            assert file is not None
            assert whole(store, file) == content
            assert file.num_bytes == len(content)
        for batch in store.batches(ME, after=None, most=10**6):
            counts = [sum(each[:3:2] == (batch.id, kind) for each in rows) for kind in (0, 1)]
            assert counts == [batch.completed, batch.failed]
            assert self.ended.get(batch.id, batch.status) == batch.status
            source = store.file(batch.input, ME)
            assert source is not None
            numbers = {number for number, _ in store.content(source, 0, 10**9)}
            assert {number for owner, number in answers if owner == batch.id} <= numbers
            if batch.status == "validating":
                assert counts == [0, 0]
            if batch.status in ("completed", "expired"):
                assert sum(counts) == batch.total == len(numbers)
            for name, count, kind in zip((batch.output, batch.errors), counts, (0, 1)):
                assert (name is not None) == (count > 0 and batch.status not in OPEN)
                if name is not None:
                    output = store.file(name, ME)
                    assert output is not None
                    told = b"".join(text for *key, text in sorted(rows) if key[::2] == [batch.id, kind])
                    assert whole(store, output) == told
                    assert output.num_bytes == len(told)


def whole(store: BatchStore, file: StoredFile) -> bytes:
    """A file, read in pieces of a line each."""
    number, found = 0, b""
    while lines := store.content(file, number, 1):
        number = lines[-1][0]
        found += b"".join(text for _, text in lines)
    return found


@pytest.mark.parametrize("seed", range(cases(8, 1000)))
def test_after_a_kill_at_any_statement_each_line_is_answered_once(seed: int, tmp_path: Path) -> None:
    drive = Drive(seed)
    folder = tmp_path / "0"
    folder.mkdir()
    for life in range(1, 6):
        with pytest.raises(Killed):
            drive.live(folder)
        folder = shutil.copytree(folder, tmp_path / str(life))  # the disk at that moment
        store = opened(folder)
        drive.check(store)
        store.close()
    store = opened(folder)
    for _ in range(20):
        drive.step(store)
    while batches := store.open_batches():
        drive.work(store, batches[0], "answer")
    drive.check(store)
    store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    store = BatchStore(tmp_path / "a/b", MOST_BYTES)
    yield store
    store.close()


def test_a_line_has_one_answer(store: BatchStore) -> None:
    batch = store.add_batch(ME, store.add_file(ME, "a", [(1, b"{}")]), "/v1/completions", {})
    store.begin(batch, lambda *_: None)
    store.answer(batch, 1, b"first", is_error=False)
    with pytest.raises(sqlite3.IntegrityError):
        store.answer(batch, 1, b"second", is_error=False)
    after = store.batch(batch.id, ME)
    assert after is not None
    assert (after.completed, after.failed) == (1, 0)


def test_a_batch_that_is_cancelled_before_it_begins_has_no_answers(store: BatchStore) -> None:
    batch = store.add_batch(ME, store.add_file(ME, "a", [(1, b"{}")]), "/v1/completions", {})
    store.cancel(batch)
    store.begin(batch, lambda *_: b"bad")  # it is as before
    after = store.batch(batch.id, ME)
    assert after is not None
    assert (after.status, after.failed, store.next_line(after, 0)) == ("cancelling", 0, (1, b"{}"))


def test_what_others_keep_is_not_found(store: BatchStore) -> None:
    file = store.add_file("you", "a", [(1, b"{}")])
    batch = store.add_batch("you", file, "/v1/completions", {})
    assert (store.file(file.id, ME), store.batch(batch.id, ME)) == (None, None)
    assert store.files(ME, after=None, most=9, is_ascending=True, purpose=None) == []
    assert store.batches(ME, after=None, most=9) == []


def test_a_file_that_is_read_stays(store: BatchStore) -> None:
    file = store.add_file(ME, "a", [(1, b"{}")])
    batch = store.add_batch(ME, file, "/v1/completions", {})
    with pytest.raises(InUse, match=f"is read by {batch.id}; cancel that first"):
        store.delete(file)
    store.cancel(batch)
    store.end(batch, "cancelled", lambda *_: None)
    store.delete(file)
    assert store.file(file.id, ME) is None
    assert store.content(file, 0, 9) == []


def test_pages_of_a_list_meet(store: BatchStore) -> None:
    made = [store.add_file(ME, str(number), [(1, b"{}")]) for number in range(7)]
    for is_ascending in (False, True):
        found: list[StoredFile] = []
        while page := store.files(
            ME, after=found[-1].place if found else None, most=3, is_ascending=is_ascending, purpose="batch"
        ):
            found += page
        assert found == (made if is_ascending else made[::-1])
    assert store.files(ME, after=None, most=9, is_ascending=True, purpose="batch_output") == []


def test_open_batches_are_found_without_reading_those_that_have_ended(tmp_path: Path) -> None:
    """A full store of an earlier release gets the index when it is opened."""
    made = BatchStore(tmp_path, 2**18)
    made._db.execute("DROP INDEX open_batches")
    with contextlib.suppress(sqlite3.OperationalError):
        while True:
            made.add_file(ME, "b", [(1, b"y" * 2**12)])
    made.close()
    store = BatchStore(tmp_path, 2**18)
    for query, values in ((batch_store._ALL_OPEN, ()), (batch_store._OPEN_OF, ("a",))):
        plan = str(store._db.execute(f"EXPLAIN QUERY PLAN {query}", values).fetchall())
        assert "USING INDEX open_batches" in plan
    store.close()


def test_a_store_that_is_larger_than_it_may_be_opens_without_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = BatchStore(tmp_path, 2**20)
    kept = made.add_file(ME, "b", [(1, b"y" * 2**19)])
    made._db.execute("DROP INDEX open_batches")
    made._db.execute("VACUUM")  # or the index would come back into the room that it had
    made.close()
    monkeypatch.setattr(batch_store, "_RESERVE_BYTES", 0)
    store = BatchStore(tmp_path, 2**16)
    assert not store._db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'open_batches'").fetchall()
    assert store.files(ME, after=None, most=9, is_ascending=True, purpose=None) == [kept]
    store.close()


def test_a_full_store_keeps_what_it_has(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 2**18)
    kept = store.add_file(ME, "a", [(1, b"x" * 2**16)])
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.add_file(ME, "b", [(number, b"y" * 2**16) for number in range(1, 9)])
    assert store.files(ME, after=None, most=9, is_ascending=True, purpose=None) == [kept]
    batch = store.add_batch(ME, kept, "/v1/completions", {})
    with contextlib.suppress(sqlite3.OperationalError):
        while True:
            store.add_file(ME, "b", [(1, b"y" * 2**12)])
    before = store._db.execute("PRAGMA page_count").fetchone()
    store.begin(batch, lambda number, text: b"z" * 2**15)  # into the reserve, which others do not get
    store.end(batch, "cancelled", lambda *_: None)
    assert store._db.execute("PRAGMA page_count").fetchone() > before
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.add_file(ME, "b", [(number, b"y" * 2**16) for number in range(1, 9)])
    for each in store.files(ME, after=None, most=99, is_ascending=True, purpose=None):
        store.delete(each)
    assert store.add_file(ME, "c", [(1, b"z" * 2**16)]).num_bytes == 2**16
    store.close()


def test_answers_leave_room_for_the_ends_of_batches(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 2**18)
    file = store.add_file(ME, "a", [(1, b"x")])
    batches = [store.add_batch(ME, file, "/v1/completions", {}) for _ in range(60)]
    for batch in batches:
        store.begin(batch, lambda number, text: b"z")
    for size in (2**20, 2**16, 2**12, 2**8, 1):
        with contextlib.suppress(sqlite3.OperationalError):
            while True:
                with store._reserve_transaction(has_answers=True):
                    store._db.execute("INSERT INTO lines VALUES ('b', NULL, ?)", (b"y" * size,))
    for batch in batches:
        store.end(batch, "cancelled", lambda *_: None)
    store.close()


def test_who_has_no_room_for_a_new_store_is_told_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="database or disk is full; make room there, or name another folder"):
        BatchStore(tmp_path / "a", 1)


def test_a_folder_that_cannot_be_used_is_refused_in_a_line(tmp_path: Path) -> None:
    first = BatchStore(tmp_path / "a", MOST_BYTES)
    with pytest.raises(OSError, match=r"--batches .*/a: database is locked; another server may have it open"):
        BatchStore(tmp_path / "a", MOST_BYTES)
    first._db.execute("PRAGMA user_version = 9")
    first.close()
    with pytest.raises(OSError, match="is of version 9, and this server reads 1; name another folder"):
        BatchStore(tmp_path / "a", MOST_BYTES)
    (tmp_path / "batches.sqlite3").write_text("no database" * 100)
    with pytest.raises(OSError, match="file is not a database"):
        BatchStore(tmp_path, MOST_BYTES)
    with pytest.raises(OSError, match=r"batches.sqlite3 is no folder; name one"):
        BatchStore(tmp_path / "batches.sqlite3", MOST_BYTES)
