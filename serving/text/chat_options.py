"""Read the fields by which a request changes how its conversation becomes a prompt.

The fields are those that vLLM's users know. The values in `chat_template_kwargs` enter the template's sandbox
as plain values, and cannot replace what the server itself gives a template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from borders.field_table import DEEPEST_KWARGS, LONGEST_KWARGS, MOST_KWARGS, default
from borders.refusal import BadRequest
from serving.text.tokenizer_settings import SPECIAL_KEYS

# What clients and templates call the thoughts of an earlier answer; the first is our own name
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_END = "\ue002 "  # a private-use character; the space shows whether the template strips a message
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_RESERVED = {  # the server's own names, arguments of transformers that are no variables, and Jinja's globals
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("conversation", "chat_template", "tokenize", "tool_choice", "raise_exception", "strftime_now"),
    *("range", "dict", "lipsum", "cycler", "joiner", "namespace", "loop", "self", "caller"),
    *SPECIAL_KEYS,
}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a request says about its conversation besides the messages; raises BadRequest if it is invalid.

    borders/field_table.py says what the fields mean.
    """

    add_generation_prompt: bool = default("add_generation_prompt")
    continue_final_message: bool = default("continue_final_message")
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the template
    tools: Sequence[Mapping[str, Any]] = ()  # the form is that of the OpenAI API
    reasoning_effort: str | None = None  # None: the template's default

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "continue_final_message",
                "excludes add_generation_prompt, which is true",
                value=True,
                fix="set add_generation_prompt to false",
            )
        _check_kwargs(self.chat_template_kwargs)


def with_end_marked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a mark behind the text of the last, or behind its thoughts if it has no text.

    A template may write that text more than once, and its words may occur in the template itself, so the text
    cannot be searched for. Raises BadRequest where the text is empty.
    """
    *before, final = [dict(each) for each in messages]
    for name in ("content", *THOUGHTS):
        marked = _marked(final.get(name))
        if marked is not None:
            return [*before, final | {name: marked}]
    raise _nothing_to_continue()


def _marked(content: Any) -> Any:
    """Return a text, or parts of which one is text, with the mark behind it; None where there is no text."""
    if isinstance(content, str):
        return content + _END if content.strip() else None
    parts = content if isinstance(content, list) else []
    for at in reversed(range(len(parts))):
        text = parts[at].get("text")
        if isinstance(text, str) and text.strip():
            return [*parts[:at], parts[at] | {"text": text + _END}, *parts[at + 1 :]]
    return None


def up_to_mark(rendered: str) -> str:
    """Return a rendered conversation up to the mark, cut as transformers cuts it.

    Where the template strips a message, the result ends without spaces. Raises BadRequest where the template
    left the mark out.
    """
    kept, mark, rest = rendered.rpartition(_END.rstrip())
    if not mark:
        raise _nothing_to_continue()
    return kept if rest.startswith(" ") else kept.rstrip()


def strings_in(value: Any) -> list[str]:
    """Return every string within a JSON value, names of objects included."""
    match value:
        case str():
            return [value]
        case Mapping():
            return [text for pair in value.items() for each in pair for text in strings_in(each)]
        case list():
            return [text for each in value for text in strings_in(each)]
    return []


def with_strings(value: Any, changed: Callable[[str], str]) -> Any:
    """Return a JSON value with every string changed."""
    match value:
        case str():
            return changed(value)
        case Mapping():
            return {changed(name): with_strings(each, changed) for name, each in value.items()}
        case list():
            return [with_strings(each, changed) for each in value]
    return value


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    if len(kwargs) > MOST_KWARGS:
        raise _wrong(f"has {len(kwargs)} names; it may have {MOST_KWARGS}", "leave some out")
    for name in kwargs:
        if not _NAME.fullmatch(name):
            problem = "has a name that is not a variable's (up to 64 letters, digits and _)"
            raise _wrong(problem, "rename it")
        if name in _RESERVED:
            raise _wrong(f"has {name}, which the server gives the template", "leave it out")
    if _depth(kwargs) > DEEPEST_KWARGS:
        raise _wrong(f"is nested more than {DEEPEST_KWARGS} deep", "flatten it")
    try:
        size = len(json.dumps(kwargs, ensure_ascii=False))
    except (TypeError, ValueError) as error:
        raise _wrong("holds what is not JSON", "send plain values") from error
    if size > LONGEST_KWARGS:
        raise _wrong(f"is {size} characters of JSON; it may be {LONGEST_KWARGS}", "shorten it")


def _depth(value: Any, depth: int = 0) -> int:
    """Return how deeply a value is nested; the search stops just beyond the limit."""
    if not isinstance(value, (Mapping, list)) or depth > DEEPEST_KWARGS:
        return depth
    within = value.values() if isinstance(value, Mapping) else value
    return max((_depth(each, depth + 1) for each in within), default=depth + 1)


def _wrong(problem: str, fix: str) -> BadRequest:
    return BadRequest("chat_template_kwargs", problem, fix=fix)


def _nothing_to_continue() -> BadRequest:
    return BadRequest(
        "continue_final_message",
        "finds no content of the last message in what the chat template makes of it",
        fix="let the last message have text, or leave this out",
    )
