"""How are a client's long lists taken without long work?

A body's limit lets a million entries in. They are checked at C's speed, in one pass, and refused at the first
wrong one, not after an error for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_MOST_BIASES = 1024  # as serving's engine takes them

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_SCHEMA = {
    "anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, _IDS, {"type": "array", "items": _IDS}]
}


def _prompt(given: Any) -> Any:
    """A text, token ids, or a list of either."""
    if isinstance(given, str):
        return given
    kinds = set(map(type, given)) if isinstance(given, list) else set()
    if kinds <= {str} or kinds == {int}:
        if isinstance(given, list):
            return given
    elif kinds == {list} and all(set(map(type, each)) <= {int} for each in given):
        return given
    raise PydanticCustomError("prompt", "it must be a string, a list of token ids, or a list of either")


def _all(kind: type) -> Callable[[Any], Any]:
    def check(given: Any) -> Any:
        if isinstance(given, list) and not set(map(type, given)) <= {kind}:
            name = {int: "integers", str: "strings"}[kind]
            raise PydanticCustomError("entries", "it must be a list of {kind}", {"kind": name})
        return given

    return check


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > _MOST_BIASES:
        raise PydanticCustomError(
            "too_many",
            "it is of {count} tokens; it must be of at most {most}",
            {"count": len(given), "most": _MOST_BIASES},
        )
    return given


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]], PlainValidator(_prompt), WithJsonSchema(_SCHEMA)
]
Integers = Annotated[list[int], BeforeValidator(_all(int))]
Strings = Annotated[list[str], BeforeValidator(_all(str))]
Biases = Annotated[dict[str, float], BeforeValidator(_few)]
