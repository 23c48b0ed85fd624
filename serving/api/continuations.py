"""Let a router, and nobody else, learn the tokens behind answers, and have answers continued here.

A router shows an operator's key in a header of its own, beside the key of the client for whom it asks. What
it sends to continue an answer becomes the client's own request once more, with what is known of the answer
beside it: so it has the client's rights, limits and form.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from borders.refusal import BadRequest
from recipes.schema.server_section import ServerSection
from serving.api.access import whole_body
from serving.api.api_keys import ANYBODY, ApiKeys
from serving.api.errors import error_response, response_of
from serving.continuation import PATH, RESUMED_PATHS, ROUTER_KEY_HEADER, Continuation, read_continuation

_LONG_BYTES = 2**14  # a body of this size or more is read in a thread
_FORBIDDEN = (
    "only a router may do this: it shows an operator's key of this server (API_KEY in its environment), or it"
    " runs on this machine where no key is needed"
)


class Continuations:
    """Wrap an application; `fingerprint` returns that of what may go on here.

    Without keys, only a server for this machine alone (`is_local`) believes that a router is one.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        section: ServerSection,
        fingerprint: Callable[[], str],
        *,
        is_local: bool,
    ) -> None:
        self._app = app
        self._keys = keys
        self._section = section
        self._fingerprint = fingerprint
        self._is_local = is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["path"]
        if scope["method"] != "POST" or not (path == PATH or path in RESUMED_PATHS):
            await self._app(scope, receive, send)
            return
        is_router = self._is_router(scope)
        if path == PATH:
            await (self._continued if is_router else _forbidden)(scope, receive, send)
            return
        if is_router and self._section.most_resumed:
            scope["state"]["tells_tokens"] = True
        await self._app(scope, receive, send)

    def _is_router(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        shown = headers.get(ROUTER_KEY_HEADER.encode())
        if shown is None or b"origin" in headers:  # no page in a browser is a router
            return False
        client = self._keys.client(shown.decode("latin-1"))
        return client is not None and client.may_operate and (client is not ANYBODY or self._is_local)

    async def _continued(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await whole_body(receive)
        if body is None:
            return
        try:
            is_long = len(body) >= _LONG_BYTES
            known = await asyncio.to_thread(read_continuation, body) if is_long else read_continuation(body)
        except BadRequest as bad:
            await response_of(bad)(scope, receive, send)
            return
        refusal = self._refusal(known)
        if refusal is not None:
            await refusal({**scope, "path": known.path}, receive, send)
            return
        is_given = False

        async def given() -> Message:
            nonlocal is_given
            if is_given:
                return await receive()  # returns when the router disconnects
            is_given = True
            return {"type": "http.request", "body": known.body, "more_body": False}

        state: dict[str, Any] = scope["state"]
        state |= {"tells_tokens": True, "continuation": known}
        await self._app({**scope, "path": known.path, "raw_path": known.path.encode()}, given, send)

    def _refusal(self, known: Continuation) -> Response | None:
        if not self._section.most_resumed:
            return error_response(
                409, "answers do not go on here: server.resume is 0, or server.weights_root is set"
            )
        if known.begun.fingerprint != self._fingerprint():
            why = "the answer was begun with other weights, another type or other software"
            return error_response(409, f"{why} than this server's; continue it at one like the first")
        return None


async def _forbidden(scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(403, _FORBIDDEN)(scope, receive, send)
