"""What do HEAD and OPTIONS mean, which every path is asked sooner or later?"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Methods:
    """Stands before an application that knows GET and POST alone.

    HEAD is GET without the body; OPTIONS tells the methods of a path, which is what a 405 tells.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        method = scope.get("method")
        if method not in ("HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        is_told = False  # all that will be

        async def listen() -> Message:
            return {"type": "http.disconnect"} if is_told else await receive()  # which ends a stream

        async def tell(message: Message) -> None:
            nonlocal is_told
            if is_told:
                return
            if message["type"] == "http.response.start":
                is_told = method == "HEAD" or message["status"] == 405
                if method == "OPTIONS" and is_told:
                    allowed = [header for header in message["headers"] if header[0] == b"allow"]
                    message = {**message, "status": 204, "headers": allowed}
            await send(message)
            if is_told:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        if method == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, listen, tell)
