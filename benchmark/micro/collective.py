"""Measure how long the ranks of a recipe wait for each other in collectives, by size.

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

from benchmark.options import Column, recipe_of, table
from models.parallel.group import Group
from recipes.cluster.in_ranks import in_ranks
from recipes.machine import start
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError

ROUNDS = 5  # the median of the rounds counts
WARM_UP = 3  # calls of each size before the timed ones
COLUMNS = (
    Column("method", "collective"),
    Column("bytes", "bytes of a rank", "{:,}"),
    Column("us", "µs of a call", "{:,.1f}"),
    Column("gb_per_s", "GB/s", "{:.3f}"),
)


def times_us(
    group: Group, device: torch.device, sizes: list[int], repeats: int
) -> Iterator[tuple[str, int, float]]:
    """Yield each method's name, the bytes that a rank contributes, and the microseconds of a call."""
    wait = (lambda: None) if device.type == "cpu" else torch.get_device_module(device).synchronize
    calls: dict[str, Callable[[Tensor], Tensor]]
    calls = {"all_reduce": group.all_reduce, "all_gather": group.all_gather, "broadcast": group.broadcast}
    for name, call in calls.items():
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


def collectives_of(
    recipe: Recipe, group: Group, sizes: list[int], repeats: int
) -> tuple[str, list[tuple[str, int, float]]]:
    """Return a rank's device and times."""
    machine = start(recipe.device)
    return machine.name, list(times_us(group, machine.device, sizes, repeats))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the first rank."""
    recipe = recipe_of(options)
    ranks = recipe.parallel.ranks
    if ranks < 2:
        raise RecipeError("parallel.tensor", "one rank waits for nobody", "set it to 2 or more", value=ranks)
    (name, rows), *_ = in_ranks(recipe, collectives_of, options.sizes, options.repeats)
    figures = [
        {"method": method, "bytes": size, "us": round(us, 1), "gb_per_s": round(size / us / 1e3, 3)}
        for method, size, us in rows
    ]
    return {"collective": {"device": name, "ranks": ranks, "calls": figures}}


def print_table(result: Mapping[str, Any]) -> None:
    """Print a row for each collective and size."""
    found = result["collective"]
    print(f"{found['ranks']} ranks of {found['device']}\n")
    print(table(COLUMNS, found["calls"]))
