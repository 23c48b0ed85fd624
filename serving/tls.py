"""Read the files by which a server or a router encrypts HTTP, and knows who is on the other side.

A router believes whoever shows a certificate of its `--tls-authority`, at whatever address: replicas come and
go, and the authority signs them alone. A server may demand a certificate of its clients in the same way.

A connection has its place among a server's from the moment that it is accepted, and little time to agree on
keys: otherwise whoever reaches the port could hold all descriptors without a certificate.

Certificates are renewed while a server runs: files that change are read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import partial

HANDSHAKE_S = 10.0  # time that a client has to agree on keys
_RENEWAL_S = 60.0  # interval between checks whether the files have changed
_PAUSE_S = 1.0  # interval between attempts to accept where the system has no descriptor left


log = logging.getLogger(__name__)


class Tls:
    """How connections are encrypted by files that may be renewed: each takes the `context` when it begins.

    Renewed files make another context. The one before it could not take them: it would keep a certificate
    with a key of another type, and an authority that is gone, and would be broken where a key does not fit.
    """

    def __init__(self, make: Callable[[], ssl.SSLContext], paths: Sequence[str]) -> None:
        """Read the files; raises ValueError for those that cannot be used."""
        self._make, self._paths = make, paths
        self._seen = self._states()  # before they are read, so that no change is missed
        self._failed = False  # they could not be used when they were last read
        self.context = make()

    def check(self) -> None:
        """Use files that have changed; where they cannot be used, those before them are, and the log says so.

        A certificate and its key may be renewed one after the other. Files that cannot be used are read at
        each check: whether they can be read changes without them.
        """
        found = self._states()
        is_new = found != self._seen
        if not (is_new or self._failed):
            return
        self._seen = found
        try:
            self.context = self._make()
        except ValueError as error:
            self._failed = True
            if is_new:
                log.error("the files before their change are used: %s", error)
        else:
            self._failed = False
            log.info("renewed: %s", ", ".join(self._paths))

    async def renew(self) -> None:
        """Check the files now and then, until cancelled."""
        while True:
            await asyncio.sleep(_RENEWAL_S)
            self.check()

    def _states(self) -> list[tuple[int, int, int] | None]:
        return [_state(each) for each in self._paths]


def _state(path: str) -> tuple[int, int, int] | None:
    """Return what changes with a file, None if there is none that can be found."""
    try:
        found = os.stat(path)
    except OSError:  # reading it says why
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; the certificate needs its private key, and the authority of clients needs both."""

    certificate: str | None = None
    private_key: str | None = None
    client_authority: str | None = None

    def for_clients(self) -> Tls | None:
        """Return how connections of clients are encrypted, None if they are not.

        Raises ValueError for files that cannot be used.
        """
        if self.certificate is None:
            for option, path in {
                "--tls-private-key": self.private_key,
                "--tls-client-authority": self.client_authority,
            }.items():
                if path is not None:
                    raise ValueError(f"{option} is read only with --tls-certificate; give both")
            return None
        return Tls(self._clients_context, self._paths(self.client_authority))

    def for_replicas(self, authority: str | None) -> Tls | None:
        """Return how a router encrypts what it asks replicas of this authority, None without one.

        It shows them its own certificate, if it has one. Raises ValueError for files that cannot be used.
        """
        if authority is None:
            return None
        return Tls(partial(self._replicas_context, authority), self._paths(authority))

    def _paths(self, authority: str | None) -> list[str]:
        return [each for each in (self.certificate, self.private_key, authority) if each is not None]

    def _clients_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._show(context)
        if self.client_authority is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            _believe(context, "--tls-client-authority", self.client_authority)
        return context

    def _replicas_context(self, authority: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        _believe(context, "--tls-authority", authority)
        if self.certificate is not None:
            self._show(context)
        return context

    def _show(self, context: ssl.SSLContext) -> None:
        """Let a context show the certificate."""
        assert self.certificate is not None, "there is none to show"
        if self.private_key is None:
            raise ValueError("--tls-certificate needs --tls-private-key; give both")
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.private_key, password=_no_password)
        except OSError as error:  # ssl.SSLError is one
            raise _unusable("--tls-certificate, --tls-private-key", error) from error


class Handshakes:
    """Accepts connections that are encrypted, at most so many with those that have agreed on keys already.

    An event loop that accepted them itself would show them to a server only after their handshakes. One too
    many is closed without a word, since a word would need the keys.
    """

    def __init__(self, tls: Tls, most_connections: int) -> None:
        self.tls, self._most = tls, most_connections
        self._agreeing: set[asyncio.Task[None]] = set()

    async def accept(
        self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], connected: Sized
    ) -> None:
        """Accept until cancelled; each connection is given a protocol when it has agreed on keys."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        try:
            while True:
                try:
                    client, _ = await loop.sock_accept(listener)
                except OSError:  # the client is gone, or descriptors are used up
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if len(connected) + len(self._agreeing) >= self._most:
                    client.close()
                    continue
                task = loop.create_task(self._agree(client, protocol))
                self._agreeing.add(task)
                task.add_done_callback(self._agreeing.discard)
        finally:
            for each in self._agreeing:
                each.cancel()

    async def _agree(self, client: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # TLS has told the client; the connection or its time has ended
            await loop.connect_accepted_socket(
                protocol, client, ssl=self.tls.context, ssl_handshake_timeout=HANDSHAKE_S
            )


def _believe(context: ssl.SSLContext, option: str, path: str) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise _unusable(f"{option} {path}", error) from error


def _unusable(what: str, error: OSError) -> ValueError:
    return ValueError(f"{what}: {error.strerror or error}; name PEM files that this user can read")


def _no_password() -> str:
    """Refuse a private key that has a password, for which OpenSSL would ask at the terminal."""
    raise ValueError("the private key has a password; store it without")
