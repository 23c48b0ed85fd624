"""Serve `POST /v1/responses`, OpenAI's newer form of a chat.

Request and answer are those of a chat in another notation. Nothing is stored: a client sends the items of
earlier turns again.

Reasoning, a message and each call are separate items, in the order in which the model wrote them. The events
are those that OpenAI documents, in the documented order.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fastapi import Request
from pydantic import Field, model_validator
from starlette.responses import Response

from borders.refusal import BadRequest
from continuous_batching.request import TokenLogprobs
from serving.answers.answers import AnswerDelta, AnswerStream, UnstreamedAnswer
from serving.api.answer_parser import AnswerParser
from serving.api.choices import as_content
from serving.api.errors import whole
from serving.api.generation import Generation, fields_as_sent
from serving.api.items import carrying, check_repeated
from serving.api.pieces import Json, parts, pieces_of
from serving.api.responses_input import messages_of, response_format_of, tool_choice_of, tools_of
from serving.api.schemas import IN_RESPONSES, Ignored, PaddingOptions, SamplingBody, Strings, refused, takes
from serving.api.streamed import COMMENT
from serving.failures import Failure
from serving.text.tokenizer import Text
from serving.tools.parsing import CallDelta, Parsed

Kind = Literal["reasoning", "message", "function_call"]
Status = Literal["in_progress", "completed", "incomplete"]
_MARKS = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass(slots=True)
class Item:
    """One item; `pieces` are parts of its text, or of its arguments."""

    kind: Kind
    place: int  # index among the items
    id: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def part(self) -> str:
        """The type of the item's content."""
        return "reasoning_text" if self.kind == "reasoning" else "output_text"


class _WaitingTokens:
    """Tokens of which it is not known yet whether they are of a message: what they spell, and their entries.

    A token of which a part is decided waits for the rest. Its entry is taken once.
    """

    def __init__(self) -> None:
        self._pieces = deque[tuple[str, list[TokenLogprobs]]]()
        self._size = 0  # number of characters

    def add(self, text: str, entries: Sequence[TokenLogprobs]) -> None:
        """Add tokens; those before them that spell nothing begin a character of theirs."""
        before = self._pieces.pop()[1] if self._pieces and not self._pieces[-1][0] else []
        self._pieces.append((text, [*before, *entries]))
        self._size += len(text)

    def take(self, texts: Sequence[str], num_behind: int | None) -> list[TokenLogprobs]:
        """Return the entries of the tokens of a message's texts, which wait no longer, as those before them.

        They have `num_behind` characters behind them, and a mark, if need be; None: that is not known.
        """
        found = self._find("".join(texts), num_behind)
        if found is None and len(texts) > 1:  # there is a mark between two of them
            return [one for each in texts for one in self.take([each], None)]
        start, size = found or (0, self._size - (num_behind or 0))
        self._drop(start)
        own: list[TokenLogprobs] = []
        while size > 0:
            piece, entries = self._pieces.popleft()
            own += entries
            taken = min(size, len(piece))
            size, self._size = size - taken, self._size - taken
            if taken < len(piece):
                self._pieces.appendleft((piece[taken:], []))
        return own

    def pass_over(self, text: str, num_behind: int | None) -> None:
        """Let the tokens of reasoning, and those before them, wait no longer."""
        self._drop(sum(self._find(text, num_behind) or ()))

    def cut(self, size: int) -> None:
        """Let only the last characters wait; those before them are of marks, or are not shown."""
        self._drop(self._size - size)

    def rest(self) -> list[TokenLogprobs]:
        """Return the entries of the tokens at the end that spell nothing, such as the one that ended it."""
        return self._pieces[-1][1] if self._pieces and not self._pieces[-1][0] else []

    def _find(self, text: str, num_behind: int | None) -> tuple[int, int] | None:
        """Return where what is said begins, and its length; a line break before it may be the parser's own.

        It stands at the end where a mark comes before it, which the text may resemble. Otherwise it is what
        has waited longest.
        """
        waiting = "".join(piece for piece, _ in self._pieces)
        end = -1 if num_behind is None else len(waiting) - num_behind
        for each in (text, text.removeprefix("\n")):
            if end >= len(each) and waiting.endswith(each, 0, end):
                return end - len(each), len(each)
            if (at := waiting.find(each)) >= 0:
                return at, len(each)
        return None

    def _drop(self, size: int) -> None:
        while size > 0:
            piece, entries = self._pieces.popleft()
            taken = min(size, len(piece))
            size, self._size = size - taken, self._size - taken
            if taken < len(piece):
                self._pieces.appendleft((piece[taken:], entries))


class OutputItems:
    """The items of the response `name`, from which their ids follow.

    `text` names the tokens whose log-probabilities are reported.

    Reasoning that `carries` has its text once more in the field that a client sends back unread.
    """

    def __init__(
        self, text: Text | None, call_id: Callable[[CallDelta], str], name: str, *, carries: bool = False
    ) -> None:
        self._name = name
        self._carries = carries
        self._text = text
        self._call_id = call_id
        self._items: list[Item] = []
        self._is_open = False  # whether the last item is still open
        self._last_status: Status = "completed"
        self._waiting = _WaitingTokens()

    def written(self) -> list[Json]:
        """Return all items, after they have ended."""
        statuses: list[Status] = ["completed"] * len(self._items)
        statuses[-1:] = [self._last_status] * len(statuses[-1:])
        return [self._json(item, status) for item, status in zip(self._items, statuses)]

    def push(
        self, said: Parsed, text: str, logprobs: Sequence[TokenLogprobs] | None, num_held: int
    ) -> Iterator[Json]:
        """Yield the events for new parts.

        `text` is what the new tokens spell, and `logprobs` are theirs, if asked for. Of the last `num_held`
        characters it is not decided yet what they are.
        """
        if logprobs is not None:
            self._waiting.add(text, logprobs)
        texts: list[str] = []  # Texts of one message that come together are told by one event
        has_entries = logprobs is not None
        for part in said.parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            if texts:
                yield from self._say("message", texts, self._waiting.take(texts, None) if has_entries else ())
                texts = []
            if isinstance(part, CallDelta):
                yield from self._call(part)
                continue
            if has_entries:
                self._waiting.pass_over(part.text, num_held if part is said.parts[-1] else None)
            yield from self._say("reasoning", [part.text])
        if texts:
            own = self._waiting.take(texts, num_held) if has_entries else ()
            yield from self._say("message", texts, own)
        self._waiting.cut(num_held)

    def end(self, status: Status) -> Iterator[Json]:
        """Yield the events for the end; a response that says nothing has an empty message."""
        if not self._items:
            yield from self._say("message", [])
        self._last_status = status
        if self._items[-1].kind == "message":  # the token that ended it spells nothing
            self._items[-1].logprobs += self._waiting.rest()
        yield from self._close(status)

    def _say(self, kind: Kind, texts: Sequence[str], own: Sequence[TokenLogprobs] = ()) -> Iterator[Json]:
        """Yield the events for a text, which comes in parts; `own` are the entries of its tokens."""
        text = "".join(texts)
        if not self._is_open or self._items[-1].kind != kind:
            yield from self._begin(kind)
            part = self._part(self._items[-1], text="")
            yield self._event("response.content_part.added", part=part)
        item, logprobs = self._items[-1], {}
        item.pieces.append(text)
        if kind == "message":
            logprobs = self._logprobs(own)
            item.logprobs += own
        if text:
            yield self._event(f"response.{item.part}.delta", delta=text, **logprobs)

    def _call(self, delta: CallDelta) -> Iterator[Json]:
        if delta.name is not None:
            yield from self._begin("function_call", call_id=self._call_id(delta), name=delta.name)
        if delta.arguments:
            self._items[-1].pieces.append(delta.arguments)
            yield self._event("response.function_call_arguments.delta", delta=delta.arguments)

    def _begin(self, kind: Kind, *, call_id: str = "", name: str = "") -> Iterator[Json]:
        yield from self._close("completed")
        item = Item(kind, len(self._items), f"{_MARKS[kind]}_{self._id()}", call_id, name)
        self._items.append(item)
        self._is_open = True
        yield {
            "type": "response.output_item.added",
            "output_index": item.place,
            "item": self._json(item, "in_progress"),
        }

    def _id(self) -> str:
        """Return the id of the next item, which is the same where the response goes on at another server."""
        return hashlib.sha256(f"{self._name} {len(self._items)}".encode()).hexdigest()[:32]

    def _close(self, status: Status) -> Iterator[Json]:
        if not self._is_open:
            return
        self._is_open, item = False, self._items[-1]
        text = "".join(item.pieces)
        item.pieces = [text]
        if item.kind == "function_call":
            yield self._event("response.function_call_arguments.done", name=item.name, arguments=text)
        else:
            logprobs = self._logprobs(item.logprobs) if item.kind == "message" else {}
            yield self._event(f"response.{item.part}.done", text=text, **logprobs)
            yield self._event("response.content_part.done", part=self._part(item))
        done = {"type": "response.output_item.done", "output_index": item.place}
        yield done | {"item": self._json(item, status)}

    def _event(self, kind: str, **fields: object) -> Json:
        """Return an event of the last item."""
        item = self._items[-1]
        event = {"type": kind, "item_id": item.id, "output_index": item.place}
        return event | ({} if item.kind == "function_call" else {"content_index": 0}) | fields

    def _json(self, item: Item, status: Status) -> Json:
        head: Json = {"id": item.id, "type": item.kind, "status": status}
        if item.kind == "function_call":
            call = {"call_id": item.call_id, "name": item.name, "arguments": "".join(item.pieces)}
            return head | call
        role: Json = {"role": "assistant"} if item.kind == "message" else {"summary": []}
        if item.kind == "reasoning" and self._carries and status != "in_progress":
            role["encrypted_content"] = carrying("".join(item.pieces))
        return head | role | {"content": [] if status == "in_progress" else parts([self._part(item)])}

    def _part(self, item: Item, text: str | None = None) -> Json:
        part: Json = {"type": item.part, "text": "".join(item.pieces) if text is None else text}
        return part | ({"annotations": []} | self._logprobs(item.logprobs) if item.kind == "message" else {})

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> Json:
        return {"logprobs": as_content(self._text, entries)["content"]}


_LOGPROBS, _THOUGHTS = "message.output_text.logprobs", "reasoning.encrypted_content"
_AS_SENT = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
# Why a response is incomplete, by the `finish_reason` of its answer.
_REASONS = {"length": "max_output_tokens"}
# The codes of a failed response, of which OpenAI defines few; what other errors have stands in its details.
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


@takes("responses")
class ResponsesBody(SamplingBody):
    """The body of `POST /v1/responses`."""

    ignored: ClassVar[Ignored] = IN_RESPONSES
    apart = frozenset(
        {
            *("input", "instructions", "max_output_tokens", "text", "reasoning", "tools", "tool_choice"),
            *("include", "metadata", "stream_options"),
        }
    )
    input: str | list[Any] = Field(description="a text, or items: messages, calls, their results, thoughts")
    instructions: str | None = Field(None, description="a system message before all others")
    max_output_tokens: int | None = Field(None, description="of thoughts and all else; null: as many as fit")
    text: dict[str, Any] | None = Field(None, description="`format`: the form of the answer")
    reasoning: dict[str, Any] | None = Field(None, description="`effort`: how hard to think; `summary`: auto")
    tools: list[Any] | None = Field(None, description="functions that the answer may call")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto, required, or the function that must be called; null: auto"
    )
    include: Strings | None = Field(None, description=f"{_LOGPROBS} and {_THOUGHTS}, and nothing else")
    metadata: dict[str, str] | None = Field(None, description="sent back as it came")
    stream_options: PaddingOptions | None = None

    @model_validator(mode="after")
    def _includes_what_there_is(self) -> ResponsesBody:
        for index, name in enumerate(self.include or ()):
            if name not in (_LOGPROBS, _THOUGHTS):
                problem = f'include[{index}] is "{whole(name[:60])}", which no answer here has'
                raise refused("include", f"{problem}: leave it out")
        if self.top_logprobs and _LOGPROBS not in (self.include or ()):
            raise refused("top_logprobs", f'top_logprobs needs "{_LOGPROBS}" in include')
        return self

    def fields(self) -> dict[str, Any]:
        """Return what is asked for as fields of a chat; raises BadRequest."""
        fields = {
            "messages": messages_of(self.input, self.instructions),
            "max_tokens": self.max_output_tokens,
            "response_format": None if self.text is None else response_format_of(self.text),
            "tools": None if self.tools is None else tools_of(self.tools),
            "tool_choice": None if self.tool_choice is None else tool_choice_of(self.tool_choice),
            "logprobs": True if _LOGPROBS in (self.include or ()) else None,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
        }
        for name, value in (self.reasoning or {}).items():
            # Clients ask for the best summary that there is, which here are the thoughts themselves
            is_best = (name, value) == ("summary", "auto")
            if value is not None and name != "effort" and not is_best:
                raise BadRequest("reasoning", "is not supported", fix="leave it out", place=f".{name}")
        for name in ("metadata", "text", "tool_choice"):  # the conversation's own fields are checked with it
            check_repeated(name, getattr(self, name))
        return {name: value for name, value in fields.items() if value is not None}


class ResponsesRoute:
    """The route for responses."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def respond(self, body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation; without a token limit, the answer may fill the model's context."""
        generation = self._generation
        name = generation.name("resp_", request)
        fields = {"id": name, **generation.fields(body, request), **body.fields()}
        with fields_as_sent(_AS_SENT):
            (answer,) = await generation.ask([fields], name, request, fill=True)
            text = generation.llm.text
            parser = AnswerParser(text, answer.request, request.state.tools)
            form = ResponseObject(text, answer, parser, body, generation.head(body)["model"])
            return await generation.respond([answer], form, request, is_streamed=bool(body.stream))


class ResponseObject:
    """The JSON form of a response (a `ResponseForm`)."""

    keep_alive = COMMENT

    def __init__(
        self, text: Text | None, answer: AnswerStream, parser: AnswerParser, body: ResponsesBody, model: str
    ) -> None:
        self._answer = answer
        self._parser = parser
        asked = body.include or ()
        self._with_logprobs = _LOGPROBS in asked
        self._items = OutputItems(text, parser.call_id, answer.group, carries=_THOUGHTS in asked)
        self._num_events = 0
        # Of joined parts it could not be told which tokens are whose, nor how many are of thoughts
        told_apart = self._with_logprobs or parser.counts_by_token
        self._unstreamed = UnstreamedAnswer(self._grown, told_apart=told_apart)
        params = answer.request.params
        self._head: Json = {
            "id": answer.group,
            "object": "response",
            "created_at": answer.created_s,
            "model": model,
        }
        self._asked: Json = {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def take(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> None:
        """Take new parts of the answer, which is written whole."""
        self._unstreamed.take(deltas)

    def whole(self) -> Iterator[bytes]:
        """Yield the whole response, made from its one answer."""
        yield from pieces_of(self._ended(self._unstreamed.parsed()))

    def events(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> Iterator[bytes]:
        """Yield the events for new parts of the answer."""
        yield from self._opening()
        for _, delta in deltas:
            for event in self._grown(delta):
                yield from self._event(event)
            if delta.finish_reason is not None:
                response = self._ended(delta)
                yield from self._event({"type": f"response.{response['status']}", "response": response})

    def end(self) -> bytes:
        """Return nothing, since the last event has already said that the response has ended."""
        return b""

    def failed(self, failure: Failure | BadRequest) -> bytes:
        """Return what ends a response that cannot be completed."""
        status = 400 if isinstance(failure, BadRequest) else failure.status
        error = {
            "code": _CODES.get(status, "server_error"),
            "message": whole(str(failure)),
            "details": {"error_code": failure.code or status},
        }
        for _ in self._items.end("incomplete"):
            pass
        response = self._response("failed", error=error, output=parts(self._items.written()))
        last = self._event({"type": "response.failed", "response": response})
        return b"".join((*self._opening(), *last))

    def _opening(self) -> Iterator[bytes]:
        """Yield the events that come before all others, which clients' helpers rely on, unless they came."""
        if self._num_events:
            return
        for kind in ("created", "in_progress"):
            yield from self._event({"type": f"response.{kind}", "response": self._response("in_progress")})

    def _grown(self, delta: AnswerDelta) -> Iterator[Json]:
        said = self._parser.push(delta.index, delta)
        logprobs, num_held = None, 0
        if self._with_logprobs:
            logprobs, num_held = delta.logprobs, self._parser.num_held(delta.index)
        yield from self._items.push(said, delta.text, logprobs, num_held)
        if delta.finish_reason is not None:
            yield from self._items.end(_status(delta))

    def _ended(self, delta: AnswerDelta) -> Json:
        status = _status(delta)
        why = {"reason": _REASONS.get(delta.finish_reason or "", delta.finish_reason)}
        return self._response(
            status,
            incomplete_details=None if status == "completed" else why,
            output=parts(self._items.written()),
            usage=self._usage(),
        )

    def _response(self, status: str, **changed: Any) -> Json:
        fields: Json = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**self._head, "status": status, **self._asked, **fields, **changed}

    def _event(self, event: Json) -> Iterator[bytes]:
        kind: str = event["type"]
        yield b"event: " + kind.encode() + b"\ndata: "
        yield from pieces_of({"type": kind, "sequence_number": self._num_events, **event})
        yield b"\n\n"
        self._num_events += 1

    def _usage(self) -> Json:
        num_prompt, num_answer = self._answer.request.num_prompt_tokens, self._answer.num_tokens
        cached = {"cached_tokens": self._answer.num_cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": cached,
            "output_tokens": num_answer,
            "output_tokens_details": {"reasoning_tokens": self._parser.num_thought_tokens},
            "total_tokens": num_prompt + num_answer,
            **self._answer.resumed_usage,
            **self._answer.weights_usage,
        }


def _status(delta: AnswerDelta) -> Status:
    return "completed" if delta.finish_reason == "stop" else "incomplete"
