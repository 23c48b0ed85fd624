"""Show the engine's state to people who open the server in a browser.

The module serves the page, the history of the last minutes, and a stream of the engine's state: the request
in each slot, the state of each page, and the queue. All viewers share one query of the engine, a few times a
second; without viewers there is one a second while there is work, for the history, and none otherwise. The
stream holds no text and no id of any request, only the kind of answer that it asks for; of the requests of
other keys, it shows only that they exist.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from serving.answers.answers import AnswerStream
from serving.api import page_files
from serving.api.streamed import StreamedResponse
from serving.async_llm import AsyncLLM
from serving.engine.messages import View
from serving.failures import Unavailable
from serving.grammars.structured_output import form_of
from serving.metrics.history import EVERY_S, History, Occupant, Sample

_TICK_S = 0.25
_LATE_S = 2.0  # delay after which the page says that the engine does not answer
_MOST_CELLS = 4096  # cells of the page map; with more pages, a cell stands for several
FREE, CACHED, HELD, SHARED = range(4)


class LivePage:
    """The history, and the queries that all viewers share."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.history = History()
        self._llm = llm
        self._num_viewers = 0
        self._watching: asyncio.Task[None] | None = None
        self._seen: dict[str, Any] = {}
        # What is in each slot, and what its owner may see of it.
        self._slots: list[tuple[Occupant, dict[str, Any]] | None] = []
        self._asked: dict[int, dict[str, Any]] = {}  # keyed by the number of each stream in a slot
        self._events: dict[str, bytes] = {}  # events of the last query, by viewer's key
        self._is_sampled = False  # the last query belongs to a new sample of the history
        self._news = asyncio.Event()

    def begin(self) -> None:
        """Begin to watch the engine, if that has not begun, until the event loop ends."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(self._watch())
            self._watching.add_done_callback(_raise_defect)

    async def events(self, owner: str) -> AsyncGenerator[bytes, None]:
        """Yield one event for each query, for a viewer with this key."""
        self._num_viewers += 1
        self.begin()
        try:
            while True:
                await self._news.wait()
                yield self._event(owner)
                if self._llm.state in ("draining", "dead"):
                    return  # a viewer must not keep the server from ending
        finally:
            self._num_viewers -= 1

    def past(self, owner: str) -> dict[str, Any]:
        """Return what a viewer with this key may see of the history."""
        return {
            "every_s": EVERY_S,
            "columns": Sample._fields,
            "samples": list(self.history.samples),
            "num_slots": self._num_slots,
            "cells": self._cells(owner),
        }

    @property
    def _num_slots(self) -> int:
        return 0 if self._llm.facts is None else self._llm.facts.num_slots

    def _cells(self, owner: str, *, only_last: bool = False) -> str:
        cells = self.history.cells(owner, self._num_slots, only_last=only_last)
        return base64.b64encode(cells).decode()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            now_s = loop.time()
            is_due = now_s >= due_s
            if self._num_viewers or (is_due and self._llm.num_requests):
                self._seen, self._slots = await self._query()
            elif is_due:
                self._slots = []
            occupants = [slot and slot[0] for slot in self._slots]
            self.history.look(occupants)
            if is_due:
                self.history.add(self._llm.stats, occupants)
                due_s = max(due_s + EVERY_S, now_s)
            self._is_sampled = is_due
            self._events.clear()
            self._news.set()
            self._news = asyncio.Event()
            await asyncio.sleep(max(0.0, now_s + _TICK_S - loop.time()))

    def _event(self, owner: str) -> bytes:
        """Return what a viewer with this key may see, as an event."""
        if owner not in self._events:
            shown = dict(self._seen)
            if self._slots:
                slots = zip(self._slots, self.history.colours)
                shown["slots"] = [slot and _shown_to(owner, *slot, colour) for slot, colour in slots]
            if self._is_sampled:
                shown |= {"sample": self.history.samples[-1], "cells": self._cells(owner, only_last=True)}
            self._events[owner] = b"data: " + msgspec.json.encode(shown) + b"\n\n"
        return self._events[owner]

    async def _query(self) -> tuple[dict[str, Any], list[tuple[Occupant, dict[str, Any]] | None]]:
        """Return what all viewers may see, and what each slot holds."""
        llm = self._llm
        looking = asyncio.ensure_future(llm.look())
        try:
            # Not `wait_for`: Python 3.11 loses a cancellation there that comes with the view
            await asyncio.wait([looking], timeout=_LATE_S)
            if not looking.done():
                return {"state": llm.engine.status, "reason": f"silent for {llm.engine.silent_s:.0f} s"}, []
            view = looking.result()
        except Unavailable as failure:
            return {"state": llm.state, "reason": str(failure)}, []
        finally:
            looking.cancel()
        beat, facts = llm.stats.last_beat, llm.facts
        if beat is None or facts is None:
            return {"state": llm.state}, []
        gauges, counters = beat.gauges, beat.counters
        slots = [None if slot is None else self._slot(*slot) for slot in view.slots]
        here = {slot[0] for slot in view.slots if slot is not None}
        self._asked = {stream: asked for stream, asked in self._asked.items() if stream in here}
        return {
            "state": llm.state,
            "model": llm.stats.model,
            "device": facts.device,
            "num_slots": facts.num_slots,
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
    ) -> tuple[Occupant, dict[str, Any]]:
        """Return what is in a slot, and what its owner may see of it."""
        answer = self._llm.answer_of(stream)
        num_prompt = num_tokens if answer is None else answer.request.num_prompt_tokens
        owner = None if answer is None else answer.owner
        return Occupant(stream, owner, num_computed < num_prompt), {
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


def _shown_to(owner: str, occupant: Occupant, content: dict[str, Any], colour: int) -> dict[str, Any]:
    return content | {"colour": colour} if occupant.owner == owner else {}


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


def router(live: LivePage) -> APIRouter:
    """Return a router with the page and what it reads."""
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        return page_files.page("engine")

    async def file(request: Request) -> Response:
        return page_files.file(request.url.path)

    for path in page_files.PATHS:
        routes.add_api_route(path, file, include_in_schema=False)

    @routes.get("/live", include_in_schema=False)
    async def stream(request: Request) -> Response:
        return StreamedResponse(live.events(request.state.client.owner), lambda: None, asyncio.Event().wait)

    @routes.get("/history", response_class=Response)
    async def history(request: Request) -> Response:
        """The figures of the last five minutes, a sample a second, and what was in each slot."""
        past = live.past(request.state.client.owner)
        return Response(msgspec.json.encode(past), media_type="application/json")

    return routes
