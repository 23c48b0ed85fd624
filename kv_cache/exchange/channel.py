"""Carry the bytes of a connection between two engines, plain or encrypted, and let both prove who they are.

One thread receives and another sends. Python's own TLS sockets allow no two threads at once and block within
a record; here the cipher works in memory behind a lock, and only the sending thread waits at the socket.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socket import MSG_DONTWAIT, socket
from typing import Protocol

from kv_cache.exchange.messages import Damaged

_RECORD_BYTES = 2**16  # bytes that are read from the socket at once
Data = bytes | memoryview


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """How an engine encrypts: as the side that dials, and as the side that listens."""

    dials: ssl.SSLContext
    listens: ssl.SSLContext

    @staticmethod
    def of(certificate: Path, private_key: Path, authority: Path) -> TlsContexts:
        """Read PEM files; raises OSError (ssl.SSLError is one) or ValueError for files that cannot be used.

        Both sides must show a certificate of the authority. No name in it is compared with an address: the
        authority signs engines alone.
        """
        made = []
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(certificate, private_key, password=_no_password)
            context.load_verify_locations(authority)
            made.append(context)
        return TlsContexts(*made)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What an engine proves to those with which it exchanges pages, and demands of them."""

    secret: bytes | None = None
    tls: TlsContexts | None = None


NONE = Credentials()


class Channel(Protocol):
    """The bytes of one connection; one thread calls `take`, and another `send`."""

    def agree(self, wait: Callable[[], None]) -> None:
        """Agree on a cipher, if there is one; `wait` returns when bytes have come. Raises ConnectionError."""
        ...

    def take(self, room: memoryview) -> int | None:
        """Read what has come and return how much, None if nothing has; raises ConnectionError at the end."""
        ...

    def send(self, data: Data) -> None:
        """Send everything, and wait for it; raises OSError."""
        ...


class Plain:
    """Bytes as they are."""

    def __init__(self, sock: socket) -> None:
        self._socket = sock

    def agree(self, wait: Callable[[], None]) -> None:
        """Do nothing: there is no cipher."""

    def take(self, room: memoryview) -> int | None:
        """See `Channel.take`."""
        try:
            count = self._socket.recv_into(room, 0, MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not count:
            raise ConnectionError("the other side has ended the connection")
        return count

    def send(self, data: Data) -> None:
        """See `Channel.send`."""
        self._socket.sendall(data)


class Encrypted:
    """Bytes within TLS."""

    def __init__(self, sock: socket, tls: TlsContexts, *, dials: bool) -> None:
        self._plain = Plain(sock)
        self._come, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls.dials if dials else tls.listens
        self._cipher = context.wrap_bio(self._come, self._going, server_side=not dials)
        self._cipher_lock = threading.Lock()
        self._socket_lock = threading.Lock()  # records must be sent in the order in which they were made
        self._record = memoryview(bytearray(_RECORD_BYTES))

    def agree(self, wait: Callable[[], None]) -> None:
        """See `Channel.agree`."""
        while not self._has_agreed():
            self._flush()
            wait()
            self._feed()
        self._flush()

    def take(self, room: memoryview) -> int | None:
        """See `Channel.take`."""
        while (count := self._deciphered(room)) is None:
            if not self._feed():
                return None
        if self._going.pending:  # such as the answer to a change of keys
            self._flush()
        if not count:
            raise ConnectionError("the other side has ended the connection")
        return count

    def send(self, data: Data) -> None:
        """See `Channel.send`."""
        rest = memoryview(data).cast("B")
        with self._socket_lock:
            with self._cipher_lock:
                while rest:
                    rest = rest[self._cipher.write(rest) :]
                record = self._going.read()
            self._plain.send(record)

    def _has_agreed(self) -> bool:
        try:
            with self._cipher_lock:
                self._cipher.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            self._flush()  # it tells the other side why
            raise _damaged(error) from error
        return True

    def _deciphered(self, room: memoryview) -> int | None:
        """Return how many bytes were read, 0 at the end, and None if no whole record has come."""
        try:
            with self._cipher_lock:
                return int(self._cipher.read(len(room), room))
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLZeroReturnError:
            return 0
        except ssl.SSLError as error:
            raise _damaged(error) from error

    def _feed(self) -> bool:
        """Hand the cipher what has come; return whether anything has."""
        count = self._plain.take(self._record)
        if count is not None:
            self._come.write(self._record[:count])
        return count is not None

    def _flush(self) -> None:
        with self._socket_lock:
            with self._cipher_lock:
                record = self._going.read()
            self._plain.send(record)


def _damaged(error: ssl.SSLError) -> Damaged:
    return Damaged(f"TLS: {error.reason or error}")


def _no_password() -> str:
    """Refuse a private key that has a password, for which OpenSSL would ask at the terminal."""
    raise ValueError("the private key has a password; store it without")
