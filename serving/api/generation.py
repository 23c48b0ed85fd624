"""How do requests travel to the engine, and answers back to a client, at once or as they are made?

What completions and chats have in common. The status of a stream is decided by its first event, so that a
request which the engine refuses, or which finds no engine, gets its status and not a stream that breaks. A
client that goes away ends its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from continuous_batching.refusal import BadRequest
from serving.answers.answers import AnswerDelta, AnswerStream, collect
from serving.api.access import Client
from serving.api.errors import body_of
from serving.api.logprobs import Json
from serving.api.model_names import ModelNames
from serving.api.schemas import GenerationBody
from serving.async_llm import AsyncLLM
from serving.failures import ClientGone, CutOff, Failure
from serving.text.request_fields import MOST_SAMPLES

Value = TypeVar("Value")

_ONLY_HTTP = {
    *("model", "stream", "stream_options", "prompt", "messages", "echo", "return_token_ids", "user"),
    "service_tier",
}
_TENANT_HEADER = "x-tenant"
_DONE = b"data: [DONE]\n\n"
_LAST_S = 5.0  # that a client which is cut off has to read why
_to_json = msgspec.json.Encoder().encode


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
    is_long: bool  # writing it may take a second

    def choice(self, delta: AnswerDelta, index: int) -> Json:
        """A whole choice."""
        ...

    def event(self, delta: AnswerDelta, index: int) -> Json:
        """A piece of a choice."""
        ...


class Generation:
    """Sends requests to the engine. `system_fingerprint` is what every answer tells of the server."""

    def __init__(self, llm: AsyncLLM, names: ModelNames, system_fingerprint: str) -> None:
        self.llm = llm
        self._names = names
        self._fingerprint = system_fingerprint

    def fields(self, body: GenerationBody, request: Request) -> dict[str, Any]:
        """What `parse_request` reads besides the prompt; raises NotFound for another model."""
        self._names.asked(body.model)
        fields = body.model_dump(exclude=_ONLY_HTTP, exclude_none=True)
        client: Client = request.state.client
        tenant = client.tenant_for(request.headers.get(_TENANT_HEADER) or body.tenant, body.user)
        if tenant:
            fields["tenant"] = tenant
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
        alone, owner = len(requests) == 1, request.state.client.owner
        works = [self.llm.ask(each, fill=fill, alone=alone, group=group, owner=owner) for each in requests]
        done = await asyncio.gather(*works, return_exceptions=True)
        answers = [each for each in done if isinstance(each, AnswerStream)]
        for each in done:
            if isinstance(each, BaseException):
                for answer in answers:
                    self.llm.abort(answer, CutOff("another prompt was not taken", "sibling"))
                raise each
        return answers

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
        writer = _Writer(answers, form, head, self.llm.abort, hides_tokens)
        return await writer.stream(request, body) if body.stream else await writer.whole(request)


class _Writer:
    """Writes the answers to the prompts of one request."""

    def __init__(
        self,
        answers: Sequence[AnswerStream],
        form: ResponseFormat,
        head: dict[str, str],
        abort: Callable[[AnswerStream], None],
        hides_tokens: bool,
    ) -> None:
        self._answers = answers
        self._form = form
        self._abort = abort
        self._hides_tokens = hides_tokens
        self._head = {"id": answers[0].group, "created": int(time.time()), **head}

    async def whole(self, request: Request) -> Response:
        """All of it as one JSON object."""
        deltas = await self._unless_gone(request.receive, self._collect())
        if self._form.is_long:
            body = await asyncio.to_thread(self._written, deltas)
        else:
            body = self._written(deltas)
        return Response(body, media_type="application/json")

    def _written(self, deltas: list[AnswerDelta]) -> bytes:
        """The JSON of it; choice by choice, so that a thread that does it lets others run between."""
        choices = [msgspec.Raw(_to_json(self._form.choice(each, index))) for index, each in enumerate(deltas)]
        head = {"object": self._form.whole, **self._head}
        return _to_json({**head, "choices": choices, "usage": self._usage()})

    async def stream(self, request: Request, body: GenerationBody) -> Response:
        """Server-sent events, once there is a first one; raises the failure that came before it."""
        options = body.stream_options
        show_usage = bool(options and options.include_usage)
        always_usage = bool(options and options.continuous_usage_stats)
        pieces = self._pieces()
        first = await self._unless_gone(request.receive, anext(pieces))

        async def events() -> AsyncGenerator[bytes, None]:
            deltas = first
            async with contextlib.aclosing(pieces):
                while True:
                    ready = b"".join(
                        self._event([self._form.event(delta, index)], always_usage) for index, delta in deltas
                    )
                    if len(self._answers) == 1 and self._answers[0].is_read:
                        break  # of several, one may be read and not yet written
                    yield ready
                    ready = b""
                    try:
                        deltas = await anext(pieces, [])
                    except (Failure, BadRequest) as failure:
                        yield b"data: " + body_of(failure) + b"\n\n" + _DONE
                        return
                    if not deltas:
                        break
            yield ready + (self._event([], True) if show_usage else b"") + _DONE

        return EventStream(events(), self._end, self._cut_off)

    def _event(self, choices: list[Json], with_usage: bool) -> bytes:
        event = {"object": self._form.piece, **self._head, "choices": choices}
        if with_usage:
            event["usage"] = self._usage()
        return b"data: " + _to_json(event) + b"\n\n"

    def _end(self) -> None:
        for answer in self._answers:
            if answer.is_open:
                self._abort(answer)

    async def _cut_off(self) -> None:
        """Returns when an answer has failed and its client had the time to read the reason."""
        tasks = [asyncio.ensure_future(each.failed.wait()) for each in self._answers]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.sleep(_LAST_S)

    async def _pieces(self) -> AsyncGenerator[list[tuple[int, AnswerDelta]], None]:
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
        async for deltas in self._pieces():
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


class EventStream(Response):
    """Events as they come. `end` is called when nobody reads any more, for whatever reason."""

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
                cut_off()  # else what the client does not read would be kept for it
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
                more = not event.endswith(_DONE)  # the last event also ends the response
                await send({"type": "http.response.body", "body": event, "more_body": more})
        if more:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
