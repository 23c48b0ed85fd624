"""Compare this project's products on a CPU with oneDNN's, by the number of rows.

A turn multiplies random rows by the linears of the recipe's layers, one after the other. So many layers take
part that their weights leave the processor's caches, as those of a whole model do. Both ways take turns in
one process, and a turn is counted in processor time of all threads, which other processes on the same cores
hardly change. oneDNN computes in the type that this project would give it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.reference import Attention
from benchmark.options import markdown
from models.decoder import Decoder
from models.layers.dtypes import TORCH_DTYPES
from models.layers.linear import Linear
from models.ops.cpu.ops import CpuOps
from models.ops.cpu.products import Products, products
from recipes.assembly import versions
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import model_config
from recipes.machine import start
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError

COLD_WEIGHTS = 2**26  # numbers of a turn: 128 MiB in bfloat16, more than most processors' last cache
COLUMNS = {
    "rows": "rows",
    "onednn_gflop_per_s": "oneDNN, GFLOP/s",
    "own_gflop_per_s": "own, GFLOP/s",
    "times_onednn": "own over oneDNN",
}


def linear_shapes(recipe: Recipe) -> list[tuple[int, int]]:
    """Return the outputs and inputs of the linears of as many layers as a turn needs, in their order."""
    config = model_config(recipe)
    if config.mixture is not None:
        raise _refused("model", "has experts, whose rows are fewer than a step's", "a recipe without experts")
    attention = Attention(shape_of(recipe.cache.page_size, config), "meta")  # weights there take no memory
    shapes: list[tuple[int, int]] = []
    for layer in Decoder(config, CpuOps(), attention).layers:
        for linear in (module for module in layer.modules() if isinstance(module, Linear)):
            if linear.form != "plain":
                raise _refused("model", "has quantized weights, of other products", "a recipe without them")
            assert linear.weight is not None, "nothing is packed yet"
            shapes.append((linear.weight.shape[0], linear.weight.shape[1]))
        if sum(outputs * inputs for outputs, inputs in shapes) >= COLD_WEIGHTS:
            break
    return shapes


def turn_of(
    multiply: Callable[[Tensor, Any], Tensor], packed: Sequence[Any], rows: Sequence[Tensor]
) -> Callable[[], None]:
    """Return what multiplies the rows of every linear by its packed weight."""

    def turn() -> None:
        for x, weight in zip(rows, packed):
            multiply(x, weight)

    return turn


def processor_s(turn: Callable[[], object]) -> float:
    """Return the processor time of one turn, of all threads."""
    began_s = time.process_time()
    turn()
    return time.process_time() - began_s


@torch.inference_mode()
def compare(
    own: Products, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, counts: Sequence[int], repeats: int
) -> list[dict[str, object]]:
    """Measure both ways in turns for each number of rows; medians, after a turn that is not counted."""
    generator, onednn = torch.Generator().manual_seed(0), CpuOps()
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    by_onednn = [onednn.pack(weight, None) for weight in weights]
    by_own = [own.pack(weight, None) for weight in weights]
    operations = sum(2 * outputs * inputs for outputs, inputs in shapes)
    compared: list[dict[str, object]] = []
    for count in counts:
        of_inputs = {size: torch.randn(count, size, generator=generator).to(dtype) for _, size in shapes}
        rows = [of_inputs[size] for _, size in shapes]
        ways = turn_of(onednn.linear, by_onednn, rows), turn_of(own.multiply, by_own, rows)
        taken_s = [[processor_s(way) for way in ways] for _ in range(1 + repeats)]
        onednn_s, own_s = np.median(taken_s[1:], axis=0).tolist()
        compared.append(
            {
                "rows": count,
                "onednn_gflop_per_s": round(count * operations / onednn_s / 1e9, 1),
                "own_gflop_per_s": round(count * operations / own_s / 1e9, 1),
                "times_onednn": round(onednn_s / own_s, 3),
            }
        )
    return compared


def measure(recipe: Recipe, counts: Sequence[int], repeats: int) -> dict[str, object]:
    """Compare the products of the recipe's layers for each number of rows."""
    if recipe.device.kind != "cpu":
        raise _refused("device.kind", "is no CPU, whose products are compared", "a recipe of a CPU")
    own = products()
    if isinstance(own, str):
        raise _refused("device.kind", f"has no products of this project: {own}", "a machine with a compiler")
    config, machine = model_config(recipe), start(recipe.device)
    shapes = linear_shapes(recipe)
    machine.operators(shape_of(recipe.cache.page_size, config))  # sets the number of threads
    return {
        "machine": versions.describe(machine.name),
        "threads": torch.get_num_threads(),
        "dtype": config.dtype,
        "linears": len(shapes),
        "products": compare(own, shapes, TORCH_DTYPES[config.dtype], counts, repeats),
    }


def run(options: argparse.Namespace) -> dict[str, object]:
    """Compare the products of the recipe that the options name."""
    recipe = load(options.recipe, options.overrides, options.profile)
    said = {"recipe": options.recipe, "overrides": list(options.overrides)}
    return {**said, **measure(recipe, options.rows, options.repeats)}


def _refused(field: str, found: str, choose: str) -> RecipeError:
    return RecipeError(field, found, f"choose {choose}")


def print_table(result: Mapping[str, Any]) -> None:
    """Print the machine and a row for each number of rows."""
    print("machine:", ", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print(f"{result['linears']} linears in {result['dtype']}, threads: {result['threads']}")
    print("GFLOP/s count processor time of all threads\n")
    rows = [tuple(row[name] for name in COLUMNS) for row in result["products"]]
    print(markdown(tuple(COLUMNS.values()), rows))
