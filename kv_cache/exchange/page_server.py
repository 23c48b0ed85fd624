"""How do engines that answer reach this one, which computes prompts?

Each has a connection. What it wants is queued for the engine's thread, which is woken; parts of pages are
queued for a thread of the connection, which waits for the device and for room in the other side's window.
"""

from __future__ import annotations

import queue
import socket
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kv_cache.exchange.connection import Connection, Wake
from kv_cache.exchange.identity import PageIdentity, address_of_pages
from kv_cache.exchange.messages import (
    Damaged,
    Hello,
    PagePart,
    PagesWanted,
    PartTaken,
    Said,
    Unfit,
    Unwanted,
    Welcome,
)
from kv_cache.exchange.transports import TRANSPORTS, Bytes, Reach, Ring, Transport

MOST_CONNECTIONS = 256


@dataclass(frozen=True, slots=True)
class LinkAsked:
    """What another engine said; None: it is gone."""

    link: PageLink
    message: PagesWanted | Unwanted | None


class PageServer:
    """Listens for engines that answer. `most_part_bytes` is the most that is ever sent at once."""

    def __init__(
        self,
        endpoint: str,
        identity: PageIdentity,
        wake: Wake,
        *,
        most_part_bytes: int,
        transports: dict[str, Transport] = TRANSPORTS,
    ) -> None:
        self.identity, self.wake = identity, wake
        self.most_part_bytes = most_part_bytes
        self.transports = transports
        self.asked = queue.SimpleQueue[LinkAsked]()
        self.links = set[PageLink]()
        host, port = address_of_pages(endpoint)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="pages-accept", daemon=True).start()

    def close(self) -> None:
        """Take no more, and end what there is."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in [*self.links]:
            link.connection.end("this engine ends")

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                sock, _ = self._listener.accept()
                if len(self.links) >= MOST_CONNECTIONS:
                    sock.close()
                    continue
                link = PageLink(self)
                self.links.add(link)
                link.connection.start(sock)


class PageLink:
    """One engine that answers."""

    def __init__(self, server: PageServer) -> None:
        self._server = server
        self._reach: Reach | None = None
        self._ring = Ring(0)
        self._has_room = threading.Condition()
        self._unsent_bytes = 0
        self._is_unfit = False
        self.connection = Connection(self._take, self._lost)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of pages that were read and are not sent yet."""
        return self._unsent_bytes

    def part(
        self,
        number: int,
        layer: int,
        first_page: int,
        num_pages: int,
        num_bytes: int,
        wait: Callable[[], Bytes],
    ) -> None:
        """Send some pages of a layer, whose bytes are there when `wait` returns."""
        with self._has_room:
            self._unsent_bytes += num_bytes

        def job() -> tuple[Said, Bytes | None]:
            data, reach = wait(), self._reach
            assert reach is not None, "pages are sent to who said hello"
            offset = self._room(num_bytes)
            behind = reach.put(offset, data)
            with self._has_room:
                self._unsent_bytes -= num_bytes
            self._server.wake.ring()  # more may be read
            check = zlib.crc32(data.data)
            return PagePart(number, layer, first_page, num_pages, offset, num_bytes, check), behind

        self.connection.do(job)

    def _room(self, num_bytes: int) -> int:
        with self._has_room:
            while (offset := self._ring.take(num_bytes)) is None:
                if not self.connection.is_open:
                    raise ConnectionError("the other side is gone")
                self._has_room.wait()
            return offset

    def _take(self, message: Said) -> None:
        if isinstance(message, Hello):
            self._greet(message)
        elif self._is_unfit:
            return  # as it is being told
        elif self._reach is None:
            raise Damaged("it did not say hello")
        elif isinstance(message, PartTaken):
            with self._has_room:
                self._ring.give_back()
                self._has_room.notify()
        elif isinstance(message, PagesWanted | Unwanted):
            self._server.asked.put(LinkAsked(self, message))
            self._server.wake.ring()
        else:
            raise Damaged(f"an engine of answers said {type(message).__name__}")

    def _greet(self, hello: Hello) -> None:
        if self._reach is not None or self._is_unfit:
            raise Damaged("it said hello twice")
        problem = self._server.identity.difference(hello) or self._reached(hello)
        if problem is None:
            self.connection.say(Welcome())
        else:
            self._is_unfit = True  # it ends the connection when it has read why
            self.connection.say(Unfit(problem))

    def _reached(self, hello: Hello) -> str | None:
        """Find its window; or why that cannot be."""
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
            self._reach = transport.reach(hello.window, hello.window_bytes)
        except (OSError, ValueError) as error:
            return str(error)
        self._ring = Ring(hello.window_bytes)
        return None

    def _lost(self, why: str) -> None:
        self._server.links.discard(self)
        with self._has_room:
            self._has_room.notify()
        self._server.asked.put(LinkAsked(self, None))
        self._server.wake.ring()
