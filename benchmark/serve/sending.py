"""Send each request at its time, and record whether the client kept its times."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark.run_clock import RunClock
from benchmark.serve.client import ClientAnswer, StreamingClient
from benchmark.serve.trace_requests import TraceRequest

LOOK_S = 0.02  # seconds between two measurements of how late the event loop is


@dataclass(slots=True)
class ClientRun:
    """The results of a load. Times are on the client's clock; `lags_s` is how late its event loop was.

    `now` is the number of requests in flight, `most` the largest number so far. `passed` is what the clocks
    showed from `start_s` to the last answer's end.
    """

    answers: list[ClientAnswer] = field(default_factory=list)
    now: int = 0
    most: int = 0
    lags_s: list[float] = field(default_factory=list)
    start_s: float = 0.0
    passed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SendSchedule:
    """How requests are sent: `loops` has those of each client of a closed loop; else each has its time.

    `max_concurrency` bounds how many are in flight at once.
    """

    asks: Sequence[TraceRequest]
    loops: Sequence[Sequence[TraceRequest]] | None = None
    max_concurrency: int | None = None


async def serve(
    server: StreamingClient, load: SendSchedule, on_answer: Callable[[ClientAnswer], None]
) -> ClientRun:
    """Send a load; `on_answer` is called with each answer when it ends."""
    run = ClientRun()
    bodies = {
        ask.id: ask.body(server.model, server.seed + number, server.extra)
        for number, ask in enumerate(load.asks)
    }
    limit = asyncio.Semaphore(load.max_concurrency or len(load.asks))
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()  # a pause of the collector would be counted as the server's
    clock = RunClock()
    run.start_s = time.perf_counter()
    lag = asyncio.create_task(_watch_loop(run.lags_s))

    async def one(ask: TraceRequest, due_s: float | None) -> None:
        free_s = time.perf_counter()
        answer = ClientAnswer(ask, late_s=0.0 if due_s is None else free_s - due_s, due_s=due_s)
        async with limit:
            run.now += 1
            run.most = max(run.most, run.now)
            await server.ask(answer, bodies.pop(ask.id))
            run.now -= 1
        answer.held_s = answer.sent_s - free_s
        run.answers.append(answer)
        on_answer(answer)

    async def client(asks: Sequence[TraceRequest]) -> None:
        for ask in asks:
            await one(ask, None)

    try:
        if load.loops is not None:
            await asyncio.gather(*(client(asks) for asks in load.loops))
        else:
            await _open(load.asks, run.start_s, one)
    finally:
        lag.cancel()
        if not was_frozen:  # what the caller has frozen stays so
            gc.unfreeze()
    run.passed = clock.read()
    return run


async def _open(asks: Sequence[TraceRequest], start_s: float, one: Callable) -> None:
    """Send each request when it is due, whether or not earlier ones have ended."""
    tasks = []
    for ask in asks:
        due_s = start_s + ask.due_s
        if (rest_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(rest_s)
        tasks.append(asyncio.create_task(one(ask, due_s)))
    await asyncio.gather(*tasks)


async def _watch_loop(lags_s: list[float]) -> None:
    while True:
        due_s = time.perf_counter() + LOOK_S
        await asyncio.sleep(LOOK_S)
        lags_s.append(time.perf_counter() - due_s)
