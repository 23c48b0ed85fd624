"""How is a recipe served to many, over HTTP?

    python -m scripts.serve RECIPE [key=value ...] [--host 127.0.0.1] [--port 8000]

Speaks OpenAI's API at /v1. SIGTERM, or ctrl-C, lets what runs come to its end (`server.drain_s`); a second
one does not wait. The host is this machine alone unless it is told; who opens it to others gives keys:
--api-keys FILE, or the environment's API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from recipes.schema.server_section import ServerSection
from scripts import verb
from serving.api.api_keys import Keys, key_of_environment
from serving.api.app import application
from serving.api.connections import IDLE_S, bound, room
from serving.api.protocol import Protocol
from serving.async_llm import AsyncLLM
from serving.metrics import logs
from serving.metrics.logs import FORMATS
from serving.metrics.pulse import report
from serving.metrics.tally import Tally

log = logging.getLogger("serve")
_PULSE_S = 10.0  # between lines about what it does
_BACKLOG = 2048  # connections that wait to be accepted
_LAST_PORT = 2**16 - 1
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.serve", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    top.add_argument("recipe", help="a YAML file, such as recipes/tiny/cpu.yaml")
    top.add_argument("overrides", nargs="*", metavar="key=value", help="such as cache.page_size=32")
    top.add_argument("--profile", metavar="NAME", help="a name in recipes/profiles, such as low_latency")
    top.add_argument("--host", default="127.0.0.1", help="the address to listen at")
    top.add_argument("--port", type=int, default=8000, help="0: any that is free, which is logged")
    top.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    top.add_argument("--api-keys", metavar="FILE", help="KEY or KEY TENANT a line; without one, all may ask")
    top.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help="a web page's origin whose scripts may ask, or *; may be repeated",
    )
    top.add_argument(
        "--otlp-endpoint", metavar="URL", help="where OpenTelemetry's spans go; none if not given"
    )
    top.add_argument("--log-format", choices=FORMATS, default="text", help="json: an object a line")
    top.add_argument("--log-requests", action="store_true", help="a line for each request, without its text")
    return top


class Server(uvicorn.Server):
    """Signals are ours: the first lets requests end, and only then closes the door."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


async def serve(llm: AsyncLLM, server: Server, listener: socket.socket) -> None:
    """Until a signal, or until there can be no engine."""
    loop = asyncio.get_running_loop()
    asked, hurried = asyncio.Event(), asyncio.Event()

    def ask() -> None:
        if asked.is_set():
            server.force_exit = True
            hurried.set()
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    llm.start()
    listening = asyncio.ensure_future(server.serve([listener]))
    dead = asyncio.ensure_future(llm.engine.until(lambda: llm.state == "dead"))
    told = asyncio.ensure_future(asked.wait())
    pulse = asyncio.ensure_future(report(llm.tally, _PULSE_S))
    await asyncio.wait([told, dead, listening], return_when=asyncio.FIRST_COMPLETED)
    if asked.is_set():
        log.info("ends: %d requests may go on for %g s", llm.num_requests, llm.recipe.server.drain_s)
        draining = asyncio.ensure_future(llm.drain(llm.recipe.server.drain_s))
        again = asyncio.ensure_future(hurried.wait())
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
    pulse.cancel()
    server.should_exit = True
    await listening
    await llm.close()


def listener_at(host: str, port: int) -> socket.socket:
    """A socket that listens; raises OSError or ValueError in one line."""
    if not 0 <= port <= _LAST_PORT:
        raise ValueError(f"--port is {port}; it must be from 0 (any that is free) to {_LAST_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound(listener)
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # who has read in the log that we listen may come
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror}; choose another --port") from None
    return listener


def configuration(app: ASGIApp, limits: ServerSection) -> uvicorn.Config:
    """uvicorn's."""
    return uvicorn.Config(
        app,
        http=partial(Protocol, most_connections=room()),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=5,
        backlog=_BACKLOG,
    )


def keys_of(options: argparse.Namespace) -> dict[str, str]:
    """Keys and their tenants; raises ValueError for a key that no client could send."""
    tenant_of = Keys.read(options.api_keys) if options.api_keys else {}
    if key := key_of_environment():
        tenant_of.setdefault(key, "")
    return tenant_of


def main(argv: list[str]) -> int:
    """Serve until told to end; 1 where no engine could be started."""
    options = parser().parse_intermixed_args(argv)
    lines = logs.install(options.log_format)
    try:
        return _run(options, lines)
    finally:
        lines.close()


def _run(options: argparse.Namespace, lines: logs.Lines) -> int:
    logging.getLogger("serving.api.guard").setLevel(logging.INFO if options.log_requests else logging.WARNING)
    tenant_of = keys_of(options)
    tally, close = _tally(options)
    llm = AsyncLLM(options.recipe, options.overrides, options.profile, tally)
    tally.num_lost_lines = lambda: lines.num_lost
    keys = Keys(tenant_of, share_prefixes=llm.recipe.server.share_prefixes)
    tally.model = model = options.served_model_name or _name_of(llm, options.recipe)
    listener = listener_at(options.host, options.port)
    is_open = not keys.are_needed
    if options.host not in _LOOPBACK and is_open:
        log.warning("everybody who reaches %s may ask: give --api-keys FILE", options.host)
    host, port = listener.getsockname()[:2]
    log.info("listening at http://%s:%d, model %s", f"[{host}]" if ":" in host else host, port, model)
    is_local = is_open and options.host in _LOOPBACK
    app = application(llm, model, keys, options.cors_origin, is_local=is_local)
    server = Server(configuration(app, llm.recipe.server))
    gc.collect()
    gc.freeze()  # what is imported is not looked through again while clients wait
    try:
        uvloop.run(serve(llm, server, listener))
    finally:
        close()
    return 1 if llm.engine.has_failed else 0


def _tally(options: argparse.Namespace) -> tuple[Tally, Callable[[], None]]:
    """What counts what is done, and how it ends."""
    if not options.otlp_endpoint:
        return Tally(), lambda: None
    try:
        from serving.metrics.traces import Traces
    except ImportError as error:
        raise ValueError(f"--otlp-endpoint needs {error.name}: bash scripts/setup.sh otel") from error
    traces = Traces.to(options.otlp_endpoint)
    return traces, traces.close


def _name_of(llm: AsyncLLM, recipe: str) -> str:
    path = llm.recipe.model.path
    return Path(recipe).parent.name if path is None or path.name == "weights" else path.name


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    verb.run(main)
