"""Split a response into its items, and make the events that report them as they grow.

Reasoning, a message and each call are separate items, in the order in which the model wrote them. The events
are those that OpenAI documents, in the documented order; responses.py numbers them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from continuous_batching.request import TokenLogprobs
from serving.api.logprobs import as_content
from serving.api.pieces import Json, parts
from serving.text.tokenizer import Text
from serving.tools.parsing import CallDelta, Parsed, Thought

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


class OutputItems:
    """The items of one response; `text` names the tokens whose log-probabilities are reported."""

    def __init__(self, text: Text | None, call_id: Callable[[], str]) -> None:
        self._text = text
        self._call_id = call_id
        self._items: list[Item] = []
        self._is_open = False  # whether the last item is still open
        self._last_status: Status = "completed"
        self._waiting: list[TokenLogprobs] = []  # entries of tokens not yet known to belong to a message

    def written(self) -> list[Json]:
        """Return all items, after they have ended."""
        statuses: list[Status] = ["completed"] * len(self._items)
        statuses[-1:] = [self._last_status] * len(statuses[-1:])
        return [self._json(item, status) for item, status in zip(self._items, statuses)]

    def push(self, said: Parsed, logprobs: Sequence[TokenLogprobs]) -> Iterator[Json]:
        """Yield the events for new parts; `logprobs` are those of the new tokens, if asked for."""
        self._waiting += logprobs
        for part in said.parts:
            if isinstance(part, CallDelta):
                yield from self._call(part)
            elif isinstance(part, Thought):
                yield from self._say("reasoning", part.text)
            else:
                yield from self._say("message", part)

    def end(self, status: Status) -> Iterator[Json]:
        """Yield the events for the end; a response that says nothing has an empty message."""
        if not self._items:
            yield from self._say("message", "")
        self._last_status = status
        if self._items[-1].kind == "message":
            self._items[-1].logprobs += self._waiting
        yield from self._close(status)

    def _say(self, kind: Kind, text: str) -> Iterator[Json]:
        if not self._is_open or self._items[-1].kind != kind:
            yield from self._begin(kind)
            part = self._part(self._items[-1], text="")
            yield self._event("response.content_part.added", part=part)
        item, logprobs = self._items[-1], {}
        item.pieces.append(text)
        if kind == "message":
            logprobs = self._logprobs(self._waiting)
            item.logprobs += self._waiting
        self._waiting = []
        if text:
            yield self._event(f"response.{item.part}.delta", delta=text, **logprobs)

    def _call(self, delta: CallDelta) -> Iterator[Json]:
        if delta.name is not None:
            yield from self._begin("function_call", call_id=self._call_id(), name=delta.name)
        self._waiting = []
        if delta.arguments:
            self._items[-1].pieces.append(delta.arguments)
            yield self._event("response.function_call_arguments.delta", delta=delta.arguments)

    def _begin(self, kind: Kind, *, call_id: str = "", name: str = "") -> Iterator[Json]:
        yield from self._close("completed")
        item = Item(kind, len(self._items), f"{_MARKS[kind]}_{uuid.uuid4().hex}", call_id, name)
        self._items.append(item)
        self._is_open = True
        yield {
            "type": "response.output_item.added",
            "output_index": item.place,
            "item": self._json(item, "in_progress"),
        }

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
        return head | role | {"content": [] if status == "in_progress" else parts([self._part(item)])}

    def _part(self, item: Item, text: str | None = None) -> Json:
        part: Json = {"type": item.part, "text": "".join(item.pieces) if text is None else text}
        return part | ({"annotations": []} | self._logprobs(item.logprobs) if item.kind == "message" else {})

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> Json:
        return {"logprobs": as_content(self._text, entries)["content"]}
