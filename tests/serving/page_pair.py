"""Two engines of a small model in one process: one computes prompts, one answers; and what lies between."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from kv_cache.device.storage import KVCache
from kv_cache.exchange.channel import NONE, Credentials
from kv_cache.exchange.connection import Wake
from kv_cache.exchange.messages import HEAD, NO_DRAFTS, PageIdentity
from kv_cache.exchange.page_server import PageServer
from kv_cache.exchange.prompt_source import PromptSource
from kv_cache.exchange.transports import TRANSPORTS, Transport
from recipes.assembly.engine import BuiltEngine
from serving.engine.page_exchange import PageExchange, PageFetches, PageSends
from tests.continuous_batching.recount import recount
from tests.kv_cache import device
from tests.patience import PATIENCE_S

HERE = "tcp://127.0.0.1:0"  # the name of the engine of prompts in these tests, wherever it listens
Between = Callable[[int], int]  # maps the port of the engine of prompts to the one that is dialled


def cache_of(engine: Engine) -> KVCache:
    cache: KVCache = engine.runner.cache  # type: ignore[attr-defined]  # a ModelRunner's
    return cache


class Closeable(Protocol):
    """What a pair ends with itself: peers that dial it, and what lies between its engines."""

    def close(self) -> None: ...


class Pair:
    """The two engines, their thread, and the network between them."""

    def __init__(
        self,
        attention: str = "fused",
        *,
        transport: str = "tcp",
        transports: dict[str, Transport] = TRANSPORTS,
        between: Between = lambda port: port,
        most_part_bytes: int = 1 << 11,
        window_bytes: int = 1 << 14,
        most_wait_s: float = PATIENCE_S,
        answers_model: str = "the model",
        num_prompt_pages: int = 60,
        num_answer_pages: int = 60,
        credentials: Credentials = NONE,
        answers_credentials: Credentials | None = None,
        built: tuple[BuiltEngine, BuiltEngine] | None = None,
        drafts: tuple[str, str] = (NO_DRAFTS, NO_DRAFTS),
        **options: Any,
    ) -> None:
        adapters: Mapping[int, str] = {}
        if built is None:
            self.prompts = device.make(attention, num_pages=num_prompt_pages, **options)
            self.answers = device.make(attention, num_pages=num_answer_pages, **options)
            self.decoder = device.model(attention).decoder
        else:
            self.prompts, self.answers = (each.engine for each in built)
            self.decoder = built[0].runner.decoder
            adapters = {} if built[0].adapters is None else built[0].adapters.digests
        page_size = self.prompts.slots.page_size
        for engine in (self.prompts, self.answers):
            engine.clock = time.monotonic
        self.page_bytes = sum(cache_of(self.answers).layer_bytes)
        self.num_layers = len(cache_of(self.answers).layer_bytes)
        layout = cache_of(self.prompts).layout
        one, other = Wake(), Wake()
        self.server = PageServer(
            HERE,
            PageIdentity("the model", page_size, layout, drafts[0]),
            one,
            most_part_bytes=max(most_part_bytes, *cache_of(self.prompts).layer_bytes),
            transports=transports,
            credentials=credentials,
        )
        self.sends = PageSends(
            self.prompts,
            cache_of(self.prompts),
            self.decoder,
            self.server,
            most_part_bytes,
            adapters,
        )
        self.source = PromptSource(
            f"tcp://127.0.0.1:{between(self.server.port)}",
            PageIdentity(answers_model, page_size, cache_of(self.answers).layout, drafts[1]),
            other,
            transport=transport,
            window_bytes=window_bytes,
            transports=transports,
            credentials=answers_credentials or credentials,
        )
        sources = {HERE: self.source}
        self.fetches = PageFetches(self.answers, cache_of(self.answers), sources, most_wait_s, other)
        self.sending = PageExchange(one, self.sends, None)
        self.fetching = PageExchange(other, None, self.fetches)
        self._poller = select.poll()  # unlike `select`, it takes descriptors above 1,023
        for wake in one, other:
            self._poller.register(wake.fd, select.POLLIN)
        self.is_stopped = False  # the engine of prompts makes no more steps
        self.ends_with: list[Closeable] = [between] if isinstance(between, Listener) else []
        self.finished: list[Request] = []

    def close(self) -> None:
        self.source.close()
        self.server.close()
        for each in self.ends_with:
            each.close()
        self.decoder.after_layer = None

    def ask(self, requests: Sequence[Request]) -> None:
        for number, request in enumerate(requests):
            if not self.fetching.begin(number, request):
                self.answers.add(request)

    def turn(self) -> None:
        """One round of both engines' loops; recounts all pages."""
        stepped = False
        if not self.is_stopped:
            self.sending.take()
            recount(self.prompts.scheduler)
            if self.prompts.has_work and (step := self.prompts.step()) is not None:
                self.sending.stepped(step)
                stepped = True
        for fetch in self.fetching.take():
            self.answers.add(fetch.leader)
        recount(self.answers.scheduler)
        if self.answers.has_work and (step := self.answers.step()) is not None:
            self.finished += step.finished
            stepped = True
        if not stepped:
            self._poller.poll(50)  # milliseconds

    def serve(self, requests: Sequence[Request]) -> list[list[int]]:
        """The answers to requests, whatever becomes of the transfers."""
        self.ask(requests)
        self.until(lambda: len(self.fetches) == 0 and not self.answers.has_work)
        return [each.answer.tolist() for each in requests]

    def until(self, holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until_s, "what must come did not"
            self.turn()

    def settle(self) -> None:
        """Until neither engine holds anything for the other: all pages are free or idle."""
        engines = self.prompts, self.answers
        self.until(
            lambda: not (len(self.sends) or len(self.fetches) or any(each.has_work for each in engines))
        )
        for engine in engines:
            scheduler = engine.scheduler
            held, states = scheduler.lifecycle.held, scheduler.tables.states
            assert not len(held.pages)
            assert not len(held.states)
            assert scheduler.pool.num_held == scheduler.prefix.num_idle
            assert states is None or states.pool.num_held == states.num_idle
            recount(scheduler)


def prompts(count: int, seed: int = 0, shared: int = 20, longest: int = 60) -> list[Request]:
    """Requests that begin alike, and would be computed by the engine of prompts."""
    random = np.random.default_rng(seed)
    beginning = random.integers(1, device.VOCABULARY, shared)
    return [
        Request(
            f"r{number}",
            np.concatenate([beginning, random.integers(1, device.VOCABULARY, random.integers(4, longest))]),
            SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
            prompt_replica=HERE,
        )
        for number in range(count)
    ]


def alone(requests: Sequence[Request], attention: str = "fused") -> list[list[int]]:
    """The answers of one engine that computes everything itself, one request after the other."""
    found = []
    for each in requests:
        key = attention, each.prompt.tobytes(), repr(each.params)
        if key not in _ALONE:  # many tests ask for the same prompts
            engine = device.make(attention)
            request = Request(each.id, each.prompt, each.params)
            engine.add(request)
            while engine.has_work:
                engine.step()
            _ALONE[key] = request.answer.tolist()
        found.append(_ALONE[key])
    return found


_ALONE: dict[tuple[str, bytes, str], list[int]] = {}


class Listener:
    """Accepts connections in threads of its own, every one of which has ended once it is closed."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def serve(self, sock: socket.socket) -> None:
        """What is done with a connection that has come: `keep` holds its sockets, `run` its work."""
        raise NotImplementedError

    def keep(self, sock: socket.socket) -> socket.socket:
        """The socket, which ends with the listener."""
        self._sockets.append(sock)
        return sock

    def run(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def start(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        """No connection comes after the acceptor has ended, so none is left open."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor.ident is not None:
            self._acceptor.join(PATIENCE_S)
            assert not self._acceptor.is_alive(), "the acceptor does not end"
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a connection's thread does not end"
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self.serve(self.keep(self._listener.accept()[0]))


class Link(Listener):
    """Passes the frames of one direction on, up to some frame, which it treats otherwise."""

    def __init__(self, of: str, number: int, how: str) -> None:
        super().__init__()
        self.of, self.number, self.how = of, number, how
        self.counts = {"prompts": 0, "answers": 0}  # frames that came from each
        self._prompts_port = 0

    def __call__(self, port: int) -> int:
        self._prompts_port = port
        self.start()
        return self.port

    def serve(self, sock: socket.socket) -> None:
        prompts = self.keep(socket.create_connection(("127.0.0.1", self._prompts_port)))
        self.run(self._pass, "answers", sock, prompts)
        self.run(self._pass, "prompts", prompts, sock)

    def _pass(self, name: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), source.makefile("rb") as file:
            while head := file.read(HEAD.size):
                length, num_bytes, _ = struct.unpack("<III", head)
                frame = bytearray(head + file.read(length + num_bytes))
                number = self.counts[name]
                self.counts[name] += 1
                if (name, number) == (self.of, self.number):
                    if self.how == "cut":
                        break
                    if self.how == "torn":
                        target.sendall(frame[: len(frame) // 2])
                        break
                    if self.how == "lost":
                        continue
                    if self.how == "twice":
                        target.sendall(frame)
                    if self.how == "damaged":
                        frame[-1] ^= 1
                target.sendall(frame)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
