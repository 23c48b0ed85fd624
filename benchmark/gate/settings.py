"""Define the laws of settings: they are of a recipe that could have run, with its overrides.

A result states its recipe in full. An engine starts only with settings that pass the recipe's own checks, and
each override is among the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, get_type_hints

from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, first
from recipes.schema.keys import NAMES, keys_of
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError
from recipes.schema.source_location import parse

ABSENT = object()
SIZES = (  # a server's figure, the key that sets it, and how many the server keeps for itself
    ("num_slots", "scheduler.num_slots", 0),
    ("num_pages", "cache.num_pages", 1),
    ("page_size", "cache.page_size", 0),
)


def recipe_of(stated: Mapping[str, Any]) -> Recipe:
    """Build the recipe that settings describe; raises RecipeError where none could."""
    values = {}
    for each in keys_of(Recipe):
        value = _value(stated, each.name)
        if value is ABSENT and each.default is not MISSING:
            continue  # the engine did not have this key yet
        if value is ABSENT:
            raise RecipeError(each.name, "is absent", "every recipe has it")
        if isinstance(value, str) and each.kind is Path:
            value = Path(value)
        if isinstance(value, list) and each.kind == NAMES:
            value = tuple(value)
        values[each.name] = value
    sections = {}
    for name, section in get_type_hints(Recipe).items():
        prefix = f"{name}."
        own = {key.removeprefix(prefix): each for key, each in values.items() if key.startswith(prefix)}
        sections[name] = section(**own)
    return Recipe(**sections)


def _value(stated: Mapping[str, Any], name: str) -> Any:
    section, _, leaf = name.partition(".")
    return stated.get(section, {}).get(leaf, ABSENT)


def possible(figures: Figures) -> str | None:
    """Check that settings pass a recipe's own checks, and that every override is among them."""
    stated = figures.raw("settings")
    if not isinstance(stated, Mapping) or not all(isinstance(each, Mapping) for each in stated.values()):
        raise ValueError("settings must be an object of a recipe's sections")
    return first([*_overridden(figures, stated), _unlike_a_recipe("settings", stated)])


def served(figures: Figures) -> str | None:
    """Check that a server's recipe passes its own checks, and that the server's sizes are the recipe's."""
    server = figures.raw("server")
    if not isinstance(server, Mapping) or server.get("recipe") is None:
        raise NotCheckable("server.recipe is absent")
    stated = server["recipe"]
    if not isinstance(stated, Mapping) or not all(isinstance(each, Mapping) for each in stated.values()):
        raise ValueError("server.recipe must be an object of a recipe's sections")
    wrongs = [_unlike_a_recipe("server.recipe", stated)]
    for ours, key, extra in SIZES:
        asked, said = _value(stated, key), figures.given(f"server.{ours}")
        if said is not None and isinstance(asked, int):
            wrongs.append(differs(f"server.{ours}", said, key, asked - extra, 0))
    if (slots := figures.given("server.num_slots")) is not None and figures.raw(
        "metrics.columns"
    ) is not None:
        running = float(figures.column("running").max(initial=0))
        wrongs.append(exceeds("the most that ran", running, "server.num_slots", slots, 0))
    return first(wrongs)


def _unlike_a_recipe(what: str, stated: Mapping[str, Any]) -> str | None:
    try:
        recipe_of(stated)
    except RecipeError as error:
        return f"{what} is of no recipe: {error}"
    return None


def _overridden(figures: Figures, stated: Mapping[str, Any]) -> list[str | None]:
    overrides = figures.raw("overrides") or []
    if not isinstance(overrides, list) or not all(isinstance(each, str) for each in overrides):
        raise ValueError("overrides must be a list of texts such as cache.page_size=32")
    kinds = {each.name: each.kind for each in keys_of(Recipe)}
    # The last override of a key is the one that holds.
    last = dict(each.partition("=")[::2] for each in overrides)
    wrongs: list[str | None] = []
    for name, text in last.items():
        if name.startswith("model.config."):
            continue  # the override sets a part of a key
        if name not in kinds:
            wrongs.append(f"overrides name {name}, which is no key of a recipe")
        elif kinds[name] is not Path:  # settings state paths relative to the repository
            asked, ran = parse(text, "overrides", numbered=False).plain, _value(stated, name)
            if asked != (list(ran) if isinstance(ran, tuple) else ran):
                wrongs.append(f"overrides ask for {name}={text}, but settings have {ran}")
    return wrongs


LAWS = (
    Law("recipe", "settings are of a recipe that could have run, with its overrides", possible, "settings"),
    Law("server's recipe", "a server's recipe could have run, and has its sizes", served, "server"),
)
