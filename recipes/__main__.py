"""Show what a recipe says, and whether it fits into memory.

python -m recipes show RECIPE [key=value ...] [--profile NAME]   its keys, their origins, the memory it takes
python -m recipes keys                                           every key that there is, as a Markdown table
python -m recipes names                                          what other engines call them, likewise
python -m recipes divisions                                      what goes with several devices, likewise
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from recipes import divisions
from recipes.assembly import memory_plan, sizing
from recipes.assembly.families import share_of
from recipes.assembly.operators import check_operators, divides_pages
from recipes.cluster.cluster import find_cluster, ranks_here
from recipes.fitting import with_recipe
from recipes.schema import verb
from recipes.schema.command_line import add_recipe
from recipes.schema.foreign_keys import names_table
from recipes.schema.keys import keys_of, table
from recipes.schema.reader import LoadedRecipe, placed, read
from recipes.schema.recipe import Recipe, from_root
from recipes.schema.recipe_error import RecipeError, in_yaml
from recipes.schema.scheduler_defaults import completed


def main(given: list[str]) -> None:
    """Run one verb; raises ValueError or OSError for a recipe that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("verb", choices=("show", "keys", "names", "divisions"))
    asked = parser.parse_args(given[:1]).verb
    one = argparse.ArgumentParser(prog=f"{parser.prog} {asked}")
    if asked == "show":
        add_recipe(one)
    options = one.parse_intermixed_args(with_recipe("recipes", given)[1:] if asked == "show" else given[1:])
    if asked == "keys":
        print(table(Recipe), end="")
    elif asked == "names":
        print(names_table(), end="")
    elif asked == "divisions":
        print(divisions.table(), end="")
    else:
        show(options.recipe, options.overrides, options.profile)


def show(path: str, overrides: Sequence[str], profile: str | None = None) -> None:
    """Print the keys of a recipe, their origins and the memory that it takes; raises ValueError."""
    loaded = read(path, overrides, profile)
    planned_gib = loaded.recipe.device.memory_gib
    memory_bytes = None if planned_gib is None else int(planned_gib * memory_plan.GIB)
    try:
        config, share = share_of(loaded.recipe, 0)
        here = ranks_here(loaded.recipe.parallel, find_cluster(loaded.recipe.parallel, os.environ))
        plan = sizing.plan_memory(loaded.recipe, config, memory_bytes, share=share, ranks_here=here)
        check_operators(loaded.recipe, config, plan.longest_tokens, share)
    except ValueError as error:
        _print_columns(_rows(loaded, None))
        if isinstance(error, RecipeError):
            raise placed(error, loaded.entries, path) from None
        raise
    _print_columns(_rows(loaded, plan.longest_tokens))
    print()
    rows = memory_plan.report(loaded.recipe, config, plan, share)
    if divides_pages(loaded.recipe, config):
        rows = [*rows, *sizing.of_divided_pages(loaded.recipe, config, memory_bytes, share)]
    _print_columns([*rows, *_decided(loaded.recipe)])


def _decided(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the keys that are left to the machine, with value and reason."""
    if recipe.device.kind != "cpu":
        return []
    from recipes import machine  # imported here because it imports torch, which takes a second

    return machine.decided(recipe.device)


def _rows(loaded: LoadedRecipe, longest_tokens: int | None) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and origin of every key, including a policy's values for keys that are left out."""
    section, sources = completed(loaded.recipe.scheduler, longest_tokens)
    recipe = replace(loaded.recipe, scheduler=section)
    for each in keys_of(Recipe):
        source, origin = sources.get(each.name.removeprefix("scheduler.")), loaded.origin(each.name)
        if source is not None:
            origin = source if origin == "default" else f"{source}; {origin}"
        yield each.name, _shown(recipe.value(each.name)), origin


def _shown(value: object) -> str:
    if isinstance(value, Path):
        return from_root(value)
    if isinstance(value, dict) and "model_type" in value:
        return f"{value['model_type']}, {len(value)} keys"
    return in_yaml(value)


def _print_columns(columns: Iterable[tuple[str, ...]]) -> None:
    rows = list(columns)
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


if __name__ == "__main__":
    verb.run(main)
