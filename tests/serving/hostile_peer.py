"""Peers of the exchange of pages that say what no engine of ours says, over real sockets."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from kv_cache.exchange.messages import (
    HEAD,
    VERSION,
    Hello,
    PageMessage,
    PagesWanted,
    Welcome,
    framed,
    lengths_of,
)
from kv_cache.exchange.messages import unframed as decoded
from tests.kv_cache import device
from tests.serving.page_pair import Listener, Pair, cache_of

Frame = bytes | PageMessage


def as_frame(message: Frame) -> bytes:
    """A message as bytes, whatever its fields are."""
    return message if isinstance(message, bytes) else framed(message)  # type: ignore[arg-type]  # hostile


def framed_body(body: Any, num_bytes: int = 0) -> bytes:
    """What is no message, with a right head, which announces so many bytes behind it."""
    data = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    lengths = HEAD.pack(len(data), num_bytes, 0)[:8]
    return lengths + zlib.crc32(data, zlib.crc32(lengths)).to_bytes(4, "little") + data


class AnswersPeer:
    """Dials the engine of prompts of a pair, as one that answers does, and ends with it."""

    def __init__(self, pair: Pair, *, greets: bool = True, window_bytes: int = 1 << 14) -> None:
        self.sock = socket.create_connection(("127.0.0.1", pair.server.port))
        pair.ends_with.append(self)
        self.heard: list[Any] = []
        self.is_closed = False
        self._data = b""
        if greets:
            layout = cache_of(pair.prompts).layout
            self.say(Hello(VERSION, "the model", device.PAGE_SIZE, layout, "tcp", b"", window_bytes))

    def say(self, message: Frame) -> None:
        with suppress(ConnectionError):  # it has ended by then
            self.sock.sendall(as_frame(message))

    def listen(self) -> bool:
        """Read what has come; whether there is an answer after Welcome, or the end."""
        while not self.is_closed:
            try:
                data = self.sock.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self.is_closed = not data
            self._data += data
        while len(self._data) >= HEAD.size:
            length, num_bytes, check = lengths_of(self._data[: HEAD.size])
            if len(self._data) < HEAD.size + length + num_bytes:
                break
            self.heard.append(decoded(self._data[HEAD.size :][:length], num_bytes, check))
            self._data = self._data[HEAD.size + length + num_bytes :]
        return self.is_closed or any(not isinstance(each, Welcome) for each in self.heard)

    def close(self) -> None:
        self.sock.close()


class PromptsPeer(Listener):
    """Listens as an engine of prompts does, and answers each wish by what `lie` makes of it."""

    def __init__(self, lie: Callable[[PagesWanted], Frame], *, greets: bool = True) -> None:
        super().__init__()
        self._lie, self._greets = lie, greets
        self.num_asked = 0
        self.start()

    def __call__(self, port: int) -> int:
        """The port that the engine of answers dials, in the place of the one of the pair."""
        return self.port

    def serve(self, sock: socket.socket) -> None:
        self.run(self._answer, sock)

    def _answer(self, sock: socket.socket) -> None:
        with suppress(OSError, ValueError), sock.makefile("rb") as file:
            while len(head := file.read(HEAD.size)) == HEAD.size:
                length, num_bytes, check = lengths_of(head)
                message = decoded(file.read(length), num_bytes, check)
                if isinstance(message, Hello) and self._greets:
                    sock.sendall(framed(Welcome()))
                elif isinstance(message, PagesWanted):
                    self.num_asked += 1
                    sock.sendall(as_frame(self._lie(message)))
