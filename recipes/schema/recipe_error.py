"""Define the error for a recipe that cannot be used, and how values appear in errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RecipeError(ValueError):
    """A recipe that cannot be used, as data; its text is one line made from that data.

    `keys` are the dotted keys that the error is about, the one to change first; there are none where a file
    is not a recipe at all. `value` is what the first key was set to, and `limit` the bound that it would have
    to keep. `problem` says what is wrong, and `fix` what to do. `place` is where it was set:
    recipes/tiny/cpu.yaml:7.
    """

    def __init__(
        self,
        keys: str | tuple[str, ...],
        problem: str,
        fix: str = "",
        *,
        value: object = None,
        limit: object = None,
        place: str = "",
    ) -> None:
        super().__init__(keys, problem, fix)
        self.keys = (keys,) if isinstance(keys, str) else keys
        self.problem = problem
        self.fix = fix
        self.value = value
        self.limit = limit
        self.place = place

    def at(self, place: str) -> RecipeError:
        """Return the same error with this place."""
        return RecipeError(self.keys, self.problem, self.fix, value=self.value, limit=self.limit, place=place)

    def __str__(self) -> str:
        said = ": ".join(filter(None, (self.place, *self.keys[:1], self.problem)))
        return f"{said}; {self.fix}" if self.fix else said


def in_words(value: object) -> str:
    """Return a value as an error shows it, however large it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, (str, dict, list)) else in_yaml(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# YAML reads these as truth values unless they are quoted
_TRUTHS = ("yes", "no", "on", "off", "true", "false")


def in_yaml(value: object) -> str:
    """Return a value as a recipe would write it."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    if isinstance(value, list):
        return in_yaml(tuple(value))
    if isinstance(value, dict):
        return f"{{{', '.join(f'{in_yaml(name)}: {in_yaml(each)}' for name, each in value.items())}}}"
    if value in _TRUTHS:
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the suffix of an error about an unknown name."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""
