"""Let requests use logits processors that the operator provides.

`server.logits_processors` of the recipe names classes, as MODULE:CLASS, which are imported when the engine
starts. A request names them by class alone, so it can never cause an import.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from borders.field_table import LONGEST_ARGUMENTS, MOST_PROCESSORS
from borders.field_types import check_unicode
from borders.refusal import BadRequest, abbreviate_json
from continuous_batching.own_processors import OwnProcessors, Processor
from continuous_batching.request import Request
from recipes.schema.recipe import Recipe

_KEY = "server.logits_processors"


class KnownProcessors:
    """The processor classes by name; each is called with the vocabulary size and a request's arguments."""

    def __init__(self, classes: Mapping[str, Callable[..., Processor]], vocab_size: int) -> None:
        self._classes = classes
        self._vocab_size = vocab_size

    @staticmethod
    def of(recipe: Recipe | None, vocab_size: int) -> KnownProcessors:
        """Import the classes that a recipe names.

        Raises ValueError for one that cannot be imported, or whose name is taken by another.
        """
        names = () if recipe is None else recipe.server.logits_processors
        classes: dict[str, Callable[..., Processor]] = {}
        for path in names:
            module, _, name = path.partition(":")
            if not module or not name:
                raise ValueError(f"{_KEY} has {abbreviate_json(path)}; it must be MODULE:CLASS")
            if name in classes:
                raise ValueError(f"{_KEY} names {name} twice; requests could not tell them apart")
            try:
                classes[name] = getattr(importlib.import_module(module), name)
            except Exception as error:  # a module may raise anything when it is imported
                raise ValueError(f"{_KEY}: {path}: {type(error).__name__}: {error}") from error
        return KnownProcessors(classes, vocab_size)

    def give(self, request: Request) -> None:
        """Give a request and its further samples the processors that it names; raises BadRequest."""
        if not request.params.processors:
            return
        named = [self._made(index, *each) for index, each in enumerate(request.params.processors)]
        for each in (request, *request.followers):
            each.processors = OwnProcessors(named)

    def _made(self, index: int, name: str, arguments: str) -> tuple[str, Processor]:
        place = f"[{index}]"
        if name not in self._classes:
            limit = " or ".join(map(abbreviate_json, self._classes)) or f"left out: the recipe has no {_KEY}"
            raise BadRequest("logits_processors", value=name, limit=limit, place=f"{place}.name")
        try:
            return name, self._classes[name](self._vocab_size, **json.loads(arguments))
        except Exception as error:  # the operator's code may raise anything about what a client sent
            problem = f"of {name}: {type(error).__name__}: {error}"
            raise BadRequest("logits_processors", problem, place=f"{place}.args") from error


def read_processors(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Read the field of a request: names, with arguments as JSON; raises BadRequest."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MOST_PROCESSORS:
        raise BadRequest(name, f"must be a list of at most {MOST_PROCESSORS} processors")
    return tuple(_read(name, f"[{index}]", each) for index, each in enumerate(value))


def _read(name: str, place: str, value: object) -> tuple[str, str]:
    if (
        not isinstance(value, Mapping)
        or not isinstance(value.get("name"), str)
        or value.keys() - {"name", "args"}
    ):
        raise BadRequest(name, value=value, limit='{"name": ..., "args": {...}}', place=place)
    arguments = value.get("args")
    if arguments is not None and not isinstance(arguments, Mapping):
        raise BadRequest(name, value=arguments, limit="an object", place=f"{place}.args")
    written = json.dumps(arguments or {})
    if len(written) > LONGEST_ARGUMENTS:
        problem = f"has {len(written)} characters of JSON; it may have {LONGEST_ARGUMENTS}"
        raise BadRequest(name, problem, place=f"{place}.args")
    check_unicode(name, value["name"], place=f"{place}.name")
    check_unicode(name, json.dumps(arguments or {}, ensure_ascii=False), place=f"{place}.args")
    return str(value["name"]), written
