"""Check the items of a conversation, and let them carry thoughts, as the APIs with items or blocks share it.

Nothing is stored here. So where a client is not shown thoughts, or sends back none that it was shown, a field
that it keeps unread holds them: a signature in Anthropic's API, encrypted content in OpenAI's.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping
from typing import Any

from borders.field_types import check_unicode
from borders.refusal import BadRequest, abbreviate_json
from serving.api.pieces import to_json

_MARK = "carried."


def carrying(thoughts: str) -> str:
    """Return the field's value."""
    return _MARK + base64.b64encode(thoughts.encode("utf-8", "replace")).decode()


def carried(value: str, field: str, place: str) -> str | None:
    """Return the thoughts that a field at this place holds, or None if it is not of this server.

    Raises BadRequest where it was changed on the way.
    """
    if not value.startswith(_MARK):
        return None
    try:
        return base64.b64decode(value.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise BadRequest(field, "is not as it was sent; send it back unchanged", place=place) from error


def check_repeated(field: str, value: object) -> None:
    """Raise BadRequest for a value that the answer repeats, and which no JSON in UTF-8 can hold."""
    try:
        to_json(value)
    except UnicodeEncodeError as error:
        problem = "is not Unicode text: it holds half a surrogate pair"
        raise BadRequest(field, problem, fix="send both halves, or neither") from error


def string_at(field: str, place: str, value: object) -> str:
    """Return the text at a place of a field; raises BadRequest for anything else."""
    if not isinstance(value, str):
        raise wrong(field, place, value, "a string")
    check_unicode(field, value, place=place)
    return value


def check_names(field: str, place: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise BadRequest if an object at a place of a field has other names than these."""
    for name in given:
        if name not in known:
            problem = f"has no {abbreviate_json(name)}; it may have {', '.join(sorted(known))}"
            raise BadRequest(field, problem, place=place)


def wrong(field: str, place: str, value: object, limit: str) -> BadRequest:
    """Return the refusal of a value at a place of a field."""
    return BadRequest(field, value=value, limit=limit, place=place)
