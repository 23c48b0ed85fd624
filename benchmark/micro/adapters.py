"""Measure what adapters cost: room for them, requests that share one, and requests that use many.

Two engines of a recipe, one of which has room for adapters, answer the same requests in turns. The adapters'
weights are random: no figure here depends on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmark.options import add_json, show
from benchmark.run_clock import RunClock
from continuous_batching.request import Request, SamplingParams
from models.layers.low_rank import LowRank
from recipes.assembly import versions
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.adapters_section import MOST_ADAPTERS, MOST_RANK, AdaptersSection
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import MOST_COUNT, whole
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe

ROUNDS = 5  # rounds in turns, whose median counts; one more before them warms up
SCALE = 1e-3  # largest random weight of an adapter


def measure(
    recipe: Recipe, most: int, rank: int, num_requests: int, lengths: tuple[int, int]
) -> dict[str, Any]:
    """Return the output tokens a second of each case, and their ratio to the engine without room."""
    plain = build(replace(recipe, adapters=AdaptersSection()))
    roomy = build(replace(recipe, adapters=AdaptersSection(most=most, rank=rank)))
    fill(roomy)
    cases: dict[str, tuple[BuiltEngine, Sequence[int]]] = {
        "without room": (plain, [0]),
        "none": (roomy, [0]),
        "one": (roomy, [1]),
        f"{most} by turns": (roomy, range(1, most + 1)),
    }
    rounds = [
        {
            name: serve(built, np.random.default_rng(number), num_requests, lengths, numbers)
            for name, (built, numbers) in cases.items()
        }
        for number in range(1 + ROUNDS)
    ]
    rows = {}
    for name in cases:
        ratios = [each[name] / each["without room"] for each in rounds[1:]]
        tokens_per_s = statistics.median(each[name] for each in rounds[1:])
        rows[name] = {
            "tokens_per_s": round(tokens_per_s, 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(each, 3) for each in ratios],
        }
    room_bytes = roomy.memory.adapter_bytes
    return {"most": most, "rank": rank, "requests": num_requests, "room_bytes": room_bytes, "cases": rows}


def fill(built: BuiltEngine) -> None:
    """Fill all adapters with random weights."""
    generator = torch.Generator().manual_seed(0)
    for each in built.runner.decoder.modules():
        if not isinstance(each, LowRank):
            continue
        for number, (index, width) in product(range(1, each.rooms.most + 1), enumerate(each.widths)):
            a, b = torch.empty(each.rooms.rank, each.num_inputs), torch.empty(width, each.rooms.rank)
            for numbers in (a, b):
                numbers.uniform_(-SCALE, SCALE, generator=generator)
            each.put(number, index, a, b)


def serve(
    built: BuiltEngine,
    random: np.random.Generator,
    num_requests: int,
    lengths: tuple[int, int],
    numbers: Sequence[int],
) -> float:
    """Return the output tokens a second of requests that all come at once and use these adapters in turns."""
    engine, (prompt_tokens, output_tokens) = built.engine, lengths
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    for index in range(num_requests):
        prompt, number = (
            random.integers(0, built.config.vocab_size, prompt_tokens).astype(np.int32),
            numbers[index % len(numbers)],
        )
        request = Request(f"{random.integers(2**62)}", prompt, params, adapter=number, cache_salt=str(number))
        engine.add(request)
    start_s = time.perf_counter()
    while engine.has_work:
        engine.step()
    return num_requests * output_tokens / (time.perf_counter() - start_s)


def print_table(result: Mapping[str, Any]) -> None:
    """Print a Markdown row for each case."""
    found = result["adapters"]
    print(
        f"{found['requests']} requests, room for {found['most']} adapters of rank {found['rank']}"
        f" ({found['room_bytes'] / 2**20:.1f} MiB)\n"
    )
    print("| adapters of requests | tokens/s | beside an engine without room |\n|---|---|---|")
    for name, row in found["cases"].items():
        least, most = min(row["ratios"]), max(row["ratios"])
        print(f"| {name} | {row['tokens_per_s']:,.0f} | {row['ratio']:.2f} ({least:.2f} to {most:.2f}) |")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `adapters`."""
    add_recipe(parser)
    for name, default, most, meaning in (
        ("adapters", 8, MOST_ADAPTERS, "places"),
        ("rank", 16, MOST_RANK, "of each"),
        ("requests", 32, MOST_COUNT, "of a round"),
        ("prompt-tokens", 64, MOST_COUNT, "of each request"),
        ("output-tokens", 64, MOST_COUNT, "of each request"),
    ):
        parser.add_argument(
            f"--{name}",
            type=whole(1, most),
            default=default,
            metavar="N",
            help=f"{meaning} (default: {default})",
        )
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    recipe, clock = load(options.recipe, options.overrides, options.profile), RunClock()
    lengths = options.prompt_tokens, options.output_tokens
    found = measure(recipe, options.adapters, options.rank, options.requests, lengths)
    described = {"benchmark": "adapters", "machine": versions.describe(), "clock": clock.read()}
    show({**described, "adapters": found}, options, print_table)
