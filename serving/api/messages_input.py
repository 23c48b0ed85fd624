"""Translate the fields of `POST /v1/messages` into those of a chat.

A message of Anthropic's API is a list of blocks: text, thinking, calls of tools and their results. Turns of
one role in a row become one, as that API defines; each result of a tool becomes a message of its own. A
system message after the first turn becomes a text of the user's turn, since many chat templates refuse it
anywhere but at the beginning. What cannot be read raises BadRequest with its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from borders.refusal import BadRequest
from serving.api.items import carried, carrying, check_names, string_at, wrong
from serving.api.pieces import Json

MOST_CALLS = 128  # most calls in one message, as in chats
# Fields of any block that nothing here reads: pages are shared by their content, and texts are not cited
_EVERY = {"type", "cache_control", "citations", "caller", "toolset_name"}
_KNOWN = {
    "text": {"text"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content", "is_error"},
    "document": {"source", "title", "context"},
    "search_result": {"source", "title", "content"},
}
_OF_ROLE = {
    "user": ("text", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_IN_RESULTS = ("text", "document", "search_result")
_OF_TOOLS = {
    *("name", "description", "input_schema", "strict", "type"),
    # Notes for a service; `input_examples` would be a part of the prompt there
    *("cache_control", "eager_input_streaming", "allowed_callers", "defer_loading", "input_examples"),
}
# Claude Code's first block, which changes with each version and would part prompts that are otherwise alike
_BILLING = "x-anthropic-billing-header:"
_SHOWN = "shown."
_CLEARS = "clear_thinking_20251015"  # the one edit of `context_management` that is understood


def signature_of(thoughts: str, *, is_shown: bool) -> str:
    """Return the signature of a thinking block; it carries thoughts that the block does not show."""
    if is_shown:
        return _SHOWN + hashlib.sha256(thoughts.encode("utf-8", "replace")).hexdigest()
    return carrying(thoughts)


def messages_of(given: Sequence[Any], system: object) -> list[Json]:
    """Return the messages of the conversation given by `messages` and `system`."""
    turns = _Turns()
    if system is not None:
        turns.system(system)
    if not given:
        raise BadRequest("messages", "is empty; it must hold at least one message")
    for index, message in enumerate(given):
        turns.add(f"[{index}]", message)
    return turns.finished()


def clear_thoughts(messages: Sequence[Json], given: Mapping[str, Any]) -> None:
    """Take out of messages the thoughts that the edits of `context_management` clear."""
    field = "context_management"
    check_names(field, "", given, {"edits"})
    edits = given.get("edits") or []
    if not isinstance(edits, list):
        raise wrong(field, ".edits", edits, "a list of edits")
    for index, edit in enumerate(edits):
        place = f".edits[{index}]"
        if not isinstance(edit, Mapping):
            raise wrong(field, place, edit, 'an object {"type": ..., ...}')
        if edit.get("type") != _CLEARS:
            raise wrong(field, f"{place}.type", edit.get("type"), _CLEARS)
        check_names(field, place, edit, {"type", "keep"})
        kept = edit.get("keep")
        if kept is None:
            kept = {"type": "thinking_turns", "value": 1}  # This is the default of Anthropic's API
        if kept in ("all", {"type": "all"}):
            continue
        num_kept = kept.get("value") if isinstance(kept, Mapping) else None
        known = {"type": "thinking_turns", "value": num_kept}
        if type(num_kept) is not int or num_kept < 1 or kept != known:
            limit = '"all", {"type": "all"} or {"type": "thinking_turns", "value": 1 or more}'
            raise wrong(field, f"{place}.keep", kept, limit)
        for message in (each for turn in _thinking_turns(messages)[:-num_kept] for each in turn):
            del message["reasoning_content"]
            if "tool_calls" not in message:  # it may have been nothing but thoughts
                message.setdefault("content", "")


def _thinking_turns(messages: Sequence[Json]) -> list[list[Json]]:
    """Return the messages with thoughts of each turn that has some: a loop of calls and results is one."""
    turns: list[list[Json]] = [[]]
    role = ""
    for message in messages:
        before, role = role, message["role"]
        # A text beside results is often a client's reminder, and ends no loop
        if role == "user" and before != "tool":
            turns.append([])
        elif "reasoning_content" in message:
            turns[-1].append(message)
    return [each for each in turns if each]


class _Turns:
    """The messages read so far, in the form of chats, but that thoughts are lists until all are there."""

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def system(self, given: object) -> None:
        """Add the system prompt, without the block that identifies a client to a service."""
        blocks = [{"type": "text", "text": given}] if isinstance(given, str) else given
        texts = self._texts("system", "", blocks, ("text",))
        kept = [each for each in texts if not each["text"].startswith(_BILLING)]
        if kept:
            self.messages.append({"role": "system", "content": _joined(kept)})

    def add(self, place: str, message: object) -> None:
        """Add a message."""
        if not isinstance(message, Mapping):
            raise wrong("messages", place, message, 'an object {"role": ..., "content": ...}')
        check_names("messages", place, message, {"role", "content"})
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in _OF_ROLE:
            raise wrong("messages", f"{place}.role", role, "user, assistant or system")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise wrong("messages", f"{place}.content", content, "a string or a list of blocks")
        for index, block in enumerate(content):
            at = f"{place}.content[{index}]"
            kind = _kind(at, block, _OF_ROLE[role])
            self._block(role, at, kind, block)
        if not content and role != "system":
            self._turn(role)

    def finished(self) -> list[Json]:
        """Return all messages; a turn of the assistant that says nothing has no content, as in chats."""
        if not self.messages:
            raise BadRequest("messages", "hold no text", fix="send a message of the user")
        for each in self.messages:
            if "reasoning_content" in each:
                each["reasoning_content"] = "\n".join(each["reasoning_content"])
        for each in self.messages[:-1]:  # the last one would be continued, and is refused if it is empty
            if each["role"] == "assistant" and each["content"] == "" and len(each) > 2:
                del each["content"]
        return self.messages

    def _block(self, role: str, place: str, kind: str, block: Mapping[str, Any]) -> None:
        match kind:
            case "redacted_thinking":
                self._turn(role)  # its text is known to the service that wrote it alone
            case "thinking":
                turn = self._turn(role)
                if thoughts := _thoughts(place, block):
                    turn.setdefault("reasoning_content", []).append(thoughts)
            case "tool_use":
                calls = self._turn(role).setdefault("tool_calls", [])
                if len(calls) == MOST_CALLS:
                    raise BadRequest("messages", f"is more than {MOST_CALLS} calls in a row", place=place)
                calls.append(_call(place, block))
            case "tool_result":
                self.messages.append(self._result(place, block))
            case _:
                text = _text("messages", place, kind, block)
                if role == "system" and self.messages and self.messages[-1]["role"] != "system":
                    role, text = "user", f"<system-reminder>\n{text}\n</system-reminder>"
                turn = self._turn(role)
                turn["content"] = _appended(turn["content"], text)

    def _turn(self, role: str) -> Json:
        """Return the last message if it has this role, or a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

    def _result(self, place: str, block: Mapping[str, Any]) -> Json:
        content = block.get("content")
        if content is None or isinstance(content, str):
            content = [] if not content else [{"type": "text", "text": content}]
        if (is_error := block.get("is_error")) not in (None, True, False):
            raise wrong("messages", f"{place}.is_error", is_error, "true or false")
        texts = self._texts("messages", f"{place}.content", content, _IN_RESULTS)
        if is_error:  # no chat template has a field for it
            texts.insert(0, {"type": "text", "text": "Error:"})
        named = {"tool_call_id": string_at("messages", f"{place}.tool_use_id", block.get("tool_use_id"))}
        return {"role": "tool", "content": _joined(texts), **named}

    def _texts(self, field: str, place: str, blocks: object, kinds: Collection[str]) -> list[Json]:
        """Return the texts of blocks, of which each must be of one of these kinds."""
        if not isinstance(blocks, list):
            raise wrong(field, place, blocks, "a string or a list of blocks")
        texts = []
        for index, block in enumerate(blocks):
            at = f"{place}[{index}]"
            text = _text(field, at, _kind(at, block, kinds, field=field), block)
            texts.append({"type": "text", "text": text})
        return texts


def _kind(place: str, block: object, kinds: Collection[str], *, field: str = "messages") -> str:
    """Return the type of a block, whose names are then known."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(kind, str):
        raise wrong(field, place, block, 'an object {"type": ..., ...}')
    if kind not in kinds:
        more = "; this model reads text" if kind in ("image", "document", "container_upload") else ""
        raise wrong(field, f"{place}.type", kind, f"one of {', '.join(kinds)}{more}")
    check_names(field, place, block, _KNOWN[kind] | _EVERY)
    return kind


def _text(field: str, place: str, kind: str, block: Mapping[str, Any]) -> str:
    """Return the text of a block of text, of a document or of what a search found."""
    if kind == "text":
        return string_at(field, f"{place}.text", block.get("text"))
    heads = [string_at(field, f"{place}.{name}", block.get(name) or "") for name in ("title", "context")]
    source = block.get("source")
    if kind == "search_result":
        heads[1] = string_at(field, f"{place}.source", source)
        source = {"type": "content", "content": block.get("content")}
    form = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or form not in ("text", "content"):
        raise wrong(field, f"{place}.source", source, "text or content; this model reads text")
    name = "data" if form == "text" else "content"
    at, parts = f"{place}.{name}" if kind == "search_result" else f"{place}.source.{name}", source.get(name)
    if isinstance(parts, list) and form == "content":
        within = [
            _text(field, f"{at}[{i}]", _kind(f"{at}[{i}]", each, ("text",), field=field), each)
            for i, each in enumerate(parts)
        ]
    else:
        within = [string_at(field, at, parts)]
    return "\n".join([each for each in heads if each] + within)


def _thoughts(place: str, block: Mapping[str, Any]) -> str:
    """Return the text of a thinking block, which may be carried in its signature."""
    text = string_at("messages", f"{place}.thinking", block.get("thinking"))
    signature = string_at("messages", f"{place}.signature", block.get("signature") or "")
    return text or carried(signature, "messages", f"{place}.signature") or ""


def _call(place: str, block: Mapping[str, Any]) -> Json:
    name, identity = (string_at("messages", f"{place}.{each}", block.get(each)) for each in ("name", "id"))
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise wrong("messages", f"{place}.input", given, "an object")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": dict(given)}}


def tools_of(tools: Sequence[Any]) -> list[Json]:
    """Translate tools into the form of chats."""
    made = []
    for index, tool in enumerate(tools):
        place = f"[{index}]"
        if not isinstance(tool, Mapping):
            raise wrong("tools", place, tool, 'an object {"name": ..., "input_schema": ...}')
        if tool.get("type") not in (None, "custom"):
            limit = "custom, since no tool is built in here: describe it by an input_schema"
            raise wrong("tools", f"{place}.type", tool["type"], limit)
        check_names("tools", place, tool, _OF_TOOLS)
        if not isinstance(tool.get("input_schema"), Mapping):
            raise wrong("tools", f"{place}.input_schema", tool.get("input_schema"), "a JSON schema")
        named = ("name", "description", "strict")
        function = {name: tool[name] for name in named if tool.get(name) is not None}
        made.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return made


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def tool_choice_of(choice: Mapping[str, Any]) -> Json:
    """Translate a tool choice into the fields of a chat."""
    kind = choice.get("type")
    check_names("tool_choice", "", choice, {"type", "name", "disable_parallel_tool_use"})
    if kind == "tool":
        name = string_at("tool_choice", ".name", choice.get("name"))
        fields: Json = {"tool_choice": {"type": "function", "function": {"name": name}}}
    elif isinstance(kind, str) and kind in _CHOICES:
        fields = {"tool_choice": _CHOICES[kind]}
    else:
        raise wrong("tool_choice", ".type", kind, "auto, any, tool or none")
    is_single = choice.get("disable_parallel_tool_use")
    if is_single not in (None, True, False):
        raise wrong("tool_choice", ".disable_parallel_tool_use", is_single, "true or false")
    return fields | ({"parallel_tool_calls": False} if is_single else {})


DISPLAYS = (None, "summarized", "omitted")
_USUAL_EFFORT = "medium"


def thinking_of(given: Mapping[str, Any] | None, effort: str | None, *, follows_tools: bool) -> Json:
    """Translate `thinking` into the fields of a chat; an answer does not think unless it is asked to.

    `follows_tools` says that the last message holds results of tools.
    """
    if given is None:
        return {"reasoning_effort": "none"}
    kind, known = given.get("type"), {"type", "display"}
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise wrong("thinking", ".type", kind, "enabled, adaptive, between_tools or disabled")
    check_names("thinking", "", given, known | {"budget_tokens"} if kind == "enabled" else known)
    if given.get("display") not in DISPLAYS:
        raise wrong("thinking", ".display", given["display"], "summarized or omitted")
    if kind == "disabled" or (kind == "between_tools" and not follows_tools):
        return {"reasoning_effort": "none"}
    fields: Json = {"reasoning_effort": effort or _USUAL_EFFORT}
    if kind == "enabled":
        budget = given.get("budget_tokens")
        if type(budget) is not int or budget < 1:
            raise wrong("thinking", ".budget_tokens", budget, "an integer of at least 1")
        fields["thinking_token_budget"] = budget
    return fields


def response_format_of(form: object, field: str) -> Json | None:
    """Translate the form of the answer into that of chats; `field` is where it was sent."""
    place = ".format" if field == "output_config" else ""
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise wrong(field, place, form, 'an object {"type": "json_schema", "schema": ...}')
    check_names(field, place, form, {"type", "schema"})
    if not isinstance(form.get("schema"), Mapping):
        raise wrong(field, f"{place}.schema", form.get("schema"), "a JSON schema")
    named = {"name": "answer", "schema": form["schema"]}
    return {"type": "json_schema", "json_schema": named}


def _joined(texts: list[Json]) -> str | list[Json]:
    """Return a content: parts stay apart, since a template may join them in its own way."""
    return texts[0]["text"] if len(texts) == 1 else texts or ""


def _appended(content: str | list[Json], text: str) -> str | list[Json]:
    """Return a content with another text; a list is extended, since a copy for each text takes too long."""
    part = {"type": "text", "text": text}
    if isinstance(content, list):
        content.append(part)
        return content
    return text if content == "" else [{"type": "text", "text": content}, part]
