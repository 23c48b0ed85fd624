"""What does this recipe say, and does it fit?

python -m recipes show RECIPE [key=value ...] [--profile NAME]   its keys, where each was said, and its sizing
python -m recipes keys                                           every key that there is, as a Markdown table
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.schema.keys import RecipeError, in_yaml, keys_of, table
from recipes.schema.reader import placed, read
from recipes.schema.recipe import Recipe, from_root


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; 0, or 2 for a recipe that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m recipes", description="Look at recipes.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("keys", help="every key that a recipe may have, as a Markdown table")
    show_verb = verbs.add_parser("show", help="a recipe's keys, where each was said, and its sizing")
    show_verb.add_argument("recipe", help="a YAML file, such as recipes/tiny/cpu.yaml")
    show_verb.add_argument("overrides", nargs="*", metavar="key=value", help="such as cache.page_size=32")
    show_verb.add_argument(
        "--profile", metavar="NAME", help="a name in recipes/profiles, such as low_latency"
    )
    options = parser.parse_args(arguments)
    try:
        if options.verb == "keys":
            print(table(Recipe), end="")
        else:
            show(options.recipe, options.overrides, options.profile)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def show(path: str, overrides: Sequence[str], profile: str | None = None) -> None:
    """Prints the resolved recipe and its sizing; raises ValueError."""
    reading = read(path, overrides, profile)
    rows = [
        (each.name, _shown(reading.recipe.value(each.name)), reading.origin(each.name))
        for each in keys_of(Recipe)
    ]
    _print_columns(rows)

    # here, because they bring torch, which takes a second
    from recipes.build import machine, memory_plan, sizing

    config, planned_gib = sizing.model_config(reading.recipe), reading.recipe.device.memory_gib
    memory_bytes = None if planned_gib is None else int(planned_gib * memory_plan.GIB)
    try:
        sized = sizing.size(reading.recipe, config, memory_bytes)
    except RecipeError as error:
        raise placed(error, reading.entries, path) from None
    print()
    decided = machine.decided(reading.recipe.device)
    _print_columns([*memory_plan.report(reading.recipe, config, sized), *decided])


def _shown(value: object) -> str:
    if isinstance(value, Path):
        return from_root(value)
    if isinstance(value, dict):
        return f"{value.get('model_type')}, {len(value)} keys"
    return in_yaml(value)


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
