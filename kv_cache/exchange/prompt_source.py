"""Request pages from an engine that computes prompts.

There is one connection, which is dialled when it is first needed, and again after it was lost. No call waits:
what arrives is queued for the engine's thread, which is woken.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
import zlib
from dataclasses import dataclass

from borders.field_types import LONGEST_NAME
from borders.refusal import one_line
from borders.shared_secret import Unproven
from kv_cache.exchange.channel import NONE, Credentials
from kv_cache.exchange.connection import Connection, Stalled, Wake
from kv_cache.exchange.messages import (
    VERSION,
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
    framed,
)
from kv_cache.exchange.transports import TRANSPORTS, PageWindow, Transport

CONNECT_S = 2.0
# Pause before a lost engine is dialled again, and before one that does not fit is
LOST_S, UNFIT_S = 1.0, 30.0
# Pause after the engine left a message unfinished or a prompt waiting for too long
STALLED_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Came:
    """A message that arrived; None: the connection has ended, and with it all its transfers.

    `num_held` must be passed to `Connection.handled`.
    """

    connection: Connection
    message: PagePart | AllSent | NotSent | None
    num_held: int = 0


class PromptSource:
    """An engine of prompts at tcp://HOST:PORT. `identity` describes this engine."""

    def __init__(
        self,
        endpoint: str,
        identity: PageIdentity,
        wake: Wake,
        *,
        transport: str = "tcp",
        window_bytes: int = 2**26,
        transports: dict[str, Transport] = TRANSPORTS,
        credentials: Credentials = NONE,
    ) -> None:
        self.endpoint = endpoint
        self._credentials = credentials
        self._address = address_of_pages(endpoint)
        self._identity, self._wake = identity, wake
        self._name, self._transport, self._window_bytes = transport, transports[transport], window_bytes
        self.came = queue.SimpleQueue[Came]()
        self._life: _Life | None = None
        self._not_before_s = 0.0
        self._arrived_s = 0.0  # when all pages of a prompt last arrived
        self._number = 0

    def want(
        self,
        tokens: bytes,
        cache_salt: str,
        first_page: int,
        lease_s: float,
        priority: int = 0,
        tenant: str = "",
    ) -> tuple[Connection, int] | None:
        """Request pages; return the connection and the number of the transfer.

        Returns None if the engine was lost a moment ago, or let others wait in vain; and for names that are
        too long to be told, which would end the connection for all.
        """
        if max(len(cache_salt), len(tenant)) > LONGEST_NAME:
            return None
        if time.monotonic() < self._not_before_s:
            return None
        if self._life is None or not self._life.connection.is_open:
            self._life = _Life(self)
        self._number += 1
        connection = self._life.connection
        connection.say(PagesWanted(self._number, tokens, cache_salt, first_page, lease_s, priority, tenant))
        return connection, self._number

    def was_late(self, since_s: float) -> None:
        """Note that a prompt requested at `since_s` (by `time.monotonic`) did not arrive in time.

        Unless another one has arrived since, nothing is requested for some time, because each request would
        wait as long. If something requested before still arrives, requests are sent again.
        """
        if self._arrived_s < since_s:
            self._not_before_s = time.monotonic() + STALLED_S
            log.warning(
                "pages from %s: none came in time; it is left alone for %g s", self.endpoint, STALLED_S
            )

    def has_arrived(self) -> None:
        """Note that all pages of a prompt have arrived."""
        self._arrived_s = time.monotonic()
        self._not_before_s = 0.0

    def close(self) -> None:
        """End the connection, if there is one."""
        if self._life is not None:
            self._life.connection.end("this engine ends")

    def _hello(self, window: PageWindow) -> bytes:
        own = self._identity
        return framed(
            Hello(
                VERSION,
                own.model,
                own.page_size,
                own.layout,
                self._name,
                window.description,
                self._window_bytes,
                own.drafts,
                own.long_factors,
            )
        )

    def _ended(self, connection: Connection, why: str, pause_s: float) -> None:
        self._not_before_s = time.monotonic() + pause_s
        log.warning("pages from %s: %s", self.endpoint, one_line(why))
        self.came.put(Came(connection, None))
        self._wake.ring()


class _Life:
    """One connection, from the time it is dialled."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._pause_s = LOST_S
        self._is_welcome = False
        self._window: PageWindow | None = None
        self.connection = Connection(self._take, self._ended, credentials=source._credentials, dials=True)
        try:
            threading.Thread(target=self._dial, name="pages-dial", daemon=True).start()
        except RuntimeError as error:  # the system has no thread for it
            self.connection.end(str(error))

    def _dial(self) -> None:
        source = self._source
        try:
            sock = socket.create_connection(source._address, CONNECT_S)
        except (OSError, ValueError) as error:  # a UnicodeError means that the name of a host cannot be one
            self.connection.end(str(error))
            return
        try:
            self._window = window = source._transport.expose(source._window_bytes)
        except (OSError, RuntimeError, MemoryError) as error:  # Mooncake's own are RuntimeErrors
            self.connection.end(str(error) or type(error).__name__)
            sock.close()
            return
        self.connection.window = window.memory
        try:
            self.connection.start(sock, source._hello(window))
        except (OSError, RuntimeError) as error:  # a RuntimeError means that the system has no thread for it
            self.connection.end(str(error))
        if not self.connection.is_open:  # it may have ended before there was a window to close
            window.close()

    def _ended(self, why: str) -> None:
        if self._window is not None:
            self._window.close()
        if isinstance(self.connection.error, Stalled):
            self._pause_s = STALLED_S
        if isinstance(self.connection.error, Unproven):
            self._pause_s = UNFIT_S
        self._source._ended(self.connection, why, self._pause_s)

    def _take(self, message: Said) -> None:
        match message:
            case Welcome():
                assert self._window is not None, "the connection was started with a window"
                self._window.reached()
                self._is_welcome = True
                self.connection.greeted()
            case Unfit(why):
                self._pause_s = UNFIT_S
                raise ValueError(why)
            case PagePart() | AllSent() | NotSent() if self._is_welcome:
                if isinstance(message, PagePart):
                    self._check(message)
                self._source.came.put(Came(self.connection, message, self.connection.keep()))
                self._source._wake.ring()
            case _:
                raise Damaged(f"an engine of prompts said {type(message).__name__}")

    def _check(self, part: PagePart) -> None:
        if zlib.crc32(self.connection.part(part).data) != part.check:
            raise Damaged("bytes of pages are not as they were sent")


def taken(connection: Connection) -> None:
    """Tell the peer that the oldest part was taken out of its window."""
    connection.say(PartTaken())


def unwanted(connection: Connection, number: int) -> None:
    """Tell the peer that a transfer is no longer wanted."""
    connection.say(Unwanted(number))
