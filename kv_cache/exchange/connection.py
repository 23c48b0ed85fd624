"""How do messages about pages travel, while an engine steps?

The engine's thread never waits for the other side: one thread of a connection sends what is queued, one
receives. Whatever goes wrong with either ends the connection, once, with the reason.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kv_cache.exchange.messages import HEAD, Damaged, PagePart, Said, framed, lengths_of, unframed
from kv_cache.exchange.transports import Bytes

Job = Callable[[], tuple[Said, Bytes | None]]  # makes a message, and the bytes behind it, when it is its turn


class Wake:
    """Wakes a thread that polls `fd`; any thread may ring it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        """Wake it."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """It is awake."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class Connection:
    """A socket to another engine, with a thread for each way once it is started; what is said before waits.

    `take` gets each message, in the receiving thread; a ConnectionError or ValueError of it ends the
    connection. `lost` gets the reason of the end, once. Bytes that come behind a message about some part are
    put into `window`.
    """

    def __init__(self, take: Callable[[Said], None], lost: Callable[[str], None]) -> None:
        self._socket: socket.socket | None = None
        self._take, self._lost = take, lost
        self.window: Bytes = np.empty(0, dtype=np.uint8)
        self._jobs = queue.SimpleQueue[Job | None]()
        self._lock = threading.Lock()
        self.is_open = True

    def start(self, sock: socket.socket) -> None:
        """Send and receive from now on, over this socket."""
        with self._lock:
            self._socket = sock
            has_ended = not self.is_open
        if has_ended:
            sock.close()
            return
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for work in (self._receive, self._send):
            job = partial(work, sock)
            threading.Thread(target=self._guarded, args=(job,), name="pages", daemon=True).start()

    def say(self, message: Said) -> None:
        """Send a message after all that is queued."""
        self._jobs.put(lambda: (message, None))

    def do(self, job: Job) -> None:
        """Send what a job makes, in its turn; it runs in the sending thread, and may wait there."""
        self._jobs.put(job)

    def end(self, why: str) -> None:
        """End it; the other side learns that, too. What is queued is not sent any more."""
        with self._lock:
            if not self.is_open:
                return
            self.is_open = False
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        self._jobs.put(None)
        self._lost(why)

    def _guarded(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except (OSError, ValueError) as error:  # Damaged and a shut socket among them
            self.end(str(error) or type(error).__name__)

    def _send(self, sock: socket.socket) -> None:
        while (job := self._jobs.get()) is not None and self.is_open:
            message, behind = job()
            if behind is None:
                sock.sendall(framed(message))
            else:
                sock.sendall(framed(message, len(behind)))
                sock.sendall(behind.data)

    def _receive(self, sock: socket.socket) -> None:
        head = bytearray(HEAD.size)
        while True:
            _fill(sock, memoryview(head))
            length, num_bytes, check = lengths_of(bytes(head))
            body = bytearray(length)
            _fill(sock, memoryview(body))
            message = unframed(bytes(body), num_bytes, check)
            if num_bytes:
                if not isinstance(message, PagePart) or num_bytes != message.num_bytes:
                    raise Damaged("bytes came behind a message that tells of none")
                _fill(sock, self.part(message).data)
            self._take(message)

    def part(self, part: PagePart) -> Bytes:
        """The bytes of the window that a message tells of; raises Damaged where it has not so many."""
        start, stop = part.offset, part.offset + part.num_bytes
        if not 0 <= start <= stop <= len(self.window):
            raise Damaged(f"bytes {start} to {stop} of a window of {len(self.window)} were told of")
        return self.window[start:stop]


def _fill(sock: socket.socket, room: memoryview) -> None:
    at = 0
    while at < len(room):
        count = sock.recv_into(room[at:])
        if not count:
            raise ConnectionError("the other side has ended the connection")
        at += count
