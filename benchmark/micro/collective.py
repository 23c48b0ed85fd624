"""Time the collectives that a step calls between the ranks of a recipe, by size.

A decode of R rows adds up [R, hidden] twice in each layer (all_reduce), gathers [R, vocabulary / ranks]
(all_gather), and sends [R] tokens from the first rank to the others (broadcast). Times are of the first rank,
from the call to its end on the device; bandwidth counts the bytes that each rank contributes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmark.options import add_json, show
from benchmark.run_clock import RunClock
from models.parallel.group import Group
from recipes.assembly import versions
from recipes.cluster.in_ranks import in_ranks
from recipes.machine import start
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import MOST_COUNT, whole, wholes
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError

ROUNDS = 5  # the median of the rounds counts
WARM_UP = 3  # calls of each size before the timed ones


def methods(group: Group) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the collectives that a step calls, by name."""
    return {"all_reduce": group.all_reduce, "all_gather": group.all_gather, "broadcast": group.broadcast}


def times_us(
    group: Group, device: torch.device, sizes: list[int], repeats: int
) -> Iterator[tuple[str, int, float]]:
    """Yield each method's name, the bytes that a rank contributes, and the microseconds of a call."""
    wait = (lambda: None) if device.type == "cpu" else torch.get_device_module(device).synchronize
    for name, call in methods(group).items():
        for size in sizes:
            x = torch.zeros(size // 4, dtype=torch.float32, device=device)
            for _ in range(WARM_UP):
                call(x)
            rounds = []
            for _ in range(ROUNDS):
                wait()
                start_s = time.perf_counter()
                for _ in range(repeats):
                    call(x)
                wait()
                rounds.append(1e6 * (time.perf_counter() - start_s) / repeats)
            yield name, size, statistics.median(rounds)


def body(
    recipe: Recipe, group: Group, sizes: list[int], repeats: int
) -> tuple[str, list[tuple[str, int, float]]]:
    """Return a rank's device and times."""
    machine = start(recipe.device)
    return machine.name, list(times_us(group, machine.device, sizes, repeats))


def measure(recipe: Recipe, sizes: list[int], repeats: int) -> dict[str, Any]:
    """Return the figures of the first rank."""
    ranks = recipe.parallel.ranks
    if ranks < 2:
        raise RecipeError("parallel.tensor", "one rank waits for nobody", "set it to 2 or more", value=ranks)
    (name, rows), *_ = in_ranks(recipe, body, sizes, repeats)
    figures = [
        {"method": method, "bytes": size, "us": round(us, 1), "gb_per_s": round(size / us / 1e3, 3)}
        for method, size, us in rows
    ]
    return {"device": name, "ranks": ranks, "calls": figures}


def print_table(result: Mapping[str, Any]) -> None:
    """Print a Markdown row for each size."""
    found = result["collective"]
    names = list(dict.fromkeys(row["method"] for row in found["calls"]))
    by_size: dict[int, dict[str, Any]] = {}
    for row in found["calls"]:
        by_size.setdefault(row["bytes"], {})[row["method"]] = row
    print(f"{found['ranks']} ranks of {found['device']}: µs of a call (GB/s)\n")
    print(f"| bytes of a rank | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    for size, row in by_size.items():
        cells = [f"{row[name]['us']:,.1f} ({row[name]['gb_per_s']:.3f})" for name in names]
        print(f"| {size:,} | {' | '.join(cells)} |")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `collective`."""
    add_recipe(parser)
    parser.add_argument(
        "--sizes",
        type=wholes(4, 2**32),
        default=[8 << 10, 64 << 10, 512 << 10, 4 << 20],
        metavar="BYTES,...",
        help="what a rank brings",
    )
    parser.add_argument("--repeats", type=whole(1, MOST_COUNT), default=20, metavar="N", help="of a round")
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    recipe, clock = load(options.recipe, options.overrides, options.profile), RunClock()
    found = measure(recipe, options.sizes, options.repeats)
    described = {"benchmark": "collective", "machine": versions.describe(), "clock": clock.read()}
    show({**described, "collective": found}, options, print_table)
