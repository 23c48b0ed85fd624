"""Publish which pages an engine holds, while it computes.

The events are those that vLLM publishes over ZeroMQ, so that its subscribers can read them: `BlockStored`,
`BlockRemoved` and `AllBlocksCleared` in MessagePack, on a PUB socket as [topic, sequence, batch], with
sequence numbers of 8 bytes that start at 0. A subscriber that connects late or misses a number asks the
ROUTER socket beside it for all batches from some number on; it gets [topic, sequence, batch] for each, then
the sequence -1. Beyond vLLM's protocol, a batch that is no longer kept is answered by a snapshot: one batch
of `AllBlocksCleared` and all pages, under the last sequence number.

The engine's thread only appends to a queue, and a thread of its own encodes and sends. If that thread falls
behind, the queue is replaced by all pages present at that moment; a subscriber that falls behind loses
batches, which it sees from the numbers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from borders.numbers import integers
from kv_cache.event_messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, encode
from kv_cache.page_keys import TokenIds, short_key
from kv_cache.prefix_cache import PageListener
from kv_cache.prefix_index import PrefixIndex

END = (-1).to_bytes(8, "big", signed=True)
SEQUENCE_BYTES = 8
MOST_QUEUED = 10_000  # events between the engine and the thread
MOST_BATCHED = 1_000  # events in a batch
MOST_BATCHES, MOST_BATCH_BYTES = 10_000, 2**26  # batches that are kept, to be sent again
_MOST_UNREAD = 100_000  # batches queued for each subscriber
_MOST_ASKED_BYTES = 1024  # of what a subscriber says: a topic or a question; more ends its connection
_MOST_QUESTIONS = 1000  # questions that wait
_PAUSE_MS = 10  # pause between two batches
_CLOSE_S = 1.0


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
    key and tokens.
    """

    def __init__(self, index: PrefixIndex, page_size: int, endpoint: str, topic: str = "kv-events") -> None:
        again = replay_endpoint(endpoint)
        self._index = index
        self._page_size = page_size
        self._topic = topic.encode()
        # A list holds all pages, and replaces everything before it
        self._queue: deque[BlockStored | BlockRemoved | list[BlockStored]] = deque()
        self._pages: dict[int, BlockStored] = {}  # published pages, each after the page that it continues
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._context = zmq.Context()
        self._out = self._bound(zmq.PUB, endpoint)
        self._asked = self._bound(zmq.ROUTER, again)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="page events", daemon=True)
        self._thread.start()

    def stored(self, keys: Sequence[bytes], tokens: TokenIds, before: bytes | None, salt: str) -> None:
        """Queue an event for pages that can be found from now on."""
        parent = None if before is None else short_key(before)
        self._put(BlockStored([*map(short_key, keys)], parent, tokens.ravel().tolist(), self._page_size))

    def removed(self, keys: Sequence[bytes]) -> None:
        """Queue an event for pages that can no longer be found."""
        self._put(BlockRemoved([*map(short_key, keys)]))

    def close(self) -> None:
        """Send what is queued, and end the thread."""
        self._is_closing = True
        self._thread.join(_CLOSE_S)

    def _put(self, event: BlockStored | BlockRemoved) -> None:
        if len(self._queue) < MOST_QUEUED:
            self._queue.append(event)
            return
        self._queue.clear()
        self._queue.append(
            [
                BlockStored(
                    [short_key(key)], None if before is None else short_key(before), tokens, self._page_size
                )
                for key, before, tokens in self._index.everything()
            ]
        )

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(_MOST_UNREAD)
        socket.setsockopt(zmq.RCVHWM, _MOST_QUESTIONS)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_ASKED_BYTES)
        socket.linger = int(_CLOSE_S * 1e3)
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
            if self._asked.poll(_PAUSE_MS):
                self._answer(self._asked.recv_multipart())
        self._context.destroy()

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
                        self._pages.pop(key, None)
                    taken.append(removed)
                case everything:
                    self._pages.clear()
                    for each in everything:
                        self._book(each)
                    taken = [AllBlocksCleared(), *everything]
        return taken

    def _book(self, stored: BlockStored) -> None:
        parent, size = stored.parent_block_hash, self._page_size
        for at, key in enumerate(stored.block_hashes):
            self._pages[key] = BlockStored([key], parent, stored.token_ids[at * size : (at + 1) * size], size)
            parent = key

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
        if len(frames) != 3 or len(asked) != SEQUENCE_BYTES:
            return
        first = int.from_bytes(asked, "big")
        if self._kept and self._kept[0][0] <= first <= self._next:
            batches = [each for each in self._kept if each[0] >= first]
        else:
            snapshot = KVEventBatch(time.time(), [AllBlocksCleared(), *self._pages.values()])
            batches = [(self._next - 1, encode(snapshot))]
        for number, batch in batches:
            self._asked.send_multipart([who, b"", self._topic, _sequence(number), batch])
        self._asked.send_multipart([who, b"", self._topic, END, b""])


def _sequence(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")
