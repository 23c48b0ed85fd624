"""How do others learn which pages an engine holds, while it computes?

By the events that vLLM publishes over ZeroMQ, so that whoever reads those reads these: `BlockStored`,
`BlockRemoved` and `AllBlocksCleared` in MessagePack, on a PUB socket as [topic, sequence, batch], sequences
counted from 0 in 8 bytes. Who connects late, or finds a sequence missing, asks the ROUTER socket beside it
for all from some sequence on, and gets [topic, sequence, batch] for each, then the sequence -1. Beyond what
vLLM's does, a batch that is not kept any more is answered by a snapshot: one batch, `AllBlocksCleared` and
all pages, under the last sequence.

The engine's thread only appends to a queue: a thread of its own encodes and sends. Where it falls behind, the
queue is replaced by all pages as they are then; a subscriber that falls behind loses batches, and can tell.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from kv_cache.page_keys import TokenIds, short_key
from kv_cache.prefix_cache import PageListener
from kv_cache.prefix_index import PrefixIndex
from kv_cache.vllm import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, encode

END = (-1).to_bytes(8, "big", signed=True)
SEQUENCE_BYTES = 8
MOST_QUEUED = 10_000  # events between the engine and the thread
MOST_BATCHED = 1_000  # events in a batch
MOST_BATCHES, MOST_BATCH_BYTES = 10_000, 2**26  # that are kept, to be sent again
_MOST_UNREAD = 100_000  # batches for each subscriber
_PAUSE_MS = 10  # between two batches
_CLOSE_S = 1.0


def replay_endpoint(endpoint: str) -> str:
    """Where batches are asked for again: at the next port, or in a file of the same name and `.replay`.

    Raises ValueError for what is neither `tcp://HOST:PORT` nor `ipc://PATH`.
    """
    kind, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if kind == "ipc" and rest:
        return f"{endpoint}.replay"
    if kind == "tcp" and host and port.isdecimal() and 0 < int(port) < 2**16 - 1:
        return f"tcp://{host}:{int(port) + 1}"
    raise ValueError(f"{endpoint!r} is no tcp://HOST:PORT (up to port 65534) and no ipc://PATH")


class PageEvents(PageListener):
    """Publishes what a cache tells, from a thread; raises ValueError or OSError for an unusable endpoint.

    It holds a key, a parent's key and the tokens of each page a second time.
    """

    def __init__(self, index: PrefixIndex, page_size: int, endpoint: str, topic: str = "kv-events") -> None:
        again = replay_endpoint(endpoint)
        self._index = index
        self._page_size = page_size
        self._topic = topic.encode()
        self._queue: deque[BlockStored | BlockRemoved | list[BlockStored]] = (
            deque()
        )  # a list: all there is, in place of before
        self._pages: dict[int, BlockStored] = {}  # as published; a page comes after the one it follows
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
        """Pages can be found."""
        parent = None if before is None else short_key(before)
        self._put(BlockStored([*map(short_key, keys)], parent, tokens.ravel().tolist(), self._page_size))

    def removed(self, keys: Sequence[bytes]) -> None:
        """Pages cannot be found any more."""
        self._put(BlockRemoved([*map(short_key, keys)]))

    def close(self) -> None:
        """Send what is queued, and end."""
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
        """The next events of the queue, which are booked."""
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
        """Send again from the sequence that is asked for, or all there is; what is no such question, drop."""
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
