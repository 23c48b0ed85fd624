"""Which requests come in at all? What every request passes, before its body is read.

Keys, the size of the body, an id that its answer and the log carry, and a JSON error for what went wrong
inside. Written for ASGI itself: a layer of a framework costs each event of a stream.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.answers.failures import ShutDown
from serving.api.api_keys import Keys
from serving.api.errors import DEFECT, error_response, response_of
from serving.metrics.observer import TRACE_HEADERS

log = logging.getLogger(__name__)

OPEN_PATHS = ("/", "/health", "/ready")  # a page that asks for the key, and what probes ask for
_LOCAL = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Guard:
    """Stands before an application; `told` is given the status of each response at its end.

    A server for this machine alone (`is_local`) answers to no other name: a page in a browser here could else
    read it, by a name of its own that it has made to point here.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, max_body_bytes: int, told: Callable[[int], None], *, is_local: bool
    ) -> None:
        self._app = app
        self._is_local = is_local
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http", "the server is started without others"
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        state = scope.setdefault("state", {})
        name = state["request_id"] = given if _ID.fullmatch(given) else uuid.uuid4().hex
        traced = ("traceparent", "tracestate") if b"traceparent" in headers else ()
        TRACE_HEADERS.set({each: headers.get(each.encode(), "") for each in traced})
        start_s, status = time.monotonic(), 499  # which stays where the client went away first

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            refusal = self._refusal(scope, headers, state)
            if refusal is not None:
                await refusal(scope, receive, tell)
            else:
                await self._app(scope, self._measured(receive), tell)
        except asyncio.CancelledError:  # the server waits no longer; uvicorn would answer it with 500
            if status == 499:
                await response_of(ShutDown())(scope, receive, tell)
        except Exception:
            log.exception("%s: a defect of the server", name, extra={"fields": {"request_id": name}})
            if status == 499:
                await error_response(500, DEFECT)(scope, receive, tell)
        finally:
            if scope["path"] not in OPEN_PATHS:  # a probe is no request
                self._told(status)
            took_ms = 1e3 * (time.monotonic() - start_s)
            path = scope["raw_path"].decode("latin-1")  # as it came: with no line breaks
            said = {"request_id": name, "method": scope["method"], "path": path, "status": status}
            log.info(
                "%s %s %s %d %.1f ms",
                *said.values(),
                took_ms,
                extra={"fields": said | {"took_ms": round(took_ms, 1)}},
            )

    def _refusal(self, scope: Scope, headers: dict[bytes, str], state: dict[str, object]) -> ASGIApp | None:
        if self._is_local and not _LOCAL.fullmatch(headers.get(b"host", "localhost")):
            return error_response(
                403, "without keys this server answers at localhost alone; ask there, or give it --api-keys"
            )
        client = self._keys.client(headers.get(b"authorization"))
        if client is None and scope["path"] not in OPEN_PATHS:
            return error_response(401, "the key is missing or wrong; send Authorization: Bearer KEY")
        state["client"] = client
        length = headers.get(b"content-length", "0")
        is_long = length.isdecimal() and (len(length) > 18 or int(length) > self._max_body_bytes)
        return error_response(413, self._too_long()) if is_long else None

    def _too_long(self) -> str:
        return f"the body is longer than {self._max_body_bytes} bytes (server.max_body_mib); shorten it"

    def _measured(self, receive: Receive) -> Receive:
        left = self._max_body_bytes

        async def measured() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, self._too_long())
            return message

        return measured
