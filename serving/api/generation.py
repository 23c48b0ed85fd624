"""Send requests to the engine, and their answers back to the client, whole or as a stream.

This is what all forms of an answer share. The head of a stream is sent once the engine has put its request
into the queue. So a request which the server or the engine refuses, or which finds no engine, gets a status
code; whatever fails later is the stream's last event. The requests of a client that disconnects are aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive

from borders.field_table import MOST_SAMPLES
from borders.refusal import BadRequest
from continuous_batching.routing.splitting import PROMPT_REPLICA_HEADER
from serving.answers.answers import AnswerDelta, AnswerStream, collect
from serving.api.api_keys import Client
from serving.api.model_names import ModelNames
from serving.api.pieces import PIECE_BYTES, Turns, gathered
from serving.api.schemas import RequestBody, SamplingBody
from serving.api.streamed import KeepAlive, StreamedResponse, gone
from serving.async_llm import PROMPT_REPLICA, AsyncLLM
from serving.failures import ClientGone, Failure
from serving.grammars.structured_output import FIELDS as FORMS
from serving.grammars.structured_output import form_notes
from serving.tools.definitions import tool_use

Value = TypeVar("Value")

_ONLY_HTTP = {"model", "stream", "user", "service_tier"}
_TENANT_HEADER = "x-tenant"
SCHEMA_HEADER = "x-schema-notes"  # names constraints of a schema that the answer need not meet
MOST_NOTES = 8  # constraints that the header names
EFFORT_HEADER = "x-reasoning-effort"  # says that a request's reasoning_effort changed nothing
_LAST_S = 5.0  # time that a client which is cut off has to read the reason


@contextlib.contextmanager
def fields_as_sent(names: Mapping[str, str]) -> Iterator[None]:
    """Make refusals inside this context name the field as the client sent it, not by the engine's name."""
    try:
        yield
    except BadRequest as bad:
        if bad.field is None or bad.field not in names:
            raise
        raise bad.of_field(names[bad.field]) from None


class WholeForm(Protocol):
    """Writes the answers to one request as bytes; a long piece comes in several parts."""

    def whole(self, deltas: Sequence[AnswerDelta]) -> Iterator[bytes]:
        """Yield all answers as one JSON object."""
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


class Generation:
    """Sends requests to the engine; every answer carries `system_fingerprint`."""

    def __init__(self, llm: AsyncLLM, names: ModelNames, turns: Turns) -> None:
        self.llm = llm
        self._names = names
        self._turns = turns

    def fields(self, body: RequestBody, request: Request) -> dict[str, Any]:
        """Return the fields that `parse_request` reads besides the prompt.

        Raises NotFound for another model.
        """
        self._names.asked(body.model)
        fields = body.model_dump(exclude=_ONLY_HTTP | body.apart, exclude_none=True)
        client: Client = request.state.client
        tenant = client.tenant_for(request.headers.get(_TENANT_HEADER) or body.tenant, body.user)
        if tenant:
            fields["tenant"] = tenant
        if priority := client.priority_for(body.priority):
            fields["priority"] = priority
        fields["cache_salt"] = client.salted(body.cache_salt or "")
        if replica := request.headers.get(PROMPT_REPLICA_HEADER):
            if replica not in self.llm.recipe.server.prompt_replicas:
                problem = "is not one of server.prompt_replicas"
                raise BadRequest(PROMPT_REPLICA_HEADER, problem, value=replica, fix="leave it out")
            fields[PROMPT_REPLICA] = replica
        if body.model is not None and self.llm.adapters.knows(body.model):
            fields["adapter"] = body.model
        return fields

    def _notes(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers that name what was asked for, and what the answer need not meet."""
        notes: dict[str, str] = {}
        effort, text = fields.get("reasoning_effort"), self.llm.text
        has_tools = bool(fields.get("tools"))
        if text is not None and effort is not None and text.ignores_effort(effort, has_tools=has_tools):
            notes[EFFORT_HEADER] = "no effect: the chat template does not know it"
        use = tool_use(fields)
        form = None if text is None else text.tool_format
        unmet = [*dict.fromkeys(form_notes(fields) + (() if use is None else use.notes_in(form)))]
        if unmet:
            more = ["and more"] * (len(unmet) > MOST_NOTES)
            notes[SCHEMA_HEADER] = "not enforced: " + "; ".join([*unmet[:MOST_NOTES], *more])
        return notes

    def check_number(
        self, num_prompts: int, samples_each: int | None = None, *, subject: str = "prompt, n and best_of"
    ) -> None:
        """Raise BadRequest for more samples than the server ever accepts at once."""
        limit = self.llm.recipe.server.max_requests
        each = max(1, samples_each or 1)
        num_samples = num_prompts * (
            each if each <= MOST_SAMPLES else 1
        )  # larger values of n or best_of are refused later
        if num_samples > limit:
            raise BadRequest(
                None,
                f"ask for {num_samples} samples at once; the server takes {limit} (server.max_requests)",
                value=num_samples,
                limit=limit,
                fix="send fewer at a time",
                subject=subject,
            )

    async def ask(
        self,
        requests: Sequence[dict[str, Any]],
        group: str,
        request: Request,
        *,
        fill: bool = False,
        shorten: bool = False,
    ) -> list[AnswerStream]:
        """Send all requests to the engine, or none; `group` is the id of the single response to `request`.

        Apart from their prompts, all have the same fields; `AsyncLLM.ask` says what `fill` and `shorten` are.
        """
        fields = requests[0]
        is_short = not any(fields.get(name) for name in (*FORMS, "tools"))
        request.state.notes = await self.llm.apart(partial(self._notes, fields), at_once=is_short)
        owner = request.state.client.owner
        return await self.llm.ask(requests, fill=fill, shorten=shorten, group=group, owner=owner)

    def head(self, body: SamplingBody) -> dict[str, str]:
        """Return the fields that every answer to a request contains."""
        fingerprint = self.llm.orders.weights.fingerprint
        head = {"model": self._names.asked(body.model), "system_fingerprint": fingerprint}
        return head if body.service_tier is None else head | {"service_tier": "default"}

    async def respond(
        self, answers: Sequence[AnswerStream], form: ResponseForm, request: Request, *, is_streamed: bool
    ) -> Response:
        """Return the response to one request, whole or as a stream of events."""
        writer = _Writer(self.llm, self._turns, answers)
        return await writer.stream(request, form) if is_streamed else await writer.whole(request, form)

    async def respond_whole(
        self, answers: Sequence[AnswerStream], form: WholeForm, request: Request
    ) -> Response:
        """Return the response to a request whose answers are never streamed."""
        return await _Writer(self.llm, self._turns, answers).whole(request, form)

    def asked(self, model: str | None) -> str:
        """Return the model name that a response carries; raises NotFound for another model."""
        return self._names.asked(model)


class _Writer:
    """Writes the answers to the prompts of one request."""

    def __init__(self, llm: AsyncLLM, turns: Turns, answers: Sequence[AnswerStream]) -> None:
        self._llm = llm
        self._turns = turns
        self._answers = answers

    async def whole(self, request: Request, form: WholeForm) -> Response:
        """Return all answers as one JSON object, sent in parts if it is long."""
        deltas = await self._unless_gone(request.receive, self._collect())
        pieces = gathered(form.whole(deltas))
        try:
            first = next(pieces)
        except BaseException:
            self._end()
            raise
        if len(first) < PIECE_BYTES:
            self._end()
            return Response(first, media_type="application/json")
        return StreamedResponse(
            self._in_turn(first, pieces), self._end, asyncio.Event().wait, "application/json"
        )

    async def _in_turn(self, first: bytes, pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the pieces, each of which is made in its own turn of the event loop."""
        piece: bytes | None = first
        while piece is not None:
            yield piece
            await self._turns.next()
            piece = next(pieces, None)

    async def stream(self, request: Request, form: ResponseForm) -> Response:
        """Return server-sent events once the engine has accepted the request; raises what comes before."""
        keep_alive = KeepAlive(self._llm.recipe.server.keep_alive_s, form.keep_alive)
        await self._unless_gone(request.receive, self._accepted(keep_alive.every_s or math.inf))

        async def events() -> AsyncGenerator[bytes, None]:
            ready = b""
            async with contextlib.aclosing(self._news()) as news:
                while True:
                    try:
                        deltas: list[tuple[int, AnswerDelta]] = await anext(news, [])
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
        for answer in self._answers:
            self._llm.limits.release(answer)
            if answer.is_open:
                self._llm.abort(answer)

    async def _cut_off(self) -> None:
        """Return when an answer has failed and its client had time to read the reason."""
        tasks = [asyncio.ensure_future(each.failed.wait()) for each in self._answers]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.sleep(_LAST_S)

    async def _news(self) -> AsyncGenerator[list[tuple[int, AnswerDelta]], None]:
        """Yield new parts of answers, each with the index of its choice."""
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

    async def _collect(self) -> list[AnswerDelta]:
        """Return every choice, whole."""
        known: list[dict[int, AnswerDelta]] = [{} for _ in self._answers]
        size = self._answers[0].num_answers
        async for deltas in self._news():
            for index, delta in deltas:
                collect(known[index // size], (delta,))
        return [each[index] for each in known for index in sorted(each)]

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


def prompts_of(given: str | list[Any]) -> list[dict[str, Any]]:
    """Return the prompts as fields of requests, each a text or token ids."""
    if not given and not isinstance(given, str):
        raise BadRequest("prompt", "is empty; it must hold at least one token")
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    return [{"prompt" if isinstance(each, str) else "prompt_token_ids": each} for each in prompts]
