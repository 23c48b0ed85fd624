"""Shorten a value for an error message."""

from __future__ import annotations

MOST_CHARACTERS = 60


def abbreviate(value: object) -> str:
    """Return a value as Python writes it, cut to MOST_CHARACTERS."""
    if isinstance(value, int) and value.bit_length() > 4 * MOST_CHARACTERS:
        return f"a number of {value.bit_length()} bits"
    text = f"{value!r:.{MOST_CHARACTERS}}"
    return text if len(text) < MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."
