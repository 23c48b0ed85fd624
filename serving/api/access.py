"""Check every request before its body is read: its key, its host and the size of its body.

This module also gives each request the id of its answer and of its log lines, and answers a defect inside the
application with a JSON error. It is written for ASGI itself, because each layer of a framework delays every
event of a stream. Which keys exist is the matter of api_keys.py.

The work that a body may cause is bounded before the body is decoded. A body of two megabytes may hold a
million lists, and decoding and validating them would block every request for a second. So the values are
counted first, in the bytes themselves, and a body with too many of them is never decoded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api import page_files
from serving.api.api_keys import ApiKeys
from serving.api.errors import ANTHROPICS_PATHS, DEFECT, error_response, response_of
from serving.api.pieces import Turns
from serving.api.streamed import gone
from serving.continuation import PATH
from serving.failures import ShutDown
from serving.metrics.server_stats import TRACE_HEADERS

RETRY_S = 1
MOST_CONTAINERS = 2**14  # lists and objects, each of which costs as much as about twenty numbers
SHORT_BYTES = 2**14  # a shorter body is decoded at once, a longer one in a turn of the event loop


class BodyMemory:
    """The number of bytes of all bodies that are being received or wait to be decoded.

    `limit` is what refusals call the most of them.
    """

    def __init__(self, most_bytes: int, limit: str = "server.max_bodies_mib") -> None:
        self._most_bytes = most_bytes
        self._limit = limit
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count `num_bytes` more; raises HTTPException if that exceeds the limit."""
        if self.num_bytes + num_bytes > self._most_bytes:
            raise HTTPException(
                429,
                f"bodies of {self.num_bytes} bytes are being received, of at most {self._most_bytes}"
                f" ({self._limit}): try again later",
                {"retry-after": str(RETRY_S)},
            )
        self.num_bytes += num_bytes


def check_size(body: bytes, most_values: int, limit: str = "server.max_body_values") -> None:
    """Raise HTTPException where JSON holds too many values, or too many lists and objects.

    The refusal calls `most_values` by the name `limit`. Names count as values. Of malformed JSON, only the
    part that a parser reads before it refuses the rest is counted correctly.
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
        raise _too_many(values, "values", f"{most_values} ({limit})")
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


log = logging.getLogger(__name__)

# A page that asks for the key itself, its files, and the paths of probes
OPEN_PATHS = frozenset(("/", "/health", "/ready", *page_files.PATHS))
_LOCAL = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_ID = re.compile(r"[\x21-\x7e]{1,128}")


async def whole_body(receive: Receive) -> bytes | None:
    """Return the whole body, whose size `AccessControl` bounds, or None if its sender left before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


class Door:
    """What a request passes after the checks of its head; this one is open to all."""

    def enter(self, scope: Scope) -> ASGIApp | None:
        """Return the refusal of a request, if there is no room for it."""
        return None

    def leave(self, scope: Scope) -> None:
        """Note that the request has ended, if it had entered."""


class AccessControl:
    """Wrap an application; `on_response` gets the status of each response at its end.

    A server for this machine alone (`is_local`) answers to no other host name: otherwise a web page in a
    local browser could read it through a domain name that resolves to this machine (DNS rebinding). A body
    may have `max_body_bytes`, which refusals call `limit`, or the limit of its path in `most_bytes_of`.
    `door` refuses requests for which there is no room by their heads, so that a full server neither reads nor
    decodes their bodies.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        max_body_bytes: int,
        memory: BodyMemory,
        on_response: Callable[[int], None],
        *,
        is_local: bool,
        limit: str = "server.max_body_mib",
        most_bytes_of: Mapping[str, int] = MappingProxyType({}),
        door: Door | None = None,
    ) -> None:
        self._app, self._door = app, door or Door()
        self._most_bytes_of = most_bytes_of
        self._is_local = is_local
        self._keys = keys
        self._max_body_bytes, self._limit = max_body_bytes, limit
        self._memory = memory
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http", "the server is started without others"
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if len(headers) < len(scope["headers"]):
            names = [name for name, _ in scope["headers"]]
            for label in (b"x-request-id", b"traceparent"):
                if names.count(label) > 1:  # it cannot be known which of several values is meant
                    del headers[label]
        given = headers.get(b"x-request-id", "")
        state = scope.setdefault("state", {})
        name = state["request_id"] = given if _ID.fullmatch(given) else secrets.token_hex(16)
        traced = ("traceparent", "tracestate") if b"traceparent" in headers else ()
        TRACE_HEADERS.set({each: headers.get(each.encode(), "") for each in traced})
        is_anthropics = scope["path"].startswith(ANTHROPICS_PATHS)
        named = (b"x-request-id", b"request-id") if is_anthropics else (b"x-request-id",)
        # The status stays 499 if the client closed the connection first.
        start_s, status, is_whole = time.monotonic(), 499, False

        async def send_on(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                notes = [(each.encode(), said.encode()) for each, said in state.get("notes", {}).items()]
                message["headers"] = [
                    *message["headers"],
                    *((label, name.encode()) for label in named),
                    *notes,
                ]
                # A body that the client holds back may never come.
                if refusal is not None and b"expect" in headers:
                    message["headers"].append((b"connection", b"close"))
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")

        refusal = self._refusal(scope, headers, state)
        try:
            if refusal is not None:
                await refusal(scope, receive, send_on)
            else:
                await self._measured(scope, receive, send_on)
        except asyncio.CancelledError:  # the server shuts down; uvicorn would answer with 500
            if status == 499:
                await response_of(ShutDown())(scope, receive, send_on)
            elif not is_whole and "cut_off" in state:  # what has begun must not look whole
                state["cut_off"]()
                await gone(receive)
        except Exception:
            log.exception("%s: a defect of the server", name, extra={"fields": {"request_id": name}})
            if status == 499:
                await error_response(500, DEFECT)(scope, receive, send_on)
        finally:
            self._door.leave(scope)
            if scope["path"] not in OPEN_PATHS:  # probes are not counted as requests
                self._on_response(status)
            if log.isEnabledFor(logging.INFO):
                self._log(scope, name, status, 1e3 * (time.monotonic() - start_s))

    def _log(self, scope: Scope, name: str, status: int, took_ms: float) -> None:
        path = scope["raw_path"].decode("latin-1")  # the path as received, which holds no line breaks
        shown = {"request_id": name, "method": scope["method"], "path": path, "status": status}
        fields = shown | {"took_ms": round(took_ms, 1)}
        log.info("%s %s %s %d %.1f ms", *shown.values(), took_ms, extra={"fields": fields})

    def _refusal(self, scope: Scope, headers: dict[bytes, str], state: dict[str, object]) -> ASGIApp | None:
        if self._is_local and not _LOCAL.fullmatch(headers.get(b"host", "localhost")):
            return error_response(
                403,
                "without API keys the server answers localhost only; ask there, or start it with --api-keys",
            )
        bearer = headers.get(b"authorization")
        if bearer is None and b"x-api-key" in headers:  # Anthropic's clients send their keys so
            bearer = f"Bearer {headers[b'x-api-key']}"
        client = self._keys.client(bearer)
        if client is None and scope["path"] not in OPEN_PATHS:
            return error_response(401, "the key is missing or wrong; send Authorization: Bearer KEY")
        state["client"] = client
        if b"content-encoding" in headers and not self._is_plain(scope):
            return error_response(
                415, "compressed bodies are not supported; send the body without Content-Encoding"
            )
        if headers.get(b"expect", "100-continue").lower() != "100-continue":
            return error_response(417, "Expect may only be 100-continue; leave it out")
        length = headers.get(b"content-length", "0")
        most = self._most_bytes(scope)
        is_long = length.isdecimal() and (len(length) > 18 or int(length) > most)
        return error_response(413, self._too_long(scope)) if is_long else self._door.enter(scope)

    def _is_plain(self, scope: Scope) -> bool:
        encodings = [value for name, value in scope["headers"] if name == b"content-encoding"]
        return all(value.strip().lower() in (b"", b"identity") for value in encodings)

    def _most_bytes(self, scope: Scope) -> int:
        return self._most_bytes_of.get(scope["path"], self._max_body_bytes)

    def _too_long(self, scope: Scope) -> str:
        is_file = scope["path"] in self._most_bytes_of and scope["path"] != PATH
        limit = "server.max_batch_file_mib" if is_file else self._limit
        return f"the body is longer than {self._most_bytes(scope)} bytes ({limit}); shorten it"

    async def _measured(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application read the body, within the limits on its size and on the sum of all bodies."""
        num_bytes, num_held = 0, 0

        async def measured() -> Message:
            nonlocal num_bytes, num_held
            message = await receive()
            size = len(message.get("body", b""))
            num_bytes += size
            if num_bytes > self._most_bytes(scope):
                raise HTTPException(413, self._too_long(scope))
            self._memory.take(size)
            num_held += size
            return message

        def forget() -> None:
            nonlocal num_held
            self._memory.num_bytes -= num_held
            num_held = 0

        scope["state"]["body_is_read"] = forget
        try:
            await self._app(scope, measured, send)
        except HTTPException as refusal:  # the application is a router's, and no framework that answers it
            response = error_response(refusal.status_code, refusal.detail)
            response.headers.update(refusal.headers or {})
            await response(scope, receive, send)
        finally:
            forget()


class HeadAndOptions:
    """Wrap an application that knows only GET and POST.

    HEAD is answered as GET without the body; OPTIONS is answered with the methods that a 405 response lists.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        method = scope.get("method")
        if method not in ("HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        is_sent = False  # everything that is to be sent has been sent

        async def listen() -> Message:
            return {"type": "http.disconnect"} if is_sent else await receive()  # a disconnect ends a stream

        async def send_on(message: Message) -> None:
            nonlocal is_sent
            if is_sent:
                return
            if message["type"] == "http.response.start":
                is_sent = method == "HEAD" or message["status"] == 405
                if method == "OPTIONS" and is_sent:
                    allowed = [header for header in message["headers"] if header[0] == b"allow"]
                    message = {**message, "status": 204, "headers": allowed}
            await send(message)
            if is_sent:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        if method == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, listen, send_on)
