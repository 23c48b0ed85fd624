"""Simulate one request alone on a device that is not here, by the length of its prompt.

The time to its first token is that of its prompt's chunks, one after the other; the time of each further one
is that of a decode behind them. A model with sparse attention is also simulated without its indexers, all
tokens read, so that what these bring can be seen. The roofline alone is asked, also for lengths that the
recipe's cache does not hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from benchmark.options import Column, recipe_of, table
from benchmark.simulate.deployment import SIMULATED, Placement, Result, place
from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from models.config import DecoderConfig
from recipes.schema.scheduler_defaults import completed
from simulation.roofline import Roofline

COLUMNS = (
    Column("prompt_tokens", "prompt, tokens", "{:,}"),
    Column("read", "tokens read"),
    Column("ttft_ms", "TTFT, ms", "{:,.0f}"),
    Column("tpot_ms", "TPOT, ms", "{:.2f}"),
)
ALL = "all"


def run(options: argparse.Namespace) -> Result:
    """Return the times of each length; raises ValueError where the recipe does not fit the device."""
    recipe = recipe_of(options)
    placed = place(recipe, options.device, options.tp or recipe.parallel.tensor)
    chunk = completed(recipe.scheduler, placed.memory.longest_tokens).section.max_batch_tokens
    assert chunk is not None, "a completed section has a budget"
    ways = {ALL if top is None else f"at most {top:,}": config for top, config in _ways(placed.config)}
    rows = [
        {"prompt_tokens": length, "read": name} | _times(replace(placed, config=config), length, chunk)
        for length in options.tokens
        for name, config in ways.items()
    ]
    return {"simulated": SIMULATED, **placed.facts(), "chunk": chunk, "lengths": rows}


def print_table(result: Mapping[str, Any]) -> None:
    """Print a row for each length and way."""
    print(f"SIMULATED ({result['simulated']}); {result['costs']}")
    print(f"{result['num_devices']} x {result['device_profile']}, chunks of {result['chunk']:,} tokens\n")
    print(table(COLUMNS, result["lengths"]))


def _ways(config: DecoderConfig) -> list[tuple[int | None, DecoderConfig]]:
    """Return the decoder by what its queries read: as it is, and without indexers if it has any."""
    latent = config.latent
    if latent is None or latent.index is None:
        return [(None, config)]
    layers = tuple(replace(each, index=None) for each in config.layers)
    without = replace(config, layers=layers, latent=replace(latent, index=None))
    return [(latent.index.top_k, config), (None, without)]


def _times(placed: Placement, length: int, chunk: int) -> Result:
    """Return the milliseconds to the first token, and of a decode behind the prompt."""
    costs = placed.costs()
    assert isinstance(costs, Roofline), "nothing was fitted"
    slots = SlotPool(1, length + 1, placed.recipe.cache.page_size)
    starts = range(0, length, chunk)
    first_s = sum(costs.step_s(_span(start, min(start + chunk, length), length), slots) for start in starts)
    further_s = costs.step_s(_span(length, length + 1, length), slots)
    return {"ttft_ms": 1e3 * first_s, "tpot_ms": 1e3 * further_s}


def _span(start: int, stop: int, length: int) -> Batch:
    """Return a step of one span, which samples if it ends the prompt or lies behind it."""
    row, samples = np.zeros(1, np.int64), np.arange(int(stop >= length))
    return Batch(row, np.array([start]), np.array([stop]), samples, row[: len(samples)], samples + stop)
