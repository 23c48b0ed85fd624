"""Define the keys of a recipe: their types, ranges and meanings.

The sections of a recipe are dataclasses. `key` makes each of their fields and holds its meaning and range:
the reader's errors, the checks and docs/recipe_keys.md are all derived from it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from borders.numbers import Range
from recipes.schema.recipe_error import RecipeError, in_words, in_yaml, nearest

NAMES = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a recipe by its dotted name; `least` and `most` are part of the range."""

    name: str
    hint: Any  # int, float, bool, str, Path, Literal[...], tuple[str, ...] or dict, or one of these | None
    meaning: str
    least: float | None
    most: float | None
    default: Any  # MISSING: the key is required
    elsewhere: tuple[tuple[str, str], ...] = ()  # what another engine calls a choice, and the choice

    @property
    def kind(self) -> Any:
        """The type without its `| None`."""
        return next(kind for kind in _alternatives(self.hint) if kind is not types.NoneType)

    @property
    def range(self) -> Range[Any] | None:
        """The range of a number."""
        if self.kind not in (int, float):
            return None
        assert self.least is not None, f"{self.name} has no bounds"
        assert self.most is not None, f"{self.name} has no bounds"
        return Range(self.kind, self.least, self.most)

    @property
    def nullable(self) -> bool:
        return types.NoneType in _alternatives(self.hint)

    @property
    def choices(self) -> tuple[str | bool, ...]:
        """The allowed values, for a key that chooses among some."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        kind = self.kind
        if self.choices:
            *others, last = map(in_yaml, self.choices)
            words = " or ".join(filter(None, (", ".join(others), last)))
        elif self.range is not None:
            words = str(self.range)
        else:
            words = {bool: "true or false", Path: "a path", str: "a text", NAMES: "a list of names"}.get(
                kind, "a mapping"
            )
        return f"{words}, or null" if self.nullable else words

    def accepts(self, value: object) -> bool:
        """Return whether a value is of the key's type and in its range."""
        if value is None:
            return self.nullable
        if self.choices:
            return any(type(value) is type(each) and value == each for each in self.choices)
        if self.range is not None:
            return self.range.read(value) is not None
        if self.kind == NAMES:
            return isinstance(value, tuple) and all(isinstance(each, str) and each for each in value)
        return isinstance(value, get_origin(self.kind) or self.kind)

    def check(self, value: object) -> None:
        """Raise RecipeError for a value of a wrong type or out of range."""
        if not self.accepts(value):
            near = nearest(str(value), map(in_yaml, self.choices))
            raise RecipeError(
                self.name,
                f"{in_words(value)} is not allowed",
                f"it must be {self.allowed}{near}",
                value=value,
                limit=self.allowed,
            )


def key(
    meaning: str,
    *,
    default: Any = MISSING,
    least: float | None = None,
    most: float | None = None,
    elsewhere: tuple[tuple[str, str], ...] = (),
) -> Any:
    """Return a field of a recipe's section; a number's range includes both ends."""
    metadata = {"meaning": meaning, "least": least, "most": most, "elsewhere": elsewhere}
    return field(default=default, metadata=metadata)


_HINTS: dict[type, Mapping[str, Any]] = {}


def hints_of(section: type) -> Mapping[str, Any]:
    """Return the types of a section's fields, kept because Python evaluates them for each who asks."""
    if section not in _HINTS:
        _HINTS[section] = get_type_hints(section)
    return _HINTS[section]


def keys_of(section: type, prefix: str = "") -> Iterator[Key]:
    """Yield every key of a recipe's dataclass and of the sections in it, in order."""
    hints = hints_of(section)
    for each in fields(section):
        name, hint = prefix + each.name, hints[each.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from keys_of(hint, f"{name}.")
        else:
            yield Key(name=name, hint=hint, default=each.default, **each.metadata)


def table(section: type) -> str:
    """Return the keys as a Markdown table, for docs/recipe_keys.md."""
    rows = ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    for each in keys_of(section):
        default = "required" if each.default is MISSING else in_yaml(each.default)
        rows.append(f"| `{each.name}` | {each.allowed} | {default} | {each.meaning} |")
    return "\n".join(rows) + "\n"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
