"""Keep files and batches in an SQLite file, so that a server that is killed resumes where it was.

Only one server at a time has the file open. A line of a batch is answered once its row is in `answers`, which
holds at most one for each line; that row and the batch's counts are written in one transaction. The files of
a batch's answers are those rows, so nothing is copied when the batch ends.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serving.failures import Failure

_VERSION = 1
_SCHEMA = """
CREATE TABLE files (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    made_s INTEGER NOT NULL,
    purpose TEXT NOT NULL, name TEXT NOT NULL, num_bytes INTEGER NOT NULL, batch TEXT, is_error INTEGER
);
CREATE TABLE lines (file TEXT, number INTEGER, text BLOB NOT NULL, PRIMARY KEY (file, number));
CREATE TABLE batches (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    made_s INTEGER NOT NULL,
    input TEXT NOT NULL, endpoint TEXT NOT NULL, metadata TEXT NOT NULL, status TEXT NOT NULL,
    expires_s INTEGER NOT NULL, begun_s INTEGER, cancelling_s INTEGER, ended_s INTEGER,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    output TEXT, errors TEXT
);
CREATE TABLE answers (
    batch TEXT, number INTEGER, is_error INTEGER NOT NULL, text BLOB NOT NULL, PRIMARY KEY (batch, number)
);
"""
_UNANSWERED = (
    "FROM lines WHERE file = ? AND number > ?"
    " AND NOT EXISTS (SELECT 1 FROM answers WHERE batch = ? AND answers.number = lines.number)"
)
# A store keeps every batch that has ended, and each line of a running one asks for those that are open
_OPEN_INDEX = (
    "CREATE INDEX IF NOT EXISTS open_batches ON batches (place)"
    " WHERE status IN ('validating', 'in_progress', 'cancelling')"
)
OPEN = ("validating", "in_progress", "cancelling")  # the same statuses as in the index and the queries
_LAST = 2**63 - 1  # larger than every place
_ALL_OPEN = "SELECT * FROM batches WHERE status IN ('validating', 'in_progress', 'cancelling') ORDER BY place"
_OPEN_OF = "SELECT id FROM batches WHERE input = ? AND status IN ('validating', 'in_progress', 'cancelling')"
_FILES = {  # keyed by whether the oldest file comes first
    True: "SELECT * FROM files WHERE owner = ? AND place > ? AND purpose = coalesce(?, purpose)"
    " ORDER BY place LIMIT ?",
    False: "SELECT * FROM files WHERE owner = ? AND place < ? AND purpose = coalesce(?, purpose)"
    " ORDER BY place DESC LIMIT ?",
}
_BATCHES = "SELECT * FROM batches WHERE owner = ? AND place < ? ORDER BY place DESC LIMIT ?"
WINDOW_S = 24 * 3600
_RESERVE_BYTES = 2**24  # Beyond the store's limit: the batches of a full store can begin and end.

Ended = Literal["completed", "expired", "cancelled"]
# Maps a line's number and text to its answer if it cannot be run, else to None.
Check = Callable[[int, bytes], bytes | None]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, sent by a client or holding the answers of a batch; clients know it by its `id`."""

    place: int  # position in the order of creation
    id: str
    owner: str
    made_s: int
    purpose: str
    name: str
    num_bytes: int
    batch: str | None
    is_error: bool | None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch; times are in seconds since the epoch."""

    place: int
    id: str
    owner: str
    made_s: int
    input: str
    endpoint: str
    metadata: str  # JSON
    status: str
    expires_s: int
    begun_s: int | None
    cancelling_s: int | None
    ended_s: int | None
    total: int
    completed: int
    failed: int
    # Ids of the files of its answers and of its errors, once it has ended and there are any.
    output: str | None
    errors: str | None


class InUse(Failure):
    """The file cannot be deleted, because a batch reads it."""

    status = 409


class BatchStore:
    """The files and batches of a folder.

    Every call reads, or is one transaction. Raises OSError where the folder cannot be used, and
    sqlite3.OperationalError where the disk, or the store of `most_bytes`, is full. What begins, cancels or
    ends a batch may use a reserve beyond that.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        path = folder / "batches.sqlite3"
        if folder.exists() and not folder.is_dir():
            raise OSError(f"--batches {folder} is no folder; name one, or a path where there is nothing")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The connection is used by one thread at a time, though not always by the same one.
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(
                "PRAGMA synchronous = NORMAL"
            )  # a power cut may lose the last answers, which are then computed again
            (page_size,) = self._db.execute("PRAGMA page_size").fetchone()
            self._most_pages, self._reserve = max(1, most_bytes // page_size), _RESERVE_BYTES // page_size
            self._db.execute(f"PRAGMA max_page_count = {self._most_pages}")
            self._prepare(path)
        except sqlite3.DatabaseError as error:
            fix = "another server may have it open, or it is no store of batches"
            if "is full" in str(error):  # Python 3.10 tells no code
                fix = "make room there, or name another folder"
            raise OSError(f"--batches {folder}: {error}; {fix}") from error

    def _prepare(self, path: Path) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise OSError(
                f"{path} is of version {version}, and this server reads {_VERSION}; name another folder"
            )
        with self._transaction():
            if not version:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {_VERSION}")
        # One of an earlier release that has no room left, even in the reserve, goes without
        with suppress(sqlite3.OperationalError), self._reserve_transaction():
            self._db.execute(_OPEN_INDEX)

    def close(self) -> None:
        """Close the store."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write everything inside this context, or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _reserve_transaction(self, *, has_answers: bool = False) -> Iterator[None]:
        """Write as `_transaction` does, also into the reserve; answers leave a part of it.

        Otherwise the answers of one batch could leave no room for another's end.
        """
        reserve = self._reserve * 15 // 16 if has_answers else self._reserve
        self._db.execute(f"PRAGMA max_page_count = {self._most_pages + reserve}")
        try:
            with self._transaction():
                yield
        finally:  # a store that is larger than its limit already stays as it is, and grows no more
            self._db.execute(f"PRAGMA max_page_count = {self._most_pages}")

    def add_file(self, owner: str, name: str, lines: Sequence[tuple[int, bytes]]) -> StoredFile:
        """Store a file of numbered lines, with their line ends."""
        file_id, num_bytes = f"file-{uuid.uuid4().hex}", sum(len(text) for _, text in lines)
        with self._transaction():
            self._add_file(file_id, owner, "batch", name, num_bytes)
            self._db.executemany(
                "INSERT INTO lines VALUES (?, ?, ?)", ((file_id, number, text) for number, text in lines)
            )
        found = self.file(file_id, owner)
        assert found is not None, "a file that was added"
        return found

    def _add_file(
        self,
        file_id: str,
        owner: str,
        purpose: str,
        name: str,
        num_bytes: int,
        batch: str | None = None,
        is_error: bool | None = None,
    ) -> None:
        self._db.execute(
            "INSERT INTO files (id, owner, made_s, purpose, name, num_bytes, batch, is_error)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (file_id, owner, int(time.time()), purpose, name, num_bytes, batch, is_error),
        )

    def file(self, file_id: str, owner: str) -> StoredFile | None:
        """Return a file of this owner, or None."""
        row = self._db.execute("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        return None if row is None else StoredFile(*row)

    def files(
        self, owner: str, *, after: int | None, most: int, is_ascending: bool, purpose: str | None
    ) -> list[StoredFile]:
        """Return this owner's files after a place, newest or oldest first."""
        first = (-1 if is_ascending else _LAST) if after is None else after
        rows = self._db.execute(_FILES[is_ascending], (owner, first, purpose, most))
        return [StoredFile(*row) for row in rows]

    def content(self, file: StoredFile, after: int, most_bytes: int) -> list[tuple[int, bytes]]:
        """Return the file's lines after number `after`, up to about `most_bytes`; empty at the end."""
        values: tuple[str | int | None, ...]
        if file.batch is None:
            query, values = "FROM lines WHERE file = ? AND number > ?", (file.id, after)
        else:
            query = "FROM answers WHERE batch = ? AND number > ? AND is_error = ?"
            values = (file.batch, after, file.is_error)
        found, num_bytes = [], 0
        for number, text in self._db.execute(f"SELECT number, text {query} ORDER BY number", values):
            found.append((number, text))
            num_bytes += len(text)
            if num_bytes >= most_bytes:
                break
        return found

    def delete(self, file: StoredFile) -> None:
        """Delete a file; raises InUse while a batch that has not ended reads it."""
        if (row := self._db.execute(_OPEN_OF, (file.id,)).fetchone()) is not None:
            raise InUse(f"{file.id} is read by {row[0]}; cancel that first, or wait for its end")
        with self._transaction():
            if file.batch is None:
                self._db.execute("DELETE FROM lines WHERE file = ?", (file.id,))
            else:
                chosen = (file.batch, file.is_error)
                self._db.execute("DELETE FROM answers WHERE batch = ? AND is_error = ?", chosen)
            self._db.execute("DELETE FROM files WHERE id = ?", (file.id,))

    def add_batch(
        self, owner: str, source: StoredFile, endpoint: str, metadata: dict[str, str]
    ) -> StoredBatch:
        """Add a batch that is to be run."""
        batch_id, now_s = f"batch_{uuid.uuid4().hex}", int(time.time())
        self._db.execute(
            "INSERT INTO batches (id, owner, made_s, input, endpoint, metadata, status, expires_s)"
            " VALUES (?, ?, ?, ?, ?, ?, 'validating', ?)",
            (batch_id, owner, now_s, source.id, endpoint, json.dumps(metadata), now_s + WINDOW_S),
        )
        found = self.batch(batch_id, owner)
        assert found is not None, "a batch that was added"
        return found

    def batch(self, batch_id: str, owner: str) -> StoredBatch | None:
        """Return a batch of this owner, or None."""
        query = "SELECT * FROM batches WHERE id = ? AND owner = ?"
        row = self._db.execute(query, (batch_id, owner)).fetchone()
        return None if row is None else StoredBatch(*row)

    def batches(self, owner: str, *, after: int | None, most: int) -> list[StoredBatch]:
        """Return this owner's batches after a place, newest first."""
        rows = self._db.execute(_BATCHES, (owner, _LAST if after is None else after, most))
        return [StoredBatch(*row) for row in rows]

    def open_batches(self) -> list[StoredBatch]:
        """Return the batches of all owners that have not ended, oldest first."""
        return [StoredBatch(*row) for row in self._db.execute(_ALL_OPEN)]

    def begin(self, batch: StoredBatch, check: Check) -> None:
        """Validate all lines of a batch and let it begin; lines that cannot be run are answered at once."""
        refused, total = [], 0
        query = "SELECT number, text FROM lines WHERE file = ? ORDER BY number"
        for number, text in self._db.execute(query, (batch.input,)):
            total += 1
            if (answer := check(number, text)) is not None:
                refused.append((batch.id, number, True, answer))
        with self._reserve_transaction(has_answers=bool(refused)):
            begun = self._db.execute(
                "UPDATE batches SET total = ?, failed = ?, begun_s = ?, status = 'in_progress'"
                " WHERE id = ? AND status = 'validating'",
                (total, len(refused), int(time.time()), batch.id),
            )
            if begun.rowcount:  # otherwise it was cancelled in the meantime
                self._db.executemany("INSERT INTO answers VALUES (?, ?, ?, ?)", refused)

    def next_line(self, batch: StoredBatch, after: int) -> tuple[int, bytes] | None:
        """Return the first unanswered line after number `after`, or None."""
        query = f"SELECT number, text {_UNANSWERED} ORDER BY number LIMIT 1"
        found: tuple[int, bytes] | None = self._db.execute(query, (batch.input, after, batch.id)).fetchone()
        return found

    def answer(self, batch: StoredBatch, number: int, text: bytes, *, is_error: bool) -> None:
        """Store the answer to a line that has none."""
        query = "UPDATE batches SET failed = failed + ?, completed = completed + ? WHERE id = ?"
        with self._transaction():
            self._db.execute("INSERT INTO answers VALUES (?, ?, ?, ?)", (batch.id, number, is_error, text))
            self._db.execute(query, (is_error, not is_error, batch.id))

    def cancel(self, batch: StoredBatch) -> None:
        """Let no more lines of a batch begin, unless it has ended."""
        with self._reserve_transaction():
            self._db.execute(
                "UPDATE batches SET status = 'cancelling', cancelling_s = ?"
                " WHERE id = ? AND status IN ('validating', 'in_progress')",
                (int(time.time()), batch.id),
            )

    def end(self, batch: StoredBatch, status: Ended, check: Check) -> None:
        """End a batch that nobody works on.

        `check` answers the lines without an answer; where it returns None, they stay without one.
        """
        query = f"SELECT number, text {_UNANSWERED}"
        rest = self._db.execute(query, (batch.input, 0, batch.id)).fetchall()
        checked = ((batch.id, number, True, check(number, text)) for number, text in rest)
        given = [each for each in checked if each[-1] is not None]
        with self._reserve_transaction(has_answers=bool(given)):
            self._db.executemany("INSERT INTO answers VALUES (?, ?, ?, ?)", given)
            self._db.execute(
                "UPDATE batches SET status = ?, ended_s = ?, failed = failed + ?, output = ?, errors = ?"
                " WHERE id = ?",
                (
                    status,
                    int(time.time()),
                    len(given),
                    self._add_answers(batch, is_error=False),
                    self._add_answers(batch, is_error=True),
                    batch.id,
                ),
            )

    def _add_answers(self, batch: StoredBatch, *, is_error: bool) -> str | None:
        """Add the file of a batch's answers of this kind, if there are any, and return its id."""
        query = "SELECT count(*), sum(length(text)) FROM answers WHERE batch = ? AND is_error = ?"
        count, num_bytes = self._db.execute(query, (batch.id, is_error)).fetchone()
        if not count:
            return None
        file_id, kind = f"file-{uuid.uuid4().hex}", "error" if is_error else "output"
        name = f"{batch.id}_{kind}.jsonl"
        self._add_file(file_id, batch.owner, "batch_output", name, num_bytes, batch.id, is_error)
        return file_id
