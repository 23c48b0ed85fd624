"""Publish which pages an engine holds, while it computes.

The events are those that vLLM publishes over ZeroMQ, so that its subscribers can read them: `BlockStored`,
`BlockRemoved` and `AllBlocksCleared` in MessagePack, on a PUB socket as [topic, sequence, batch], with
sequence numbers of 8 bytes that start at 0. A subscriber that connects late or misses a number asks the
ROUTER socket beside it for all batches from some number on; it gets [topic, sequence, batch] for each, then
the sequence -1. A question that comes while there is no room to send the answer to the one before is dropped.
Beyond vLLM's protocol, a batch that is no longer kept is answered by a snapshot: one batch of
`AllBlocksCleared` and all pages, under the last sequence number.

Pages of layers that see a window have events of their own, with `group_idx` and the window: a prefix can be
resumed from if its pages are there and those of each window behind it. Their tokens and parents are those of
the page of the same hash without a group.

Recurrent states have such events, too, without a window: a prefix can be resumed from if a state stands
behind its last page. Pages with no state behind them are of no use, and are told of when one follows.

With a secret, both sockets speak CURVE, ZeroMQ's encryption with keys of both sides (RFC 26). The keys of the
publisher and of all its readers follow from the secret, so that each side proves it to the other, and who
lacks it can neither read events nor ask for them, nor be believed by a reader. vLLM's readers know no secret.

The engine's thread only appends to a queue, and a thread of its own encodes and sends. If that thread falls
behind, the queue is replaced by all pages present at that moment; a subscriber that falls behind loses
batches, which it sees from the numbers.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from borders.numbers import integers
from kv_cache.event_messages import (
    STATE_KIND,
    WINDOW_KIND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    encode,
)
from kv_cache.page_keys import TokenIds, short_key
from kv_cache.prefix_cache import PageListener, PrefixCache

END = (-1).to_bytes(8, "big", signed=True)
SEQUENCE_BYTES = 8
MOST_QUEUED = 10_000  # events between the engine and the thread
MOST_BATCHED = 1_000  # events in a batch
MOST_BATCHES, MOST_BATCH_BYTES = 10_000, 2**26  # batches that are kept, to be sent again
_MOST_UNREAD = 1_000  # batches queued for each subscriber
# Messages of answers queued for each reader: one may hold all pages, and the rest of the answer waits here
_MOST_UNREAD_AGAIN = 16
_MOST_STALLED_S = 30.0  # an answer of which its reader takes nothing for so long is given up, with its memory
_MOST_ASKED_BYTES = 1024  # a subscriber's topic or question; more ends its connection
_MOST_QUESTIONS = 1000  # questions that wait
_PAUSE_MS = 10  # pause between two batches
_CLOSE_S = 1.0
_PUBLISHES, _READS = b"events of pages: publishes", b"events of pages: reads"  # roles, each with a key
_ADMISSION = "inproc://zeromq.zap.01"  # ZeroMQ asks there who may connect (RFC 27)


def _key_pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    """Return the public and the private key of a role."""
    private = z85.encode(hmac.digest(secret, role, "sha256"))
    return zmq.curve_public(private), private


def prove_as_reader(socket: zmq.Socket[Any], secret: bytes) -> None:
    """Let a socket connect to publishers with this secret alone, and encrypt."""
    socket.curve_serverkey, _ = _key_pair(secret, _PUBLISHES)
    socket.curve_publickey, socket.curve_secretkey = _key_pair(secret, _READS)


def replay_endpoint(endpoint: str) -> str:
    """Return the replay endpoint: the next port, or a file of the same name with `.replay` appended.

    Raises ValueError for anything but `tcp://HOST:PORT` and `ipc://PATH`.
    """
    kind, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if kind == "ipc" and rest:
        return f"{endpoint}.replay"
    if kind == "tcp" and host and integers(1, 2**16 - 2).parse(port):
        return f"tcp://{host}:{int(port) + 1}"
    raise ValueError(f"{endpoint!r} is no tcp://HOST:PORT (up to port 65534) and no ipc://PATH")


class PageEvents(PageListener):
    """Publishes the changes of a prefix cache, from a thread of its own.

    Raises ValueError or OSError for an unusable endpoint. It keeps a second copy of each page's key, parent
    key and tokens. Without a `secret`, whoever reaches the endpoint may read.
    """

    def __init__(
        self,
        cache: PrefixCache,
        page_size: int,
        endpoint: str,
        topic: str = "kv-events",
        secret: bytes | None = None,
    ) -> None:
        again = replay_endpoint(endpoint)
        self._cache = cache
        self._page_size = page_size
        self._topic = topic.encode()
        # Pages that are told of when a state stands behind them, by key: the key before each, and its tokens
        self._untold: dict[bytes, tuple[bytes | None, list[int]]] = {}
        # A list holds all pages, and replaces everything before it
        self._queue: deque[BlockStored | BlockRemoved | list[BlockStored]] = deque()
        # Published pages by group and key, each after the page that it continues
        self._pages: dict[tuple[int | None, int], BlockStored] = {}
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._context, self._secret = zmq.Context(), secret
        self._admission = self._context.socket(zmq.REP)
        self._admission.bind(_ADMISSION)
        self._out = self._bound(zmq.PUB, endpoint, _MOST_UNREAD)
        self._asked = self._bound(zmq.ROUTER, again, _MOST_UNREAD_AGAIN)
        self._asked.router_mandatory = True  # it says whose queue is full, and who has gone
        # What each reader has yet to be sent again, sequence and batch
        self._answers: dict[bytes, _Answer] = {}
        self._poller = zmq.Poller()
        for each in (self._admission, self._asked):
            self._poller.register(each, zmq.POLLIN)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="page events", daemon=True)
        self._thread.start()

    def stored(self, keys: Sequence[bytes], tokens: TokenIds, before: bytes | None, salt: str) -> None:
        """Queue an event for pages that can be found from now on, or resumed from, where states are kept."""
        if self._cache.keeps_states:
            for key, content in zip(keys, tokens.tolist()):
                self._untold[key] = before, content
                before = key
        else:
            self._tell(keys, tokens.ravel().tolist(), before)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Queue an event for pages that can no longer be found."""
        told = [key for key in keys if self._untold.pop(key, None) is None]
        if told:
            self._put(BlockRemoved([*map(short_key, told)]))

    def stored_beside(self, keys: Sequence[bytes], group: int, window: int) -> None:
        """Queue an event for pages of a window, or for states, that can be found from now on."""
        for key in keys if not window else ():
            self._tell_up_to(key)
        self._put(self._beside(keys, group, window))

    def removed_beside(self, keys: Sequence[bytes], group: int) -> None:
        """Queue an event for pages of a window, or for states, that can no longer be found."""
        self._put(BlockRemoved([*map(short_key, keys)], group_idx=group))

    def close(self) -> None:
        """Send what is queued, and end the thread."""
        self._is_closing = True
        self._thread.join(_CLOSE_S)

    def _tell(self, keys: Sequence[bytes], tokens: list[int], before: bytes | None) -> None:
        parent = None if before is None else short_key(before)
        self._put(BlockStored([*map(short_key, keys)], parent, tokens, self._page_size))

    def _tell_up_to(self, key: bytes | None) -> None:
        """Queue an event for the pages up to this one of which nobody has been told."""
        chain: list[tuple[bytes, list[int]]] = []
        while key is not None and (page := self._untold.pop(key, None)) is not None:
            chain.append((key, page[1]))
            key = page[0]
        if chain:
            chain.reverse()
            self._tell([each for each, _ in chain], [token for _, page in chain for token in page], key)

    def _put(self, event: BlockStored | BlockRemoved) -> None:
        if len(self._queue) < MOST_QUEUED:
            self._queue.append(event)
            return
        everything = [
            BlockStored(
                [short_key(key)], None if before is None else short_key(before), tokens, self._page_size
            )
            for key, before, tokens in self._cache.index.everything()
            if key not in self._untold
        ]
        everything += [self._beside(*each) for each in self._cache.everything_beside()]
        self._queue = deque([everything])  # not emptied, because the thread may be about to take from it

    def _beside(self, keys: Sequence[bytes], group: int, window: int) -> BlockStored:
        return BlockStored(
            [*map(short_key, keys)],
            None,
            [],
            self._page_size,
            group_idx=group,
            kv_cache_spec_kind=WINDOW_KIND if window else STATE_KIND,
            kv_cache_spec_sliding_window=window or None,
        )

    def _bound(self, kind: int, endpoint: str, most_unread: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, most_unread)
        socket.setsockopt(zmq.RCVHWM, _MOST_QUESTIONS)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_ASKED_BYTES)
        socket.linger = int(_CLOSE_S * 1e3)
        if self._secret is not None:
            socket.curve_server = True
            _, socket.curve_secretkey = _key_pair(self._secret, _PUBLISHES)
            socket.zap_domain = b"events"
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"events of pages cannot be published at {endpoint}: {error.strerror}") from None
        return socket

    def _run(self) -> None:
        self._send([AllBlocksCleared()])
        while True:
            is_last = self._is_closing
            while self._queue:
                self._send(self._taken())
            if is_last:
                break
            pause_ms = 1 if self._send_again() else _PAUSE_MS
            ready = dict(self._poller.poll(pause_ms))
            if self._admission in ready:
                self._admit(self._admission.recv_multipart())
            if self._asked in ready:
                self._answer(self._asked.recv_multipart())
        self._context.destroy()

    def _admit(self, asked: list[bytes]) -> None:
        """Say whether the side that connects has a reader's key; it has proved that it holds that key."""
        assert self._secret is not None, "without a secret ZeroMQ asks nothing"
        version, request, _domain, _address, _identity, mechanism, *keys = asked
        is_reader = mechanism == b"CURVE" and keys == [z85.decode(_key_pair(self._secret, _READS)[0])]
        status = (b"200", b"OK") if is_reader else (b"400", b"no reader's key")
        self._admission.send_multipart([version, request, *status, b"", b""])

    def _taken(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Take the next events from the queue, and apply them to the published pages."""
        taken: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        while self._queue and len(taken) < MOST_BATCHED:
            match self._queue.popleft():
                case BlockStored() as stored:
                    self._book(stored)
                    taken.append(stored)
                case BlockRemoved() as removed:
                    for key in removed.block_hashes:
                        self._pages.pop((removed.group_idx, key), None)
                    taken.append(removed)
                case everything:
                    self._pages.clear()
                    for each in everything:
                        self._book(each)
                    taken = [AllBlocksCleared(), *everything]
        return taken

    def _book(self, stored: BlockStored) -> None:
        parent, size, group = stored.parent_block_hash, self._page_size, stored.group_idx
        for at, key in enumerate(stored.block_hashes):
            tokens = stored.token_ids[at * size : (at + 1) * size]
            self._pages[group, key] = msgspec.structs.replace(
                stored, block_hashes=[key], parent_block_hash=parent, token_ids=tokens
            )
            parent = key if group is None else None

    def _send(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        batch = encode(KVEventBatch(time.time(), events))
        self._kept.append((self._next, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > MOST_BATCHES or self._kept_bytes > MOST_BATCH_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._out.send_multipart([self._topic, _sequence(self._next), batch])
        self._next += 1

    def _answer(self, frames: list[bytes]) -> None:
        """Send the batches again from the requested number on, or a snapshot; drop any other message."""
        who, asked = frames[0], frames[-1]
        if len(frames) != 3 or len(asked) != SEQUENCE_BYTES or who in self._answers:
            return
        first = int.from_bytes(asked, "big")
        if self._kept and self._kept[0][0] <= first <= self._next:
            batches = [each for each in self._kept if each[0] >= first]
        else:
            snapshot = KVEventBatch(time.time(), [AllBlocksCleared(), *self._pages.values()])
            batches = [(self._next - 1, encode(snapshot))]
        left = deque([*((_sequence(number), batch) for number, batch in batches), (END, b"")])
        self._answers[who] = _Answer(left, time.monotonic())
        self._send_again()

    def _send_again(self) -> bool:
        """Send what there is room for of the answers; return whether more of them is likely soon."""
        is_moving = False
        for who, answer in [*self._answers.items()]:
            try:
                while answer.left:
                    self._asked.send_multipart([who, b"", self._topic, *answer.left[0]], zmq.NOBLOCK)
                    answer.left.popleft()
                    answer.moved_s, is_moving = time.monotonic(), True
            except zmq.Again:
                if time.monotonic() - answer.moved_s < _MOST_STALLED_S:
                    continue
            except zmq.ZMQError:
                pass  # the reader has gone
            del self._answers[who]
        return is_moving and bool(self._answers)


@dataclass(slots=True)
class _Answer:
    """What is left of the answer to a reader's question."""

    left: deque[tuple[bytes, bytes]]  # sequence numbers and batches
    moved_s: float  # when the reader last took a part of it


def _sequence(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")
