"""Keep control tokens that a message spells out as text, apart from the chat template's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from serving.text.chat_options import strings_in, with_strings
from serving.text.vocabulary import any_of


def shielded(values: list[Any], control: Iterable[str]) -> tuple[list[Any], dict[str, str]]:
    """Return the values with a mark for each control token in their text, and what each mark stands for.

    The template cannot confuse the marks with its own control tokens, and all other text is unchanged.
    """
    written = "".join(strings_in(values))
    numbers = (number for number in itertools.count() if _mark(number) not in written)
    found = sorted(set(any_of(control).findall(written)))
    marks = {name: _mark(number) for name, number in zip(found, numbers)}
    pattern = any_of(marks)
    shielded = with_strings(values, lambda text: pattern.sub(lambda match: marks[match[0]], text))
    return shielded, {mark: name for name, mark in marks.items()}


def _mark(number: int) -> str:
    return f"\ue000{number}\ue001"  # private-use characters of Unicode
