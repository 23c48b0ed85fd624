"""Which requests does their head alone refuse, whatever they ask for?

Two readers of one request must not find two requests in it: a proxy that passes it on, and we. So what may be
read in two ways is refused, and never chosen from.
"""

from __future__ import annotations

import re

Headers = list[tuple[bytes, bytes]]  # their names in lower case

# Each says one thing that decides what is done and for whom. Others are lists (connection, content-encoding,
# tracestate), are checked by the parser (content-length), or mean nothing here
SINGLE = (
    *(b"authorization", b"content-type", b"expect", b"host", b"transfer-encoding", b"x-tenant"),
    *(b"origin", b"access-control-request-method"),
)
_ABSOLUTE = re.compile(rb"[^/?#]+://([^/?#]*)")  # a path with its scheme and host


def take_host(headers: Headers, target: bytes) -> None:
    """Where the target names a host, that one counts in place of the header's."""
    if absolute := _ABSOLUTE.match(target):
        headers[:] = [each for each in headers if each[0] != b"host"] + [(b"host", absolute[1])]


def refusal(headers: Headers, version: str) -> tuple[int, str] | None:
    """The status and the reason to refuse a request with this head; None if there is none."""
    if version not in ("1.0", "1.1"):
        return 505, f"this server speaks HTTP/1.1, not HTTP/{version}"
    names = [name for name, _ in headers]
    if b"host" not in names and version == "1.1":
        return 400, "a request has one Host header, and this has none"
    for name in SINGLE:
        if (number := names.count(name)) > 1:
            shown = "-".join(word.capitalize() for word in name.decode().split("-"))
            return 400, f"a request has one {shown} header, and this has {number}; send one"
    if b"transfer-encoding" in names and version == "1.0":
        return 400, "HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1"
    if dict(headers).get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        return 400, "the only Transfer-Encoding is chunked; send the body without another"
    return None
