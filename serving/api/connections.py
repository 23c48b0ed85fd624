"""What does the system do about clients that are gone without a word, do not read, or are too many?"""

from __future__ import annotations

import resource
import socket

# That a client may ask nothing: longer than proxies keep a connection, which is 60 s with most. The one that
# asks must close first, or a request meets a connection that is just being closed.
IDLE_S = 75
_UNHEARD_S = 60  # that a peer may acknowledge nothing of what it was sent, or have no room for it
_SENT_BYTES = 2**18  # that the system holds for a reader; more wait in the server, where they are counted
_MOST_DESCRIPTORS = 2**16
_RESERVE = 64  # descriptors that are left for files, and for another engine


def bound(listener: socket.socket) -> None:
    """Have the system drop connections whose clients are gone; those of this listener inherit it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_BYTES)
    for name, value in {
        "TCP_KEEPIDLE": _UNHEARD_S // 2,
        "TCP_KEEPINTVL": _UNHEARD_S // 6,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 1000 * _UNHEARD_S,
    }.items():
        if hasattr(socket, name):  # Linux has all of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def room() -> int:
    """How many connections there may be: this process gets all the descriptors that it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, most - _RESERVE)
