"""How near does a step come to what the device can do?

A decode must read the weights and the pages of its requests once: its floor is these bytes over the rate at
which the device copies. A prompt must be multiplied: its floor is the operations over the rate of one large
matrix product. Both rates are measured in the same run, and a step is timed as the engine runs it, from its
batch to its tokens on the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attention.reference import Attention
from continuous_batching.batch import Batch
from models.config import DecoderConfig
from models.runner import ModelRunner
from recipes.build import build
from recipes.devices import start
from recipes.reader import read
from recipes.sizing import model_config
from scripts.benchmark import machine
from scripts.benchmark.kv import seconds

COPIED_BYTES, SIDE = {"cpu": 2**26, "other": 2**32}, {"cpu": 512, "other": 8192}
WARM_UPS = 3
NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Load:
    """The spans of one step: so many decodes at one context, so many prompts of one length, or both."""

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
    def stops(self) -> list[int]:
        return [self.context] * self.num_decodes + [self.prompt] * self.num_prompts

    @property
    def lens(self) -> list[int]:
        return [1] * self.num_decodes + [self.prompt] * self.num_prompts


def pair(text: str) -> tuple[int, int]:
    """`32x1024`: so many, of so many tokens; raises ValueError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"{text} is not of the form COUNTxTOKENS, as in 32x1024")
    return int(found[1]), int(found[2])


def rates(device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """GB/s of a large copy, bytes read and bytes written, and TFLOP/s of a large matrix product."""
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
    """The median of so many calls, each until the device is done, after some that are not counted."""

    def whole() -> None:
        act()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)

    return float(np.median([seconds(whole) for _ in range(WARM_UPS + repeats)][WARM_UPS:]))


def read_bytes(config: DecoderConfig, load: Load) -> int:
    """What a step must read: keys, values and all weights but an embedding, of which it takes few rows."""
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return config.weight_bytes - config.dtype.itemsize * embedding + cached_bytes(config, load)


def cached_bytes(config: DecoderConfig, load: Load) -> int:
    """Keys and values that the spans of a step see, over all layers."""
    seen = sum(min(stop, window or stop) for window in config.windows for stop in load.stops)
    return config.dtype.itemsize * 2 * config.num_kv_heads * config.head_dim * seen


def operations(config: DecoderConfig, load: Load) -> int:
    """What a step must multiply and add: linears for each token, logits for each span, attention."""
    table = config.vocab_size * config.hidden_size
    linears = config.num_parameters - table * (1 if config.tie_embeddings else 2)
    pairs = 0
    for window in config.windows:
        for length, stop in zip(load.lens, load.stops):
            positions = np.arange(stop - length + 1, stop + 1)
            pairs += int(positions.sum() if window is None else np.minimum(positions, window).sum())
    spans = len(load.stops)
    return 2 * (linears * sum(load.lens) + table * spans) + 4 * config.num_heads * config.head_dim * pairs


def batch_of(runner: ModelRunner, load: Load) -> Batch:
    """The load over random tokens and scattered pages; raises ValueError if it does not fit."""
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
    return Batch(rows, starts, stops, np.arange(len(rows)), rows, (NONE, NONE, NONE))


def step_s(runner: ModelRunner, load: Load, repeats: int) -> float:
    """Seconds of one step."""
    batch = batch_of(runner, load)
    return median_s(lambda: runner.run(batch), runner.attention.device, repeats)


@torch.inference_mode()
def attention_s(runner: ModelRunner, load: Load, repeats: int) -> float:
    """Seconds that all layers take to write and read the cache, without what the host adds on CUDA."""
    batch, attention, cache = batch_of(runner, load), runner.attention, runner.cache
    metadata = attention.plan(batch, runner.slots.page_table)
    heads = (runner.config.num_heads, runner.config.num_kv_heads, runner.config.num_kv_heads)
    query, key, value = (
        torch.randn(batch.num_tokens, count, runner.config.head_dim, device=attention.device).to(
            runner.config.dtype
        )
        for count in heads
    )

    def layers() -> None:
        for layer, (keys, values) in enumerate(zip(cache.keys, cache.values)):
            attention.write(key, value, keys, values, metadata)
            attention.attend(query, keys, values, metadata, layer)

    if attention.device.type != "cuda" or type(attention) is Attention:  # which asks the host
        return median_s(layers, attention.device, repeats)
    layers()  # compiled now
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return median_s(graph.replay, attention.device, repeats)


def run(
    recipe_path: str, overrides: Sequence[str], loads: Sequence[Load], mixed: Sequence[Load], repeats: int
) -> dict[str, object]:
    """Each load against its floor, and each of `mixed` against its decodes and its prompts by themselves."""
    recipe = read(recipe_path, overrides).recipe
    device = start(recipe.device)
    measured = rates(device.device, model_config(recipe).dtype, repeats)  # before the cache takes the memory
    runner = build(recipe).runner
    assert isinstance(runner, ModelRunner), "a recipe builds a model"
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.normal_()  # a processor takes less power, and so runs faster, over zeros
    steps = [_against_floor(runner, load, measured, repeats) for load in loads]
    steps += [_against_parts(runner, load, repeats) for load in mixed]
    return {
        "recipe": recipe_path,
        "overrides": list(overrides),
        "machine": machine.describe(device.name),
        "rates": {name: round(rate, 3) for name, rate in measured.items()},
        "steps": steps,
    }


def _against_floor(
    runner: ModelRunner, load: Load, measured: dict[str, float], repeats: int
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


def _against_parts(runner: ModelRunner, load: Load, repeats: int) -> dict[str, object]:
    parts = [Load(load.num_decodes, load.context), Load(0, 0, load.num_prompts, load.prompt)]
    try:
        whole, *apart = [step_s(runner, each, repeats) for each in (load, *parts)]
    except ValueError as error:
        return {"load": str(load), "not_measured": str(error)}
    return {
        "load": str(load),
        "step_ms": round(1e3 * whole, 4),
        "parts_ms": [round(1e3 * part, 4) for part in apart],
        "over_sum_of_parts": round(whole / sum(apart), 4),
    }


def print_table(result: dict[str, object]) -> None:
    """Figures, one line a load."""
    for name in ("recipe", "machine", "rates"):
        print(f"{name:10} {result[name]}")
    steps = result["steps"]
    assert isinstance(steps, list)
    for step in steps:
        figures = ", ".join(
            f"{key.replace('_', ' ')} {value}" for key, value in step.items() if key != "load"
        )
        print(f"{step['load']:40} {figures}")
