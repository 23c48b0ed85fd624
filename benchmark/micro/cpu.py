"""Compare two ways to do the same work on a CPU, in turns of one process.

Products: those of this project beside oneDNN's, by the number of rows. A turn multiplies random rows by the
linears of the recipe's layers, one after the other; so many layers take part that their weights leave the
processor's caches, as those of a whole model do. oneDNN computes in the type that this project would give it.

Decodes: those that read the tokens an indexer chose beside those of the same model that read them all. Both
engines have the recipe's weights; the second one's indexer may choose as many tokens as a context has, so
that nothing is scored and everything is read.

A turn is counted in processor time of all threads, which other processes on the same cores hardly change;
medians are reported, after a turn that is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.reference import Attention
from benchmark.micro.device import StepLoad, batch_of, print_machine
from benchmark.options import Column, in_turns, recipe_of, table
from models.decoder import Decoder
from models.layers.dtypes import TORCH_DTYPES
from models.layers.linear import Linear
from models.ops.cpu.ops import CpuOps
from models.ops.cpu.products import Products, products
from recipes.assembly import versions
from recipes.assembly.decoders import shape_of
from recipes.assembly.engine import BuiltEngine, build
from recipes.assembly.families import model_config
from recipes.machine import start
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError

COLD_WEIGHTS = 2**26  # numbers of a turn: 128 MiB in bfloat16, more than most processors' last cache
PRODUCT_COLUMNS = (
    Column("rows", "rows"),
    Column("onednn_gflop_per_s", "oneDNN, GFLOP/s"),
    Column("own_gflop_per_s", "own, GFLOP/s"),
    Column("times_onednn", "own over oneDNN"),
)
DECODE_COLUMNS = (
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


def median_turns_s(ways: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median processor time of each way, which take turns."""

    def timed(way: Callable[[], object]) -> Callable[[int], float]:
        return lambda _: processor_s(way)

    turns_s = in_turns({str(number): timed(way) for number, way in enumerate(ways)}, repeats)
    return [statistics.median(each) for each in turns_s.values()]


def check_cpu(recipe: Recipe) -> None:
    """Raise RecipeError for a device whose time is not the processor's."""
    if (kind := recipe.device.kind) != "cpu":
        fix = "choose a recipe of a CPU"
        raise RecipeError("device.kind", "no CPU, whose time is counted", fix, value=kind)


def linear_shapes(recipe: Recipe) -> list[tuple[int, int]]:
    """Return the outputs and inputs of the linears of as many layers as a turn needs, in their order."""
    config = model_config(recipe)
    if config.mixture is not None:
        reason = "has experts, whose rows are fewer than a step's"
        raise RecipeError("model", reason, "choose a recipe without experts")
    attention = Attention(shape_of(recipe.cache.page_size, config), "meta")  # weights there take no memory
    shapes: list[tuple[int, int]] = []
    for layer in Decoder(config, CpuOps(), attention).layers:
        for linear in (module for module in layer.modules() if isinstance(module, Linear)):
            if linear.form != "plain":
                reason = "has quantized weights, of other products"
                raise RecipeError("model", reason, "choose a recipe without them")
            assert linear.weight is not None, "nothing is packed yet"
            shapes.append((linear.weight.shape[0], linear.weight.shape[1]))
        if sum(outputs * inputs for outputs, inputs in shapes) >= COLD_WEIGHTS:
            break
    return shapes


def multiply_all(
    multiply: Callable[[Tensor, Any], Tensor], packed: Sequence[Any], rows: Sequence[Tensor]
) -> None:
    """Multiply the rows of every linear by its packed weight."""
    for x, weight in zip(rows, packed):
        multiply(x, weight)


@torch.inference_mode()
def compare_products(
    own: Products, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, counts: Sequence[int], repeats: int
) -> list[dict[str, object]]:
    """Measure both ways for each number of rows."""
    generator, onednn = torch.Generator().manual_seed(0), CpuOps()
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    by_onednn = [onednn.pack(weight, None) for weight in weights]
    by_own = [own.pack(weight, None, is_widened=not own.multiplies(weight)) for weight in weights]
    operations = sum(2 * outputs * inputs for outputs, inputs in shapes)
    compared: list[dict[str, object]] = []
    for count in counts:
        of_inputs = {size: torch.randn(count, size, generator=generator).to(dtype) for _, size in shapes}
        rows = [of_inputs[size] for _, size in shapes]
        ways = (
            partial(multiply_all, onednn.linear, by_onednn, rows),
            partial(multiply_all, own.multiply, by_own, rows),
        )
        onednn_s, own_s = median_turns_s(ways, repeats)
        compared.append(
            {
                "rows": count,
                "onednn_gflop_per_s": round(count * operations / onednn_s / 1e9, 1),
                "own_gflop_per_s": round(count * operations / own_s / 1e9, 1),
                "times_onednn": round(onednn_s / own_s, 3),
            }
        )
    return compared


def run_products(options: argparse.Namespace) -> dict[str, object]:
    """Compare the products of the recipe's layers for each number of rows."""
    recipe = recipe_of(options)
    check_cpu(recipe)
    own = products()
    if isinstance(own, str):
        reason = f"has no products of this project: {own}"
        raise RecipeError("device.kind", reason, "choose a machine with a compiler")
    config, machine = model_config(recipe), start(recipe.device)
    shapes = linear_shapes(recipe)
    machine.operators(shape_of(recipe.cache.page_size, config))  # sets the number of threads
    dtype = TORCH_DTYPES[config.dtype]
    return {
        "machine": versions.describe(machine.name),
        "threads": torch.get_num_threads(),
        "dtype": config.dtype,
        "linears": len(shapes),
        "products": compare_products(own, shapes, dtype, options.rows, options.repeats),
    }


def print_products(result: Mapping[str, Any]) -> None:
    """Print the machine and a row for each number of rows."""
    print_machine(result)
    print(f"{result['linears']} linears in {result['dtype']}, threads: {result['threads']}")
    print("GFLOP/s count processor time of all threads\n")
    print(table(PRODUCT_COLUMNS, result["products"]))


def run_decodes(options: argparse.Namespace) -> dict[str, object]:
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
        "decodes": [compare_decodes(engines, options, each) for each in options.contexts],
    }


def compare_decodes(
    engines: Sequence[BuiltEngine], options: argparse.Namespace, context: int
) -> dict[str, object]:
    """Measure the decodes of both engines at one context."""
    at = StepLoad(options.rows, context)
    steps = [partial(engine.runner.run, batch_of(engine, at)) for engine in engines]
    chosen_s, all_s = median_turns_s(steps, options.repeats)
    return {
        "context": context,
        "chosen_ms": round(1e3 * chosen_s, 3),
        "all_ms": round(1e3 * all_s, 3),
        "times_all": round(all_s / chosen_s, 3),
    }


def print_decodes(result: Mapping[str, Any]) -> None:
    """Print the machine and a row for each context."""
    print_machine(result)
    print(f"steps of {result['rows']} decodes, in processor time of all threads; {result['chosen']} chosen\n")
    print(table(DECODE_COLUMNS, result["decodes"]))
