"""Check the messages of a conversation.

Each message has a role and text; an assistant's may have reasoning and calls, a tool's the id of its call.
Anything else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from borders.refusal import BadRequest, abbreviate_json

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_CALLS = 128  # most calls in one message
# LiteLLM keeps what else an answer said in this field and sends it back; it asks for nothing.
_UNREAD = "provider_specific_fields"
_KNOWN = {
    "assistant": {"role", "content", "name", "tool_calls", "reasoning_content", "reasoning", _UNREAD},
    "tool": {"role", "content", "name", "tool_call_id"},
}
_PLAIN = {"role", "content", "name"}

Message = dict[str, Any]


def check_messages(messages: object, *, text_arguments: bool = False) -> list[Message]:
    """Return messages as a template takes them; arguments of calls become objects, unless `text_arguments`.

    Content may also be a list of text parts, which become lines. Raises BadRequest for anything else.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages", 'must be a list of at least one {"role": ..., "content": ...}')
    return [_check_message(f"[{index}]", message, text_arguments) for index, message in enumerate(messages)]


def _check_message(place: str, message: object, text_arguments: bool) -> Message:
    if not isinstance(message, dict):
        raise _wrong(place, 'must be an object {"role": ..., "content": ...}')
    given = {key: value for key, value in message.items() if value is not None and value != []}
    role = given.get("role")
    known = _KNOWN.get(role, _PLAIN) if isinstance(role, str) else _PLAIN
    unknown = sorted(given.keys() - known)
    if unknown:
        names = "role, content and name"
        raise _wrong(f"{place}.{unknown[0]}", f"is not supported; a message has {names}")
    if role not in ROLES:
        raise _wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}")
    calls = given.get("tool_calls")
    content = message.get("content")
    if content is None and calls is not None:
        content = ""
    checked: Message = {"role": role, "content": _text_of(f"{place}.content", content)}
    for name in ("name", "tool_call_id"):
        if name in given:
            checked[name] = _check_text(f"{place}.{name}", given[name])
    thoughts = given.get("reasoning_content", given.get("reasoning"))
    if thoughts is not None:
        checked["reasoning_content"] = _check_text(f"{place}.reasoning_content", thoughts)
    if calls is not None:
        checked["tool_calls"] = _calls(f"{place}.tool_calls", calls, text_arguments)
    return checked


def _calls(place: str, calls: object, text_arguments: bool) -> list[Message]:
    if not isinstance(calls, list) or len(calls) > MOST_CALLS:
        raise _wrong(place, f"must be a list of at most {MOST_CALLS} calls")
    return [_call(f"{place}[{index}]", call, text_arguments) for index, call in enumerate(calls)]


def _call(place: str, call: object, text_arguments: bool) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _wrong(place, 'must be {"id": ..., "type": "function", "function": ...}')
    if call.get("type", "function") != "function":
        raise _wrong(f"{place}.type", f'is {abbreviate_json(call["type"])}; it must be "function"')
    name = _check_text(f"{place}.function.name", function.get("name"))
    written = function.get("arguments") or "{}"
    arguments: Any = written
    if not text_arguments:
        try:
            arguments = json.loads(_check_text(f"{place}.function.arguments", written))
        except (ValueError, RecursionError) as error:
            raise _wrong(f"{place}.function.arguments", f"is no JSON: {error}") from error
    checked: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        checked["id"] = _check_text(f"{place}.id", call["id"])
    return checked


def _text_of(place: str, content: object) -> str:
    if not isinstance(content, list):
        return _check_text(place, content)
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _wrong(f"{place}[{index}]", 'must be {"type": "text", "text": ...}; this model reads text')
        parts.append(_check_text(f"{place}[{index}].text", part.get("text")))
    return "\n".join(parts)


def _check_text(place: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(place, "must be a string")
    return value


def _wrong(place: str, problem: str) -> BadRequest:
    return BadRequest("messages", problem, place=place)
