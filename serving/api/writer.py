"""Write the answers to one request for its client, whole or as a stream of events.

The head of a stream is sent once the engine has put its request into the queue; whatever fails later is the
stream's last event. The requests of a client that disconnects are aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from typing import Protocol, TypeVar

import anyio
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive

from borders.refusal import BadRequest
from serving.answers.answers import AnswerDelta, AnswerStream
from serving.api.pieces import PIECE_BYTES, Turns, gathered
from serving.api.streamed import KeepAlive, StreamedResponse, gone
from serving.async_llm import RETRY_S, AsyncLLM
from serving.failures import ClientGone, CutOff, Failure, Overloaded, PartlyOverloaded

Value = TypeVar("Value")

LONG_TEXT = 2**14  # characters of answers, beyond which calls are looked for in a thread
_LAST_S = 5.0  # time that a client which is cut off has to read the reason


class WholeForm(Protocol):
    """Writes the answers to one request as bytes; a long piece comes in several parts."""

    def take(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> None:
        """Take new parts of answers that are written whole; each comes with the index of its answer."""
        ...

    def whole(self) -> Iterator[bytes]:
        """Yield all answers as one JSON object, once all their parts are taken."""
        ...


class ResponseForm(WholeForm, Protocol):
    """Writes the answers to one request either whole or as a stream."""

    keep_alive: bytes  # what a stream sends while it has nothing to say, which its readers skip

    def events(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> Iterator[bytes]:
        """Yield the events for new parts of answers; each part comes with the index of its answer."""
        ...

    def end(self) -> bytes:
        """Return what ends a stream whose answers are complete."""
        ...

    def failed(self, failure: Failure | BadRequest) -> bytes:
        """Return what ends a stream that cannot go on."""
        ...


class News:
    """The new parts of the answers to the prompts of one request, each with the index of its choice.

    Of several answers, each is read by a task of its own, which `close` ends.
    """

    def __init__(self, answers: Sequence[AnswerStream]) -> None:
        self._answers = answers
        self._read: deque[asyncio.Task[list[AnswerDelta]]] = deque()  # tasks whose parts are not yet returned
        self._reading: dict[asyncio.Task[list[AnswerDelta]], int] = {}  # the index of the answer of each task
        if len(answers) > 1:
            self._reading = {asyncio.ensure_future(each.next()): at for at, each in enumerate(answers)}

    async def next(self) -> list[tuple[int, AnswerDelta]]:
        """Wait for new parts of one answer and return them; empty once every answer is read.

        Raises the failure that ended an answer.
        """
        if len(self._answers) == 1:
            return [(each.index, each) for each in await self._answers[0].next()]
        size = self._answers[0].num_answers
        while self._reading:
            if not self._read:
                done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
                self._read += done
            task = self._read.popleft()
            index = self._reading.pop(task)
            if deltas := task.result():
                self._reading[asyncio.ensure_future(self._answers[index].next())] = index
                return [(index * size + each.index, each) for each in deltas]
        return []

    def close(self) -> None:
        """Read no longer."""
        for task in self._reading:
            task.cancel()


class AnswerWriter:
    """Writes the answers to the prompts of one request."""

    def __init__(self, llm: AsyncLLM, turns: Turns, answers: Sequence[AnswerStream]) -> None:
        self._llm = llm
        self._turns = turns
        self._answers = answers

    async def whole(self, request: Request, form: WholeForm) -> Response:
        """Return all answers as one JSON object, sent in parts if it is long."""
        num_characters = await self._unless_gone(request.receive, self._told(form))
        if (overloaded := self._overloaded()) is not None:
            self._end()
            raise overloaded
        pieces, is_long = gathered(form.whole()), num_characters > LONG_TEXT
        try:
            first = await self._turns.next_of(pieces, is_long=is_long) or b""
        except BaseException:
            self._end()
            raise
        if len(first) < PIECE_BYTES:
            self._end()
            return Response(first, media_type="application/json")
        return StreamedResponse(
            self._in_turn(first, pieces, is_long=is_long), self._end, asyncio.Event().wait, "application/json"
        )

    async def _in_turn(
        self, first: bytes, pieces: Iterator[bytes], *, is_long: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the pieces, each of which is made in its own turn of the event loop."""
        piece: bytes | None = first
        while piece is not None:
            yield piece
            await self._turns.next()
            piece = await self._turns.next_of(pieces, is_long=is_long)

    async def stream(self, request: Request, form: ResponseForm) -> Response:
        """Return server-sent events once the engine has accepted the request; raises what comes before."""
        keep_alive = KeepAlive(self._llm.recipe.server.keep_alive_s, form.keep_alive)
        await self._unless_gone(request.receive, self._accepted(keep_alive.every_s or math.inf))

        async def events() -> AsyncGenerator[bytes, None]:
            ready = b""
            with contextlib.closing(News(self._answers)) as news:
                while True:
                    try:
                        deltas = await news.next()
                    except (Failure, BadRequest) as failure:
                        yield form.failed(failure)
                        return
                    if not deltas:
                        break
                    pieces = gathered(form.events(deltas))
                    ready = next(pieces, b"")  # new tokens may still yield nothing to write
                    while len(ready) >= PIECE_BYTES:
                        yield ready
                        await self._turns.next()
                        ready = next(pieces, b"")
                    if len(self._answers) == 1 and self._answers[0].is_read:
                        break  # one of several answers may be read and not yet written
                    if ready:
                        yield ready
                    ready = b""
            yield ready + form.end()

        return StreamedResponse(events(), self._end, self._cut_off, keep_alive=keep_alive)

    def _overloaded(self) -> Overloaded | None:
        """Return why a line of a batch has no whole answer, if a sample was only in the engine's queue.

        A client is told so by its `finish_reason`. A line has a day for its answer, and is tried again.
        """
        first = self._answers[0]  # all have the same fields
        if not first.is_of_batch:
            return None
        timeout_s, limit_s = first.request.timeout_s, self._llm.recipe.scheduler.max_queue_wait_s
        if timeout_s is not None and (limit_s is None or timeout_s <= limit_s):
            return None  # if a time ended the wait, it was the line's own
        has_waited = list[bool]()
        for answer in self._answers:
            waited = [
                end is not None and end.reason == "timeout" and end.queue_s is None for end in answer.ends
            ]
            has_waited += sorted(waited)[: answer.num_answers]  # further samples (best_of) need not be whole
        if all(has_waited):
            return Overloaded("the request waited too long for the engine", RETRY_S)
        if any(has_waited):
            why = "a prompt waited too long for the engine (scheduler.max_queue_wait_s): send fewer at once"
            return PartlyOverloaded(why, RETRY_S)
        return None

    async def _accepted(self, most_s: float) -> None:
        """Wait for the engine's word on all prompts, at most `most_s`; raises the failure of a refused one.

        An engine in a long step says nothing before its end, and a proxy may not wait as long for a head.
        What fails after a prompt is accepted is told in the stream, however soon, so that the same request
        gets the same status each time.
        """
        with anyio.move_on_after(most_s):
            for answer in self._answers:
                await answer.decided.wait()
                if answer.failure is not None and not answer.is_accepted:
                    raise answer.failure

    def _end(self) -> None:
        failure = None  # it is the client that went away, unless an answer has failed
        if any(each.failure is not None for each in self._answers):
            failure = CutOff("another prompt of the request has failed", "sibling")
        for answer in self._answers:
            self._llm.limits.release(answer)
            if answer.is_open:
                self._llm.abort(answer, failure)

    async def _cut_off(self) -> None:
        """Return when an answer has failed and its client had time to read the reason."""
        if len(self._answers) == 1:
            await self._answers[0].failed.wait()
        else:
            tasks = [asyncio.ensure_future(each.failed.wait()) for each in self._answers]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
        await asyncio.sleep(_LAST_S)

    async def _told(self, form: WholeForm) -> int:
        """Give the form all parts of the answers, as they come, and return the number of their characters."""
        num_characters = 0
        with contextlib.closing(News(self._answers)) as news:
            while deltas := await news.next():
                num_characters += sum(len(each.text) for _, each in deltas)
                form.take(deltas)
        return num_characters

    async def _unless_gone(self, receive: Receive, work: Awaitable[Value]) -> Value:
        """Return the result of `work`.

        If the client disconnects first, the answers are ended, and ClientGone is raised.
        """
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ClientGone("the client went away", "disconnect")
        except BaseException:
            self._end()
            raise
        finally:
            working.cancel()
            leaving.cancel()
