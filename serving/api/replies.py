"""How do answers travel back to a client, at once or as they are made?

The status of a stream is decided by its first event, so that a request which the engine refuses, or which
finds no engine, gets its status and not a stream that breaks. A client that goes away ends its request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.answers.answers import Answer, Delta
from serving.answers.failures import Failure, Gone
from serving.api.errors import body_of
from serving.api.response_formats import Envelope, Json, usage

Value = TypeVar("Value")
Abort = Callable[[Answer], None]

_DONE = b"data: [DONE]\n\n"
_LAST_S = 5.0  # what a client that was cut off has to read why
_to_json = msgspec.json.Encoder().encode


class Replies:
    """The answers to the prompts of one request; `is_hidden`: their tokens are not told."""

    def __init__(
        self, answers: Sequence[Answer], envelope: Envelope, abort: Abort, is_hidden: bool = False
    ) -> None:
        self._answers = answers
        self._envelope = envelope
        self._abort = abort
        self._is_hidden = is_hidden

    async def whole(self, request: Request) -> Response:
        """All of it as one JSON object."""
        deltas = await self._or_gone(request.receive, self._collect())
        if self._envelope.form.is_long:
            body = await asyncio.to_thread(self._written, deltas)
        else:
            body = self._written(deltas)
        return Response(body, media_type="application/json")

    def _written(self, deltas: list[Delta]) -> bytes:
        """The JSON of it; choice by choice, so that a thread that does it lets others run between."""
        form = self._envelope.form
        choices = [msgspec.Raw(_to_json(form.choice(delta, index))) for index, delta in enumerate(deltas)]
        return _to_json(self._envelope.whole(choices, self._usage()))

    async def stream(self, request: Request, *, show_usage: bool, always_usage: bool) -> Response:
        """Server-sent events, from when there is something to tell; raises the Failure that came before."""
        pieces = self._pieces()
        first = await self._or_gone(request.receive, anext(pieces))

        async def events() -> AsyncGenerator[bytes, None]:
            form, deltas = self._envelope.form, first
            async with contextlib.aclosing(pieces):
                while True:
                    told = b"".join(
                        self._event([form.event(delta, index)], self._usage() if always_usage else None)
                        for index, delta in deltas
                    )
                    if len(self._answers) == 1 and self._answers[0].is_told:
                        break  # of several, one may be taken and not told yet
                    yield told
                    told = b""
                    try:
                        deltas = await anext(pieces, [])
                    except Failure as failure:
                        yield b"data: " + body_of(failure) + b"\n\n" + _DONE
                        return
                    if not deltas:
                        break
            yield told + (self._event([], self._usage()) if show_usage else b"") + _DONE

        return EventStream(events(), self._end, self._cut)

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        return b"data: " + _to_json(self._envelope.event(choices, usage)) + b"\n\n"

    def _end(self) -> None:
        for answer in self._answers:
            if answer.is_open:
                self._abort(answer)

    async def _cut(self) -> None:
        """Returns when an answer has failed and its client had the time to read so."""
        tasks = [asyncio.ensure_future(each.failed.wait()) for each in self._answers]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.sleep(_LAST_S)

    async def _pieces(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """What is new, and the index of its choice."""
        if len(self._answers) == 1:
            while deltas := await self._answers[0].next():
                yield [(each.index, each) for each in deltas]
            return
        size = self._answers[0].num_answers
        waiting = {asyncio.ensure_future(each.next()): index for index, each in enumerate(self._answers)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    if deltas := task.result():
                        waiting[asyncio.ensure_future(self._answers[index].next())] = index
                        yield [(index * size + each.index, each) for each in deltas]
        finally:
            for task in waiting:
                task.cancel()

    async def _collect(self) -> list[Delta]:
        """Every choice, whole."""
        whole: dict[int, Delta] = {}
        async for deltas in self._pieces():
            for index, delta in deltas:
                if index in whole:
                    whole[index].extend(delta)
                else:
                    whole[index] = delta
        return [whole[index] for index in sorted(whole)]

    def _usage(self) -> Json:
        return usage(
            sum(each.request.num_prompt_tokens for each in self._answers),
            0 if self._is_hidden else sum(each.num_tokens for each in self._answers),
            sum(each.num_cached_tokens for each in self._answers),
        )

    async def _or_gone(self, receive: Receive, work: Awaitable[Value]) -> Value:
        """The result, unless the client goes away first; the answers then end."""
        try:
            return await first_of(work, gone(receive))
        except BaseException:
            self._end()
            raise


class EventStream(Response):
    """Events as they come. `end` is called when nobody listens any more, however that came."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], end: Callable[[], None], cut: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._end = end
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        tasks = [asyncio.ensure_future(each) for each in (self._send(send), gone(receive), self._cut())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            cut_off = scope.get("state", {}).get("cut_off")
            if tasks[0].done():
                tasks[0].result()
            elif tasks[2].done() and cut_off is not None:
                cut_off()  # or what it does not read is kept for it
                await tasks[1]
        finally:
            for task in tasks:
                task.cancel()
            self._end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        more = True
        async with contextlib.aclosing(self._events):
            async for event in self._events:
                more = not event.endswith(_DONE)  # the end of the response goes with the last of them
                await send({"type": "http.response.body", "body": event, "more_body": more})
        if more:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(work: Awaitable[Value], other: Awaitable[Any]) -> Value:
    """What the work comes to; raises Gone if the other ends first."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise Gone("the client went away", "disconnect")
    finally:
        for task in tasks:
            task.cancel()
