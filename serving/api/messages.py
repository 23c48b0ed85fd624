"""Serve `POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's form of a chat.

Request and answer are those of a chat in another notation (messages_input.py reads the request). Thoughts,
text and each call are separate blocks, in the order in which the model wrote them. The events are those that
Anthropic documents, in the documented order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from borders.refusal import BadRequest
from serving.answers.answers import AnswerDelta, AnswerStream, UnstreamedAnswer
from serving.api.answer_parser import AnswerParser
from serving.api.errors import anthropics_error, for_anthropic
from serving.api.generation import EFFORT_HEADER, Generation, fields_as_sent
from serving.api.messages_input import (
    clear_thoughts,
    messages_of,
    response_format_of,
    signature_of,
    thinking_of,
    tool_choice_of,
    tools_of,
)
from serving.api.pieces import Json, pieces_of, to_json
from serving.api.schemas import IN_MESSAGES, Ignored, SamplingBody, Strings, takes
from serving.async_llm import parted
from serving.failures import Failure
from serving.text.chat_template import read_object
from serving.text.request_fields import parse_request
from serving.tools.parsing import CallDelta, Parsed, Thought

PATH = "/v1/messages"
Kind = Literal["thinking", "text", "tool_use"]
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_AS_SENT = {
    "prompt": "messages",
    "continue_final_message": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "thinking",
    "thinking_token_budget": "thinking",
    "parallel_tool_calls": "tool_choice",
}
_NO_THREADS = "thread_unsupported_request"


class ConversationBody(SamplingBody):
    """The fields of a conversation, which a request for its length has, too."""

    ignored: ClassVar[Ignored] = IN_MESSAGES
    apart = frozenset(
        {
            *("messages", "system", "tools", "tool_choice", "parallel_tool_calls", "thinking"),
            *("output_config", "output_format", "max_tokens", "stop_sequences", "thread"),
            "context_management",
        }
    )
    model: str = Field(description="a name of `/v1/models`")
    messages: list[Any] = Field(description='each {"role": ..., "content": ...}; content: text or blocks')
    system: str | list[Any] | None = Field(None, description="the system prompt: a text or blocks of text")
    tools: list[Any] | None = Field(None, description="functions that the answer may call")
    tool_choice: dict[str, Any] | None = Field(None, description="auto, any, tool or none; null: auto")
    thinking: dict[str, Any] | None = Field(None, description="whether to think; null: not")
    output_config: dict[str, Any] | None = Field(
        None, description="`effort`: how hard to think; `format`: a schema of the answer"
    )
    context_management: dict[str, Any] | None = Field(
        None, description="`edits`: which thoughts are left out of the prompt; null: none"
    )
    thread: dict[str, Any] | None = Field(None, description="nothing but null: no conversation is stored")
    output_format: dict[str, Any] | None = Field(None, description="the older name of output_config.format")

    def fields(self) -> dict[str, Any]:
        """Return what is asked for as fields of a chat; raises BadRequest."""
        if self.thread is not None:  # the code tells a client to go on without one
            fix = "send the whole conversation without it"
            raise BadRequest("thread", "is not supported; nothing is stored", fix=fix, code=_NO_THREADS)
        messages = messages_of(self.messages, self.system)
        if self.context_management is not None:
            clear_thoughts(messages, self.context_management)
        effort, form = self._output()
        fields: dict[str, Any] = {"messages": messages, "response_format": form}
        if self.tools is not None:
            fields["tools"] = tools_of(self.tools)
        if self.tool_choice is not None:
            fields |= tool_choice_of(self.tool_choice)
        follows_tools = messages[-1]["role"] == "tool"
        fields |= thinking_of(self.thinking, effort, follows_tools=follows_tools)
        if messages[-1]["role"] == "assistant":
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        return {name: value for name, value in fields.items() if value is not None}

    def _output(self) -> tuple[str | None, Json | None]:
        """Return the effort, and the form of the answer."""
        given = self.output_config or {}
        for name in given.keys() - {"effort", "format"}:
            raise BadRequest("output_config", "is unknown; it may have effort and format", place=f".{name}")
        effort, form = given.get("effort"), given.get("format")
        if effort not in (None, "low", "medium", "high", "xhigh", "max"):
            limit = "low, medium, high, xhigh or max"
            raise BadRequest("output_config", value=effort, limit=limit, place=".effort")
        if form is not None and self.output_format is not None:
            raise BadRequest("output_format", "is the older name of output_config.format", fix="send one")
        if form is not None:
            return effort, response_format_of(form, "output_config")
        form = self.output_format
        return effort, None if form is None else response_format_of(form, "output_format")


@takes("responses")
class MessagesBody(ConversationBody):
    """The body of `POST /v1/messages`."""

    max_tokens: int = Field(description="of thoughts and all else; the answer also ends with the context")
    stop_sequences: Strings | None = Field(None, description="texts that end the answer")
    # The base class has OpenAI's tiers, of another type
    service_tier: Literal["auto", "standard_only"] | None = Field(  # type: ignore[assignment]
        None, description="there is one"
    )

    def fields(self) -> dict[str, Any]:
        """Return what is asked for as fields of a chat; raises BadRequest."""
        fields = super().fields() | {"max_tokens": self.max_tokens}
        return fields | ({"stop": self.stop_sequences} if self.stop_sequences else {})


@takes("responses")
class CountBody(ConversationBody):
    """The body of `POST /v1/messages/count_tokens`."""


class MessagesRoutes:
    """The routes for messages."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def by_path(self) -> dict[str, Callable[..., Awaitable[Response]]]:
        """Return what answers each path."""
        return {PATH: self.create, f"{PATH}/count_tokens": self.count}

    async def create(self, body: MessagesBody, request: Request) -> Response:
        """Answer a conversation; an answer that meets the end of the model's context ends there."""
        generation = self._generation
        name = generation.name("msg_", request)
        with fields_as_sent(_AS_SENT):
            fields, note = self._fields(body, request)
            fields["id"] = name
            (answer,) = await generation.ask([fields], name, request, shorten=True)
            if note:
                request.state.notes.setdefault(EFFORT_HEADER, note)
            text = generation.llm.text
            parser = AnswerParser(text, answer.request, request.state.tools)
            form = MessageObject(answer, parser, body, request.state.request_id)
            return await generation.respond([answer], form, request, is_streamed=bool(body.stream))

    async def count(self, body: CountBody, request: Request) -> Response:
        """Return how many tokens the prompt of a conversation has."""
        llm = self._generation.llm
        with fields_as_sent(_AS_SENT):
            fields, _ = parted(self._fields(body, request)[0])
            fields |= {"id": "count", "max_tokens": 1}
            parse = partial(parse_request, fields, llm.text, adapters=llm.adapters)
            counted = await llm.apart(parse)
        return Response(to_json({"input_tokens": counted.num_prompt_tokens}), media_type="application/json")

    def _fields(self, body: ConversationBody, request: Request) -> tuple[dict[str, Any], str]:
        """Return the fields of a chat, and what has no effect: a budget where nothing ends thoughts."""
        fields = {**self._generation.fields(body, request), **body.fields()}
        text = self._generation.llm.text
        if "thinking_token_budget" not in fields or (text is not None and len(text.think_marks) == 2):
            return fields, ""
        del fields["thinking_token_budget"]
        said = "the recipe has no server.reasoning whose marks are tokens of the model"
        return fields, f"budget_tokens has no effect: {said}"


@dataclass(slots=True)
class Block:
    """One block of content; `pieces` are parts of its text, or of its call's arguments."""

    kind: Kind
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)


class Blocks:
    """The blocks of one message."""

    def __init__(self, call_id: Callable[[CallDelta], str], *, shows_thoughts: bool) -> None:
        self._call_id = call_id
        self._shows_thoughts = shows_thoughts
        self._blocks: list[Block] = []
        self._is_open = False  # whether the last block is still open

    def written(self) -> list[Json]:
        """Return all blocks, after they have ended."""
        return [self._whole(each) for each in self._blocks]

    def push(self, said: Parsed) -> Iterator[Json]:
        """Yield the events for new parts."""
        for part in said.parts:
            if isinstance(part, CallDelta):
                if part.name is not None:
                    yield from self._begin(Block("tool_use", self._call_id(part), part.name))
                yield from self._add(part.arguments)
            else:
                kind: Kind = "thinking" if isinstance(part, Thought) else "text"
                if not self._is_open or self._blocks[-1].kind != kind:
                    yield from self._begin(Block(kind))
                yield from self._add(part.text if isinstance(part, Thought) else part)

    def end(self) -> Iterator[Json]:
        """Yield the events that end the last block."""
        if not self._is_open:
            return
        self._is_open, block = False, self._blocks[-1]
        block.pieces = ["".join(block.pieces)]
        if block.kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature(block)})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _begin(self, block: Block) -> Iterator[Json]:
        yield from self.end()
        self._blocks.append(block)
        self._is_open = True
        start: Json = {"type": block.kind}
        match block.kind:
            case "tool_use":
                start |= {"id": block.id, "name": block.name, "input": {}}
            case "thinking":
                start |= {"thinking": "", "signature": ""}
            case "text":
                start |= {"text": ""}
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": start}
        if index == 0:
            yield {"type": "ping"}

    def _add(self, text: str) -> Iterator[Json]:
        block = self._blocks[-1]
        block.pieces.append(text)
        if text and (block.kind != "thinking" or self._shows_thoughts):
            kind, name = _DELTAS[block.kind]
            yield self._delta({"type": kind, name: text})

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _signature(self, block: Block) -> str:
        return signature_of("".join(block.pieces), is_shown=self._shows_thoughts)

    def _whole(self, block: Block) -> Json:
        text = "".join(block.pieces)
        match block.kind:
            case "tool_use":
                return {"type": "tool_use", "id": block.id, "name": block.name, "input": _object_of(text)}
            case "thinking":
                shown = text if self._shows_thoughts else ""
                return {"type": "thinking", "thinking": shown, "signature": self._signature(block)}
        return {"type": "text", "text": text}


def _object_of(arguments: str) -> Json:
    """Return the arguments of a call as an object; of arguments that were cut, what can be read."""
    if not arguments.strip():  # it was cut behind the call's name
        return {}
    read = read_object(arguments)
    return {"arguments": arguments} if read is None else read


def _event(event: Mapping[str, Any]) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + to_json(event) + b"\n\n"


class MessageObject:
    """The JSON form of a message (a `ResponseForm`); its stream's sign of life is an event of its own."""

    keep_alive = _event({"type": "ping"})

    def __init__(
        self,
        answer: AnswerStream,
        parser: AnswerParser,
        body: MessagesBody,
        request_id: str,
    ) -> None:
        self._answer = answer
        self._parser = parser
        self._max_tokens = body.max_tokens
        self._request_id = request_id
        shows_thoughts = (body.thinking or {}).get("display") != "omitted"
        self._blocks = Blocks(parser.call_id, shows_thoughts=shows_thoughts)
        self._head: Json = {
            "id": answer.group,
            "type": "message",
            "role": "assistant",
            "model": body.model,
        }
        self._has_begun = False
        # Thoughts that no token ends are counted in parts of a token each
        self._unstreamed = UnstreamedAnswer(self._grown, told_apart=parser.counts_by_token)

    def take(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> None:
        """Take new parts of the answer, which is written whole."""
        self._unstreamed.take(deltas)

    def whole(self) -> Iterator[bytes]:
        """Yield the whole message, made from its one answer."""
        stop = self._stop(self._unstreamed.parsed())
        yield from pieces_of(
            {**self._head, "content": self._blocks.written(), **stop, "usage": self._usage()}
        )

    def events(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> Iterator[bytes]:
        """Yield the events for new parts of the answer."""
        if not self._has_begun:
            self._has_begun = True
            stop = {"stop_reason": None, "stop_sequence": None}
            usage = self._usage() | {"output_tokens": 0}
            message = {**self._head, "content": [], **stop, "usage": usage}
            yield _event({"type": "message_start", "message": message})
        for _, delta in deltas:
            for event in self._grown(delta):
                yield _event(event)
            if delta.finish_reason is not None:
                yield _event({"type": "message_delta", "delta": self._stop(delta), "usage": self._usage()})

    def end(self) -> bytes:
        """Return the last event."""
        return _event({"type": "message_stop"})

    def failed(self, failure: Failure | BadRequest) -> bytes:
        """Return the last event of a message that cannot be completed."""
        error = anthropics_error(*for_anthropic(failure), self._request_id, failure.code)
        return b"event: error\ndata: " + error + b"\n\n"

    def _grown(self, delta: AnswerDelta) -> Iterator[Json]:
        yield from self._blocks.push(self._parser.push(delta.index, delta))
        if delta.finish_reason is not None:
            yield from self._blocks.end()

    def _stop(self, delta: AnswerDelta) -> Json:
        """Return why the answer has ended."""
        reason, sequence = "end_turn", None
        if delta.finish_reason == "length":
            is_context = self._answer.request.params.max_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_context else "max_tokens"
        elif delta.finish_reason == "timeout":
            reason = "pause_turn"
        elif isinstance(delta.stop_reason, str):
            reason, sequence = "stop_sequence", delta.stop_reason
        elif self._parser.num_calls(delta.index):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> Json:
        """Return the numbers of tokens; those found in the cache are not among the input's own."""
        num_cached = self._answer.num_cached_tokens
        return {
            "input_tokens": self._answer.request.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": self._answer.num_tokens,
            "output_tokens_details": {"thinking_tokens": self._parser.num_thought_tokens},
            "service_tier": "standard",
            **self._answer.resumed_usage,
            **self._answer.weights_usage,
        }
