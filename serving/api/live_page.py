"""Show the engine's state to people who open the server in a browser.

The module serves one plain page and a stream of the engine's state: the request in each slot, the state of
each page, and the queue. All viewers share one query of the engine, a few times a second; without viewers
there is none. The stream holds no text and no id of any request, only the kind of answer that it asks for; of
the requests of other keys, it shows only that they exist.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from serving.answers.answers import AnswerStream
from serving.api.streamed import StreamedResponse
from serving.async_llm import AsyncLLM
from serving.engine.messages import View
from serving.failures import Unavailable
from serving.grammars.structured_output import form_of

_PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_EVERY_S = 0.25
_LATE_S = 2.0  # delay after which the page says that the engine does not answer
_MOST_CELLS = 4096  # cells of the page map; with more pages, a cell stands for several
FREE, CACHED, HELD, SHARED = range(4)


class LivePage:
    """The queries that all viewers share."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._num_viewers = 0
        self._looking: asyncio.Task[None] | None = None
        self._seen: dict[str, Any] = {}
        # The owner who may see a slot, and its content.
        self._slots: list[tuple[str | None, dict[str, Any]] | None] = []
        self._asked: dict[int, dict[str, Any]] = {}  # keyed by the number of each stream in a slot
        self._events: dict[str, bytes] = {}  # events of the last query, by viewer's key
        self._news = asyncio.Event()

    async def events(self, owner: str) -> AsyncGenerator[bytes, None]:
        """Yield one event for each query, for a viewer with this key."""
        self._num_viewers += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
            self._looking.add_done_callback(_raise_defect)
        try:
            while True:
                await self._news.wait()
                yield self._event(owner)
                if self._llm.state in ("draining", "dead"):
                    return  # a viewer must not keep the server from ending
        finally:
            self._num_viewers -= 1

    async def _look(self) -> None:
        while self._num_viewers:
            self._seen, self._slots = await self._query()
            self._events.clear()
            self._news.set()
            self._news = asyncio.Event()
            await asyncio.sleep(_EVERY_S)

    def _event(self, owner: str) -> bytes:
        """Return what a viewer with this key may see, as an event."""
        if owner not in self._events:
            shown = self._seen
            if self._slots:
                slots = [slot and (slot[1] if slot[0] == owner else {}) for slot in self._slots]
                shown = shown | {"slots": slots}
            self._events[owner] = b"data: " + msgspec.json.encode(shown) + b"\n\n"
        return self._events[owner]

    async def _query(self) -> tuple[dict[str, Any], list[tuple[str | None, dict[str, Any]] | None]]:
        """Return what all viewers may see, and what each slot holds."""
        llm = self._llm
        try:
            view = await asyncio.wait_for(llm.look(), _LATE_S)
        except asyncio.TimeoutError:
            return {"state": llm.engine.status, "reason": f"silent for {llm.engine.silent_s:.0f} s"}, []
        except Unavailable as failure:
            return {"state": llm.state, "reason": str(failure)}, []
        beat, facts = llm.stats.last_beat, llm.facts
        if beat is None or facts is None:
            return {"state": llm.state}, []
        gauges, counters = beat.gauges, beat.counters
        slots = [None if slot is None else self._slot(*slot) for slot in view.slots]
        here = {slot[0] for slot in view.slots if slot is not None}
        self._asked = {stream: asked for stream, asked in self._asked.items() if stream in here}
        return {
            "state": llm.state,
            "device": facts.device,
            "page_size": facts.page_size,
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
        }, slots

    def _slot(
        self, stream: int, num_tokens: int, num_computed: int, num_pages: int
    ) -> tuple[str | None, dict[str, Any]]:
        """Return the owner who may see a slot, and the slot's content."""
        answer = self._llm.answer_of(stream)
        num_prompt = num_tokens if answer is None else answer.request.num_prompt_tokens
        return None if answer is None else answer.owner, {
            "stream": stream,
            "tokens": num_tokens,
            "computed": num_computed,
            "prompt": num_prompt,
            "pages": num_pages,
            **({} if answer is None else self._asked_by(stream, answer)),
        }

    def _asked_by(self, stream: int, answer: AnswerStream) -> dict[str, Any]:
        """Return the form of an answer, the number of its tools, and its adapter.

        What the request does not have is left out.
        """
        if stream not in self._asked:
            grammar, number = answer.request.params.grammar, answer.request.adapter
            form = None if grammar is None else form_of(grammar)
            names = {each.number: each.name for each in self._llm.adapters.all}
            found = {
                "form": None if form is None else " by ".join(reversed(form)),
                "tools": answer.num_tools,
                "adapter": names.get(number, "") if number else "",
            }
            self._asked[stream] = {name: value for name, value in found.items() if value}
        return self._asked[stream]


def _raise_defect(looking: asyncio.Task[None]) -> None:
    if not looking.cancelled():
        looking.result()


def page_map(view: View) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the state of each page except the null page.

    Where a cell stands for several pages, it has their most frequent state.
    """
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
    """Return a router with the page and the stream that it reads."""
    routes = APIRouter()
    live = LivePage(llm)

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(_PAGE, headers=_HEADERS, media_type="text/html")

    @routes.get("/live", include_in_schema=False)
    async def stream(request: Request) -> Response:
        return StreamedResponse(live.events(request.state.client.owner), lambda: None, asyncio.Event().wait)

    return routes
