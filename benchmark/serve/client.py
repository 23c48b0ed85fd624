"""Send requests to a server, and record the times and tokens of their streamed answers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from benchmark.serve.sse import Events, StreamChunk, read_chunk
from benchmark.serve.trace_requests import TraceRequest

DONE = {"stop": "stop", "length": "length", "tool_calls": "stop", "content_filter": "stop"}
REJECTED = (429, 503)  # statuses of a busy server; a 503 without Retry-After is an error
SHOWN = 200  # characters of a server's message


@dataclass(slots=True)
class ClientAnswer:
    """One request's times, in seconds on the client's clock, and its tokens.

    A piece is the content of one event. `piece_tokens` is None where the server does not say how many tokens
    each piece has. `late_s` is the time from when the request was due until it could be sent; `held_s` is how
    long the limit of concurrency then held it. `due_s` is None in a closed loop, where a request is due when
    its client is free. `error` is None for a request that was answered to its end.
    """

    ask: TraceRequest
    late_s: float = 0.0
    held_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    piece_times_s: list[float] = field(default_factory=list)
    piece_tokens: list[int] | None = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    from_usage: bool = False  # the server counted the tokens; otherwise pieces were counted
    retries: int = 0
    rejected: bool = False
    unready: bool = False  # the server said that it takes no requests now
    error: str | None = None
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class StreamingClient:
    """How and where requests are sent; `session` limits the time of each."""

    session: aiohttp.ClientSession
    base_url: str
    endpoint: str | None  # None: follows from the form of the prompt
    model: str
    seed: int
    extra: Mapping[str, Any]
    retry_rejected: bool = False

    def url(self, ask: TraceRequest) -> str:
        """Return the URL for a request."""
        return self.base_url + (self.endpoint or ("/v1/chat/completions" if ask.chat else "/v1/completions"))

    async def ask(self, answer: ClientAnswer, body: bytes) -> None:
        """Send one request and read its answer; a failure is recorded in `answer.error`."""
        headers = {"Content-Type": "application/json", "X-Request-Id": answer.ask.id, **authorization()}
        answer.sent_s = time.perf_counter()
        try:
            while (wait_s := await self._try(answer, body, headers)) is not None:
                answer.retries += 1
                await asyncio.sleep(wait_s)
        except asyncio.TimeoutError:
            answer.error = "no end within the limit of time"
        except (aiohttp.ClientError, ConnectionError) as error:
            answer.error = f"{type(error).__name__}: {error}"[:SHOWN]
        except (msgspec.DecodeError, ValueError) as error:
            answer.error = f"the stream cannot be read: {error}"[:SHOWN]
        answer.end_s = time.perf_counter()

    async def _try(self, answer: ClientAnswer, body: bytes, headers: Mapping[str, str]) -> float | None:
        """Send a request once; returns None if it is done, or the seconds to wait before trying again."""
        async with self.session.post(self.url(answer.ask), data=body, headers=headers) as response:
            if response.status == 200:
                if response.content_type != "text/event-stream":
                    answer.error = f"the server sent {response.content_type}, no stream of events"
                    return None
                return await _read(answer, response)
            again = response.headers.get("Retry-After")
            answer.error = f"HTTP {response.status}: {message(await response.read())}"
            answer.unready = response.status == 503
            answer.rejected = response.status == 429 or (response.status in REJECTED and again is not None)
            if not (answer.rejected and self.retry_rejected):
                return None
            answer.error, answer.rejected = None, False
            return float(again) if again and again.replace(".", "", 1).isdecimal() else 1.0


def authorization() -> dict[str, str]:
    """Return the header for servers that require a key, which is read from OPENAI_API_KEY."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def message(body: bytes) -> str:
    """Return the message of an error's body, in one short line."""
    try:
        return said(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return said(body.decode(errors="replace"))


def said(error: Any) -> str:
    """Return the message of an error, which servers wrap in one object or two."""
    while isinstance(error, dict):
        error = error.get("error", error.get("message", error.get("detail", "")))
    return " ".join(str(error).split())[:SHOWN]


async def _read(answer: ClientAnswer, response: aiohttp.ClientResponse) -> None:
    """Read the stream of one answer."""
    events, ended = Events(), False
    async for received in response.content.iter_any():
        now_s = time.perf_counter()
        for data in events.feed(received):
            if data == b"[DONE]":
                ended = True
                continue
            chunk = read_chunk(data)
            if chunk.error is not None:
                answer.error = f"in the stream: {said(chunk.error)}"
                return
            _take(answer, chunk, now_s)
    _close(answer, ended)


def _take(answer: ClientAnswer, chunk: StreamChunk, now_s: float) -> None:
    """Count one chunk.

    A piece is a chunk that brings tokens or, where tokens are not counted, content.
    """
    usage, choices = chunk.usage, chunk.choices or []
    counted = None if usage is None else usage.completion_tokens
    if usage is not None:
        answer.prompt_tokens = answer.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
    new = 1 if any(each.says_something for each in choices) else 0
    if counted is not None:
        new = counted - answer.output_tokens
        answer.output_tokens, answer.from_usage = counted, True
    for choice in choices:
        answer.finish_reason = choice.finish_reason or answer.finish_reason
    if not choices:  # such a chunk has the usage of the whole answer
        return
    if new > 0:
        answer.piece_times_s.append(now_s)
        if counted is None or answer.piece_tokens is None:
            answer.piece_tokens = None
        else:
            answer.piece_tokens.append(new)
    elif choices[0].finish_reason and not answer.piece_times_s:
        answer.piece_times_s.append(now_s)  # the tokens of this answer have no text
        answer.piece_tokens = None


def _close(answer: ClientAnswer, ended: bool) -> None:
    """Record an error unless the answer is whole."""
    if not answer.from_usage:
        answer.output_tokens = len(answer.piece_times_s)
    if answer.piece_tokens is None and len(answer.piece_times_s) == answer.output_tokens:
        answer.piece_tokens = [1] * answer.output_tokens
    if answer.prompt_tokens is None:
        answer.prompt_tokens = answer.ask.num_prompt
    if answer.finish_reason is None:
        answer.error = f"the stream {'has no finish_reason' if ended else 'broke off'}"
    elif answer.finish_reason not in DONE:
        answer.error = f"ended by {answer.finish_reason}"
    elif not answer.output_tokens or not answer.piece_times_s:
        answer.error = "no token came"
    else:
        answer.finish_reason = DONE[answer.finish_reason]
