"""What may stand under a recipe's key?

A recipe's sections are dataclasses. Each of their fields is made by `key`, which holds the key's meaning and
range: the reader's errors, the checks and docs/recipe_keys.md all come from there.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class RecipeError(ValueError):
    """A recipe that cannot be used. The text is one line: where, which key, what is allowed, how to mend it.

    `keys` are the dotted keys that it is about, for whoever knows where these stand.
    """

    def __init__(self, text: str, *keys: str) -> None:
        super().__init__(text)
        self.keys = keys


@dataclass(frozen=True, slots=True)
class Key:
    """A leaf of a recipe, `name` being dotted; `least` and `most` are part of the range."""

    name: str
    hint: Any  # int, float, bool, Path, Literal[...] or dict, or one of these | None
    meaning: str
    least: float | None
    most: float | None
    default: Any  # MISSING: the key is required

    @property
    def kind(self) -> Any:
        """The type without its `| None`."""
        return next(kind for kind in _alternatives(self.hint) if kind is not types.NoneType)

    @property
    def nullable(self) -> bool:
        return types.NoneType in _alternatives(self.hint)

    @property
    def choices(self) -> tuple[str | bool, ...]:
        """The texts and truth values allowed, for a key that is one of several."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def allowed(self) -> str:
        """What may stand here, in words."""
        kind = self.kind
        if self.choices:
            *others, last = map(in_yaml, self.choices)
            words = " or ".join(filter(None, (", ".join(others), last)))
        elif kind in (int, float):
            words = f"{'an integer' if kind is int else 'a number'} from {self.least} to {self.most}"
        else:
            words = {bool: "true or false", Path: "a path"}.get(kind, "a mapping")
        return f"{words}, or null" if self.nullable else words

    def accepts(self, value: object) -> bool:
        """Whether a value has the key's type; its range is another question."""
        if value is None:
            return self.nullable
        if self.choices:
            return type(value) in {type(each) for each in self.choices}
        if self.kind is float:
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        if self.kind is int:
            return isinstance(value, int) and not isinstance(value, bool)
        return isinstance(value, get_origin(self.kind) or self.kind)

    def contains(self, value: Any) -> bool:
        """Whether a value of the key's type is in its range."""
        if value is None:
            return True
        if self.choices:
            return value in self.choices
        if self.least is None or self.most is None:
            return True
        return bool(self.least <= value <= self.most)

    def check(self, value: object) -> None:
        """Raise RecipeError for a value of a wrong type or out of range."""
        if not (self.accepts(value) and self.contains(value)):
            near = nearest(str(value), map(in_yaml, self.choices))
            text = f"{self.name}: {in_words(value)} is not allowed; it must be {self.allowed}{near}"
            raise RecipeError(text, self.name)


def key(
    meaning: str, *, default: Any = MISSING, least: float | None = None, most: float | None = None
) -> Any:
    """A field of a recipe's section. A number has a range, of which both ends are part."""
    metadata = {"meaning": meaning, "least": least, "most": most}
    return field(default=default, metadata=metadata)


def keys_of(section: type, prefix: str = "") -> Iterator[Key]:
    """Every key of a recipe's dataclass, through the sections it has, in their order."""
    hints = get_type_hints(section)
    for each in fields(section):
        name, hint = prefix + each.name, hints[each.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from keys_of(hint, f"{name}.")
        else:
            yield Key(name=name, hint=hint, default=each.default, **each.metadata)


def table(section: type) -> str:
    """The keys as a Markdown table, for docs/recipe_keys.md."""
    rows = ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    for each in keys_of(section):
        default = "required" if each.default is MISSING else in_yaml(each.default)
        rows.append(f"| `{each.name}` | {each.allowed} | {default} | {each.meaning} |")
    return "\n".join(rows) + "\n"


def in_yaml(value: object) -> str:
    """A value as it would stand in a recipe."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def in_words(value: object) -> str:
    """A value as an error shows it, however large it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, (str, dict, list)) else in_yaml(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest(name: str, names: Iterable[str]) -> str:
    """What to append to an error about an unknown name."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
