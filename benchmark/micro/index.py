"""Compare decodes that read the tokens an indexer chose with decodes of the same model that read them all.

Both engines have the recipe's weights; the second one's indexer may choose as many tokens as a context has,
so that nothing is scored and everything is read. Both take turns in one process, and a step is counted in
processor time of all threads, which other processes on the same cores hardly change.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmark.micro.device import StepLoad, batch_of
from benchmark.micro.kernels import processor_s
from benchmark.options import markdown
from recipes.assembly import versions
from recipes.assembly.engine import BuiltEngine, build
from recipes.assembly.families import model_config
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError

COLUMNS = {
    "context": "tokens",
    "chosen_ms": "chosen ones read, ms",
    "all_ms": "all read, ms",
    "times_all": "all over chosen",
}


def run(options: argparse.Namespace) -> dict[str, object]:
    """Compare both engines of the recipe at each context."""
    recipe = load(options.recipe, options.overrides, options.profile)
    config = model_config(recipe)
    if config.latent is None or config.latent.index is None:
        raise RecipeError("model", "has no indexer", "choose a recipe of DeepSeek-V3.2 or GLM-5")
    if recipe.device.kind != "cpu":
        raise RecipeError("device.kind", "is no CPU, whose time is counted", "choose a recipe of a CPU")
    place = "model.config" if recipe.model.config else "model.config_overrides"
    every = [*options.overrides, f"{place}.index_topk={max(options.contexts)}"]
    engines = [build(recipe), build(load(options.recipe, every, options.profile))]
    for engine in engines:
        for tensor in engine.runner.cache.tensors:
            tensor.normal_()  # equal scores would be chosen by their place
    return {
        "recipe": options.recipe,
        "overrides": list(options.overrides),
        "machine": versions.describe(engines[0].device_name),
        "chosen": config.latent.index.top_k,
        "rows": options.rows,
        "decodes": [compare(engines, options.rows, each, options.repeats) for each in options.contexts],
    }


def compare(engines: Sequence[BuiltEngine], rows: int, context: int, repeats: int) -> dict[str, object]:
    """Return medians of turns of decodes at one context, after a turn that is not counted."""
    at = StepLoad(rows, context)
    steps = [partial(engine.runner.run, batch_of(engine, at)) for engine in engines]
    taken_s = [[processor_s(step) for step in steps] for _ in range(1 + repeats)]
    chosen_s, all_s = np.median(taken_s[1:], axis=0).tolist()
    return {
        "context": context,
        "chosen_ms": round(1e3 * chosen_s, 3),
        "all_ms": round(1e3 * all_s, 3),
        "times_all": round(all_s / chosen_s, 3),
    }


def print_table(result: Mapping[str, Any]) -> None:
    """Print the machine and a row for each context."""
    print(" ".join((result["recipe"], *result["overrides"])))
    print("machine:", ", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print(f"steps of {result['rows']} decodes, in processor time of all threads; {result['chosen']} chosen\n")
    rows = [tuple(row[name] for name in COLUMNS) for row in result["decodes"]]
    print(markdown(tuple(COLUMNS.values()), rows))
