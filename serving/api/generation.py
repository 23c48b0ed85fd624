"""How do requests travel to the engine, and answers back to a client, at once or as they are made?

What completions and chats have in common. The status of a stream is decided by its first event, so that a
request which the engine refuses, or which finds no engine, gets its status and not a stream that breaks. A
client that goes away ends its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive

from continuous_batching.refusal import BadRequest
from serving.answers.answers import AnswerDelta, AnswerStream, collect
from serving.api.api_keys import Client
from serving.api.errors import body_of
from serving.api.model_names import ModelNames
from serving.api.pieces import PIECE_BYTES, Json, gathered, is_short, object_around, to_json
from serving.api.schemas import GenerationBody
from serving.api.streamed import DONE, StreamedResponse, gone
from serving.api.turns import Turns
from serving.async_llm import AsyncLLM
from serving.failures import ClientGone, Failure
from serving.text.request_fields import MOST_SAMPLES

Value = TypeVar("Value")

_ONLY_HTTP = {
    *("model", "stream", "stream_options", "prompt", "messages", "echo", "return_token_ids", "user"),
    "service_tier",
}
_TENANT_HEADER = "x-tenant"
_LAST_S = 5.0  # that a client which is cut off has to read why


@contextlib.contextmanager
def fields_as_sent(names: Mapping[str, str]) -> Iterator[None]:
    """A refusal within it names the field as the client sent it, which may differ from the engine's name."""
    try:
        yield
    except BadRequest as bad:
        if bad.field not in names:
            raise
        raise bad.of_field(names[bad.field]) from None


class ResponseFormat(Protocol):
    """How choices are written, which differs between completions and chats."""

    whole: str  # the type of a whole answer
    piece: str  # the type of a stream's event

    def choice(self, delta: AnswerDelta, index: int) -> Json:
        """A whole choice."""
        ...

    def event(self, delta: AnswerDelta, index: int) -> Json:
        """A piece of a choice."""
        ...


class Generation:
    """Sends requests to the engine. `system_fingerprint` is what every answer tells of the server."""

    def __init__(self, llm: AsyncLLM, names: ModelNames, system_fingerprint: str, turns: Turns) -> None:
        self.llm = llm
        self._names = names
        self._fingerprint = system_fingerprint
        self._turns = turns

    def fields(self, body: GenerationBody, request: Request) -> dict[str, Any]:
        """What `parse_request` reads besides the prompt; raises NotFound for another model."""
        self._names.asked(body.model)
        fields = body.model_dump(exclude=_ONLY_HTTP, exclude_none=True)
        client: Client = request.state.client
        tenant = client.tenant_for(request.headers.get(_TENANT_HEADER) or body.tenant, body.user)
        if tenant:
            fields["tenant"] = tenant
        if priority := client.priority_for(body.priority):
            fields["priority"] = priority
        fields["cache_salt"] = client.salted(body.cache_salt or "")
        return fields

    def check_number(self, num_prompts: int, samples_each: int | None) -> None:
        """Raise BadRequest for more samples than the server ever takes at once."""
        limit = self.llm.recipe.server.max_requests
        each = max(1, samples_each or 1)
        num_samples = num_prompts * (
            each if each <= MOST_SAMPLES else 1
        )  # else n or best_of is refused later
        if num_samples > limit:
            raise BadRequest(
                None,
                f"ask for {num_samples} samples at once; the server takes {limit} (server.max_requests)",
                value=num_samples,
                limit=limit,
                fix="send fewer at a time",
                subject="prompt, n and best_of",
            )

    async def ask(
        self, requests: Sequence[dict[str, Any]], group: str, request: Request, *, fill: bool = False
    ) -> list[AnswerStream]:
        """Send all of these to the engine, or none; `group` is the id of the one response to `request`."""
        return await self.llm.ask(requests, fill=fill, group=group, owner=request.state.client.owner)

    async def respond(
        self,
        answers: Sequence[AnswerStream],
        form: ResponseFormat,
        body: GenerationBody,
        request: Request,
        *,
        hides_tokens: bool = False,
    ) -> Response:
        """The response to one request: whole, or a stream of events."""
        head = {"model": self._names.asked(body.model), "system_fingerprint": self._fingerprint}
        if body.service_tier is not None:
            head["service_tier"] = "default"
        writer = _Writer(self.llm, self._turns, answers, form, head, hides_tokens)
        return await writer.stream(request, body) if body.stream else await writer.whole(request)


class _Writer:
    """Writes the answers to the prompts of one request."""

    def __init__(
        self,
        llm: AsyncLLM,
        turns: Turns,
        answers: Sequence[AnswerStream],
        form: ResponseFormat,
        head: dict[str, str],
        hides_tokens: bool,
    ) -> None:
        self._llm = llm
        self._turns = turns
        self._answers = answers
        self._form = form
        self._hides_tokens = hides_tokens
        self._head = {"id": answers[0].group, "created": int(time.time()), **head}

    async def whole(self, request: Request) -> Response:
        """All of it as one JSON object, which leaves in parts if it is long."""
        deltas = await self._unless_gone(request.receive, self._collect())
        head = {"object": self._form.whole, **self._head}
        choices = (self._form.choice(each, index) for index, each in enumerate(deltas))
        pieces = gathered(object_around(head, choices, {"usage": self._usage()}))
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
        """The pieces, of which each is made in a turn of its own."""
        piece: bytes | None = first
        while piece is not None:
            yield piece
            await self._turns.next()
            piece = next(pieces, None)

    async def stream(self, request: Request, body: GenerationBody) -> Response:
        """Server-sent events, once there is a first one; raises the failure that came before it."""
        options = body.stream_options
        show_usage = bool(options and options.include_usage)
        always_usage = bool(options and options.continuous_usage_stats)
        news = self._news()
        first = await self._unless_gone(request.receive, anext(news))

        async def events() -> AsyncGenerator[bytes, None]:
            deltas = first
            async with contextlib.aclosing(news):
                while True:
                    pieces = gathered(self._events(deltas, always_usage))
                    ready = next(pieces)
                    while len(ready) >= PIECE_BYTES:
                        yield ready
                        await self._turns.next()
                        ready = next(pieces, b"")
                    if len(self._answers) == 1 and self._answers[0].is_read:
                        break  # of several, one may be read and not yet written
                    if ready:
                        yield ready
                    ready = b""
                    try:
                        deltas = await anext(news, [])
                    except (Failure, BadRequest) as failure:
                        yield b"data: " + body_of(failure) + b"\n\n" + DONE
                        return
                    if not deltas:
                        break
            yield ready + (self._event([], True) if show_usage else b"") + DONE

        return StreamedResponse(events(), self._end, self._cut_off)

    def _events(self, deltas: Sequence[tuple[int, AnswerDelta]], with_usage: bool) -> Iterator[bytes]:
        """An event for each piece of a choice, and a long one in pieces."""
        for index, delta in deltas:
            choice = self._form.event(delta, index)
            if is_short(choice):
                yield self._event([choice], with_usage)
                continue
            head = {"object": self._form.piece, **self._head}
            yield b"data: "
            yield from object_around(head, iter([choice]), {"usage": self._usage()} if with_usage else {})
            yield b"\n\n"

    def _event(self, choices: list[Json], with_usage: bool) -> bytes:
        event = {"object": self._form.piece, **self._head, "choices": choices}
        if with_usage:
            event["usage"] = self._usage()
        return b"data: " + to_json(event) + b"\n\n"

    def _end(self) -> None:
        for answer in self._answers:
            self._llm.limits.release(answer)
            if answer.is_open:
                self._llm.abort(answer)

    async def _cut_off(self) -> None:
        """Returns when an answer has failed and its client had the time to read the reason."""
        tasks = [asyncio.ensure_future(each.failed.wait()) for each in self._answers]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.sleep(_LAST_S)

    async def _news(self) -> AsyncGenerator[list[tuple[int, AnswerDelta]], None]:
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

    async def _collect(self) -> list[AnswerDelta]:
        """Every choice, whole."""
        known: list[dict[int, AnswerDelta]] = [{} for _ in self._answers]
        size = self._answers[0].num_answers
        async for deltas in self._news():
            for index, delta in deltas:
                collect(known[index // size], (delta,))
        return [each[index] for each in known for index in sorted(each)]

    def _usage(self) -> Json:
        num_prompt = sum(each.request.num_prompt_tokens for each in self._answers)
        num_answer = 0 if self._hides_tokens else sum(each.num_tokens for each in self._answers)
        num_cached = sum(each.num_cached_tokens for each in self._answers)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    async def _unless_gone(self, receive: Receive, work: Awaitable[Value]) -> Value:
        """The result; raises ClientGone if the client goes away first, and ends the answers then."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                result: Value = tasks[0].result()
                return result
            raise ClientGone("the client went away", "disconnect")
        except BaseException:
            self._end()
            raise
        finally:
            for task in tasks:
                task.cancel()
