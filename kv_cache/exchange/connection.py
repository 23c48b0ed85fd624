"""How do messages about pages travel, while an engine steps?

The engine's thread never waits for the other side: one thread of a connection sends what is queued, one
receives. Whatever goes wrong with either ends the connection, once, with the reason.

What the other side says is bounded here in bytes and in time, before anything is done with it: the length of
a message, the memory that messages take until the engine has handled them, the time to the greeting, and the
time from the first byte of a message to its last. Only time counts in which this side waited for the other's
bytes: when it waits for its own memory, or is itself stopped, the other is not to blame.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kv_cache.exchange.message_memory import UnhandledBytes
from kv_cache.exchange.messages import (
    HEAD,
    LONGEST_SHORT,
    Damaged,
    PagePart,
    Said,
    framed,
    lengths_of,
    unframed,
)
from kv_cache.exchange.transports import Bytes

GREETING_S = 5.0  # from the connection to the first message of the other side
MESSAGE_S = 5.0  # from the first byte of a message to its last, and a second more for each
SLOWEST_BYTES_S = 2**20  # bytes
UNREAD_S = 60.0  # for which the other side may take nothing of what is sent
MOST_UNREAD = 2**16  # messages that are queued to be sent
_CHUNK_BYTES = 2**16  # memory for a message is taken as its bytes come
_MESSAGE_BYTES = 2**10  # what a message takes beside its bytes
SHORT_BYTES = 2**19  # of short messages of one connection that were not handled yet
_POLL_S = 0.25  # a longer wait than this was longer by our own slowness
UNHEARD_S = 60  # after which a host that does not acknowledge that it is there is lost

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


class Stalled(Damaged):
    """A message was begun and did not come in time, or no greeting did."""


class Connection:
    """A socket to another engine, with a thread for each way once it is started; what is said before waits.

    `take` gets each message, in the receiving thread; a ConnectionError or ValueError of it ends the
    connection. `lost` gets the reason of the end, once. Bytes that come behind a message about some part are
    put into `window`. A `take` that queues a message for the engine's thread calls `keep`, and the engine's
    thread calls `handled`. Until `greeted` is called, messages are short and the time is limited.

    Short messages wait only for room in memory of this connection's own, longer ones for that in `unhandled`.
    """

    def __init__(
        self,
        take: Callable[[Said], None],
        lost: Callable[[str], None],
        unhandled: UnhandledBytes | None = None,
    ) -> None:
        self._socket: socket.socket | None = None
        self._take, self._lost = take, lost
        self._short, self._long = UnhandledBytes(SHORT_BYTES), unhandled or UnhandledBytes(0)
        self._num_held = 0  # bytes, for the message that is being received or taken
        self._longest_message = LONGEST_SHORT
        self._is_greeted = False
        self.window: Bytes = np.empty(0, dtype=np.uint8)
        self._jobs = queue.SimpleQueue[Job | None]()
        self._lock = threading.Lock()
        self.is_open = True
        self.error: Exception | None = None  # what the other side is to blame for, if that has ended it

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
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(UNREAD_S), 0))
        for work in (self._receive, self._send):
            job = partial(work, sock)
            threading.Thread(target=self._guarded, args=(job,), name="pages", daemon=True).start()

    def greeted(self, longest_message: int = LONGEST_SHORT) -> None:
        """The other side has said who it is: it may be silent between messages, of so many bytes each."""
        self._is_greeted, self._longest_message = True, longest_message
        if self._socket is not None:
            _notice_silence(self._socket)

    def say(self, message: Said) -> None:
        """Send a message after all that is queued."""
        if self._jobs.qsize() >= MOST_UNREAD:
            self.end("the other side does not read what it is told")
        self._jobs.put(lambda: (message, None))

    def do(self, job: Job) -> None:
        """Send what a job makes, in its turn; it runs in the sending thread, and may wait there."""
        self._jobs.put(job)

    def keep(self) -> int:
        """Keep the message that is being taken in memory; returns what is due to `handled`."""
        held, self._num_held = self._num_held, 0
        return held

    def handled(self, num_held: int) -> None:
        """A message that was kept is needed no more."""
        is_long = num_held > LONGEST_SHORT + _MESSAGE_BYTES
        (self._long if is_long else self._short).give_back(self, num_held)

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
        """Run a thread's work. What the other side is to blame for arrives here as an OSError or a ValueError
        (Damaged and a shut socket among them), and ends this connection alone. Anything else is a defect of
        ours: the connection ends as well, and the thread shows the traceback.
        """
        try:
            work()
        except BlockingIOError:
            self._fail(Stalled(f"the other side took nothing for {UNREAD_S:g} s"))
        except (OSError, ValueError) as error:
            self._fail(error)
        finally:
            self.end("a defect in this engine")

    def _fail(self, error: Exception) -> None:
        if self.is_open:
            self.error = error
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
        incoming = _Incoming(sock)
        incoming.left_s = GREETING_S
        head = bytearray(HEAD.size)
        while True:
            num_read = 0
            if self._is_greeted:
                num_read = incoming.begin(memoryview(head))
                incoming.left_s = MESSAGE_S
            incoming.fill(memoryview(head)[num_read:])
            length, num_bytes, check = lengths_of(bytes(head), self._longest_message)
            if self._is_greeted:
                incoming.left_s += (length + num_bytes) / SLOWEST_BYTES_S
            memory = self._long if length > LONGEST_SHORT else self._short
            try:
                message = unframed(self._body(incoming, length, memory), num_bytes, check)
                memory.complete(self)
                if num_bytes:
                    if not isinstance(message, PagePart) or num_bytes != message.num_bytes:
                        raise Damaged("bytes came behind a message that tells of none")
                    incoming.fill(self.part(message).data)
                self._take(message)
            finally:
                memory.complete(self)
                memory.give_back(self, self.keep())

    def _body(self, incoming: _Incoming, length: int, memory: UnhandledBytes) -> bytes:
        """Read a message, for which memory is taken as its bytes come."""
        parts = []
        self._hold(memory, _MESSAGE_BYTES)
        while length:
            part = bytearray(min(length, _CHUNK_BYTES))
            self._hold(memory, len(part))
            incoming.fill(memoryview(part))
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _hold(self, memory: UnhandledBytes, count: int) -> None:
        memory.take(self, count, lambda: self.is_open)
        self._num_held += count

    def part(self, part: PagePart) -> Bytes:
        """The bytes of the window that a message tells of; raises Damaged where it has not so many."""
        start, stop = part.offset, part.offset + part.num_bytes
        if not 0 <= start <= stop <= len(self.window):
            raise Damaged(f"bytes {start} to {stop} of a window of {len(self.window)} were told of")
        return self.window[start:stop]


class _Incoming:
    """Reads from a socket, and waits `left_s` for the bytes of the other side at most."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.left_s = 0.0

    def begin(self, room: memoryview) -> int:
        """Wait for the next bytes, however long it takes; how many came. Raises ConnectionError."""
        count = self._sock.recv_into(room)
        if not count:
            raise ConnectionError("the other side has ended the connection")
        return count

    def fill(self, room: memoryview) -> None:
        """Read as many bytes as there is room for; raises ConnectionError."""
        at = 0
        while at < len(room):
            while not self._poll.poll(0):  # bytes that are there came in time, however late this side is
                if self.left_s <= 0:
                    raise Stalled("the other side has stalled: its message did not come in time")
                self._wait()
            at += self.begin(room[at:])

    def _wait(self) -> None:
        """Wait a moment, and count it; what it took longer than that, this side was not running."""
        start_s, most_s = time.monotonic(), min(_POLL_S, self.left_s)
        self._poll.poll(math.ceil(1e3 * most_s))
        self.left_s -= min(most_s, time.monotonic() - start_s)


def _notice_silence(sock: socket.socket) -> None:
    """Let the system end a connection when its host has vanished, for its place to be free again."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNHEARD_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, UNHEARD_S // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
