"""Compare the time of a step with what the device can do.

A decode must read the weights and its requests' pages once: its floor is these bytes over the rate at which
the device copies. A prompt must be multiplied: its floor is the operations over the rate of one large matrix
product. Both rates are measured in the same run, and a step is timed as the engine runs it, from its batch to
its tokens on the host. Attention is also timed by itself, and beside kernels of other libraries. On a machine
without the recipe's device all cells of the table say "not measured".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from attention.reference import Attention
from benchmark.gate.gate import with_verdict
from benchmark.micro import cuda_candidates as candidates
from benchmark.micro.device_table import print_table
from benchmark.micro.kv import seconds
from benchmark.micro.step_loads import StepLoad, cached_bytes, operations, pair, read_bytes
from benchmark.options import add_json, show
from benchmark.run_clock import RunClock
from continuous_batching.batch import Batch
from models.layers.dtypes import TORCH_DTYPES
from models.step.runner import ModelRunner
from recipes.assembly import versions
from recipes.assembly.engine import build
from recipes.assembly.families import model_config
from recipes.machine import start
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import MOST_COUNT, whole
from recipes.schema.reader import read
from recipes.schema.recipe_error import RecipeError

COPIED_BYTES, SIDE = {"cpu": 2**26, "other": 2**32}, {"cpu": 512, "other": 8192}
WARM_UPS = 3
NONE = np.empty(0, np.int64)


def rates(device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Measure GB/s of a large copy, bytes read plus bytes written, and TFLOP/s of a large matrix product."""
    size = "cpu" if device.type == "cpu" else "other"
    side = SIDE[size]
    source = torch.ones(COPIED_BYTES[size], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    copy_s = median_s(lambda: target.copy_(source), device, repeats)
    product_s = median_s(lambda: torch.mm(left, right, out=product), device, repeats)
    return {
        "copy_gb_per_s": 2e-9 * COPIED_BYTES[size] / copy_s,
        "product_tflop_per_s": 2e-12 * side**3 / product_s,
    }


def median_s(act: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median of repeated calls, each timed until the device is done, after uncounted warm-ups."""

    def whole() -> None:
        act()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)

    return float(np.median([seconds(whole) for _ in range(WARM_UPS + repeats)][WARM_UPS:]))


def batch_of(runner: ModelRunner, load: StepLoad) -> Batch:
    """Build the load's batch over random tokens and scattered pages; raises ValueError if it does not fit."""
    slots, size = runner.slots, runner.slots.page_size
    stops = np.array(load.stops, np.int64)
    counts = -(-stops // size)
    if len(stops) > slots.num_slots or stops.max() > slots.max_tokens:
        raise ValueError(f"{load}: {slots.num_slots} slots of {slots.max_tokens} tokens do not hold it")
    if counts.sum() >= runner.cache.num_pages:
        raise ValueError(f"{load}: takes {counts.sum()} pages; the cache holds {runner.cache.num_pages - 1}")
    random, rows = np.random.default_rng(0), np.arange(len(stops))
    pages = 1 + random.permutation(runner.cache.num_pages - 1)
    for row, count in enumerate(counts.tolist()):
        slots.page_table[row, :count], pages = pages[:count], pages[count:]
    slots.token_ids[rows] = random.integers(0, runner.config.vocab_size, (len(rows), slots.max_tokens))
    starts = stops - np.array(load.lens, np.int64)
    return Batch(rows, starts, stops, np.arange(len(rows)), rows, stops)


def step_s(runner: ModelRunner, load: StepLoad, repeats: int) -> float:
    """Return the seconds of one step."""
    batch = batch_of(runner, load)
    return median_s(lambda: runner.run(batch), runner.attention.device, repeats)


@torch.inference_mode()
def attention_s(runner: ModelRunner, load: StepLoad, repeats: int, candidate: str | None = None) -> float:
    """Return the seconds that all layers take to write and read the cache, on CUDA without the host's part.

    `candidate` reads the cache in place of the engine's own attention; raises ValueError where it cannot.
    """
    batch, attention, cache = batch_of(runner, load), runner.attention, runner.cache
    metadata = attention.plan(batch, runner.slots.page_table, runner.slots.inputs(batch).write_index)
    heads = (runner.config.num_heads, runner.config.num_kv_heads, runner.config.num_kv_heads)
    query, key, value = (
        torch.randn(batch.num_tokens, count, runner.config.head_dim, device=attention.device).to(
            TORCH_DTYPES[runner.config.dtype]
        )
        for count in heads
    )

    def own(keys: Tensor, values: Tensor, layer: int) -> Tensor:
        return attention.attend(query, keys, values, metadata, layer)

    attend: candidates.Attend = own
    if candidate is not None:
        attend = candidates.made(candidate, query, batch, runner.slots.page_table, attention)
        attention.write(key, value, cache.keys[0], cache.values[0], metadata)
        candidates.check(attend, own, cache.keys[0], cache.values[0])

    def layers() -> None:
        for layer, (keys, values) in enumerate(zip(cache.keys, cache.values)):
            attention.write(key, value, keys, values, metadata)
            attend(keys, values, layer)

    # The reference attention asks the host.
    if attention.device.type != "cuda" or type(attention) is Attention:
        return median_s(layers, attention.device, repeats)
    layers()  # this call compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return median_s(graph.replay, attention.device, repeats)


def run(
    recipe_path: str,
    overrides: Sequence[str],
    profile: str | None,
    loads: Sequence[StepLoad],
    mixed: Sequence[StepLoad],
    repeats: int,
    others: Sequence[str] = (),
) -> dict[str, object]:
    """Measure each load against its floor, and each of `mixed` against its decodes and prompts alone.

    Attention of each load is timed with the kernels of `others` too.
    """
    recipe = read(recipe_path, overrides, profile).recipe
    result: dict[str, object] = {
        "recipe": recipe_path,
        "overrides": list(overrides),
        "profile": profile,
        "candidates": list(others),
    }
    try:
        device = start(recipe.device)
    except RecipeError as error:
        nothing: list[dict[str, object]] = [{"load": str(load), "not_measured": str(error)} for load in loads]
        nothing += [{"load": str(load), "is_mixed": True, "not_measured": str(error)} for load in mixed]
        return result | {"machine": versions.describe(), "rates": {}, "steps": nothing}
    measured = rates(
        device.device, TORCH_DTYPES[model_config(recipe).dtype], repeats
    )  # measured before the cache takes the memory
    runner = build(recipe).runner
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.normal_()  # a processor takes less power over zeros, and so runs faster
    steps = [
        _against_floor(runner, load, measured, repeats) | _others(runner, load, repeats, others)
        for load in loads
    ]
    steps += [_against_parts(runner, load, repeats) for load in mixed]
    return result | {
        "machine": versions.describe(device.name),
        "rates": {name: round(rate, 3) for name, rate in measured.items()},
        "steps": steps,
    }


def _against_floor(
    runner: ModelRunner, load: StepLoad, measured: dict[str, float], repeats: int
) -> dict[str, object]:
    try:
        taken, attention = step_s(runner, load, repeats), attention_s(runner, load, repeats)
    except ValueError as error:
        return {"load": str(load), "not_measured": str(error)}
    read_s = read_bytes(runner.config, load) / (1e9 * measured["copy_gb_per_s"])
    multiply_s = operations(runner.config, load) / (1e12 * measured["product_tflop_per_s"])
    cached_s = cached_bytes(runner.config, load) / (1e9 * measured["copy_gb_per_s"])
    tokens = sum(load.lens)
    return {
        "load": str(load),
        "step_ms": round(1e3 * taken, 4),
        "tokens_per_s": round(tokens / taken, 1),
        "read_floor_ms": round(1e3 * read_s, 4),
        "share_of_copy_rate": round(read_s / taken, 4),
        "product_floor_ms": round(1e3 * multiply_s, 4),
        "share_of_product_rate": round(multiply_s / taken, 4),
        "attention_ms": round(1e3 * attention, 4),
        "attention_share_of_copy_rate": round(cached_s / attention, 4),
    }


def _others(runner: ModelRunner, load: StepLoad, repeats: int, others: Sequence[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for other in others:
        try:
            found[f"{other}_ms"] = round(1e3 * attention_s(runner, load, repeats, other), 4)
        except ValueError as error:
            found[f"{other}_not_measured"] = str(error)
    return found


def _against_parts(runner: ModelRunner, load: StepLoad, repeats: int) -> dict[str, object]:
    parts = [StepLoad(load.num_decodes, load.context), StepLoad(0, 0, load.num_prompts, load.prompt)]
    try:
        whole, *apart = [step_s(runner, each, repeats) for each in (load, *parts)]
    except ValueError as error:
        return {"load": str(load), "is_mixed": True, "not_measured": str(error)}
    return {
        "load": str(load),
        "is_mixed": True,
        "step_ms": round(1e3 * whole, 4),
        "parts_ms": [round(1e3 * part, 4) for part in apart],
        "over_sum_of_parts": round(whole / sum(apart), 4),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `device`."""
    add_recipe(parser)
    add = parser.add_argument
    add("--decode", default="1x1024,32x1024,256x1024", metavar="COUNTxCONTEXT,...")
    add("--prefill", default="4x4096", metavar="COUNTxTOKENS,...")
    add("--mixed", default="32x1024+1x2048", metavar="DECODES+PROMPTS,...")
    add("--repeats", type=whole(1, MOST_COUNT), default=20, metavar="N")
    add(
        "--candidates",
        default="",
        metavar="NAME,...",
        help=f"time attention with these kernels too: {', '.join(candidates.NAMES)}",
    )
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    alone = [StepLoad(*pair(each)) for each in options.decode.split(",") if each]
    alone += [StepLoad(0, 0, *pair(each)) for each in options.prefill.split(",") if each]
    mixed = []
    for each in filter(None, options.mixed.split(",")):
        decodes, _, prompts = each.partition("+")
        mixed.append(StepLoad(*pair(decodes), *pair(prompts)))
    others = [each for each in options.candidates.split(",") if each]
    if unknown := set(others) - set(candidates.NAMES):
        known = ", ".join(candidates.NAMES)
        raise ValueError(f"--candidates: {', '.join(sorted(unknown))} is not known; choose of {known}")
    given = (options.recipe, options.overrides, options.profile)
    clock = RunClock()
    result = run(*given, alone, mixed, options.repeats, others)
    show(with_verdict({"benchmark": "device", "clock": clock.read(), **result}), options, print_table)
