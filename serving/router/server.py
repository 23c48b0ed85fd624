"""Run a router over the addresses of its replicas: listen, serve the router's own paths, drain and end.

All other requests go to a replica.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import msgspec
import uvicorn
import uvloop
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from continuous_batching.routing.routing import Route, Routing
from continuous_batching.routing.splitting import Split, Splitting
from recipes.assembly.page_events import events_secret
from recipes.schema.reader import load
from serving.adapters import NO_ADAPTERS, KnownAdapters
from serving.api import access, page_files
from serving.api.access import AccessControl, BodyMemory
from serving.api.api_keys import ANYBODY, ApiKeys, Client, key_of_environment
from serving.api.errors import NotFound, error_response, response_of
from serving.api.model_names import ANTHROPICS, anthropic_entry, anthropic_list
from serving.metrics import logs
from serving.router import fleet_figures
from serving.router.fair_turns import ModelTurns
from serving.router.fleet_figures import FleetFigures
from serving.router.membership import FleetMembers
from serving.router.models import FleetModels
from serving.router.prompts import MOST_VALUES, OWN_LIMIT, Prompts
from serving.router.proxy import Proxy
from serving.router.replicas import ReplicaTrust, upstream_of
from serving.router.resuming import KnownAnswers
from serving.router.upstream import HeaderLines
from serving.server import (
    LOOPBACK,
    ServerOptions,
    SignalFreeServer,
    configuration,
    ending_signals,
    listener_at,
    most_connections,
    name_of,
    url_of,
)
from serving.text.tokenizer import Text
from serving.tls import Handshakes, TlsFiles

_ORDERS = ("add", "remove", "drain", "resume")


class FleetApplication:
    """The router's own paths in front of the proxy.

    These are `/fleet` and the page at `/`, `/metrics`, `/health` and `/ready`, `/v1/models`, and the orders
    `/fleet/add`, `/remove`, `/drain` and `/resume` for the replica whose address is the query, as in
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
        if path in access.OPEN_PATHS:  # clients without a key reach these, so that no body there is read
            own = self._own(path, scope) if method in ("GET", "HEAD") else _other_method(method, path)
            assert own is not None, f"{path} is the router's own"
            await own(scope, receive, send)
        elif method == "GET" and (own := self._own(path, scope) or self._models(path, scope)) is not None:
            await own(scope, receive, send)
        elif method == "POST" and (order := path.removeprefix("/fleet/")) != path and order in _ORDERS:
            await (self._refusal(scope) or self._obey(order, scope))(scope, receive, send)
        else:
            await self._proxy(scope, receive, send)

    def _own(self, path: str, scope: Scope) -> ASGIApp | None:
        match path:
            case "/":
                return page_files.page("fleet")
            case _ if path in page_files.PATHS:
                return page_files.file(path)
            case "/fleet":
                client: Client = scope.get("state", {}).get("client") or ANYBODY
                figures = self._figures.as_json(client)
                return Response(msgspec.json.encode(figures), media_type="application/json")
            case "/metrics":
                return Response(
                    self._figures.as_metrics(), headers={"content-type": fleet_figures.CONTENT_TYPE}
                )
            case "/health":
                has_key = scope.get("state", {}).get("client") is not None
                return JSONResponse(
                    {"status": "ok"} | ({"replicas": self._figures.health()} if has_key else {})
                )
            case "/ready":
                is_ready = not self.is_draining and any(
                    each.state == "ready" for each in self._members.replicas
                )
                return JSONResponse(
                    {"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503
                )
        return None

    def _models(self, path: str, scope: Scope) -> ASGIApp | None:
        """Return all models of the fleet, or one by its name; None where no replica lists any."""
        prefix, entries = "/v1/models", self._members.models.entries
        name = path.removeprefix(f"{prefix}/")
        if not entries or not (path == prefix or name != path):
            return None
        if path != prefix and name not in entries:
            return response_of(NotFound.of_model(name, [*entries]))
        if any(each == ANTHROPICS.encode() for each, _ in scope["headers"]):
            found = {each: _for_anthropic(each, entry) for each, entry in entries.items()}
            whole = anthropic_list([*found.values()]) if path == prefix else found[name]
            return Response(msgspec.json.encode(whole), media_type="application/json")
        listed = b'{"object":"list","data":[' + b",".join(entries.values()) + b"]}"
        return Response(listed if path == prefix else entries[name], media_type="application/json")

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
                "replica": replica.url,
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


def _other_method(method: str, path: str) -> Response:
    """Return the list of the methods of the router's own answers, or the refusal of another one."""
    if method == "OPTIONS":
        answer = Response(status_code=204)
    else:
        answer = error_response(405, f"{path} has GET, HEAD and OPTIONS alone; send one of these")
    answer.headers["allow"] = "GET, HEAD, OPTIONS"
    return answer


def _for_anthropic(name: str, entry: bytes) -> dict[str, Any]:
    """Return the entry of a replica's list as Anthropic's clients read it."""
    said = msgspec.json.decode(entry)
    born_s, limit = said.get("created"), said.get("max_model_len")
    born_s = born_s if isinstance(born_s, int) and 0 <= born_s < 2**32 else 0
    born = datetime.fromtimestamp(born_s, timezone.utc)
    return anthropic_entry(name, born, limit if isinstance(limit, int) else None)


log = logging.getLogger("route")

_MOST_BODY_BYTES = 2**26  # a replica has a limit of its own
_MOST_BODIES_BYTES = 2**29
_TELLING_S = 1.0  # The time in which requests that the router's end cuts off tell their clients.


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """The options of the command line of scripts.route."""

    replicas: Sequence[str] = ()
    discover: Sequence[str] = ()  # names, each of whose addresses is a replica
    recipe: str | None = None  # recipe of the replicas, for the keys of their pages
    overrides: Sequence[str] = ()
    profile: str | None = None
    route: Route = "prefix"
    split: Split = "cost"
    host: str = "127.0.0.1"
    port: int = 8080
    most_open: int = 256  # requests at each replica
    drain_s: float = 30.0
    keep_alive_s: float = 15.0  # silence of a stream after which its client gets a sign of life; 0: none
    model_name: str | None = None  # the name of the recipe's model at replicas; None: as scripts.serve would
    api_keys: str | None = None
    log_format: str = "text"
    log_requests: bool = False
    tls_certificate: str | None = None
    tls_private_key: str | None = None
    tls_client_authority: str | None = None
    tls_authority: str | None = None  # signs the replicas' certificates

    @property
    def tls(self) -> TlsFiles:
        """The files by which HTTP is encrypted."""
        return TlsFiles(self.tls_certificate, self.tls_private_key, self.tls_client_authority)


def run_router(options: RouterOptions) -> int:
    """Serve until a signal; raises ValueError or OSError whose message is one line."""
    lines = logs.install(options.log_format)
    try:
        _run(options)
    finally:
        lines.close()
    return 0


def _run(options: RouterOptions) -> None:
    logging.getLogger(access.__name__).setLevel(logging.INFO if options.log_requests else logging.WARNING)
    text, page_size, share_prefixes, adapters, recipe_name = None, 0, False, NO_ADAPTERS, ""
    most_values = MOST_VALUES
    tls, trust = options.tls.for_clients(), ReplicaTrust(tls=options.tls.for_replicas(options.tls_authority))
    if options.recipe is not None:
        recipe = load(options.recipe, options.overrides, options.profile)
        text, share_prefixes = Text.of(recipe), recipe.server.share_prefixes
        most_values = recipe.server.max_body_values
        recipe_name = options.model_name or name_of(recipe.model.path, options.recipe)
        adapters = KnownAdapters(recipe.adapters)
        page_size = recipe.cache.page_size if recipe.cache.prefix_sharing else 0
        trust = replace(
            trust, events_secret=events_secret(recipe.cache), events_open=recipe.cache.events_open
        )
    key = key_of_environment()
    headers: HeaderLines = [(b"authorization", f"Bearer {key}".encode())] if key else []
    keys = ApiKeys(ServerOptions("", api_keys=options.api_keys).rights_of(), share_prefixes=share_prefixes)
    routing = Routing(len(options.replicas), options.route, tells=False)
    routing.is_open[:] = False
    splitting = Splitting(routing, options.split)
    models = FleetModels(recipe_name)
    members = FleetMembers(options.replicas, routing, headers, splitting.is_known, models, trust)
    for name in options.discover:
        upstream_of(name, trust)
    turns = ModelTurns(lambda turn: options.most_open * max(1, models.num_open(turn, routing.is_open)))
    answers = KnownAnswers()
    figures = FleetFigures(routing, members.replicas, turns, answers)
    prompts = Prompts(text, page_size if options.route == "prefix" else 0, adapters, most_values)
    is_local = not keys.are_needed and options.host in LOOPBACK
    proxy = Proxy(
        routing,
        members.replicas,
        prompts,
        turns,
        figures,
        splitting,
        models,
        options.keep_alive_s,
        answers,
        key.encode(),
    )
    app = FleetApplication(proxy, members, figures, is_local=is_local)
    memory = BodyMemory(_MOST_BODIES_BYTES, OWN_LIMIT)
    guarded = AccessControl(
        app, keys, _MOST_BODY_BYTES, memory, lambda status: None, is_local=is_local, limit=OWN_LIMIT
    )
    most = most_connections()
    server = SignalFreeServer(configuration(guarded, most), None if tls is None else Handshakes(tls, most))
    with listener_at(options.host, options.port) as listener:
        url = url_of(listener, is_encrypted=tls is not None)
        where = f"{url}, {len(options.replicas)} replicas by {options.route}"
        gc.collect()
        gc.freeze()
        watching = [members.watch(prompts.page_size), *map(members.follow, options.discover)]
        if trust.tls is not None:
            watching.append(trust.tls.renew())
        uvloop.run(_serve(app, server, listener, members, turns, watching, options.drain_s, where))


async def _serve(
    app: FleetApplication,
    server: uvicorn.Server,
    listener: socket.socket,
    members: FleetMembers,
    turns: ModelTurns,
    forever: Sequence[Coroutine[None, None, None]],
    drain_s: float,
    where: str,
) -> None:
    """Serve until a signal; after it, no request waits longer than `drain_s`, after a second one, none."""
    loop = asyncio.get_running_loop()
    stop, again = ending_signals(server)
    # From here on a signal ends the router in order.
    log.info("listening at %s", where)
    beside = [asyncio.ensure_future(each) for each in (*forever, _fill(turns))]
    listening = asyncio.ensure_future(server.serve([listener]))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([*beside, listening, stopping], return_when=asyncio.FIRST_COMPLETED)
    for each in beside:
        if each.done():
            each.result()  # raises if the task ended by a defect
    app.is_draining = True
    until_s = loop.time() + drain_s
    while (turns.num_open or turns.num_waiting) and loop.time() < until_s and not again.is_set():
        await asyncio.sleep(0.05)
    server.should_exit = True
    await listening
    if again.is_set():  # Otherwise uvicorn has cancelled them.
        for request in server.server_state.tasks:
            request.cancel()
    if server.server_state.tasks:  # They tell their clients.
        await asyncio.wait(server.server_state.tasks, timeout=_TELLING_S)
    for each in beside:
        each.cancel()
    for replica in members.replicas:
        replica.close()


async def _fill(turns: ModelTurns) -> None:
    """Let waiting requests through once a replica has opened."""
    while True:
        await asyncio.sleep(0.05)
        turns.fill()
