"""Run a router over the addresses of its replicas: listen, drain and end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

import numpy as np
import uvicorn
import uvloop

from continuous_batching.routing.routing import Route, Routing
from continuous_batching.routing.splitting import Split, Splitting
from recipes.schema.reader import load
from serving.adapters import NO_ADAPTERS, KnownAdapters
from serving.api import access
from serving.api.access import AccessControl
from serving.api.api_keys import ApiKeys, key_of_environment
from serving.api.bodies import BodyMemory
from serving.metrics import logs
from serving.router.app import FleetApplication
from serving.router.fair_turns import FairTurns
from serving.router.fleet_figures import FleetFigures
from serving.router.membership import FleetMembers
from serving.router.prompts import Prompts
from serving.router.proxy import Proxy
from serving.router.replicas import address_of
from serving.router.upstream import HeaderLines
from serving.server import (
    LOOPBACK,
    ServerOptions,
    SignalFreeServer,
    configuration,
    listener_at,
    most_connections,
)
from serving.text.tokenizer import Text

log = logging.getLogger("route")

_MOST_BODY_BYTES = 2**26  # a replica has a limit of its own
_MOST_BODIES_BYTES = 2**29


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
    api_keys: str | None = None
    log_format: str = "text"
    log_requests: bool = False


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
    text, page_size, share_prefixes, adapters = None, 0, False, NO_ADAPTERS
    if options.recipe is not None:
        recipe = load(options.recipe, options.overrides, options.profile)
        text, share_prefixes = Text.of(recipe), recipe.server.share_prefixes
        adapters = KnownAdapters(recipe.adapters)
        page_size = recipe.cache.page_size if recipe.cache.prefix_sharing else 0
    key = key_of_environment()
    headers: HeaderLines = [(b"authorization", f"Bearer {key}".encode())] if key else []
    keys = ApiKeys(ServerOptions("", api_keys=options.api_keys).rights_of(), share_prefixes=share_prefixes)
    routing = Routing(len(options.replicas), options.route, tells=False)
    routing.is_open[:] = False
    splitting = Splitting(routing, options.split)
    members = FleetMembers(options.replicas, routing, headers, splitting.is_known)
    for name in options.discover:
        address_of(name)
    turns = FairTurns(lambda: options.most_open * max(1, int(np.count_nonzero(routing.is_open))))
    figures = FleetFigures(routing, members.replicas, turns)
    prompts = Prompts(text, page_size if options.route == "prefix" else 0, adapters)
    is_local = not keys.are_needed and options.host in LOOPBACK
    proxy = Proxy(routing, members.replicas, prompts, turns, figures, splitting)
    app = FleetApplication(proxy, members, figures, is_local=is_local)
    memory = BodyMemory(_MOST_BODIES_BYTES)
    guarded = AccessControl(app, keys, _MOST_BODY_BYTES, memory, lambda status: None, is_local=is_local)
    server = SignalFreeServer(configuration(guarded, most_connections()))
    with listener_at(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        count = len(options.replicas)
        log.info("listening at http://%s:%d, %d replicas by %s", host, port, count, options.route)
        gc.collect()
        gc.freeze()
        watching = [members.watch(prompts.page_size), *map(members.follow, options.discover)]
        uvloop.run(_serve(app, server, listener, members, turns, watching, options.drain_s))


async def _serve(
    app: FleetApplication,
    server: uvicorn.Server,
    listener: socket.socket,
    members: FleetMembers,
    turns: FairTurns,
    forever: Sequence[Coroutine[None, None, None]],
    drain_s: float,
) -> None:
    """Serve until a signal; after it, no request waits longer than `drain_s`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    beside = [asyncio.ensure_future(each) for each in (*forever, _fill(turns))]
    listening = asyncio.ensure_future(server.serve([listener]))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([*beside, listening, stopping], return_when=asyncio.FIRST_COMPLETED)
    for each in beside:
        if each.done():
            each.result()  # raises if the task ended by a defect
    app.is_draining = True
    until_s = loop.time() + drain_s
    while (turns.num_open or turns.num_waiting) and loop.time() < until_s:
        await asyncio.sleep(0.05)
    server.should_exit = True
    await listening
    for each in beside:
        each.cancel()
    for replica in members.replicas:
        replica.close()


async def _fill(turns: FairTurns) -> None:
    """Let waiting requests through once a replica has opened."""
    while True:
        await asyncio.sleep(0.05)
        turns.fill()
