"""When is each request sent, and did the client keep its times?"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmark.serve.client import ClientAnswer, StreamingClient
from benchmark.serve.trace_requests import TraceRequest

LOOK_S = 0.02  # between two looks at how late the event loop is


@dataclass(slots=True)
class ClientRun:
    """What came of a load. Times are on the client's clock; `lags_s` is how late its event loop was.

    `now` and `most` requests are, and were, on their way at once.
    """

    answers: list[ClientAnswer] = field(default_factory=list)
    now: int = 0
    most: int = 0
    lags_s: list[float] = field(default_factory=list)
    start_s: float = 0.0
    end_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SendSchedule:
    """How requests are sent: `loops` holds those of each client of a closed loop, else each has its time.

    `max_concurrency` bounds how many are on their way at once.
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
    gc.freeze()  # a pause of the collector would be counted as the server's
    run.start_s = time.perf_counter()
    cpu_s = time.process_time()
    lag = asyncio.create_task(_watch_loop(run.lags_s))

    async def one(ask: TraceRequest, due_s: float) -> None:
        answer = ClientAnswer(ask, late_s=time.perf_counter() - due_s)
        started_s = time.perf_counter()
        async with limit:
            answer.held_s = time.perf_counter() - started_s
            run.now += 1
            run.most = max(run.most, run.now)
            await server.ask(answer, bodies.pop(ask.id))
            run.now -= 1
        run.answers.append(answer)
        on_answer(answer)

    async def client(asks: Sequence[TraceRequest]) -> None:
        for ask in asks:
            await one(ask, time.perf_counter())

    try:
        if load.loops is not None:
            await asyncio.gather(*(client(asks) for asks in load.loops))
        else:
            await _open(load.asks, run.start_s, one)
    finally:
        lag.cancel()
        gc.unfreeze()
    run.end_s, run.cpu_s = time.perf_counter(), time.process_time() - cpu_s
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
