"""List the fields of the OpenAI API that are accepted although nothing here reads them.

They are fields that change no answer: notes for a store that this server does not have, hints about speed,
and values that mean "none". Any other value is refused, with the values that would be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from borders.field_table import MOST_TOOLS
from borders.field_types import LONGEST_NAME

Fields = Mapping[str, Any]
MOST_NOTES = 16
LONGEST_NOTE_NAME = 64
LONGEST_NOTE = 512


def _never(_: Any, __: Fields) -> bool:
    return False


def _one_of(*values: Any) -> Callable[[Any, Fields], bool]:
    return lambda given, _: any(type(given) is type(each) and given == each for each in values)


def _label(given: Any, _: Fields) -> bool:
    return isinstance(given, str) and len(given) <= LONGEST_NAME


def _count(given: Any, _: Fields) -> bool:
    return type(given) is int and given > 0


def _notes(given: Any, _: Fields) -> bool:
    return (
        isinstance(given, dict)
        and len(given) <= MOST_NOTES
        and all(len(name) <= LONGEST_NOTE_NAME for name in given)
        and all(isinstance(each, str) and len(each) <= LONGEST_NOTE for each in given.values())
    )


def _unused(choice: str) -> Callable[[Any, Fields], bool]:
    """Accept a list of tools that may not be called."""

    def allows(given: Any, beside: Fields) -> bool:
        if not isinstance(given, list) or len(given) > MOST_TOOLS:
            return False
        return not given or (beside.get(choice) == "none" and all(isinstance(each, dict) for each in given))

    return allows


def _prediction(given: Any, _: Fields) -> bool:
    return isinstance(given, dict) and given.keys() == {"type", "content"} and given["type"] == "content"


_STRING = f"a string of at most {LONGEST_NAME} characters"
_NOTES = f"up to {MOST_NOTES} strings of {LONGEST_NOTE} characters, by names of {LONGEST_NOTE_NAME}"
_NOTHING_IS_KEPT = "no response is kept; send the items of earlier ones in input"
# The check of each field's value, and the accepted values in words (empty where no value is accepted).
Ignored = Mapping[str, tuple[Callable[[Any, Fields], bool], str]]
IGNORED: Ignored = {
    "audio": (_never, ""),
    "function_call": (_one_of("none"), '"none"'),
    "functions": (_unused("function_call"), f'up to {MOST_TOOLS} beside function_call: "none"'),
    "metadata": (_notes, _NOTES),
    "modalities": (_one_of(["text"]), '["text"]'),
    "moderation": (_never, ""),
    "prediction": (_prediction, '{"type": "content", "content": ...}'),
    "prompt_cache_key": (_label, _STRING),
    "prompt_cache_options": (_never, ""),
    "prompt_cache_retention": (_one_of("in_memory", "in-memory", "24h"), '"in_memory" or "24h"'),
    "safety_identifier": (_label, _STRING),
    "store": (_one_of(True, False), "true or false"),
    "suffix": (_one_of(""), '""'),
    "verbosity": (_one_of("low", "medium", "high"), '"low", "medium" or "high"'),
    "web_search_options": (_never, ""),
}


IN_RESPONSES: Ignored = {
    **{
        name: IGNORED[name]
        for name in (
            *("metadata", "moderation", "prompt_cache_key", "prompt_cache_options"),
            *("prompt_cache_retention", "safety_identifier", "store"),
        )
    },
    "access_programs": (_never, ""),
    "background": (_one_of(False), "false"),
    "background_options": (_never, ""),
    "context_management": (_never, ""),
    "conversation": (_never, ""),
    "image": (_never, ""),
    "max_tool_calls": (_count, "1 or more, of built-in tools, of which there are none"),
    "previous_response_id": (_never, ""),
    "prompt": (_never, ""),
    "truncation": (_one_of("disabled"), '"disabled"'),
}
_FIXES = {"previous_response_id": _NOTHING_IS_KEPT, "conversation": _NOTHING_IS_KEPT}


def problem_of(name: str, fields: Fields, ignored: Ignored = IGNORED) -> str | None:
    """Return why a field cannot be accepted as it was sent, or None if it can."""
    allows, allowed = ignored[name]
    if fields[name] is None or allows(fields[name], fields):
        return None
    accepted = f"; only {allowed} is accepted" if allowed else ""
    return f"{name} is not supported{accepted}: {_FIXES.get(name, 'leave it out')}"
