"""Define the refusal of a request that cannot be served as it is, and shorten values for its message.

The refusal is data (field, value, limit, fix), which each API turns into its own answer.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

TOO_LONG = "context_length_exceeded"  # the code of a prompt that is too long, as in OpenAI's API
_LONGEST_VALUE = 60  # characters of a value in a message
_PATH = re.compile(r"(?<![\w/.:~-])/(?:[^\s/'\"]+/)+")
LONGEST_LINE = 1000  # characters of what another process says, where it is shown


class BadRequest(ValueError):
    """A request that cannot be served as it is, as data from which each API makes its own answer.

    `field` is the request's field at fault, or None if no single one is; `place` is the position within it
    ("[3]", "[0].role"). `value` is what was given, `limit` what is allowed, and `fix` what to do. `str()` is
    one line: the field (or `subject`), what is wrong with it (`problem`, by default that its value must be
    within the limit), and the fix. Its reader may be a client, who knows neither the engine's ids nor the
    recipe, so it names what was sent. `code` is for programs, where OpenAI's API defines one.
    """

    def __init__(
        self,
        field: str | None,
        problem: str = "",
        *,
        value: Any = None,
        limit: Any = None,
        fix: str = "",
        place: str = "",
        subject: str = "",
        code: str | None = None,
    ) -> None:
        super().__init__()
        self.field = field
        self.problem = problem or f"is {abbreviate_json(value)}; it must be {limit}"
        self.value = value
        self.limit = limit
        self.fix = fix
        self.place = place
        self.subject = subject
        self.code = code

    def __str__(self) -> str:
        subject = self.subject or f"{self.field or ''}{self.place}"
        line = f"{subject} {self.problem}" if subject else self.problem
        return f"{line}: {self.fix}" if self.fix else line

    def __repr__(self) -> str:
        return f"BadRequest({str(self)!r}, field={self.field!r})"

    def of_field(self, field: str) -> BadRequest:
        """Return the same refusal for the name by which the sender knows the field."""
        return BadRequest(
            field,
            self.problem,
            value=self.value,
            limit=self.limit,
            fix=self.fix,
            place=self.place,
            subject=self.subject.replace(self.field, field) if self.field else self.subject,
            code=self.code,
        )


def abbreviate_json(value: object) -> str:
    """Format a value as JSON, shortened for an error message; a long value is not encoded as a whole."""
    if isinstance(value, (str, list, tuple)):
        value = value[:_LONGEST_VALUE]
    elif isinstance(value, dict):
        value = dict(islice(value.items(), _LONGEST_VALUE))
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (RecursionError, ValueError, TypeError):  # too deep, or a mapping whose keys JSON does not know
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


MOST_CHARACTERS = 60


def abbreviate(value: object) -> str:
    """Return a value as Python writes it, cut to MOST_CHARACTERS."""
    if isinstance(value, int) and value.bit_length() > 4 * MOST_CHARACTERS:
        return f"a number of {value.bit_length()} bits"
    text = f"{value!r:.{MOST_CHARACTERS}}"
    return text if len(text) < MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."


def one_line(text: str) -> str:
    """Return another process's text as one printable line of bounded length."""
    shown = "".join(each if each.isprintable() else " " for each in text[: LONGEST_LINE + 1])
    return shown if len(shown) <= LONGEST_LINE else f"{shown[: LONGEST_LINE - 3]}..."


def without_paths(text: str) -> str:
    """Return a text for clients, in which only the last name of each absolute path is left."""
    return _PATH.sub(".../", text)
