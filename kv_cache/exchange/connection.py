"""Send and receive messages about pages beside the engine's steps.

The engine's thread never waits for the peer: a connection has one thread that sends what is queued and one
that receives. Any failure of either ends the connection, once, with the reason.

What the peer sends is bounded in bytes and in time before it is acted on: the length of a message, the memory
of messages that the engine has not handled, the time to the greeting, and the time from the first byte of a
message to its last. Only time in which this side waited for the peer's bytes counts: when this side waits for
its own memory, or is itself stopped, the peer is not to blame.

All connections share the memory for long messages. A connection takes from it as bytes arrive, never for what
is only announced, and at most its share. Incomplete messages cannot wait for each other for ever, because one
at a time may complete itself beyond the pool.
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
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from borders.shared_secret import Unproven, prove_as_dialler, prove_as_listener
from kv_cache.exchange.channel import NONE, Channel, Credentials, Encrypted, Plain
from kv_cache.exchange.messages import (
    HEAD,
    LONGEST_SHORT,
    Damaged,
    PagePart,
    Said,
    Unfit,
    framed,
    lengths_of,
    unframed,
)
from kv_cache.exchange.transports import Bytes


class UnhandledBytes:
    """A pool of memory that several connections share.

    `most_of_one` is the share of one connection, and at least its longest message; at most one such message
    may exceed `num_bytes`.
    """

    def __init__(self, num_bytes: int, most_of_one: int | None = None) -> None:
        self._num_left = num_bytes
        self._most_of_one = num_bytes if most_of_one is None else most_of_one
        self._num_of = Counter[object]()
        self._overdrawn_by: object | None = None
        self._has_room = threading.Condition()

    def take(self, holder: object, count: int, is_open: Callable[[], bool]) -> None:
        """Wait for so many bytes; raises ConnectionError if the connection that needs them ends."""
        with self._has_room:
            while not self._may_take(holder, count):
                if not is_open():
                    raise ConnectionError("the connection has ended")
                self._has_room.wait(1.0)  # the end of a connection is not notified
            if self._num_left < count:
                self._overdrawn_by = holder
            self._num_left -= count
            self._num_of[holder] += count

    def complete(self, holder: object) -> None:
        """Note that a holder's message is complete, or will never be."""
        with self._has_room:
            if self._overdrawn_by is holder:
                self._overdrawn_by = None
                self._has_room.notify_all()

    def give_back(self, holder: object, count: int) -> None:
        """Return `count` bytes to the pool."""
        with self._has_room:
            self._num_left += count
            self._num_of[holder] -= count
            if not self._num_of[holder]:
                del self._num_of[holder]
            self._has_room.notify_all()

    def _may_take(self, holder: object, count: int) -> bool:
        if self._num_of[holder] + count > self._most_of_one:
            return False
        if self._num_left >= count or self._overdrawn_by is holder:
            return True
        # An overdraft must be paid back before the next
        return self._overdrawn_by is None and self._num_left >= 0


GREETING_S = 5.0  # time from the connection to the peer's first message, its proof included
MESSAGE_S = 5.0  # time from the first byte of a message to its last, plus a second for each SLOWEST_BYTES_S
SLOWEST_BYTES_S = 2**20  # bytes a second
UNREAD_S = 60.0  # time for which the peer may read nothing of what is sent
MOST_UNREAD = 2**16  # messages that are queued to be sent
_CHUNK_BYTES = 2**16  # memory for a message is taken as its bytes arrive
_MESSAGE_BYTES = 2**10  # memory that a message takes beside its bytes
# Memory for short messages of one connection that have not been handled
SHORT_BYTES = 2**19
_POLL_S = 0.25  # what a wait takes beyond this is due to this process being slow
UNHEARD_S = 60  # time after which a host that does not answer keep-alives is lost
ASKS_FOR_SECRET = "set server.pages_key_file to files of the same content in both engines"

# Makes a message, and the bytes behind it, in the sending thread
Job = Callable[[], tuple[Said, Bytes | None]]


class Wake:
    """Wakes a thread that polls `fd`; any thread may call `ring`.

    The descriptor is closed with the last reference, because a receiving thread may ring after its engine has
    ended, and would otherwise write to whatever has the number by then.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd).atexit = False

    def ring(self) -> None:
        """Wake the thread."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Reset the event after waking."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class Stalled(Damaged):
    """A message was begun and did not arrive in time, or no greeting did."""


class Connection:
    """A socket to another engine, with one thread for each direction once it is started.

    Messages sent before that are queued.

    `take` receives each message, in the receiving thread; a ConnectionError or ValueError of it ends the
    connection. `lost` receives the reason of the end, once. Bytes behind a message about a part of pages are
    put into `window`. A `take` that queues a message for the engine's thread calls `keep`, and the engine's
    thread calls `handled`. Until `greeted` is called, messages must be short and the time is limited.

    Short messages wait only for memory of this connection's own, longer ones for memory of `unhandled`.

    Before any message, both sides encrypt and prove themselves as the `credentials` say; `dials` says which
    side this one is. Nothing that was queued is sent before.
    """

    def __init__(
        self,
        take: Callable[[Said], None],
        lost: Callable[[str], None],
        unhandled: UnhandledBytes | None = None,
        *,
        credentials: Credentials = NONE,
        dials: bool = False,
    ) -> None:
        self._credentials, self._dials = credentials, dials
        self._socket: socket.socket | None = None
        self._may_send = threading.Event()  # both sides have proved themselves, or the connection has ended
        self._take, self._lost = take, lost
        self._short, self._long = UnhandledBytes(SHORT_BYTES), unhandled or UnhandledBytes(0)
        self._num_held = 0  # bytes held for the message that is being received or taken
        self._longest_message = LONGEST_SHORT
        self._is_greeted = False
        self.window: Bytes = np.empty(0, dtype=np.uint8)
        self._jobs = queue.SimpleQueue[Job | None]()
        self._lock = threading.Lock()
        self._num_running = 0  # threads that use the socket
        self.is_open = True
        self.error: Exception | None = None  # the peer's fault that ended the connection, if any

    def start(self, sock: socket.socket, first: bytes = b"") -> None:
        """Send and receive over this socket from now on; `first` is sent before what was queued."""
        with self._lock:
            self._socket = sock
            has_ended = not self.is_open
        if has_ended:
            sock.close()
            return
        try:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(UNREAD_S), 0))
            channel = self._channel_over(sock)
        except OSError:
            sock.close()
            raise
        incoming = _Incoming(sock, channel)
        for job in (partial(self._receive, channel, incoming, first), partial(self._send, channel)):
            with self._lock:
                self._num_running += 1
            try:
                threading.Thread(target=self._guarded, args=(job,), name="pages", daemon=True).start()
            except RuntimeError:
                self._leave(sock)
                raise

    def greeted(self, longest_message: int = LONGEST_SHORT) -> None:
        """Note that the peer has identified itself.

        It may be silent between messages, which have at most `longest_message` bytes.
        """
        self._is_greeted, self._longest_message = True, longest_message
        if self._socket is not None:
            _notice_silence(self._socket)

    def say(self, message: Said) -> None:
        """Queue a message."""
        if self._jobs.qsize() >= MOST_UNREAD:
            self.end("the peer does not read the messages that are sent to it")
        self._jobs.put(lambda: (message, None))

    def do(self, job: Job) -> None:
        """Queue a job, which makes a message in the sending thread and may wait there."""
        self._jobs.put(job)

    def keep(self) -> int:
        """Keep the memory of the message being taken; return the number of bytes to pass to `handled`."""
        held, self._num_held = self._num_held, 0
        return held

    def handled(self, num_held: int) -> None:
        """Free the memory of a message that was kept."""
        is_long = num_held > LONGEST_SHORT + _MESSAGE_BYTES
        (self._long if is_long else self._short).give_back(self, num_held)

    def end(self, why: str) -> None:
        """End the connection; the peer sees that too. What is still queued is not sent."""
        with self._lock:
            if not self.is_open:
                return
            self.is_open = False
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._may_send.set()
        self._jobs.put(None)
        self._lost(why)

    def _guarded(self, work: Callable[[], Any]) -> None:
        """Run a thread's work, and end the connection when it fails.

        A fault of the peer arrives here as an OSError or a ValueError (among them Damaged and a closed
        socket), and ends this connection alone. Anything else is a programming error: the connection ends as
        well, and the thread prints the traceback.
        """
        try:
            work()
        except BlockingIOError:
            self._fail(Stalled(f"the other side took nothing for {UNREAD_S:g} s"))
        except (OSError, ValueError) as error:
            self._fail(error)
        finally:
            self.end("a defect in this engine")
            assert self._socket is not None, "its threads are started with a socket"
            self._leave(self._socket)

    def _leave(self, sock: socket.socket) -> None:
        """Close the socket behind the last of its threads.

        If it were closed before, a thread that is about to poll it would wait for another file of its number.
        """
        with self._lock:
            self._num_running -= 1
            is_last = not self._num_running
        if is_last:
            sock.close()

    def _fail(self, error: Exception) -> None:
        if self.is_open:
            self.error = error
        self.end(str(error) or type(error).__name__)

    def _channel_over(self, sock: socket.socket) -> Channel:
        tls = self._credentials.tls
        return Plain(sock) if tls is None else Encrypted(sock, tls, dials=self._dials)

    def _send(self, channel: Channel) -> None:
        self._may_send.wait()
        while (job := self._jobs.get()) is not None and self.is_open:
            message, behind = job()
            if behind is None:
                channel.send(framed(message))
            else:
                channel.send(framed(message, len(behind)))
                channel.send(behind.data)

    def _prove(self, channel: Channel, incoming: _Incoming) -> None:
        """Encrypt, and let both sides prove that they hold the secret; raises ConnectionError."""
        channel.agree(incoming.wait)
        secret = self._credentials.secret
        if secret is None:
            return
        if not self._dials:
            try:
                prove_as_listener(secret, channel.send, incoming.exactly)
            except Unproven as error:
                # What is said to a peer that has not proved itself is the same for all
                with contextlib.suppress(OSError):
                    channel.send(framed(Unfit(f"{error}; {ASKS_FOR_SECRET}")))
                    incoming.drain()
                raise
            return
        try:
            prove_as_dialler(secret, channel.send, incoming.exactly)
        except Stalled:
            raise
        except ConnectionError as error:
            raise Unproven(f"{error}; {ASKS_FOR_SECRET}") from error

    def _receive(self, channel: Channel, incoming: _Incoming, first: bytes) -> None:
        incoming.left_s = GREETING_S
        self._prove(channel, incoming)
        if first:
            channel.send(first)
        self._may_send.set()
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
        """Read a message, taking memory for it as its bytes arrive."""
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
        """Return the bytes of the window that a message refers to.

        Raises Damaged if the window is too small.
        """
        start, stop = part.offset, part.offset + part.num_bytes
        if not 0 <= start <= stop <= len(self.window):
            raise Damaged(
                f"a message refers to bytes {start} to {stop} of a window of {len(self.window)} bytes"
            )
        return self.window[start:stop]


class _Incoming:
    """Reads from a channel, and waits at most `left_s` for the peer's bytes."""

    def __init__(self, sock: socket.socket, channel: Channel) -> None:
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.left_s = 0.0

    def begin(self, room: memoryview) -> int:
        """Wait for the next bytes for any time; return how many came. Raises ConnectionError."""
        while (count := self._channel.take(room)) is None:
            self._poll.poll()
        return count

    def fill(self, room: memoryview) -> None:
        """Read as many bytes as fit into `room`; raises ConnectionError."""
        at = 0
        while at < len(room):
            while (count := self._channel.take(room[at:])) is None:
                self.wait()
            at += count

    def exactly(self, count: int) -> bytes:
        """Return the next `count` bytes; raises ConnectionError."""
        read = bytearray(count)
        self.fill(memoryview(read))
        return bytes(read)

    def drain(self) -> None:
        """Drop what the peer still sends, so that it can read what it was told; raises ConnectionError.

        A connection that is closed with unread data is reset. Whoever sends more than a greeting is not
        listening.
        """
        self.exactly(LONGEST_SHORT)

    def wait(self) -> None:
        """Return when bytes have come; raises Stalled when they do not come in time.

        Bytes that have arrived count as in time, however late this side reads them.
        """
        while not self._poll.poll(0):
            if self.left_s <= 0:
                raise Stalled("the other side has stalled: its message did not come in time")
            self._wait()

    def _wait(self) -> None:
        """Wait for a moment and count it.

        Time beyond it was not the peer's, because this process did not run.
        """
        start_s, most_s = time.monotonic(), min(_POLL_S, self.left_s)
        self._poll.poll(math.ceil(1e3 * most_s))
        self.left_s -= min(most_s, time.monotonic() - start_s)


def _notice_silence(sock: socket.socket) -> None:
    """Have the system end a connection whose host has vanished, so that its place becomes free."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNHEARD_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, UNHEARD_S // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
