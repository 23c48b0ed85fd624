"""Compare the text that has arrived with the text that a format expects, whatever its white space."""

from __future__ import annotations

MOST_SPACE = 64  # most white space within the words around a call; more of it makes them content
NO, MAYBE = -1, -2


def match(literal: str, text: str, at: int) -> int:
    """Return where the literal ends in the text, white space ignored, or NO, or MAYBE if it is cut off."""
    num_spaces = 0
    for char in "".join(literal.split()):
        while at < len(text) and text[at].isspace():
            at += 1
            num_spaces += 1
        if num_spaces > MOST_SPACE:
            return NO
        if at == len(text):
            return MAYBE
        if text[at] != char:
            return NO
        at += 1
    return at


def after_space(text: str, at: int, most: int) -> int:
    """Return where the white space ends that begins here, of which `most` characters are looked at."""
    end = min(len(text), at + most)
    while at < end and text[at].isspace():
        at += 1
    return at
