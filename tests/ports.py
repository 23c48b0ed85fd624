"""TCP ports that a test names before anything listens at them.

The system gives a port out of its own range (from 32,768 on, where Linux is not told otherwise) to whoever
connects or listens without naming one. A port that was drawn there and closed again is another process's a
moment later, so these lie below that range, and no other test run on this machine is given them.
"""

from __future__ import annotations

import contextlib
import socket

_FIRST, _LAST, _WIDTH = 18_000, 29_000, 32
_claims: list[socket.socket] = []


def free_port() -> int:
    """The first of 32 ports that nobody listens at; they are this process's until it ends."""
    for first in range(_FIRST, _LAST, _WIDTH):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0the ports of a test from {first}")  # it goes with the process that bound it
            with contextlib.ExitStack() as listeners:
                for port in range(first, first + _WIDTH):
                    listeners.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return first
    raise AssertionError(f"no {_WIDTH} ports in a row are free from {_FIRST} to {_LAST}")
