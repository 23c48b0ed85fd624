"""What do people see who open the server in a browser?

One plain page, and a stream of the engine's state: the request in each slot, the state of each page, the
queue. All viewers share one query of the engine, a few times a second; without viewers there is none. It
holds no text and no name of any request, because all keys see the same.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from serving.api.generation import EventStream
from serving.async_llm import AsyncLLM
from serving.engine.messages import View
from serving.failures import Unavailable

_PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_EVERY_S = 0.25
_MOST_CELLS = 4096  # of the map of pages; of more pages, a cell stands for several
FREE, CACHED, HELD, SHARED = range(4)


class LivePage:
    """The queries that all viewers share."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._num_viewers = 0
        self._looking: asyncio.Task[None] | None = None
        self._event = b""
        self._news = asyncio.Event()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """One event for each query, for one viewer."""
        self._num_viewers += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
            self._looking.add_done_callback(_raise_defect)
        try:
            while True:
                await self._news.wait()
                yield self._event
                if self._llm.state in ("draining", "dead"):
                    return  # a viewer must not keep the server from ending
        finally:
            self._num_viewers -= 1

    async def _look(self) -> None:
        while self._num_viewers:
            event = msgspec.json.encode(await self._seen())
            self._event = b"data: " + event + b"\n\n"
            self._news.set()
            self._news = asyncio.Event()
            await asyncio.sleep(_EVERY_S)

    async def _seen(self) -> dict[str, Any]:
        llm = self._llm
        try:
            view = await llm.look()
        except Unavailable as failure:
            return {"state": llm.state, "reason": str(failure)}
        beat, facts = llm.last_beat, llm.facts
        if beat is None or facts is None:
            return {"state": llm.state}
        gauges, counters = beat.gauges, beat.counters
        return {
            "state": llm.state,
            "device": facts.device,
            "page_size": facts.page_size,
            "slots": [None if slot is None else self._slot(*slot) for slot in view.slots],
            "pages": base64.b64encode(page_map(view).tobytes()).decode(),
            "num_pages": facts.num_pages - 1,
            "running": gauges.running_requests,
            "waiting": gauges.waiting_requests,
            "held_back": beat.held_back,
            "held_pages": gauges.held_pages,
            "cached_pages": gauges.idle_pages,
            "hit_rate": round(gauges.hit_rate, 4),
            "sampled_tokens": counters.sampled_tokens,
            "computed_tokens": counters.computed_tokens,
            "preemptions": counters.preemptions,
        }

    def _slot(self, stream: int, num_tokens: int, num_computed: int, num_pages: int) -> dict[str, Any]:
        request = self._llm.request_of(stream)
        num_prompt = num_tokens if request is None else request.num_prompt_tokens
        return {
            "stream": stream,
            "tokens": num_tokens,
            "computed": num_computed,
            "prompt": num_prompt,
            "pages": num_pages,
        }


def _raise_defect(looking: asyncio.Task[None]) -> None:
    if not looking.cancelled():
        looking.result()


def page_map(view: View) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The state of each page but the null page; of many pages, the most frequent state in each cell."""
    holders = np.frombuffer(view.holders, dtype=np.uint8)[1:]
    cached = np.frombuffer(view.cached, dtype=np.uint8)[1:].astype(bool)
    users = holders.astype(np.int16) - cached
    states = np.full(len(holders), FREE, dtype=np.uint8)
    states[cached & (users == 0)] = CACHED
    states[users == 1] = HELD
    states[users > 1] = SHARED
    if len(states) <= _MOST_CELLS:
        return states
    bounds = np.linspace(0, len(states), _MOST_CELLS + 1).astype(np.int64)
    counts = np.stack([np.add.reduceat((states == each).astype(np.int64), bounds[:-1]) for each in range(4)])
    most: np.ndarray[Any, np.dtype[np.uint8]] = counts.argmax(axis=0).astype(np.uint8)
    return most


def router(llm: AsyncLLM) -> APIRouter:
    """The page, and the stream that it reads."""
    routes = APIRouter()
    live = LivePage(llm)

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(_PAGE, headers=_HEADERS, media_type="text/html")

    @routes.get("/live", include_in_schema=False)
    async def stream() -> Response:
        return EventStream(live.events(), lambda: None, asyncio.Event().wait)

    return routes
