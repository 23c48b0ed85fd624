"""Translate the fields of `POST /v1/responses` into those of a chat.

Each item of the input is a message, a call, a call's result or reasoning. Consecutive reasoning, text and
calls of an assistant become one message. What cannot be read raises BadRequest with its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from borders.refusal import BadRequest
from serving.api.items import carried, check_names, string_at, wrong
from serving.api.pieces import Json

# Fields of any item; items that this server made may be sent back unchanged.
_EVERY = {"type", "id", "status"}
_KNOWN = {
    "message": {"role", "content", "phase"},  # a client of OpenAI sends back the phase that it was told
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"summary", "content", "encrypted_content"},
}
_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # the field of each kind's text
_OF_PARTS = {"type", "text", "refusal", "annotations", "logprobs", "parsed"}
_VERBOSITIES = (None, "low", "medium", "high")


def messages_of(given: str | Sequence[Any], instructions: str | None) -> list[Json]:
    """Return the messages of the conversation given by `input` and `instructions`."""
    turns = _Turns()
    if instructions is not None:
        turns.messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise BadRequest("input", "is empty; it must hold at least one item")
    for index, item in enumerate(given):
        turns.add(f"[{index}]", item)
    return turns.finished()


class _Turns:
    """The messages read so far, whose thoughts are lists until all are there."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._turn: Json | None = None  # the last message, while it is an assistant's and still open

    def add(self, place: str, item: object) -> None:
        """Add an item of the input."""
        if not isinstance(item, Mapping):
            raise wrong("input", place, item, "an object")
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in _KNOWN:
            raise wrong("input", f"{place}.type", kind, f"one of {', '.join(_KNOWN)}")
        given = {name: each for name, each in item.items() if each is not None and each != []}
        check_names("input", place, given, _KNOWN[kind] | _EVERY)
        if kind == "message":
            self._message(place, given)
        elif kind == "function_call":
            self._call(place, given)
        elif kind == "function_call_output":
            self._turn = None
            content = _text(f"{place}.output", given.get("output", ""))
            named = {"tool_call_id": string_at("input", f"{place}.call_id", given.get("call_id"))}
            self.messages.append({"role": "tool", "content": content, **named})
        else:
            self._thoughts(place, given)

    def finished(self) -> list[Json]:
        """Return all messages."""
        for each in self.messages:
            if "reasoning_content" in each:
                each["reasoning_content"] = "\n".join(filter(None, each["reasoning_content"]))
        return self.messages

    def _message(self, place: str, given: Mapping[str, Any]) -> None:
        message = {"role": given.get("role"), "content": _text(f"{place}.content", given.get("content", ""))}
        if message["role"] not in ("user", "system", "developer", "assistant"):
            raise wrong("input", f"{place}.role", message["role"], "user, system, developer or assistant")
        if message["role"] != "assistant":
            self._turn = None
            self.messages.append(message)
            return
        self._end_text()
        turn = self._open_message()
        turn["content"] = _together(turn["content"], message["content"])

    def _call(self, place: str, given: Mapping[str, Any]) -> None:
        name, arguments = (
            string_at("input", f"{place}.{each}", given.get(each)) for each in ("name", "arguments")
        )
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        call["id"] = string_at("input", f"{place}.call_id", given.get("call_id"))
        self._open_message().setdefault("tool_calls", []).append(call)

    def _thoughts(self, place: str, given: Mapping[str, Any]) -> None:
        sent = string_at("input", f"{place}.encrypted_content", given.get("encrypted_content", ""))
        held = carried(sent, "input", f"{place}.encrypted_content")
        if "summary" in given and "content" not in given and not sent:
            problem = "is a summary alone, which no model here reads"
            raise BadRequest("input", problem, fix="send the item's content", place=place)
        thoughts, content = [], given.get("content", [])
        if not isinstance(content, list):
            raise wrong("input", f"{place}.content", content, "a list of parts")
        for index, part in enumerate(content):
            at = f"{place}.content[{index}]"
            if not isinstance(part, Mapping) or part.get("type") != "reasoning_text":
                raise wrong("input", at, part, '{"type": "reasoning_text", "text": ...}')
            thoughts.append(string_at("input", f"{at}.text", part.get("text")))
        self._end_text()
        if sent and held is None and not thoughts:
            return  # the service that wrote it alone can read it
        said = "\n".join(thoughts) or held or ""
        self._open_message().setdefault("reasoning_content", []).append(said)

    def _end_text(self) -> None:
        """Close a message that has text, unless it has calls, too: their results follow its end."""
        if self._turn is not None and self._turn["content"] and "tool_calls" not in self._turn:
            self._turn = None

    def _open_message(self) -> Json:
        """Return the open message of the assistant, or a new one if there is none."""
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn


def tools_of(tools: Sequence[Any]) -> list[Any]:
    """Translate functions into the form of chats; `tool_use` refuses whatever is not a function."""
    made = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            made.append(tool)
            continue
        given = {name: each for name, each in tool.items() if each is not None and name != "type"}
        known = {"name", "description", "parameters", "strict"}
        check_names("tools", f"[{index}]", given, known | {"type"})
        made.append({"type": "function", "function": given})
    return made


def tool_choice_of(choice: str | Mapping[str, Any]) -> Any:
    """Translate a tool choice into the form of chats."""
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def response_format_of(text: Mapping[str, Any]) -> Any:
    """Translate the form of the answer into that of chats; None: any text."""
    check_names("text", "", text, {"format", "verbosity"})
    if text.get("verbosity") not in _VERBOSITIES:
        raise wrong("text", ".verbosity", text["verbosity"], "low, medium or high")
    form = text.get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise wrong("text", ".format", form, 'an object, such as {"type": "json_object"}')
    known = {"type", "name", "description", "schema", "strict"}
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise wrong("text", ".format.type", kind, "text, json_object or json_schema")
    check_names("text", ".format", form, known if kind == "json_schema" else {"type"})
    if kind != "json_schema":
        return form
    if form.get("schema") is None:
        raise BadRequest("text", "is missing", fix="give the schema", place=".format.schema")
    named = {name: each for name, each in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": named}


def _together(first: Any, second: Any) -> Any:
    """Return two contents as one, whose parts stay apart, since a template may join them in its own way.

    A list is extended, since a copy for each content takes too long.
    """
    if not first or not second:
        return first or second
    parts, more = (
        [{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)
    )
    parts.extend(more)
    return parts


def _text(place: str, content: object) -> Any:
    """Return a text, or its parts in the form of chats."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return string_at("input", place, content)
    parts = []
    for index, part in enumerate(content):
        at = f"{place}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _PARTS:
            raise wrong("input", at, part, '{"type": "input_text" or "output_text", "text": ...}')
        given = {name: each for name, each in part.items() if each is not None}
        check_names("input", at, given, _OF_PARTS)
        name = _PARTS[kind]
        parts.append({"type": "text", "text": string_at("input", f"{at}.{name}", part.get(name))})
    return parts
