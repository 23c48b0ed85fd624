"""Bound the work that a request's body may cause before it is decoded.

A body of two megabytes may hold a million lists, and decoding and validating them would block every request
for a second. So the values are counted first, in the bytes themselves, and a body with too many of them is
never decoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from serving.api.turns import Turns

RETRY_S = 1
MOST_CONTAINERS = 2**14  # lists and objects, each of which costs as much as about twenty numbers
SHORT_BYTES = 2**14  # a shorter body is decoded at once, a longer one in a turn of the event loop


class BodyMemory:
    """The number of bytes of all bodies that are being received or wait to be decoded."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count `num_bytes` more; raises HTTPException if that exceeds the limit."""
        if self.num_bytes + num_bytes > self._most_bytes:
            raise HTTPException(
                429,
                f"bodies of {self.num_bytes} bytes are being received, of at most {self._most_bytes}"
                " (server.max_bodies_mib): try again later",
                {"retry-after": str(RETRY_S)},
            )
        self.num_bytes += num_bytes


def check_size(body: bytes, most_values: int) -> None:
    """Raise HTTPException where JSON holds too many values, or too many lists and objects.

    Names count as values. Of malformed JSON, only the part that a parser reads before it refuses the rest is
    counted correctly.
    """
    containers = body.count(b"[") + body.count(b"{")
    values = containers + body.count(b",")
    if values <= min(most_values, MOST_CONTAINERS):
        return
    # Then each remaining quote begins or ends a string.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = bare.count(b'"') // 2
    if strings <= most_values:
        bare = b"".join(bare.split(b'"')[::2])  # what is inside strings is text
        containers = bare.count(b"[") + bare.count(b"{")
        values = max(strings, containers + bare.count(b","))
    else:
        values, containers = strings, 0
    if values > most_values:
        raise _too_many(values, "values", f"{most_values} (server.max_body_values)")
    if containers > MOST_CONTAINERS:
        raise _too_many(containers, "lists and objects", str(MOST_CONTAINERS))


def _too_many(found: int, what: str, most: str) -> HTTPException:
    return HTTPException(413, f"the body holds {found} {what}, and may hold {most}; send fewer at a time")


def bounded_route(most_values: int, turns: Turns) -> type[APIRoute]:
    """Return a class of routes whose requests check their JSON by `check_size` before decoding it."""

    class BoundedRequest(Request):
        async def json(self) -> Any:
            body = await self.body()
            if len(body) > SHORT_BYTES:
                await turns.next()
            check_size(body, most_values)
            values = json.loads(body.decode())  # the count would be wrong in other encodings
            self.state.body_is_read()
            return values

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def bounded(request: Request) -> Response:
                return await handle(BoundedRequest(request.scope, request.receive))

            return bounded

    return BoundedRoute
