"""Compare the time of a step with what the device can do.

A decode must read the weights and its requests' pages once: its floor is these bytes over the rate at which
the device copies. A prompt must be multiplied: its floor is the operations over the rate of one large matrix
product. Both rates are measured in the same run, and a step is timed as the engine runs it, from its batch to
its tokens on the host. Attention is also timed by itself. Layers with a window have pages of their own, as in
an engine that serves. On a machine without the recipe's device all cells of the table say "not measured".
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attention.latent import LatentAttention
from attention.reference import Attention
from benchmark.options import Column, recipe_of, table, verdict_line
from continuous_batching.batch import Batch
from kv_cache.pages import Index
from models.config import DecoderConfig
from models.cost import attention_operations
from models.layers.dtypes import TORCH_DTYPES
from models.step.inputs import step_inputs
from recipes.assembly import versions
from recipes.assembly.engine import BuiltEngine, build
from recipes.assembly.families import model_config
from recipes.machine import start
from recipes.schema.numbers import MOST_TOKENS, whole
from recipes.schema.recipe_error import RecipeError

COPIED_BYTES, SIDE = {"cpu": 2**26, "other": 2**32}, {"cpu": 512, "other": 8192}
WARM_UPS = 3
NOT_MEASURED = "not measured"
LOAD, STEP = Column("load", "load"), Column("step_ms", "step, ms")
COLUMNS = (
    *(LOAD, STEP),
    Column("tokens_per_s", "tokens/s"),
    Column("share_of_copy_rate", "of the copy rate"),
    Column("share_of_product_rate", "of the product rate"),
    Column("attention_ms", "attention, ms"),
    Column("attention_share_of_copy_rate", "of the copy rate"),
)
MIXED_COLUMNS = (
    *(LOAD, STEP),
    Column("parts_ms", "its parts apart, ms", "{0[0]}, {0[1]}"),
    Column("over_sum_of_parts", "over their sum"),
)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The spans of one step: decodes at one context, prompts of one length, or both."""

    num_decodes: int = 0
    context: int = 0
    num_prompts: int = 0
    prompt: int = 0

    def __str__(self) -> str:
        parts = []
        if self.num_decodes:
            parts.append(f"{self.num_decodes} decodes at {self.context}")
        if self.num_prompts:
            parts.append(f"{self.num_prompts} prompts of {self.prompt}")
        return ", ".join(parts)

    @property
    def is_mixed(self) -> bool:
        return bool(self.num_decodes and self.num_prompts)

    @property
    def stops(self) -> list[int]:
        return [self.context] * self.num_decodes + [self.prompt] * self.num_prompts

    @property
    def lens(self) -> list[int]:
        return [1] * self.num_decodes + [self.prompt] * self.num_prompts


def pair(text: str) -> tuple[int, int]:
    """Parse `32x1024` as a count and a number of tokens; raises ValueError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"{text} is not of the form COUNTxTOKENS, as in 32x1024")
    one = whole(1, MOST_TOKENS)
    try:
        return one(found[1]), one(found[2])
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{text:.60}: {error}") from error


def read_bytes(config: DecoderConfig, load: StepLoad) -> int:
    """Return the bytes that a step must read: keys, values and all weights except rows of an embedding."""
    return config.step_weight_bytes + cached_bytes(config, load)


def cached_bytes(config: DecoderConfig, load: StepLoad) -> int:
    """Return the bytes of keys and values that the spans of a step see, over all layers."""
    seen = sum(min(stop, reach or stop) for reach in config.reaches for stop in load.stops)
    most = 0 if config.latent is None or config.latent.index is None else config.latent.index.top_k
    scored = config.num_indexers * sum(stop for stop in load.stops if stop > most)
    return config.num_kv_heads * config.attended_head_bytes * seen + config.index_key_bytes * scored


def operations(config: DecoderConfig, load: StepLoad) -> int:
    """Return a step's operations: linears for each token, logits for each span, and attention."""
    table = config.vocab_size * config.hidden_size
    linears = config.num_active_parameters - table * (1 if config.tie_embeddings else 2)
    pairs = 0
    for window in config.reaches:
        for length, stop in zip(load.lens, load.stops):
            positions = np.arange(stop - length + 1, stop + 1)
            pairs += int(positions.sum() if window is None else np.minimum(positions, window).sum())
    spans = len(load.stops)
    context = sum(load.stops) * len(config.attention_windows)
    scores = config.num_heads * attention_operations(config, context, pairs)
    return 2 * (linears * sum(load.lens) + table * spans) + int(scores)


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

    def whole_s() -> float:
        start_s = time.perf_counter()
        act()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter() - start_s

    return statistics.median([whole_s() for _ in range(WARM_UPS + repeats)][WARM_UPS:])


def batch_of(built: BuiltEngine, load: StepLoad) -> Batch:
    """Build the load's batch over random tokens and scattered pages; raises ValueError if it does not fit."""
    slots = built.runner.slots
    stops = np.array(load.stops, np.int64)
    starts = stops - np.array(load.lens, np.int64)
    counts = -(-stops // slots.page_size)
    if len(stops) > slots.num_slots or stops.max() > slots.max_tokens:
        raise ValueError(f"{load}: {slots.num_slots} slots of {slots.max_tokens} tokens do not hold it")
    random, rows = np.random.default_rng(0), np.arange(len(stops))
    try:
        for group in built.engine.scheduler.tables.groups:
            scatter(group.table, group.first_seen(starts), counts, group.pool.num_pages, random)
    except ValueError as error:
        raise ValueError(f"{load}: {error}") from error
    slots.token_ids[rows] = random.integers(0, built.config.vocab_size, (len(rows), slots.max_tokens))
    return Batch(rows, starts, stops, np.arange(len(rows)), rows, stops)


def scatter(
    table: NDArray[np.int32], firsts: Index, stops: Index, num_pages: int, random: np.random.Generator
) -> None:
    """Give row i of a page table scattered pages from `firsts[i]` to `stops[i]` - 1, and no others.

    Raises ValueError if the pool of `num_pages` pages holds too few.
    """
    wanted = int((stops - firsts).sum())
    if wanted >= num_pages:
        raise ValueError(f"takes {wanted} pages; the cache holds {num_pages - 1}")
    pages = 1 + random.permutation(num_pages - 1)
    table[:] = 0
    for row, (first, stop) in enumerate(zip(firsts.tolist(), stops.tolist())):
        table[row, first:stop], pages = pages[: stop - first], pages[stop - first :]


def step_s(built: BuiltEngine, load: StepLoad, repeats: int) -> float:
    """Return the seconds of one step."""
    batch, runner = batch_of(built, load), built.runner
    return median_s(lambda: runner.run(batch), runner.attention.device, repeats)


@torch.inference_mode()
def attention_s(built: BuiltEngine, load: StepLoad, repeats: int) -> float | None:
    """Return the seconds that all layers take to write and read the cache, on CUDA without the host.

    None where a cache of latents is read, which is woven into the products of its layers.
    """
    batch, runner = batch_of(built, load), built.runner
    attention, cache = runner.attention, runner.cache
    if isinstance(attention, LatentAttention):
        return None
    inputs = step_inputs(batch, runner.slots, runner.decoder, cache)
    heads = (runner.config.num_heads, runner.config.num_kv_heads, runner.config.num_kv_heads)
    query, key, value = (
        torch.randn(batch.num_tokens, count, runner.config.head_dim, device=attention.device).to(
            TORCH_DTYPES[runner.config.dtype]
        )
        for count in heads
    )

    def layers() -> None:
        for layer in range(runner.config.num_layers):
            keys, values = cache.of(layer)
            metadata = inputs.metadata_of(runner.config.group_of(layer))
            attention.write(key, value, keys, values, metadata)
            attention.attend(query, keys, values, metadata, layer)

    # The reference attention asks the host.
    if attention.device.type != "cuda" or type(attention) is Attention:
        return median_s(layers, attention.device, repeats)
    layers()  # this call compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return median_s(graph.replay, attention.device, repeats)


def loads_of(options: argparse.Namespace) -> list[StepLoad]:
    """Return the loads of one kind, and then those of decodes and prompts together."""
    alone = [StepLoad(*pair(each)) for each in options.decode.split(",") if each]
    alone += [StepLoad(0, 0, *pair(each)) for each in options.prefill.split(",") if each]
    both = [each.partition("+") for each in options.mixed.split(",") if each]
    return alone + [StepLoad(*pair(decodes), *pair(prompts)) for decodes, _, prompts in both]


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure each load against its floor, and each mixed one against its decodes and prompts alone."""
    loads, repeats, recipe = loads_of(options), options.repeats, recipe_of(options)
    steps: list[dict[str, object]] = [{"load": str(load), "is_mixed": load.is_mixed} for load in loads]
    try:
        device = start(recipe.device)
    except RecipeError as error:
        return {"rates": {}, "steps": [step | {"not_measured": str(error)} for step in steps]}
    # The rates are measured before the cache takes the memory.
    measured = rates(device.device, TORCH_DTYPES[model_config(recipe).dtype], repeats)
    built = build(recipe)
    for tensor in built.runner.cache.tensors:
        tensor.normal_()  # a processor takes less power over zeros, and so runs faster
    for step, load in zip(steps, loads):
        try:
            if load.is_mixed:
                step |= _against_parts(built, load, repeats)
            else:
                step |= _against_floor(built, load, measured, repeats)
        except ValueError as error:
            step["not_measured"] = str(error)
    return {
        "machine": versions.describe(device.name),
        "rates": {name: round(rate, 3) for name, rate in measured.items()},
        "steps": steps,
    }


def _against_floor(
    built: BuiltEngine, load: StepLoad, measured: dict[str, float], repeats: int
) -> dict[str, object]:
    taken, attention = step_s(built, load, repeats), attention_s(built, load, repeats)
    read_s = read_bytes(built.config, load) / (1e9 * measured["copy_gb_per_s"])
    multiply_s = operations(built.config, load) / (1e12 * measured["product_tflop_per_s"])
    cached_s = cached_bytes(built.config, load) / (1e9 * measured["copy_gb_per_s"])
    found: dict[str, object] = {
        "step_ms": round(1e3 * taken, 4),
        "tokens_per_s": round(sum(load.lens) / taken, 1),
        "read_floor_ms": round(1e3 * read_s, 4),
        "share_of_copy_rate": round(read_s / taken, 4),
        "product_floor_ms": round(1e3 * multiply_s, 4),
        "share_of_product_rate": round(multiply_s / taken, 4),
    }
    if attention is None:
        return found | {"attention_not_measured": "attention over latents is not timed by itself"}
    attention_ms, share = round(1e3 * attention, 4), round(cached_s / attention, 4)
    return found | {"attention_ms": attention_ms, "attention_share_of_copy_rate": share}


def _against_parts(built: BuiltEngine, load: StepLoad, repeats: int) -> dict[str, object]:
    parts = [StepLoad(load.num_decodes, load.context), StepLoad(0, 0, load.num_prompts, load.prompt)]
    whole, *apart = [step_s(built, each, repeats) for each in (load, *parts)]
    return {
        "step_ms": round(1e3 * whole, 4),
        "parts_ms": [round(1e3 * part, 4) for part in apart],
        "over_sum_of_parts": round(whole / sum(apart), 4),
    }


def print_table(result: Mapping[str, Any]) -> None:
    """Print the machine, its rates, a row for each load, and the reasons for empty cells."""
    print(" ".join((result["recipe"], *result["overrides"])))
    print("machine:", ", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    rates = ", ".join(f"{name} {value}" for name, value in result["rates"].items())
    print("rates:", rates or NOT_MEASURED)
    for is_mixed, columns in ((False, COLUMNS), (True, MIXED_COLUMNS)):
        if steps := [step for step in result["steps"] if step["is_mixed"] == is_mixed]:
            print(f"\n{table(columns, steps, NOT_MEASURED)}")
    reasons = dict.fromkeys(
        str(why) for step in result["steps"] for name, why in step.items() if name.endswith("not_measured")
    )
    if reasons:
        print("", *(f"{NOT_MEASURED}: {why}" for why in reasons), sep="\n")
    if any("step_ms" in step for step in result["steps"]):
        print("", verdict_line(result["verdict"]), sep="\n")
