"""Serve pages to the engines that answer, from an engine that computes prompts.

Each peer has a connection. Its requests are queued for the engine's thread, which is woken; parts of pages
are queued for the connection's sending thread, which waits for the device and for room in the peer's window.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from borders.refusal import one_line
from borders.shared_secret import Unproven
from kv_cache.exchange.channel import NONE, Credentials
from kv_cache.exchange.connection import UNREAD_S, Connection, UnhandledBytes, Wake
from kv_cache.exchange.messages import (
    LONGEST_MESSAGE,
    LONGEST_SHORT,
    AllSent,
    Damaged,
    Hello,
    NotSent,
    PageIdentity,
    PagePart,
    PagesWanted,
    PartTaken,
    Said,
    Unfit,
    Unwanted,
    Welcome,
    address_of_pages,
)
from kv_cache.exchange.transports import TRANSPORTS, Bytes, Reach, Ring, Transport

MOST_CONNECTIONS = 256  # connections that have said hello
# Connections without a hello; the oldest gives way to a new one
MOST_UNGREETED = 64
MOST_UNHANDLED_BYTES = 2**27  # memory for messages longer than LONGEST_SHORT, from all peers
# Tokens of a prompt that gets an answer, even if requests may have fewer here
LONGEST_PROMPT = 2**20
_LOG_S = 1.0  # interval between two log lines about faults of peers, each with their number
_ACCEPT_AGAIN_S = 0.1  # pause after the system had no descriptor or thread for a connection

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkAsked:
    """A message of a peer; None: it is gone. `num_held` must be passed to `Connection.handled`."""

    link: PageLink
    message: PagesWanted | Unwanted | None
    num_held: int = 0


class PageServer:
    """Listens for engines that answer.

    `most_part_bytes` is the largest part that is ever sent. A prompt of up to twice the `most_tokens` of a
    request here is refused with a reason; a longer message ends its connection.
    """

    def __init__(
        self,
        endpoint: str,
        identity: PageIdentity,
        wake: Wake,
        *,
        most_part_bytes: int,
        most_tokens: int = LONGEST_PROMPT,
        transports: dict[str, Transport] = TRANSPORTS,
        credentials: Credentials = NONE,
    ) -> None:
        self.identity, self.wake = identity, wake
        self.credentials = credentials
        longest = 4 * max(LONGEST_PROMPT, 2 * most_tokens) + LONGEST_SHORT
        self.longest_message = min(longest, LONGEST_MESSAGE)
        self.most_part_bytes = most_part_bytes
        self.transports = transports
        self.asked = queue.SimpleQueue[LinkAsked]()
        share = max(MOST_UNHANDLED_BYTES // 8, self.longest_message + LONGEST_SHORT)
        self.unhandled = UnhandledBytes(MOST_UNHANDLED_BYTES, share)
        self.num_faults = 0  # connections that ended by a fault of the peer
        self._log_at_s = 0.0  # time of the next log line about faults
        self._lock = threading.Lock()
        self._ungreeted: dict[PageLink, None] = {}  # the oldest first
        self._greeted = set[PageLink]()
        self._is_closed = False
        host, port = address_of_pages(endpoint)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="pages-accept", daemon=True).start()

    @property
    def links(self) -> list[PageLink]:
        """All connections, with and without a hello."""
        with self._lock:
            return [*self._ungreeted, *self._greeted]

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self.links:
            link.connection.end("this engine ends")

    def has_greeted(self, link: PageLink) -> bool:
        """Give a peer that said hello a place of its own; return False if all are taken."""
        with self._lock:
            if len(self._greeted) >= MOST_CONNECTIONS or self._ungreeted.pop(link, link) is not None:
                return False
            self._greeted.add(link)
            return True

    def has_ended(self, link: PageLink, why: str, *, is_fault: bool) -> None:
        """Remove a connection that has ended; count and log a fault of the peer."""
        with self._lock:
            self._ungreeted.pop(link, None)
            self._greeted.discard(link)
            self.num_faults += is_fault
        if is_fault and time.monotonic() >= self._log_at_s:
            self._log_at_s = time.monotonic() + _LOG_S
            log.warning(
                "the connection of %s is ended, the fault no. %d of other engines: %s",
                link.peer,
                self.num_faults,
                one_line(why),
            )

    def _accept(self) -> None:
        log_at_s = 0.0
        while not self._is_closed:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    if time.monotonic() >= log_at_s:
                        log_at_s = time.monotonic() + _LOG_S
                        log.warning("no connection for pages can be taken: %s", error)
                    time.sleep(_ACCEPT_AGAIN_S)
                continue
            link = PageLink(self, f"{address[0]}:{address[1]}")
            with self._lock:
                self._ungreeted[link] = None
                oldest = next(iter(self._ungreeted)) if len(self._ungreeted) > MOST_UNGREETED else None
            if oldest is not None:
                oldest.connection.end("it had not said hello when others came")
            try:
                link.connection.start(sock)
            except (OSError, RuntimeError) as error:  # the peer is gone, or there is no thread for it
                link.connection.end(str(error))


class PageLink:
    """The connection to one engine that answers."""

    def __init__(self, server: PageServer, peer: str) -> None:
        self._server = server
        self.peer = peer
        self._reach: Reach | None = None
        self._ring = Ring(0)
        self._has_room = threading.Condition()
        self._unsent_bytes = 0
        self._is_unfit = False
        self._wanted = set[int]()  # numbers of transfers that are not over
        self.connection = Connection(self._take, self._lost, server.unhandled, credentials=server.credentials)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of pages that have been read and not yet sent."""
        return self._unsent_bytes

    def conclude(self, message: AllSent | NotSent) -> None:
        """Send the last message of a transfer."""
        self._wanted.discard(message.number)
        self.connection.say(message)

    def part(
        self,
        number: int,
        layer: int,
        first_page: int,
        num_pages: int,
        num_bytes: int,
        wait: Callable[[], Bytes],
    ) -> None:
        """Send some pages of a layer, whose bytes are ready when `wait` returns."""
        with self._has_room:
            self._unsent_bytes += num_bytes

        def job() -> tuple[Said, Bytes | None]:
            data, reach = wait(), self._reach
            assert reach is not None, "pages are sent to who said hello"
            offset = self._room(num_bytes)
            behind = reach.put(offset, data)
            with self._has_room:
                self._unsent_bytes -= num_bytes
            self._server.wake.ring()  # the engine may read more pages
            check = zlib.crc32(data.data)
            return PagePart(number, layer, first_page, num_pages, offset, num_bytes, check), behind

        self.connection.do(job)

    def _room(self, num_bytes: int) -> int:
        until_s = time.monotonic() + UNREAD_S
        with self._has_room:
            while (offset := self._ring.take(num_bytes)) is None:
                if not self.connection.is_open:
                    raise ConnectionError("the other side is gone")
                if not self._has_room.wait(until_s - time.monotonic()):
                    raise Damaged(f"no part was taken out of its window for {UNREAD_S:g} s")
            return offset

    def _take(self, message: Said) -> None:
        if isinstance(message, Hello):
            self._greet(message)
        elif self._is_unfit:
            return  # the peer is being told so
        elif self._reach is None:
            raise Damaged("it did not say hello")
        elif isinstance(message, PartTaken):
            with self._has_room:
                self._ring.give_back()
                self._has_room.notify()
        elif isinstance(message, PagesWanted) and (problem := self._problem(message)):
            self.connection.say(NotSent(message.number, problem))
        elif isinstance(message, PagesWanted | Unwanted):
            if isinstance(message, PagesWanted):
                self._wanted.add(message.number)
            elif message.number in self._wanted:
                self._wanted.discard(message.number)
            else:
                return  # the transfer is over
            self._server.asked.put(LinkAsked(self, message, self.connection.keep()))
            self._server.wake.ring()
        else:
            raise Damaged(f"an engine of answers said {type(message).__name__}")

    def _problem(self, wanted: PagesWanted) -> str | None:
        """Return why no engine could send what is wanted, or None.

        The token ids are checked later by the engine, which knows the vocabulary.
        """
        page_bytes = 4 * self._server.identity.page_size
        num_pages, num_left = divmod(len(wanted.tokens), page_bytes)
        if num_left or not num_pages:
            return f"{len(wanted.tokens)} bytes are no tokens of whole pages, each of {page_bytes} bytes"
        if wanted.first_page >= num_pages:
            return f"the first page that is wanted is {wanted.first_page}, and there are {num_pages}"
        return None

    def _greet(self, hello: Hello) -> None:
        if self._reach is not None or self._is_unfit:
            raise Damaged("it said hello twice")
        problem = self._server.identity.difference(hello) or self._reached(hello)
        if problem is None and not self._server.has_greeted(self):
            problem = f"{MOST_CONNECTIONS} engines are connected here, which is the most"
        if problem is None:
            self.connection.greeted(self._server.longest_message)
            self.connection.say(Welcome())
        else:
            self._is_unfit = True  # the peer ends the connection when it has read the reason
            self.connection.say(Unfit(one_line(problem)))

    def _reached(self, hello: Hello) -> str | None:
        """Open the peer's window; return why that is impossible, or None."""
        transport = self._server.transports.get(hello.transport)
        if transport is None:
            return (
                f"there is no transport {hello.transport} here; there is {', '.join(self._server.transports)}"
            )
        if hello.window_bytes < self._server.most_part_bytes:
            return (
                f"its window has {hello.window_bytes} bytes, and parts of {self._server.most_part_bytes} are"
                " sent; raise server.page_window_mib there"
            )
        try:
            self._reach = reach = transport.reach(hello.window, hello.window_bytes)
        except (MemoryError, OSError, ValueError) as error:
            return str(error) or type(error).__name__
        if not self.connection.is_open:  # it may have ended before there was a reach to close
            reach.close()
        self._ring = Ring(hello.window_bytes)
        return None

    def _lost(self, why: str) -> None:
        is_fault = isinstance(self.connection.error, Damaged | Unproven | ValueError) and not self._is_unfit
        self._server.has_ended(self, why, is_fault=is_fault)
        if self._reach is not None:
            self._reach.close()
        with self._has_room:
            self._has_room.notify()
        self._server.asked.put(LinkAsked(self, None))
        self._server.wake.ring()
