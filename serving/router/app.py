"""Serve the router's own paths; all other requests go to a replica."""

from __future__ import annotations

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api.api_keys import ANYBODY, Client
from serving.api.errors import error_response
from serving.router import fleet_figures
from serving.router.fleet_figures import FleetFigures
from serving.router.membership import FleetMembers
from serving.router.proxy import Proxy

_ORDERS = ("add", "remove", "drain", "resume")


class FleetApplication:
    """The router's own paths in front of the proxy.

    These are `/fleet` and its page at `/`, `/metrics`, `/health` and `/ready`, and the orders `/fleet/add`,
    `/remove`, `/drain` and `/resume` for the replica whose address is the query, as in
    /fleet/drain?http://127.0.0.1:8001. Without keys, orders are accepted only where no other machine reaches
    the router (`is_local`).
    """

    def __init__(self, proxy: Proxy, members: FleetMembers, figures: FleetFigures, *, is_local: bool) -> None:
        self._proxy = proxy
        self._members = members
        self._figures = figures
        self._is_local = is_local
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        method, path = scope["method"], scope["path"]
        if method == "GET" and (own := self._own(path)) is not None:
            await own(scope, receive, send)
        elif method == "POST" and (order := path.removeprefix("/fleet/")) != path and order in _ORDERS:
            await (self._refusal(scope) or self._obey(order, scope))(scope, receive, send)
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
                is_ready = not self.is_draining and any(
                    each.state == "ready" for each in self._members.replicas
                )
                return JSONResponse(
                    {"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503
                )
        return None

    def _obey(self, order: str, scope: Scope) -> Response:
        url = scope["query_string"].decode("latin-1")
        try:
            replica = self._members.add(url) if order == "add" else self._members.find(url)
        except ValueError as error:
            return error_response(400, str(error))
        if replica is None:
            return error_response(404, f"there is no replica {url!r}; GET /fleet names them")
        match order:
            case "remove":
                self._members.remove(url)
            case "drain" | "resume":
                replica.drain(order == "drain")
        return JSONResponse(
            {
                "replica": url,
                "state": replica.state,
                "drained": replica.is_drained,
                "leaves": replica.leaves,
                "open": replica.num_open,
                "trouble": replica.trouble,
            }
        )

    def _refusal(self, scope: Scope) -> Response | None:
        """Refuse orders that no operator gave: replicas see all prompts, and the router's own key."""
        client: Client = scope.get("state", {}).get("client") or ANYBODY
        if not client.may_operate or (client is ANYBODY and not self._is_local):
            return error_response(
                403, "only the key in the router's API_KEY may do this: start the router with one"
            )
        if any(name == b"origin" for name, _ in scope["headers"]):
            return error_response(403, "pages in a browser may not do this; send it from a command line")
        return None
