"""Parse a YAML text into values with their lines.

The parser is stricter than YAML: no duplicate keys, only text as keys, no aliases, plain types only, and no
deep nesting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from recipes.schema.recipe_error import RecipeError

MOST_LEVELS = 32  # levels of nesting; a recipe has 2, and a config.json within it a few more
# Most characters of a value that is no text; a recipe's numbers are shorter, and long ones take long to read.
MOST_DIGITS = 400


@dataclass(frozen=True, slots=True)
class Located:
    """A value and the line of its key; the values of a mapping are themselves Located."""

    value: Any
    line: int

    @property
    def plain(self) -> Any:
        """The value without its lines."""
        if isinstance(self.value, dict):
            return {name: each.plain for name, each in self.value.items()}
        return [each.plain for each in self.value] if isinstance(self.value, list) else self.value


class _Problem(Exception):
    """What is wrong with the text, and on which line (0: unknown)."""

    def __init__(self, text: str, mark: Any) -> None:
        super().__init__(text)
        self.line: int = mark.line + 1 if mark is not None else 0


def parse(text: str, name: str, *, numbered: bool = True) -> Located:
    """Return the single document of a text.

    Raises RecipeError with `name` and, if numbered, the line as its place.
    """
    try:
        _check_events(text)
        node = yaml.compose(text, yaml.SafeLoader)
        return _located(node, 1) if node is not None else Located(None, 1)
    except _Problem as error:
        line, problem = error.line, str(error)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, problem = (mark.line + 1 if mark else 0), f"not YAML: {error.problem}"
    except (yaml.YAMLError, ValueError) as error:  # bytes that are no text, or an escape that is no character
        line, problem = 0, f"not YAML: {' '.join(str(error).split())}"
    raise RecipeError((), problem, place=f"{name}:{line}" if line and numbered else name)


def _check_events(text: str) -> None:
    """Refuse aliases and deep nesting before `yaml.compose`, which recurses into every level."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise _Problem(f"*{event.anchor} is an alias; write the value out", event.start_mark)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_LEVELS:
            raise _Problem(f"nested more than {MOST_LEVELS} levels deep", event.start_mark)


def _located(node: yaml.Node, line: int, name: str = "") -> Located:
    if isinstance(node, yaml.MappingNode):
        return Located(dict(_items(node, name)), line)
    if isinstance(node, yaml.SequenceNode):
        return Located([_located(each, each.start_mark.line + 1, name) for each in node.value], line)
    return Located(_scalar(node), line)


def _scalar(node: yaml.Node) -> Any:
    kind = node.tag.rpartition(":")[2]
    if kind != "str" and len(node.value) > MOST_DIGITS:
        problem = f"not YAML: a value of type {kind} with {len(node.value)} characters; put a text in quotes"
        raise _Problem(problem, node.start_mark)
    try:
        return yaml.SafeLoader("").construct_object(node)
    # A date of the 99th month, `!!int ""`, `!!bool maybe` and `!!timestamp x` each fail in a different way.
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        shown = f"{node.value:.60}"
        raise _Problem(f"not YAML: {shown!r} is no {kind} ({error})", node.start_mark) from error


def _items(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, Located]]:
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = key_node.value, key_node.start_mark.line + 1
        if key_node.tag != "tag:yaml.org,2002:str":
            raise _Problem("a key is not text; put it in quotes", key_node.start_mark)
        name = f"{prefix}.{key}" if prefix else key
        if key in lines:
            raise _Problem(
                f"{name}: stands twice, the first time in line {lines[key]}; remove one", key_node.start_mark
            )
        lines[key] = line
        yield key, _located(value_node, line, name)
