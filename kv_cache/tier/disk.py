"""Store pages as files in a folder that the engines of one machine share.

There is one file for each page, in a folder for each identity. A page is written to a file of its own and
renamed once it is whole. The time of a file's last change records when it was last used.

A writer holds a lock, whose file holds the total number of bytes. The total is raised before a file is
written, so that the bound holds at any time, and a process that is killed leaves a total that is too large
rather than too small; it is recounted at each start, and when room is made. Where the disk is full before the
bound is reached, the least recently used files give way, too. Nothing waits for the disk: an entry that a
loss of power leaves half written is found by its checksum. A folder that somebody empties is filled again:
its lock is another file then, which a writer recognises, as another may hold that one already.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kv_cache.tier.store import MOST_ENTRY_BYTES, StoreFailed

LOCK, INCOMING = "lock", "incoming"
# Share of the bound that is freed at once when there is no room, because scanning all files takes a while
_ROOM = 0.1
_COUNT_BYTES = 8
_AHEAD_NS = 60 * 10**9  # A file's time is further ahead only if the clock has been set back since
_MOST_LOCKS = 8  # Opened in turn at most: some file systems never tell twice the same of a file
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV)  # a link, a socket, a device that is not there
_ENTRY = re.compile(r"[0-9a-f]{16}/[0-9a-f]{2}/[0-9a-f]{64}")  # any other file in the folder is left alone


class DiskStore:
    """Entries below `folder`, of at most `most_bytes` in total, including those of other identities.

    An entry of this identity has at most `most_entry_bytes`; no more is read of any. Raises OSError if
    the folder cannot be created or written to.
    """

    def __init__(
        self, folder: Path, most_bytes: int, identity: bytes, most_entry_bytes: int = MOST_ENTRY_BYTES
    ) -> None:
        self._folder, self._most_bytes, self._most_entry_bytes = folder, most_bytes, most_entry_bytes
        self._own = folder / identity.hex()[:16]
        self._lock = self._open_lock()
        self._own.mkdir(mode=0o700, exist_ok=True)
        # A disk was full after an eviction, too, as where snapshots hold what is deleted, and still is
        self._evicts_in_vain = False
        self._thread_lock = threading.Lock()  # the lock of the file excludes processes, but not threads
        with self._locked():
            # A writer that was killed has left it, and no total counts it.
            (folder / INCOMING).unlink(missing_ok=True)
            self._make_room(0)

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `PageStore.read`; entries that are found count as used."""
        return [self._read(self._path(key)) for key in keys]

    def write(self, key: bytes, entry: bytes) -> bool:
        """See `PageStore.write`."""
        path, size = self._path(key), len(entry)
        if size > self._most_bytes or path.exists():
            return False
        try:
            with self._locked():
                used = self._used()
                if used + size > self._most_bytes:
                    used = self._make_room(size)
                try:
                    self._put(path, entry, used)
                    self._evicts_in_vain = False
                except OSError as error:
                    if error.errno not in _FULL or self._evicts_in_vain:
                        raise
                    self._evicts_in_vain = True
                    self._put(path, entry, self._make_room(size, is_full=True))
                    self._evicts_in_vain = False
        except OSError as error:
            raise StoreFailed(str(error)) from error
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `PageStore.remove`."""
        try:
            with self._locked():
                for key in keys:
                    path = self._path(key)
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        size = path.lstat().st_size
                        path.unlink()
                        self._book(max(0, self._used() - size))
        except OSError as error:
            raise StoreFailed(str(error)) from error

    def close(self) -> None:
        """See `PageStore.close`."""
        os.close(self._lock)

    def _read(self, path: Path) -> bytes | None:
        """Return an entry, or b"" for what is no plain file, or one that is too large."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _NO_FILE:
                return b""
            raise StoreFailed(str(error)) from error
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size > self._most_entry_bytes:
                return b""
            parts, left = list[bytes](), self._most_entry_bytes
            while left and (part := os.read(file, left)):
                parts.append(part)
                left -= len(part)
            _use(file)
        except OSError as error:
            raise StoreFailed(str(error)) from error
        finally:
            os.close(file)
        return b"".join(parts)

    def _put(self, path: Path, entry: bytes, used: int) -> None:
        """Write a file that appears under its name when it is whole, and add it to the `used` bytes.

        The lock admits one writer at a time. Nothing is left of a file that cannot be written.
        """
        incoming = self._folder / INCOMING
        self._book(used + len(entry))
        try:
            for each in (self._own, path.parent):
                each.mkdir(mode=0o700, exist_ok=True)
            file = os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                rest = memoryview(entry)
                while rest:
                    rest = rest[os.write(file, rest) :]
            finally:
                os.close(file)
            _use(incoming)
            incoming.rename(path)
        except OSError:
            incoming.unlink(missing_ok=True)
            self._book(used)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                for _ in range(_MOST_LOCKS):
                    if self._is_lock_there():
                        break
                    before, self._lock = self._lock, self._open_lock()
                    os.close(before)
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                if not os.fstat(self._lock).st_size:  # a new one, into which nobody has counted the files
                    self._make_room(0)
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _open_lock(self) -> int:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _is_lock_there(self) -> bool:
        """Whether the file that is open is still the one in the folder."""
        try:
            return os.path.samestat(os.fstat(self._lock), (self._folder / LOCK).stat())
        except FileNotFoundError:
            return False

    def _used(self) -> int:
        return int.from_bytes(os.pread(self._lock, _COUNT_BYTES, 0), "little")

    def _book(self, num_bytes: int) -> None:
        os.pwrite(self._lock, num_bytes.to_bytes(_COUNT_BYTES, "little"), 0)

    def _make_room(self, size: int, *, is_full: bool = False) -> int:
        """Delete the least recently used files until `size` fits with a reserve.

        Where the disk is full, what the files have now is all that it holds of them. Returns the bytes that
        remain.
        """
        files = sorted(self._files())
        used = sum(each.st_size for _, each, _ in files)
        most = min(used, self._most_bytes) if is_full else self._most_bytes
        target = most - size
        if used > target:
            target = max(0, target - int(_ROOM * most))
        for _, found, path in files:
            if used <= target:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            used -= found.st_size
        self._book(used)
        return used

    def _files(self) -> Iterator[tuple[int, os.stat_result, Path]]:
        """Yield all entries, of any identity, with the time of their last use.

        It is 0 where the clock has been set back since: such files would otherwise outlast all later ones.
        """
        latest_ns = time.time_ns() + _AHEAD_NS
        for path in self._folder.glob("*/*/*"):
            if _ENTRY.fullmatch("/".join(path.parts[-3:])):
                with contextlib.suppress(FileNotFoundError):
                    found = path.lstat()
                    if not stat.S_ISDIR(found.st_mode):
                        yield found.st_mtime_ns if found.st_mtime_ns <= latest_ns else 0, found, path

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._own / name[:2] / name


def _use(path: Path | int) -> None:
    """Record when a file was used, in nanoseconds, because the system's own file times advance in ticks."""
    now_ns = time.time_ns()
    os.utime(path, ns=(now_ns, now_ns))
