"""Which paths does a router answer itself? All others go to a replica."""

from __future__ import annotations

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api.errors import error_response
from serving.router import fleet_figures
from serving.router.fleet_figures import FleetFigures
from serving.router.proxy import Proxy
from serving.router.replicas import FleetReplica


class FleetApplication:
    """`/fleet` and its page at `/`, `/metrics`, `/health`, `/ready`, `/fleet/drain` and `/fleet/resume`."""

    def __init__(self, proxy: Proxy, replicas: list[FleetReplica], figures: FleetFigures) -> None:
        self._proxy = proxy
        self._replicas = replicas
        self._figures = figures
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """UpstreamAnswer one request."""
        method, path = scope["method"], scope["path"]
        if method == "GET" and (own := self._own(path)) is not None:
            await own(scope, receive, send)
        elif method == "POST" and path in ("/fleet/drain", "/fleet/resume"):
            await self._drain(scope, is_drained=path == "/fleet/drain")(scope, receive, send)
        else:
            await self._proxy(scope, receive, send)

    def _own(self, path: str) -> ASGIApp | None:
        match path:
            case "/":
                return Response(fleet_figures.PAGE, media_type="text/html")
            case "/fleet":
                return Response(msgspec.json.encode(self._figures.as_json()), media_type="application/json")
            case "/metrics":
                return Response(
                    self._figures.as_metrics(), headers={"content-type": fleet_figures.CONTENT_TYPE}
                )
            case "/health":
                return JSONResponse({"status": "ok"})
            case "/ready":
                is_ready = not self.is_draining and any(each.state == "ready" for each in self._replicas)
                return JSONResponse(
                    {"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503
                )
        return None

    def _drain(self, scope: Scope, *, is_drained: bool) -> Response:
        """Of the replica whose address is the query, such as /fleet/drain?http://127.0.0.1:8001."""
        url = scope["query_string"].decode("latin-1")
        for each in self._replicas:
            if each.url == url:
                each.drain(is_drained)
                return JSONResponse({"replica": url, "drained": is_drained, "open": each.num_open})
        return error_response(404, f"there is no replica {url!r}; GET /fleet names them")
