"""Read recipes and files from a command line, in the same way for every verb."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from borders.field_table import FIELDS, range_of
from recipes.schema.foreign_keys import SWITCHES, foreign_key
from recipes.schema.numbers import option

# These options take no value in any verb; `--recipe RECIPE key=value ...` counts as an option without a
# value, too.
FLAGS = frozenset(
    f"--{name}"
    for name in [
        "dry-run",
        "fleet",
        "full",
        "help",
        "ignore-eos",
        "json",
        "launches",
        "laws",
        "list",
        "log",
        "log-requests",
        "once",
        "overload",
        "quick",
        "resume",
        "router-cost",
        "save-result",
        "skip-bad",
        "sources",
        "virtual",
        "vllm",
    ]
)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a recipe's file, for keys that replace its own, and for a profile."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a YAML file, such as recipes/tiny/cpu.yaml, or a checkpoint's folder, for\nwhich one is chosen",
    )
    # With a default, argparse does not call them required where the recipe is missing.
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as cache.page_size=32"
    )
    parser.add_argument("--profile", metavar="NAME", help="a name in recipes/profiles, such as low_latency")


def add_field(parser: argparse.ArgumentParser, name: str) -> None:
    """Add an option for a field of requests that is a number; it is None where it is left out."""
    kind, meaning = option(range_of(name)), FIELDS[name].meaning
    parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=meaning)


# Names of other engines that are options of ours, too, in all verbs or in this one
_OWN_OPTIONS = ("host", "port", "served_model_name", "api_key")
_OWN_OF_VERB = {"simulate": ("tp", "pp", "dp")}
_SHORT = ("-tp", "-pp", "-dp", "-ep")
_MODEL = ("model=", "model_path=")


def with_keys(arguments: Sequence[str], place: int = 0, verb: str = "") -> list[str]:
    """Return a verb's arguments with other engines' options as overrides, which the recipe's reader judges.

    `--tensor-parallel-size 2`, `-tp 2` and `--enforce-eager` become `tensor_parallel_size=2`, `tp=2` and
    `enforce_eager=true` behind the recipe, whose place among the positional arguments is given. In a
    command that needs no other, `--model DIR` is the model.
    """
    kept, keys = _parted(arguments, (*_OWN_OPTIONS, *_OWN_OF_VERB.get(verb, ())))
    places = places_of_positionals(kept)[place:]
    if not places and not place and (named := [each for each in keys if each.startswith(_MODEL)]):
        keys.remove(named[0])
        return [*kept, named[0].partition("=")[2], *keys]
    at = places[0] + 1 if places else len(kept)
    return [*kept[:at], *keys, *kept[at:]]


def _parted(arguments: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without other engines' options, and these as overrides."""
    kept, keys, rest = list[str](), list[str](), iter(arguments)
    for argument in rest:
        option_name, is_joined, value = argument.partition("=")
        name = option_name.lstrip("-").replace("-", "_")
        switch = name.removeprefix("no_")
        is_option = argument.startswith("--") or argument in _SHORT
        if argument == "--":
            kept += [argument, *rest]
        elif is_option and switch in SWITCHES:
            keys.append(f"{switch}={value if is_joined else str(switch == name).lower()}")
        elif is_option and name not in own and foreign_key(name) is not None:
            given = value if is_joined else next(rest, None)
            if given is None:
                raise ValueError(f"{argument} has no value; give one, as in {argument} VALUE")
            keys.append(f"{name}={given}")
        else:
            kept.append(argument)
            if argument.startswith("--") and _takes_value(argument):
                kept += itertools.islice(rest, 1)
    return kept, keys


def _takes_value(argument: str) -> bool:
    return "=" not in argument and argument not in (*FLAGS, "--recipe")


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
        elif argument.startswith("--") and _takes_value(argument):
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
