"""Prove to each other, over a connection, that both sides hold the same secret, without sending it.

Each side chooses a nonce, and proves the secret by a keyed digest (HMAC-SHA256) of both nonces and of its own
role. A proof is thus valid in one connection and one direction alone: what was recorded cannot be replayed,
nor reflected. The side that dials proves first, so that whoever merely reaches a port gets no digest from
which a short secret could be guessed. The bytes of the connection are not protected afterwards; that is what
TLS is for.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from borders.files import read_bounded

HELLO = b"cbproof1"  # it begins each handshake, and changes with what follows it
NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
FEWEST_BYTES = 32  # a shorter secret is refused
_MOST_BYTES = 4096
_DIALS, _LISTENS = b"dials", b"listens"

Send = Callable[[bytes], None]
Receive = Callable[[int], bytes]  # returns exactly so many bytes


class Unproven(ConnectionError):
    """The other side has not proved that it holds the secret."""


def new_secret() -> bytes:
    """Return a secret for processes that can tell it to each other."""
    return secrets.token_hex(FEWEST_BYTES).encode()


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, without white space around it; raises ValueError or OSError."""
    secret = read_bounded(path, _MOST_BYTES).strip()
    if len(secret) < FEWEST_BYTES:
        raise ValueError(
            f"{path} has {len(secret)} bytes, and a secret at least {FEWEST_BYTES}; make one by openssl rand"
            " -hex 32"
        )
    return secret


def within(sock: socket.socket, limit_s: float) -> Receive:
    """Return what reads from a socket, everything within a time; raises ConnectionError."""
    until_s = time.monotonic() + limit_s

    def receive(count: int) -> bytes:
        data = b""
        while len(data) < count:
            sock.settimeout(max(1e-3, until_s - time.monotonic()))
            try:
                more = sock.recv(count - len(data))
            except socket.timeout as error:  # noqa: UP041, which Python 3.10 knows apart from TimeoutError
                raise Unproven(f"the other side has said nothing for {limit_s:g} s") from error
            if not more:
                raise ConnectionError("the other side has ended the connection")
            data += more
        return data

    return receive


def prove_as_dialler(secret: bytes, send: Send, receive: Receive) -> None:
    """Prove the secret to the side that listens, and hear its proof; raises Unproven."""
    own = secrets.token_bytes(NONCE_BYTES)
    send(HELLO + own)
    theirs = receive(NONCE_BYTES)
    send(_proof(secret, _DIALS, own, theirs))
    _check(receive(_PROOF_BYTES), _proof(secret, _LISTENS, own, theirs))


def prove_as_listener(secret: bytes, send: Send, receive: Receive) -> None:
    """Hear the proof of the side that dials, and prove the secret to it; raises Unproven."""
    if receive(len(HELLO)) != HELLO:
        raise Unproven("the other side proves no secret")
    theirs = receive(NONCE_BYTES)
    own = secrets.token_bytes(NONCE_BYTES)
    send(own)
    _check(receive(_PROOF_BYTES), _proof(secret, _DIALS, theirs, own))
    send(_proof(secret, _LISTENS, theirs, own))


def _proof(secret: bytes, role: bytes, of_dialler: bytes, of_listener: bytes) -> bytes:
    return hmac.digest(secret, HELLO + of_dialler + of_listener + role, "sha256")


def _check(given: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(given, expected):
        raise Unproven("the other side holds another secret")
