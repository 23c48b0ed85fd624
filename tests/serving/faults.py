"""Five checks around a fault, and a server in a thread of this process, where all it holds can be counted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest

from serving.api.api_keys import ApiKeys
from serving.api.app import application
from serving.async_llm import AsyncLLM
from serving.server import SignalFreeServer, configuration, listener_at
from tests.patience import PATIENCE_S
from tests.serving import warm
from tests.serving.server import TINY

PROMPTS = ["348+275=", "One day, ", "What is 17 + 25?", "Tell me of the sea. "]


class Served:
    """`scripts.serve`'s server on the tiny model, whose engine may be told to break (broken_engine.py)."""

    def __init__(self, *overrides: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.llm = AsyncLLM(TINY, *overrides)
        self._listener = listener_at("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        app = application(self.llm, "tiny", ApiKeys({}), is_local=True)
        self._server = SignalFreeServer(configuration(app, 1000))
        self._thread = threading.Thread(target=self._run)
        self._patch = pytest.MonkeyPatch()
        self.engines = warm.Engines() if warm.is_possible() else None
        if self.engines is not None:
            self._patch.setattr(asyncio, "create_subprocess_exec", self.engines.start)

    def __enter__(self) -> Served:
        self._patch.setenv("OMP_NUM_THREADS", "1")
        gc.collect()
        gc.freeze()  # `held` collects again and again, and need not visit all that the run has imported
        self._thread.start()
        self.call(self.llm.ready())
        self.told = asyncio.run(_tell_all(self.url))
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        self._patch.undo()
        gc.collect()
        gc.freeze()
        assert not self._thread.is_alive(), "the server does not end"

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _serve(self) -> None:
        self.llm.start()
        try:
            await self._server.serve([self._listener])
        finally:
            await self.llm.close()

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float = PATIENCE_S) -> Any:
        """Do it in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def one(self, **body: Any) -> Told:
        """What one who asks alone is told."""

        async def asked() -> Told:
            async with aiohttp.ClientSession() as session:
                return await ask(session, self.url, **body)

        return asyncio.run(asked())

    @property
    def connections(self) -> set[Any]:
        """That are open."""
        return self._server.server_state.connections

    def held(self) -> dict[str, int]:
        """What the server holds besides its engine: the same whenever nobody asks for anything."""
        gc.collect()
        return {
            "tasks": len(asyncio.all_tasks(self._loop)),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "requests": self.llm.num_requests,
            "open": self.llm.stats.num_open,
            "connections": len(self.connections),
        }

    def leaks(self) -> str | None:
        """What the engine holds although nobody asks for anything."""
        view = self.call(self.llm.look())
        holders, cached = (np.frombuffer(each, np.uint8) for each in (view.holders, view.cached))
        if any(row is not None for row in view.slots):
            return f"slots {view.slots}"
        wrong = np.flatnonzero(holders[1:] != cached[1:]) + 1
        return f"pages {wrong.tolist()} are held by nobody" if len(wrong) else None

    @contextlib.contextmanager
    def five_checks(self, *, survives: bool = True, neighbours: int = 4) -> Iterator[None]:
        """Around a fault: nothing hangs, neighbours get their tokens, nothing leaks, statuses are right (the
        test checks those of what it breaks itself), and the counters agree.

        Unless the engine `survives`, a neighbour may get a part of its tokens, and then an error.
        """
        self.settle()
        before = self.held()
        with Neighbours(self, neighbours) as others:
            yield
        others.check(survives=survives)
        self.settle(before)
        stats = self.llm.stats
        assert stats.num_samples == sum(stats.ends.values()), (stats.num_samples, stats.ends)

    def settle(self, before: dict[str, int] | None = None) -> None:
        """Within the time, the server is ready, and holds what it did."""
        self.call(self.llm.ready())
        until_s = time.monotonic() + PATIENCE_S
        while True:
            leak, held = self.leaks(), self.held()
            if leak is None and not held["requests"] and (before is None or _no_more(held, before)):
                return
            assert time.monotonic() < until_s, f"{leak}; held {held}, before {before}"
            time.sleep(0.05)


def _no_more(held: dict[str, int], before: dict[str, int]) -> bool:
    spare = 12  # descriptors and a task of a spare process, which may come and go
    slack = {"tasks": 2, "descriptors": spare}
    return all(count <= before[name] + slack.get(name, 0) for name, count in held.items())


@dataclass
class Told:
    """What a client was told."""

    status: int
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    is_whole: bool = False


async def ask(session: aiohttp.ClientSession, url: str, **body: Any) -> Told:
    """A completion, streamed, to its end; each wait is at most PATIENCE_S."""
    asked = {"max_tokens": 24, "temperature": 0, "return_token_ids": True, "stream": True} | body
    timeout = aiohttp.ClientTimeout(sock_connect=PATIENCE_S, sock_read=PATIENCE_S)
    async with session.post(f"{url}/v1/completions", json=asked, timeout=timeout) as response:
        told = Told(response.status)
        if response.status != 200:
            told.error = (await response.json())["error"]["message"]
            return told
        async for event in events(response):
            if "error" in event:
                told.error = event["error"]["message"]
            elif event["choices"]:
                told.tokens += event["choices"][0]["token_ids"]
                told.is_whole |= event["choices"][0]["finish_reason"] is not None
        return told


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Of a stream, up to its [DONE]."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


async def _tell_all(url: str) -> list[list[int]]:
    async with aiohttp.ClientSession() as session:
        told = [await ask(session, url, prompt=prompt) for prompt in PROMPTS]
    assert all(each.is_whole for each in told), told
    return [each.tokens for each in told]


class Neighbours:
    """Clients that ask again and again, until the fault is over."""

    def __init__(self, served: Served, number: int) -> None:
        self._served = served
        self._number = number
        self._over = threading.Event()
        self._told: list[tuple[int, Told]] = []
        self._broken: list[BaseException] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()))

    def __enter__(self) -> Neighbours:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a neighbour hangs"

    async def _all(self) -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._go_on(session, index) for index in range(self._number)))

    async def _go_on(self, session: aiohttp.ClientSession, index: int) -> None:
        which = index % len(PROMPTS)
        while True:
            try:
                self._told.append((which, await ask(session, self._served.url, prompt=PROMPTS[which])))
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                self._broken.append(error)
                return
            if self._over.is_set():
                return
            await asyncio.sleep(0.1)

    def check(self, *, survives: bool) -> None:
        """Their tokens are those of one who asks alone."""
        assert not self._broken, self._broken
        assert not survives or not self._number or any(each.is_whole for _, each in self._told)
        for which, each in self._told:
            alone = self._served.told[which]
            if survives or each.is_whole:
                assert (each.status, each.tokens, each.error) == (200, alone, None)
            else:
                assert each.status in (200, 503), each
                assert each.error, each
                assert each.tokens == alone[: len(each.tokens)]
