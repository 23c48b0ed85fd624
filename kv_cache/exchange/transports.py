"""How do bytes of pages get from one engine into another's memory?

In two calls: the engine that answers `expose`s a window of its memory once for each connection, and the one
that computes prompts `put`s bytes there. Messages go over a socket beside it, whatever the transport.

On hardware the two calls are those of Mooncake's transfer engine (register memory, write to a peer's) or of
HIXL's; neither is here, and neither was tried. A write must have arrived when `put` returns.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"pages-[0-9a-f]{32}")


class PageWindow(Protocol):
    """Memory of the engine that answers, into which bytes of pages are put."""

    description: bytes  # by which the other side reaches it
    memory: Bytes

    def reached(self) -> None:
        """The other side has reached it."""
        ...


class Reach(Protocol):
    """The same memory, seen from the other side."""

    def put(self, offset: int, data: Bytes) -> Bytes | None:
        """Put bytes there. What is returned goes behind the message that tells of them, and comes to lie
        there with it.
        """
        ...


class Transport(Protocol):
    """A way for bytes of pages."""

    def expose(self, num_bytes: int) -> PageWindow:
        """Make a window; raises OSError where there is no memory for it."""
        ...

    def reach(self, description: bytes, num_bytes: int) -> Reach:
        """Find another engine's window; raises OSError or ValueError where that cannot be."""
        ...


class _Memory:
    """A window in this process, which is filled from the socket."""

    def __init__(self, num_bytes: int) -> None:
        self.description = b""
        self.memory: Bytes = np.empty(num_bytes, dtype=np.uint8)

    def reached(self) -> None:
        """There is nothing to reach."""


class _Behind:
    """Bytes go over the socket, behind the messages that tell of them."""

    def put(self, offset: int, data: Bytes) -> Bytes | None:
        """They are sent with the message."""
        return data


class Tcp:
    """Bytes go over the connection, between any two machines."""

    def expose(self, num_bytes: int) -> PageWindow:
        """Memory of this process."""
        return _Memory(num_bytes)

    def reach(self, description: bytes, num_bytes: int) -> Reach:
        """There is nothing to find."""
        return _Behind()


class _SharedWindow:
    """A file in memory, whose name is gone once the other side has opened it: no crash leaves it behind."""

    def __init__(self, num_bytes: int) -> None:
        self._path = _FOLDER / f"pages-{secrets.token_hex(16)}"
        self.description = self._path.name.encode()
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, num_bytes)  # now, not by a fault when it is written to
            self.memory: Bytes = np.frombuffer(mmap.mmap(file, num_bytes), dtype=np.uint8)
        except OSError:
            self.reached()
            raise
        finally:
            os.close(file)

    def reached(self) -> None:
        """Take its name away."""
        with suppress(FileNotFoundError):
            self._path.unlink()

    def __del__(self) -> None:
        self.reached()


class _SharedReach:
    def __init__(self, memory: mmap.mmap) -> None:
        self._memory: Bytes = np.frombuffer(memory, dtype=np.uint8)

    def put(self, offset: int, data: Bytes) -> Bytes | None:
        """They are there at once."""
        self._memory[offset : offset + len(data)] = data
        return None


class SharedMemory:
    """Bytes go through memory that both processes of one machine see."""

    def expose(self, num_bytes: int) -> PageWindow:
        """A new file in memory that only this user may open."""
        return _SharedWindow(num_bytes)

    def reach(self, description: bytes, num_bytes: int) -> Reach:
        """Open it; on another machine it is not there."""
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
            if found.st_uid != os.geteuid():  # who may shorten it could end this process by that
                raise ValueError("its window is of another user; run both engines as one, or use tcp there")
            if found.st_size != num_bytes:
                raise ValueError(f"its window has not the {num_bytes} bytes that it says")
            return _SharedReach(mmap.mmap(file, num_bytes))
        finally:
            os.close(file)


TRANSPORTS: dict[str, Transport] = {"tcp": Tcp(), "shared_memory": SharedMemory()}


class Ring:
    """Which bytes of a window are free? They are given out in turn, and come back in the same order."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._taken: list[tuple[int, int]] = []  # where each part begins and ends, the oldest first

    def take(self, count: int) -> int | None:
        """Where so many bytes in a row are free; None while there are not."""
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
        """The oldest part is free again; raises ValueError where none is taken."""
        if not self._taken:
            raise ValueError("a part was given back that was never taken")
        del self._taken[0]
