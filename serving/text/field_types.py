"""Read the value of a request's field as its type.

A reader takes a field's name and its JSON value, and returns the value in the form in which it is used; it
raises BadRequest for another type, and for lists and strings that are too long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from borders.refusal import BadRequest, shown
from borders.request_bounds import LAST_ID, LONGEST_NAME
from continuous_batching.request import packed_ids
from serving.text.vocabulary import check_unicode

Reader = Callable[[str, Any], Any]
MOST_ALLOWED = 2**18  # most ids in a list, which is more than any vocabulary has


def wrong(field: str, value: object, limit: str, *, place: str = "") -> BadRequest:
    """Return the refusal of a value outside its limit."""
    return BadRequest(field, value=value, limit=limit, place=place)


def string(name: str, value: Any) -> str:
    """Read a string."""
    if not isinstance(value, str):
        raise wrong(name, value, "a string")
    return value


def label(name: str, value: Any) -> str:
    """Read a string that is stored, sent on, and may be shown."""
    if len(string(name, value)) > LONGEST_NAME:
        raise wrong(name, value, f"at most {LONGEST_NAME} characters long")
    check_unicode(name, value)
    return value


def integer(name: str, value: Any, *, place: str = "") -> int:
    """Read an integer; a boolean is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(name, value, "an integer", place=place)
    return value


def number(name: str, value: Any, *, place: str = "") -> float:
    """Read a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e15:
        raise wrong(name, value, "a number", place=place)
    return float(value)


def boolean(name: str, value: Any) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def early_stopping(name: str, value: Any) -> bool | str:
    """Read true, false or "never"."""
    if value != "never" and not isinstance(value, bool):
        raise wrong(name, value, 'true, false or "never"')
    return value


def top_k(name: str, value: Any) -> int:
    """Read an integer, where -1 means off as 0 does."""
    return 0 if integer(name, value) == -1 else int(value)  # vLLM reads -1 so


def count_or_boolean(name: str, value: Any) -> int | bool:
    """Read an integer or a boolean."""
    return value if isinstance(value, bool) else integer(name, value)


def seconds(name: str, value: Any) -> float:
    """Read a number of seconds, at least 0."""
    if (seconds := number(name, value)) < 0:
        raise wrong(name, value, "0 or more seconds")
    return seconds


def timeout(name: str, value: Any) -> float:
    """Read a number of seconds above 0."""
    if (timeout_s := number(name, value)) <= 0:
        raise wrong(name, value, "above 0 seconds")
    return timeout_s


def priority(name: str, value: Any) -> int:
    """Read an integer of 32 bits."""
    if abs(priority := integer(name, value)) > LAST_ID:
        raise wrong(name, value, f"an integer from {-LAST_ID} to {LAST_ID}")
    return priority


def string_list(name: str, value: Any) -> tuple[str, ...]:
    """Read one string, or a list of strings."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise wrong(name, value, "a string or a list of strings")
    for each in strings:
        check_unicode(name, each)
    return tuple(strings)


def token_id_list(name: str, value: Any) -> tuple[int, ...]:
    """Read a list of token ids."""
    if not isinstance(value, list):
        raise wrong(name, value, "a list of token ids")
    if value and ({*map(type, value)} != {int} or min(value) < 0 or max(value) > LAST_ID):
        # The loop only finds the wrong one; long prompts are checked above.
        for index, token in enumerate(value):
            if integer(name, token, place=f"[{index}]") not in range(LAST_ID + 1):
                raise wrong(name, token, "a token id", place=f"[{index}]")
    return tuple(value)


def packed_token_ids(name: str, value: Any) -> bytes:
    """Read a list of token ids, packed by `packed_ids`."""
    if isinstance(value, list) and len(value) > MOST_ALLOWED:
        raise wrong(name, len(value), f"a list of at most {MOST_ALLOWED} token ids")
    return packed_ids(token_id_list(name, value))


def truncation(name: str, value: Any) -> int:
    """Read -1, or a number of tokens."""
    if (asked := integer(name, value)) != -1 and not 1 <= asked <= LAST_ID:
        raise wrong(name, value, f"-1 (as many as fit) or from 1 to {LAST_ID}")
    return asked


def mapping(name: str, value: Any) -> Any:
    """Read a JSON object."""
    if not isinstance(value, Mapping):
        raise wrong(name, value, "an object")
    return value


def biases(name: str, value: Any) -> dict[int, float]:
    """Read biases by token id."""
    if not isinstance(value, dict):
        raise wrong(name, value, 'an object of token ids and numbers, such as {"123": -1.5}')
    for token in value:
        if not re.fullmatch(r"[0-9]{1,10}", str(token)) or int(token) > LAST_ID:
            raise wrong(name, value, f"an object whose keys are token ids; {shown(token)} is none")
    return {int(token): number(name, bias, place=f"[{token}]") for token, bias in value.items()}


def anything(name: str, value: Any) -> Any:
    """Accept any value, which is checked where it is used."""
    return value
