"""Compare decodes that read the tokens an indexer chose with decodes that read them all, on a CPU.

Both engines have the recipe's weights; the second one's indexer may choose as many tokens as a context has,
so that nothing is scored and everything is read. They take turns, which are counted in processor time of all
threads, which other processes on the same cores hardly change; medians are reported, after a turn that is not
counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmark.micro.device import StepLoad, batch_of, print_machine
from benchmark.options import Column, in_turns, recipe_of, table
from recipes.assembly import versions
from recipes.assembly.engine import BuiltEngine, build
from recipes.assembly.families import model_config
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError

COLUMNS = (
    Column("context", "tokens"),
    Column("chosen_ms", "chosen ones read, ms"),
    Column("all_ms", "all read, ms"),
    Column("times_all", "all over chosen"),
)


def processor_s(turn: Callable[[], object]) -> float:
    """Return the processor time of one turn, of all threads."""
    began_s = time.process_time()
    turn()
    return time.process_time() - began_s


def check_cpu(recipe: Recipe) -> None:
    """Raise RecipeError for a device whose time is not the processor's."""
    if (kind := recipe.device.kind) != "cpu":
        fix = "choose a recipe of a CPU"
        raise RecipeError("device.kind", "no CPU, whose time is counted", fix, value=kind)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Compare both engines of the recipe at each context."""
    recipe = recipe_of(options)
    config = model_config(recipe)
    if config.latent is None or config.latent.index is None:
        raise RecipeError("model", "has no indexer", "choose a recipe of DeepSeek-V3.2 or GLM-5")
    check_cpu(recipe)
    place = "model.config" if recipe.model.config else "model.config_overrides"
    every = [*options.overrides, f"{place}.index_topk={max(options.contexts)}"]
    engines = [build(recipe), build(load(options.recipe, every, options.profile))]
    for engine in engines:
        for tensor in engine.runner.cache.tensors:
            tensor.normal_()  # equal scores would be chosen by their place
    return {
        "machine": versions.describe(engines[0].device_name),
        "chosen": config.latent.index.top_k,
        "rows": options.rows,
        "decodes": [compared(engines, options, each) for each in options.contexts],
    }


def compared(engines: Sequence[BuiltEngine], options: argparse.Namespace, context: int) -> dict[str, object]:
    """Measure the decodes of both engines at one context."""
    at = StepLoad(options.rows, context)

    def way(engine: BuiltEngine) -> Callable[[int], float]:
        step = partial(engine.runner.run, batch_of(engine, at))
        return lambda _: processor_s(step)

    chosen, every = map(way, engines)
    turns_s = in_turns({"chosen": chosen, "all": every}, options.repeats)
    chosen_s, all_s = map(statistics.median, turns_s.values())
    return {
        "context": context,
        "chosen_ms": round(1e3 * chosen_s, 3),
        "all_ms": round(1e3 * all_s, 3),
        "times_all": round(all_s / chosen_s, 3),
    }


def print_table(result: Mapping[str, Any]) -> None:
    """Print the machine and a row for each context."""
    print_machine(result)
    print(f"steps of {result['rows']} decodes, in processor time of all threads; {result['chosen']} chosen\n")
    print(table(COLUMNS, result["decodes"]))
