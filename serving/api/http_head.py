"""Refuse requests whose HTTP head is ambiguous.

A proxy that forwards a request and this server must not read two different requests from the same bytes
(request smuggling). So a head that can be read in two ways is refused; none of its readings is chosen.
"""

from __future__ import annotations

import re

Headers = list[tuple[bytes, bytes]]  # the names are in lower case

# Each of these headers carries one value that decides what is done and for whom. Other headers are lists
# (connection, content-encoding, tracestate), are checked by the parser (content-length), or have no meaning
# here.
SINGLE = (
    *(b"authorization", b"content-type", b"expect", b"host", b"transfer-encoding", b"x-tenant"),
    *(b"origin", b"access-control-request-method"),
)
_ABSOLUTE = re.compile(rb"[^/?#]+://([^/?#]*)")  # a target that includes scheme and host


def take_host(headers: Headers, target: bytes) -> None:
    """Replace the Host header by the host that the target names, if it names one."""
    if absolute := _ABSOLUTE.match(target):
        headers[:] = [each for each in headers if each[0] != b"host"] + [(b"host", absolute[1])]


def refusal(headers: Headers, version: str) -> tuple[int, str] | None:
    """Return the status and the reason to refuse a request with this head, or None to accept it."""
    if version not in ("1.0", "1.1"):
        return 505, f"this server speaks HTTP/1.1, not HTTP/{version}"
    names = [name for name, _ in headers]
    if b"host" not in names and version == "1.1":
        return 400, "a request has one Host header, and this has none"
    for name in SINGLE:
        if (number := names.count(name)) > 1:
            title = "-".join(word.capitalize() for word in name.decode().split("-"))
            return 400, f"a request has one {title} header, and this has {number}; send one"
    if b"transfer-encoding" in names and version == "1.0":
        return 400, "HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1"
    if dict(headers).get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        return 400, "the only Transfer-Encoding is chunked; send the body without another"
    return None
