"""Let an opaque field of an answer carry thoughts, which come back with the conversation.

Nothing is stored here. So where a client is not shown thoughts, or sends back none that it was shown, a field
that it keeps unread holds them: a signature in Anthropic's API, encrypted content in OpenAI's.
"""

from __future__ import annotations

import base64
import binascii

from borders.refusal import BadRequest

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
