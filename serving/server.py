"""Run a server for a recipe: listen, drain and end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from borders.numbers import PORTS
from recipes.model_folder import name_of_folder
from serving.api import access
from serving.api.api_keys import ApiKeys, Rights, key_of_environment
from serving.api.app import application
from serving.api.batch_runner import Batches
from serving.api.live_page import LivePage
from serving.api.protocol import Protocol
from serving.async_llm import AsyncLLM
from serving.metrics import logs
from serving.metrics.server_stats import ServerStats, report
from serving.tls import Handshakes, TlsFiles

log = logging.getLogger("serve")
# IDLE_S is how long a client may send no request. It is longer than proxies keep a connection, 60 s with most
# of them: the sender of requests must close first, or a request may meet a connection that is just being
# closed.
IDLE_S = 75
_LOG_EVERY_S = 10.0  # interval between log lines about the server's work
_BACKLOG = 2048  # connections that may wait to be accepted
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_UNHEARD_S = 60  # time that a peer may acknowledge nothing, or have no room for data
_SENT_BYTES = 2**18  # bytes that the system holds for a reader; more waits in the server, where it is counted
_MOST_DESCRIPTORS = 2**16
_RESERVE = 64  # descriptors that are left for files, and for another engine
_LEAST_DESCRIPTORS = 2 * _RESERVE


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of the command line of scripts.serve."""

    recipe: str
    overrides: Sequence[str] = ()
    profile: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    model_name: str | None = None
    api_keys: str | None = None  # a file
    cors_origins: Sequence[str] = ()
    otlp_endpoint: str | None = None
    log_format: str = "text"
    log_requests: bool = False
    batches: str | None = None  # a folder
    tls_certificate: str | None = None
    tls_private_key: str | None = None
    tls_client_authority: str | None = None

    @property
    def tls(self) -> TlsFiles:
        """The files by which HTTP is encrypted."""
        return TlsFiles(self.tls_certificate, self.tls_private_key, self.tls_client_authority)

    def rights_of(self) -> dict[str, Rights]:
        """Return the keys and their rights; raises ValueError for a key that no client could send.

        The environment's key is the operator's, and may ask for any priority, whatever its line says.
        """
        rights_of = {} if self.api_keys is None else ApiKeys.read(self.api_keys)
        if key := key_of_environment():
            rights_of[key] = replace(rights_of.get(key, Rights()), max_priority=None)
        return rights_of


class SignalFreeServer(uvicorn.Server):
    """A server that leaves signals to `_serve`, which first lets requests end and only then stops listening.

    Its connections are encrypted where `handshakes` are given: uvicorn's own TLS would count connections, and
    bound their time, only after their handshakes.
    """

    def __init__(self, config: uvicorn.Config, handshakes: Handshakes | None = None) -> None:
        super().__init__(config)
        self._handshakes = handshakes
        self._accepting: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen at the sockets."""
        if self._handshakes is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self._accepting.append(asyncio.ensure_future(self._handshakes.tls.renew()))
        protocol: Any = self.config.http_protocol_class  # typed as a Protocol, which takes no arguments
        new = partial(
            protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for each in sockets or ():
            accepting = self._handshakes.accept(each, new, self.server_state.connections)
            self._accepting.append(asyncio.ensure_future(accepting))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no longer, and let connections end."""
        for each in self._accepting:
            each.cancel()
        if self._accepting:
            await asyncio.wait(self._accepting)
        await super().shutdown(sockets)


def run_server(options: ServerOptions) -> int:
    """Serve until a signal; returns 1 where no engine could be started.

    Raises ValueError or OSError whose message is one line.
    """
    gc.freeze()  # What is imported stays: no collection visits it
    lines = logs.install(options.log_format)
    try:
        return _run(options, lines)
    finally:
        lines.close()


def _run(options: ServerOptions, lines: logs.Lines) -> int:
    logging.getLogger(access.__name__).setLevel(logging.INFO if options.log_requests else logging.WARNING)
    rights_of = options.rights_of()
    most, tls = most_connections(), options.tls.for_clients()
    stats, close = _stats(options.otlp_endpoint)
    with contextlib.ExitStack() as ends:
        ends.callback(close)
        llm = AsyncLLM(options.recipe, *options.overrides, profile=options.profile, stats=stats)
        stats.num_lost_lines = lambda: lines.num_lost
        keys = ApiKeys(rights_of, share_prefixes=llm.recipe.server.share_prefixes)
        model = (
            name_of(llm.recipe.model.path, options.recipe)
            if options.model_name is None
            else options.model_name
        )
        stats.model = model = _sendable(model)
        listener = ends.enter_context(listener_at(options.host, options.port))
        is_open = not keys.are_needed
        if options.host not in LOOPBACK and is_open:
            log.warning("anyone who reaches %s may send requests: set --api-keys FILE", options.host)
        where = f"{url_of(listener, is_encrypted=tls is not None)}, model {model}"
        is_local = is_open and options.host in LOOPBACK
        batches = None if options.batches is None else Batches.of(Path(options.batches), llm, keys)
        live = LivePage(llm)
        app = application(
            llm, model, keys, options.cors_origins, is_local=is_local, batches=batches, live=live
        )
        server = SignalFreeServer(configuration(app, most), None if tls is None else Handshakes(tls, most))
        gc.collect()
        gc.freeze()  # later collections then skip what is imported, and delay clients less
        uvloop.run(_serve(llm, server, listener, live, batches, where))
    return 1 if llm.engine.has_failed else 0


async def _serve(
    llm: AsyncLLM,
    server: uvicorn.Server,
    listener: socket.socket,
    live: LivePage,
    batches: Batches | None,
    where: str,
) -> None:
    """Serve until a signal, or until there can be no engine; a second signal does not wait for requests."""
    first, second = ending_signals(server)
    # From here on a signal ends the server in order.
    log.info("listening at %s", where)
    llm.start()
    live.begin()
    listening = asyncio.ensure_future(server.serve([listener]))
    waits = [asyncio.ensure_future(each) for each in (llm.engine.dead(), first.wait())]
    beside = [asyncio.ensure_future(report(llm.stats, _LOG_EVERY_S))]
    if batches is not None:
        beside.append(asyncio.ensure_future(batches.run()))
    await asyncio.wait([*waits, listening], return_when=asyncio.FIRST_COMPLETED)
    if first.is_set():
        log.info("ends: %d requests may go on for %g s", llm.num_requests, llm.recipe.server.drain_s)
        draining = asyncio.ensure_future(llm.drain(llm.recipe.server.drain_s))
        again = asyncio.ensure_future(second.wait())
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
    server.should_exit = True
    await listening
    await llm.close()
    for each in beside:
        each.cancel()
    await asyncio.wait(beside)


def ending_signals(server: uvicorn.Server) -> tuple[asyncio.Event, asyncio.Event]:
    """Return what the first signal to end sets, and the second one, after which the server does not wait.

    A closed terminal's counts, too, since it must leave no engine and no folder behind, and break no stream;
    under nohup it is ignored.
    """
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if first.is_set():
            server.force_exit = True
            second.set()
        first.set()

    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
        loop.add_signal_handler(number, on_signal)
    return first, second


def listener_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises OSError or ValueError whose message is one line."""
    if port not in PORTS:
        raise ValueError(f"--port is {port}; it must be {PORTS}, where 0 is any that is free")
    if not host:  # the system would take an empty host for every address
        raise ValueError("--host is empty; name an address, such as 127.0.0.1 (0.0.0.0 is every one)")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        _drop_lost_clients(listener)
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # clients can connect from the moment that the log says so
    except OSError as error:
        listener.close()
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror}; choose another {option}") from None
    return listener


def url_of(listener: socket.socket, *, is_encrypted: bool) -> str:
    """Return the address at which clients reach a listening socket."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_encrypted else 'http'}://{shown}:{port}"


def _drop_lost_clients(listener: socket.socket) -> None:
    """Let the system close connections whose clients are gone; accepted connections inherit the options."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_BYTES)
    for name, value in {
        "TCP_KEEPIDLE": _UNHEARD_S // 2,
        "TCP_KEEPINTVL": _UNHEARD_S // 6,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 1000 * _UNHEARD_S,
    }.items():
        if hasattr(socket, name):  # Linux has all of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def most_connections() -> int:
    """Return the largest number of connections, after raising this process's limit of descriptors.

    Raises ValueError where the limit is too low to serve anyone.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if most < _LEAST_DESCRIPTORS:
        raise ValueError(
            f"the system lets this process open {most} files and connections, and a server needs"
            f" {_LEAST_DESCRIPTORS}: raise the limit (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most - _RESERVE


def configuration(app: ASGIApp, most_connections: int) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    found = uvicorn.Config(
        app,
        http=partial(Protocol, most_connections=most_connections),  # type: ignore[arg-type] # it is only called
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks where a client is
        lifespan="off",
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=5,
        backlog=_BACKLOG,
        reset_contextvars=True,  # a request that was pipelined begins with nothing of the one before it
    )
    found.load()
    return found


def _stats(otlp_endpoint: str | None) -> tuple[ServerStats, Callable[[], None]]:
    """Return the server's statistics, and the function that closes them."""
    if otlp_endpoint is None:
        return ServerStats(), lambda: None
    try:
        from serving.metrics.traces import Traces
    except ImportError as error:
        raise ValueError(f"--otlp-endpoint needs {error.name}: bash scripts/setup.sh otel") from error
    traces = Traces.to(otlp_endpoint)
    return traces, traces.close


def _sendable(model: str) -> str:
    """Return the model's name, which every answer holds; raises ValueError for an unusable one."""
    if not model.strip() or not model.isprintable():
        raise ValueError(
            f"the model's name is {model!r}; it must be printable text in UTF-8:"
            " give one by --served-model-name NAME"
        )
    return model


def name_of(path: Path | None, recipe: str) -> str:
    """Return the name under which a model is served unless another is given."""
    return Path(recipe).parent.name if path is None or path.name == "weights" else name_of_folder(path)
