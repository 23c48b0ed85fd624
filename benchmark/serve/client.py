"""Read the requests of a trace, send them to a server, and record when its answers bring what."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from benchmark.options import why
from borders.files import check_rereadable, lines_of
from borders.refusal import abbreviate

PROMPTS = ("prompt_token_ids", "prompt", "messages")
# Fields that are sent in another form, or not at all.
OURS = {"id", "arrival_s", "tenant", "max_completion_tokens", *PROMPTS}
MANY = ("n", "best_of", "beam_width")  # fields that ask for several answers, which are not counted here
STREAM = {"include_usage": True, "continuous_usage_stats": True}
MOST_ARRIVAL_S = 1e9  # seconds, some thirty years
MOST_TOKENS = 2**31 - 1
DONE = {"stop": "stop", "length": "length", "tool_calls": "stop", "content_filter": "stop"}
SHOWN = 200  # characters of a server's message


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it is due, in seconds from the start, and what is sent.

    `max_tokens` None stands for the server's own limit. `fields` are those of the line that servers know too;
    `content` is the prompt, whose number of tokens is known as `num_prompt` only where it holds ids.
    """

    id: str
    due_s: float
    max_tokens: int | None
    chat: bool
    content: Any
    num_prompt: int | None
    fields: Mapping[str, Any]

    def body(self, model: str, seed: int, extra: Mapping[str, Any]) -> bytes:
        """Return the JSON of its POST; `extra` fields win, and a null among them removes a field.

        A limit of tokens is sent by the name that this request has for it.
        """
        said = {
            "model": model,
            "messages" if self.chat else "prompt": self.content,
            self._limit: self.max_tokens,
            "seed": seed,
            "stream": True,
            "stream_options": STREAM,
            **self.fields,
            **self._named(extra),
        }
        return msgspec.json.encode({name: value for name, value in said.items() if value is not None})

    def limited(self, extra: Mapping[str, Any]) -> TraceRequest:
        """Return the request with the `max_tokens` that is sent beside these `extra` fields."""
        return replace(self, max_tokens=self._named(extra).get(self._limit, self.max_tokens))

    def _named(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `extra` with the other name for the limit replaced; who gives both means both."""
        other = "max_tokens" if self.chat else "max_completion_tokens"
        if other not in extra or self._limit in extra:
            return extra
        return {self._limit if name == other else name: value for name, value in extra.items()}

    @property
    def _limit(self) -> str:
        return "max_completion_tokens" if self.chat else "max_tokens"


def read_requests(path: Path, *, skip_bad: bool) -> tuple[list[TraceRequest], list[str]]:
    """Return the requests of a JSONL file in order of arrival, and the lines that were skipped.

    Raises ValueError for a line that is no request, unless bad lines are skipped, and where none is left.
    """
    asks: dict[str, TraceRequest] = {}
    skipped = []
    check_rereadable(path)  # the file is also read_requests for its digest
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            ask = _ask(line)
            if ask.id in asks:
                raise ValueError(f"the id {ask.id} is taken by an earlier line")
        except (ValueError, RecursionError) as error:
            reason = f"{path}: line {number}: {why(error)}"
            if not skip_bad:
                raise ValueError(f"{reason}; --skip-bad leaves such lines out") from error
            skipped.append(reason)
        else:
            asks[ask.id] = ask
    if not asks:
        raise ValueError(f"{path} holds no request that can be read")
    return sorted(asks.values(), key=lambda ask: ask.due_s), skipped


def digest(path: Path) -> str:
    """Return the sha256 of a file, by which two runs can be seen to have served the same."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()


def clients(asks: Sequence[TraceRequest]) -> list[list[TraceRequest]] | None:
    """Return the requests of each client of a closed loop, in order; None where the trace is not one.

    A closed loop has no times, and its ids are `CLIENT/NUMBER`.
    """
    of_client: dict[str, list[TraceRequest]] = {}
    for ask in asks:
        client, slash, number = ask.id.rpartition("/")
        if ask.due_s or not slash or not number.isdecimal():
            return None
        of_client.setdefault(client, []).append(ask)
    for each in of_client.values():
        each.sort(key=lambda ask: int(ask.id.rpartition("/")[2]))
    return list(of_client.values())


def at_rate(asks: Sequence[TraceRequest], rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Return the same requests, arriving by a Poisson process; at rate inf, all at once."""
    gaps_s = np.zeros(len(asks))
    if rate_per_s < math.inf:
        gaps_s = np.random.default_rng(seed).exponential(1 / rate_per_s, len(asks))
    times_s = np.cumsum(gaps_s) - gaps_s[0]
    return [replace(ask, due_s=float(time_s)) for ask, time_s in zip(asks, times_s)]


def _ask(line: bytes) -> TraceRequest:
    """Parse a request; raises ValueError, in one line, for anything else."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("a request must be a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None}
    if not isinstance(fields.get("id"), str) or not fields["id"]:
        raise ValueError("id is missing; it must be a string of at least one character")
    forms = [name for name in PROMPTS if name in fields]
    if len(forms) != 1 or not fields[forms[0]]:
        raise ValueError(f"exactly one of {', '.join(PROMPTS)} must be given, and not be empty")
    due_s = fields.get("arrival_s", 0.0)
    if isinstance(due_s, bool) or not isinstance(due_s, (int, float)) or not 0 <= due_s <= MOST_ARRIVAL_S:
        raise ValueError(
            f"arrival_s is {abbreviate(due_s)}; it must be a number from 0 to {MOST_ARRIVAL_S:g}"
        )
    max_tokens = fields.pop("max_tokens", fields.get("max_completion_tokens", 16))
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or not 1 <= max_tokens <= MOST_TOKENS:
        raise ValueError(
            f"max_tokens is {abbreviate(max_tokens)}; it must be an integer from 1 to {MOST_TOKENS}"
        )
    for name in MANY:
        if fields.get(name, 1) not in (0, 1):
            raise ValueError(
                f"{name} is {abbreviate(fields[name])}; the benchmark counts one answer to a request"
            )
    content, num_prompt = fields[forms[0]], None
    if forms[0] == "prompt_token_ids":
        if not (isinstance(content, list) and all(type(each) is int for each in content)):
            raise ValueError("prompt_token_ids must be a list of integers")
        num_prompt = len(content)
    sent = {name: value for name, value in fields.items() if name not in OURS}
    if "tenant" in fields:
        sent["user"] = fields["tenant"]
    return TraceRequest(
        fields["id"], float(due_s), max_tokens, forms[0] == "messages", content, num_prompt, sent
    )


class ChatDelta(msgspec.Struct):
    """The part of a message that a chunk of a chat adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class AnswerChoice(msgspec.Struct):
    """One answer's part of a chunk; `text` of a completion, `delta` of a chat."""

    text: str | None = None
    delta: ChatDelta | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        if self.delta is None:
            return bool(self.text)
        given = self.delta
        return bool(given.content or given.reasoning_content or given.reasoning or given.tool_calls)


class Cached(msgspec.Struct):
    """Tokens of the prompt that were found in a cache."""

    cached_tokens: int | None = None


class TokenUsage(msgspec.Struct):
    """Tokens so far; in the last chunk, tokens of the whole answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Cached | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class StreamChunk(msgspec.Struct):
    """One event's data. Other fields that servers send are ignored."""

    choices: list[AnswerChoice] | None = None
    usage: TokenUsage | None = None
    error: Any = None


read_chunk = msgspec.json.Decoder(StreamChunk).decode


class Events:
    """Splits bytes from the network into the data of events.

    An event ends with an empty line. Comments and fields other than `data` are ignored, and several lines of
    data are joined, as the standard for server-sent events has it.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that are complete by now; raises ValueError for one beyond 16 MiB."""
        text = self._rest + received
        if b"\r" in text:
            held = text.endswith(b"\r")  # the line feed may come next
            text = text.replace(b"\r\n", b"\n")
            text = text[:-1].replace(b"\r", b"\n") + b"\r" if held else text.replace(b"\r", b"\n")
        *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > 2**24:
            raise ValueError("an event of the stream is longer than 16 MiB")
        return [data for event in events if (data := _data(event))]


def _data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly every event has this form
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


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
    rejected: bool = False
    unready: bool = False  # the server said that it takes no requests now
    error: str | None = None
    due_s: float | None = None


@dataclass(slots=True)
class ClientRun:
    """The results of a load. Times are on the client's clock; `lags_s` is how late its event loop was.

    `now` is the number of requests in flight, `most` the largest number so far. `passed` is what the clocks
    showed from the start to the last answer's end.
    """

    answers: list[ClientAnswer] = field(default_factory=list)
    now: int = 0
    most: int = 0
    lags_s: list[float] = field(default_factory=list)
    passed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamingClient:
    """How and where requests are sent; `session` limits the time of each."""

    session: aiohttp.ClientSession
    base_url: str
    endpoint: str | None  # None: follows from the form of the prompt
    model: str
    seed: int
    extra: Mapping[str, Any]

    def url(self, ask: TraceRequest) -> str:
        """Return the URL for a request."""
        return self.base_url + (self.endpoint or ("/v1/chat/completions" if ask.chat else "/v1/completions"))

    async def ask(self, answer: ClientAnswer, body: bytes) -> None:
        """Send one request and read its answer; a failure is recorded in `answer.error`."""
        headers = {"Content-Type": "application/json", "X-Request-Id": answer.ask.id, **authorization()}
        answer.sent_s = time.perf_counter()
        try:
            async with self.session.post(self.url(answer.ask), data=body, headers=headers) as response:
                await _read_response(answer, response)
        except asyncio.TimeoutError:
            answer.error = "no end within the limit of time"
        except (aiohttp.ClientError, ConnectionError) as error:
            answer.error = f"{type(error).__name__}: {error}"[:SHOWN]
        except (msgspec.DecodeError, ValueError) as error:
            answer.error = f"the stream cannot be read: {error}"[:SHOWN]
        answer.end_s = time.perf_counter()


async def _read_response(answer: ClientAnswer, response: aiohttp.ClientResponse) -> None:
    """Read an answer, or why there is none."""
    if response.status != 200:
        answer.error = f"HTTP {response.status}: {message(await response.read())}"
        answer.unready = response.status == 503
        # A busy server says 429, or 503 with a time to come again; any other 503 is an error.
        comes_again = response.status == 503 and "Retry-After" in response.headers
        answer.rejected = response.status == 429 or comes_again
    elif response.content_type != "text/event-stream":
        answer.error = f"the server sent {response.content_type}, no stream of events"
    else:
        await _read_answer(answer, response)


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


async def chunks(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, StreamChunk | None]]:
    """Yield each event of a stream with the time at which it came; None for the last one, `[DONE]`."""
    events = Events()
    async for received in response.content.iter_any():
        now_s = time.perf_counter()
        for data in events.feed(received):
            yield now_s, None if data == b"[DONE]" else read_chunk(data)


@dataclass(slots=True)
class StreamedAnswer:
    """The text of a stream, and when its first event came; 0.0 where none did."""

    text: str = ""
    first_s: float = 0.0
    usage: TokenUsage = field(default_factory=TokenUsage)
    is_whole: bool = False


async def read_stream(response: aiohttp.ClientResponse) -> StreamedAnswer:
    """Read a stream to its end."""
    found = StreamedAnswer()
    async for now_s, chunk in chunks(response):
        found.first_s = found.first_s or now_s
        if chunk is None:
            found.is_whole = True
            continue
        for each in chunk.choices or ():
            found.text += each.text or (each.delta and each.delta.content) or ""
        found.usage = chunk.usage or found.usage
    return found


async def _read_answer(answer: ClientAnswer, response: aiohttp.ClientResponse) -> None:
    """Read the stream of one answer."""
    ended = False
    async for now_s, chunk in chunks(response):
        if chunk is None:
            ended = True
            continue
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
        answer.cached_tokens = answer.cached_tokens if usage.cached_tokens is None else usage.cached_tokens
    new = 1 if any(each.says_something for each in choices) else 0
    if counted is not None:
        if answer.piece_tokens is not None:  # otherwise the count includes earlier pieces
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
