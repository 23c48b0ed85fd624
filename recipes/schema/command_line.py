"""Read recipes and files from a command line, in the same way for every verb."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from borders.field_table import FIELDS, range_of
from recipes.schema.numbers import option

# These options take no value in any verb; `--recipe RECIPE key=value ...` counts as an option without a
# value, too.
FLAGS = frozenset(
    f"--{name}"
    for name in [
        "adapters",
        "at-once",
        "dry-run",
        "fleet",
        "followed",
        "help",
        "ignore-eos",
        "in-turn",
        "json",
        "launches",
        "laws",
        "list",
        "log",
        "log-requests",
        "masks",
        "once",
        "one-batch",
        "parts",
        "pipeline",
        "quick",
        "resume",
        "retry-rejected",
        "router-cost",
        "save-result",
        "schemas",
        "share-prefixes",
        "simulated",
        "skip-bad",
        "sources",
        "stall",
        "tensor",
        "tier",
        "types",
        "virtual",
    ]
)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a recipe's file, for keys that replace its own, and for a profile."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a YAML file, such as recipes/tiny/cpu.yaml, or a checkpoint's folder, for\nwhich one is chosen",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as cache.page_size=32")
    parser.add_argument("--profile", metavar="NAME", help="a name in recipes/profiles, such as low_latency")


def add_field(parser: argparse.ArgumentParser, name: str, *, default: float) -> None:
    """Add an option for a field of requests that is a number."""
    kind, meaning = option(range_of(name)), FIELDS[name].meaning
    parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, metavar="N", help=meaning)


def positionals(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that are neither options nor values of options.

    It serves callers that do not parse the verb's command line.
    """
    return [arguments[place] for place in places_of_positionals(arguments)]


def places_of_positionals(arguments: Sequence[str]) -> list[int]:
    """Return the places of the arguments that are neither options nor values of options."""
    found: list[int] = []
    places = iter(range(len(arguments)))
    for place in places:
        argument = arguments[place]
        if argument == "--":
            return [*found, *places]
        if not argument.startswith("-") or argument == "-":
            found.append(place)
        elif argument.startswith("--") and "=" not in argument and argument not in (*FLAGS, "--recipe"):
            next(places, None)  # skip the option's value
    return found


def profiles_in(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the profiles that a verb's arguments name; the last one holds."""
    for at, argument in enumerate(arguments):
        if argument.startswith("--profile="):
            yield argument.partition("=")[2]
        elif argument == "--profile":
            yield from arguments[at + 1 : at + 2]


def keep_apart(output: str | Path, *inputs: str | Path) -> None:
    """Raise ValueError where a command would overwrite a file that it reads, whatever its name is."""
    for each in inputs:
        if os.path.exists(output) and os.path.exists(each) and os.path.samefile(output, each):
            raise ValueError(
                f"{output} is read by this command, which would write over it; name another file"
            )
