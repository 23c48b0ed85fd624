"""Learn which pages a replica holds from the events that it publishes (`kv_cache.events`).

Batches missing in the sequence, as at first, are requested again; a request is also sent now and then when
nothing seems to be missing, since the last event may have been lost. When the connection ends, everything
that was reported is forgotten: a server may have replaced its engine, whose sequence starts from 0 again.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import itertools
import logging
import time

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from borders.addresses import is_loopback
from borders.refusal import one_line
from continuous_batching.routing.routing import Routing
from kv_cache.event_messages import STATE_KIND, AllBlocksCleared, BlockRemoved, BlockStored, decode
from kv_cache.events import END, SEQUENCE_BYTES, prove_as_reader, replay_endpoint

log = logging.getLogger("route")

_ASK_S = 2.0  # interval between requests when nothing seems to be missing
_MOST_PART_BYTES = 2**26  # most bytes of a message; a larger one ends the connection
_MOST_UNREAD = 4  # most messages waiting for each socket; a publisher with more is made to wait
_MOST_GROUPS = 64  # most groups of layers of a replica
_MOST_PAGES = 2**22  # most pages of a replica; one that reports more is judged by what was sent to it alone
_AGAIN_S = 0.1  # interval between requests when something is missing, and before the next connection
# Connections in a row without agreement on keys, after which the log says so, and the next ones wait longer
_MOST_UNPROVEN = 3
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # what fails for these may succeed later
_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def _means_every_address(name: str) -> bool:
    """Return whether this is an address to listen on, and not one to connect to."""
    try:
        return name == "*" or ipaddress.ip_address(name.strip("[]")).is_unspecified
    except ValueError:  # it is a host name
        return False


def is_of_others(endpoint: str, host: str) -> bool:
    """Return whether an endpoint of a server on this host is at another machine than this one."""
    kind, _, rest = reached_at(endpoint, host).partition("://")
    return kind == "tcp" and not is_loopback(rest.rpartition(":")[0])


def reached_at(endpoint: str, host: str) -> str:
    """Return the address at which to reach an endpoint that a server on this host listens on."""
    kind, _, rest = endpoint.partition("://")
    name, _, port = rest.rpartition(":")
    return f"tcp://{host}:{port}" if kind == "tcp" and _means_every_address(name) else endpoint


class PageReader:
    """Reads the events of one replica into the routing, which believes them while they can be read.

    With a `secret`, only publishers are believed that prove it. Raises ValueError for an endpoint that cannot
    be connected to, and OSError where the system lacks what a connection takes.
    """

    def __init__(
        self, endpoint: str, host: str, replica: int, routing: Routing, secret: bytes | None = None
    ) -> None:
        endpoint = reached_at(endpoint, host)
        self._endpoint, self._again_at = endpoint, replay_endpoint(endpoint)
        self._replica = replica
        self._routing = routing
        self._secret = secret
        self._num_unproven = 0  # connections in a row that ended before both sides had agreed on keys
        self._context, self._connections = zmq.asyncio.Context(), itertools.count()
        self._sockets: list[zmq.asyncio.Socket] = []  # those that are open
        self._asked_s = -1.0
        self.num_gaps = 0
        self._num_pages = 0  # number of pages that it reports
        self._task: asyncio.Task[None] | None = None
        try:
            self._connect()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            kind = OSError if error.errno in _SCARCE else ValueError
            raise kind(f"{endpoint}: {error.strerror}") from None

    def start(self) -> None:
        """Read for ever, in the running event loop."""
        self._routing.believe(self._replica)
        self._task = asyncio.get_running_loop().create_task(self._read())

    def close(self) -> None:
        """Stop reading, and forget what was reported."""
        if self._task is not None:
            self._task.cancel()
        self._context.destroy(linger=0)
        self._forget()

    def _connect(self) -> None:
        """Connect new sockets, which have received nothing yet; raises ZMQError."""
        self._live, self._again = self._socket(zmq.SUB), self._socket(zmq.DEALER)
        self._live.subscribe(b"")
        # The default is named by a descriptor, which the socket before it may have had
        address = f"inproc://connection-{next(self._connections)}"
        self._gone = self._live.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKES, address)
        self._sockets.append(self._gone)
        self._live.connect(self._endpoint)
        self._again.connect(self._again_at)
        self._has_agreed = False  # both sides have agreed on keys, or on none
        self._next = 0  # the next expected sequence number
        self._last_live = -1

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        """Open a socket, which reads no more than a replica may send."""
        opened = self._context.socket(kind)
        self._sockets.append(opened)
        opened.setsockopt(zmq.MAXMSGSIZE, _MOST_PART_BYTES)
        opened.setsockopt(zmq.RCVHWM, _MOST_UNREAD)
        if self._secret is not None:
            prove_as_reader(opened, self._secret)
        return opened

    def _disconnect(self) -> None:
        for each in self._sockets:
            each.disable_monitor()
            each.close(linger=0)
        self._sockets.clear()

    async def _connect_again(self) -> None:
        """Connect anew; while that fails, as without a free descriptor, nothing is known of its pages."""
        while True:
            self._disconnect()
            try:
                self._connect()
            except zmq.ZMQError as error:
                if self._routing.tells[self._replica]:
                    log.warning(
                        "replica %d: its pages cannot be read at %s now: %s",
                        self._replica,
                        self._endpoint,
                        error.strerror,
                    )
                self._forget()
            else:
                self._routing.believe(self._replica)
                return
            await asyncio.sleep(_ASK_S)

    def _clear(self) -> None:
        self._routing.cleared(self._replica)
        self._num_pages = 0

    def _forget(self) -> None:
        self._clear()
        self._routing.tells[self._replica] = False

    async def _read(self) -> None:
        try:
            while True:
                self._clear()
                await self._read_one()
                await asyncio.sleep(_AGAIN_S if self._num_unproven < _MOST_UNPROVEN else _ASK_S)
                # The next publisher may be another engine, whose sequence numbers say nothing about this
                # one's.
                await self._connect_again()
        # An OverflowError means a number beyond 8 bytes, a RecursionError that the message is nested too
        # deeply.
        except (
            ValueError,
            OverflowError,
            RecursionError,
            msgspec.MsgspecError,
        ) as error:  # a layout that is not understood, so nothing is known of its pages
            log.warning(
                "replica %d publishes what is no event of pages: %s", self._replica, one_line(str(error))
            )
            self._disconnect()
            self._forget()

    async def _read_one(self) -> None:
        """Read until the connection to the publisher has ended."""
        poller = zmq.asyncio.Poller()
        for each in (self._live, self._again, self._gone):
            poller.register(each, zmq.POLLIN)
        await self._ask()  # If it is refused, so is the other connection, whose end is awaited.
        while True:
            if time.monotonic() >= self._asked_s + _ASK_S and not await self._ask() and self._has_agreed:
                return
            ready = dict(await poller.poll(1e3 * _ASK_S))
            if self._gone in ready and self._has_ended(await self._gone.recv_multipart()):
                return
            if self._again in ready:
                self._take_answer(await self._again.recv_multipart())
            if self._live in ready:
                await self._hear(await self._live.recv_multipart())

    def _has_ended(self, message: list[bytes]) -> bool:
        """Return whether this message about the connection tells of its end, or that it was never made."""
        if parse_monitor_message(message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._has_agreed, self._num_unproven = True, 0
            return False
        if not self._has_agreed:
            self._num_unproven += 1
            if self._num_unproven == _MOST_UNPROVEN:  # a publisher that ends may break off one
                log.warning(
                    "replica %d: %s does not prove the router's secret for events, or wants one: set"
                    " cache.events_key_file to files of the same content in replica and router",
                    self._replica,
                    self._endpoint,
                )
        return True

    async def _ask(self) -> bool:
        """Ask for all batches from the next one on; return whether the question is on its way.

        A connection that was refused is never made again, and a question to it would wait for ever.
        """
        self._asked_s = time.monotonic()
        question = [b"", self._next.to_bytes(SEQUENCE_BYTES, "big")]
        try:
            await self._again.send_multipart(question, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _take_answer(self, frames: list[bytes]) -> None:
        """Take what was asked for again."""
        if frames[-2:-1] != [END]:
            number, batch = _numbered(frames, 4)
            self._take(number, batch, is_answer=True)

    async def _hear(self, frames: list[bytes]) -> None:
        """Take what is published now, and ask again for what is missing before it."""
        number, batch = _numbered(frames, 3)
        if number <= self._last_live:  # another engine publishes, whose sequence starts from 0
            self._next = 0
        self._last_live = number
        if number > self._next:
            self.num_gaps += 1
            if time.monotonic() >= self._asked_s + _AGAIN_S:
                await self._ask()
        elif number == self._next:
            self._take(number, batch)

    def _take(self, number: int, batch: bytes, *, is_answer: bool = False) -> None:
        """Apply the events of a batch; an answer may be a snapshot, which replaces everything known."""
        if number < self._next and not is_answer:
            return
        found = decode(batch).events
        is_snapshot = bool(found) and isinstance(found[0], AllBlocksCleared)
        if is_answer and number != self._next and not is_snapshot:
            return  # it answers an earlier request
        for event in found:
            match event:
                case BlockStored(keys):
                    if len(keys) <= _MOST_PAGES:
                        self._num_pages += self._stored(event)
                    if max(len(keys), self._num_pages) > _MOST_PAGES:
                        raise ValueError(f"it announces more than {_MOST_PAGES} pages")
                case BlockRemoved(keys):
                    if event.group_idx:
                        gone = self._routing.removed_beside(self._replica, keys, event.group_idx)
                    else:
                        gone = self._routing.removed(self._replica, keys)
                    self._num_pages -= gone
                case AllBlocksCleared():
                    self._clear()
        self._next = number + 1

    def _stored(self, event: BlockStored) -> int:
        """Add the pages of an event; return how many of them are new."""
        if not event.group_idx:
            return self._routing.stored(self._replica, event.block_hashes)
        window = event.kv_cache_spec_sliding_window
        if event.kv_cache_spec_kind == STATE_KIND and window is None:
            window = 0
        elif window is None or window < 1:
            raise ValueError(f"pages of group {event.group_idx} see no window of tokens")
        if not 0 < event.group_idx <= _MOST_GROUPS:
            raise ValueError(f"group {event.group_idx} is none from 1 to {_MOST_GROUPS}")
        return self._routing.stored_beside(self._replica, event.block_hashes, event.group_idx, window)


def _numbered(frames: list[bytes], count: int) -> tuple[int, bytes]:
    """Return the number and the batch at the end of so many frames; raises ValueError."""
    if len(frames) != count or len(frames[-2]) != SEQUENCE_BYTES:
        raise ValueError(f"{len(frames)} frames, without a number where it belongs")
    return int.from_bytes(frames[-2], "big"), frames[-1]
