"""Move page bytes from one engine into another's memory.

A transport has two calls: the engine that answers exposes a window of its memory once for each connection
(`expose`), and the engine that computes prompts writes bytes there (`put`). Messages go over a socket beside
it, whatever the transport.

mooncake.py does both by Mooncake's transfer engine. A write must have arrived when `put` returns.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"pages-[0-9a-f]{32}")
_NAMED_S = 60.0  # A peer opens a window within connection.GREETING_S, or its connection ends


class PageWindow(Protocol):
    """Memory of the engine that answers, into which page bytes are put."""

    description: bytes  # bytes from which the peer can reach the window
    memory: Bytes

    def reached(self) -> None:
        """Note that the peer has opened the window."""
        ...

    def close(self) -> None:
        """Let nobody write to the window any more: its connection has ended. Any thread may call it."""
        ...


class Reach(Protocol):
    """The same memory, seen by the peer."""

    def put(self, offset: int, data: Bytes) -> Bytes | None:
        """Write bytes there.

        Any bytes that are returned must follow the message about them on the socket, and reach the window
        that way.
        """
        ...

    def close(self) -> None:
        """Write no more: the connection has ended. Any thread may call it, also while another one writes."""
        ...


class Transport(Protocol):
    """A transport of page bytes."""

    def expose(self, num_bytes: int) -> PageWindow:
        """Create a window; raises OSError if there is no memory for it."""
        ...

    def reach(self, description: bytes, num_bytes: int) -> Reach:
        """Open another engine's window; raises OSError or ValueError if that is impossible."""
        ...


class _Memory:
    """A window in this process, which is filled from the socket."""

    def __init__(self, num_bytes: int) -> None:
        self.description = b""
        self.memory: Bytes = np.empty(num_bytes, dtype=np.uint8)

    def reached(self) -> None:
        """Do nothing: the peer opens nothing."""

    def close(self) -> None:
        """Do nothing: only the connection's own thread writes to it."""


class _Behind:
    """Sends bytes over the socket, behind the messages about them."""

    def put(self, offset: int, data: Bytes) -> Bytes | None:
        """Return the bytes, to be sent with the message."""
        return data

    def close(self) -> None:
        """Do nothing: the socket ends with the connection."""


class Tcp:
    """Sends bytes over the connection, between any two machines."""

    def expose(self, num_bytes: int) -> PageWindow:
        """Allocate memory of this process."""
        return _Memory(num_bytes)

    def reach(self, description: bytes, num_bytes: int) -> Reach:
        """Return a reach that needs no window."""
        return _Behind()


class _SharedWindow:
    """A file in memory, whose name is removed once the peer has opened it.

    A process that is killed before that leaves it behind, until this user's next window is exposed.
    """

    def __init__(self, num_bytes: int) -> None:
        self._path = _FOLDER / f"pages-{secrets.token_hex(16)}"
        self.description = self._path.name.encode()
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Allocate now rather than by a page fault when it is written
            os.posix_fallocate(file, 0, num_bytes)
            self.memory: Bytes = np.frombuffer(mmap.mmap(file, num_bytes), dtype=np.uint8)
        except OSError:
            self.reached()
            raise
        finally:
            os.close(file)

    def reached(self) -> None:
        """Remove the file's name."""
        with suppress(FileNotFoundError):
            self._path.unlink()

    def close(self) -> None:
        """Remove the name of a window that nobody has reached; who has it open shares no other memory."""
        self.reached()

    def __del__(self) -> None:
        self.reached()


def _remove_forgotten() -> None:
    """Remove the windows of this user whose process has ended before a peer opened them."""
    oldest_s = time.time() - _NAMED_S
    for path in _FOLDER.glob("pages-*"):
        with suppress(OSError):  # another process may remove it, too
            found = path.lstat()
            is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if is_own and found.st_mtime < oldest_s and _NAME.fullmatch(path.name):
                path.unlink()


class _SharedReach:
    def __init__(self, memory: mmap.mmap) -> None:
        self._memory: Bytes = np.frombuffer(memory, dtype=np.uint8)

    def put(self, offset: int, data: Bytes) -> Bytes | None:
        """Copy the bytes, which are visible to the peer at once."""
        self._memory[offset : offset + len(data)] = data
        return None

    def close(self) -> None:
        """Do nothing: the memory is freed when neither side has it open."""


class SharedMemory:
    """Passes bytes through memory that two processes of one machine share."""

    def expose(self, num_bytes: int) -> PageWindow:
        """Create a file in memory that only this user may open."""
        _remove_forgotten()
        return _SharedWindow(num_bytes)

    def reach(self, description: bytes, num_bytes: int) -> Reach:
        """Open the peer's file, which does not exist on another machine."""
        name = description.decode("ascii", "replace")
        if not _NAME.fullmatch(name):
            raise ValueError("its window has no name of one")
        try:
            file = os.open(_FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise ValueError(
                "its shared memory is not on this machine; set server.page_transport to tcp there"
            ) from None
        try:
            found = os.fstat(file)
            if found.st_uid != os.geteuid():  # a user who can truncate the file could crash this process
                raise ValueError("its window is of another user; run both engines as one, or use tcp there")
            if found.st_size != num_bytes:
                raise ValueError(f"its window has not the {num_bytes} bytes that it says")
            return _SharedReach(mmap.mmap(file, num_bytes))
        finally:
            os.close(file)


TRANSPORTS: dict[str, Transport] = {"tcp": Tcp(), "shared_memory": SharedMemory()}


class Ring:
    """Allocates the bytes of a window in turn; they are freed in the same order."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._taken: list[tuple[int, int]] = []  # start and stop of each part in use, the oldest first

    def take(self, count: int) -> int | None:
        """Return the offset of `count` contiguous free bytes, or None if there are none now."""
        if not self._taken:
            start, stop = 0, self.num_bytes
        else:
            (oldest, _), (newest, start) = self._taken[0], self._taken[-1]
            stop = self.num_bytes
            if newest < oldest:
                stop = oldest
            elif start + count > stop:
                start, stop = 0, oldest
        if start + count > stop:
            return None
        self._taken.append((start, start + count))
        return start

    def give_back(self) -> None:
        """Free the oldest part; raises ValueError if none is in use."""
        if not self._taken:
            raise ValueError("a part was given back that was never taken")
        del self._taken[0]
