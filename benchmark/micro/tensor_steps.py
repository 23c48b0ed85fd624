"""Compare the steps of a recipe's tensor ranks with those of one rank, measured and simulated.

Rank 0 serves the same requests alone, and then with the others, in turns. The roofline of `simulate --tp` is
fitted (simulation/fitted_device.py) to the steps of rank 0 alone, and to sums of some sizes over all ranks
that each follow a product; it is fitted to no step of several ranks. Its prediction for these steps is
compared with the time that they took.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmark.micro.stages import check_cpu, serve
from benchmark.options import markdown
from benchmark.simulate.deployment import device_name
from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine, Runner
from continuous_batching.slots import SlotPool
from kv_cache.pages import PageCopy
from models.config import DecoderConfig
from models.layers.dtypes import TORCH_DTYPES
from models.parallel.group import ALONE, Group
from recipes.assembly.engine import BuiltEngine, assemble
from recipes.assembly.families import model_config
from recipes.cluster.in_ranks import in_ranks
from recipes.schema.parallel_section import ParallelSection
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError
from simulation.device import SimulatedDevice
from simulation.fitted_device import StepSize, fitted_device, predicted_s, with_links
from simulation.roofline import Roofline

SUMMED_TOKENS = (1, 8, 64, 256)  # numbers of tokens whose hidden states are summed
REPEATS = 10  # repetitions in a round
READ_SIDE, READ_WEIGHTS = 4096, 4  # sizes of products with one row: more than caches hold
LEAST_SUM_S = 1e-7  # no sum between processes takes less: a smaller result was lost in the products' noise
Steps = list[tuple[StepSize, float]]  # sizes of steps and the seconds that each took


class TimedSteps:
    """A runner whose steps are timed. Ranks that do not sample receive the tokens from the first."""

    def __init__(self, runner: Runner, group: Group, slots: SlotPool, config: DecoderConfig) -> None:
        self._runner, self._group, self._slots = runner, group, slots
        # No rate of the device changes what a step reads.
        self._seen = Roofline(config, SimulatedDevice.load("epyc")).seen
        self.steps: Steps = []

    def run(self, batch: Batch) -> Sampled:
        start_s = time.perf_counter()
        sampled = self._runner.run(batch)
        taken_s = time.perf_counter() - start_s
        captured = batch.num_spans + batch.num_drafts
        size = StepSize(batch.num_tokens, captured, len(batch.owners), *self._seen(batch, batch.num_tokens))
        self.steps.append((size, taken_s))
        tokens = torch.zeros(len(batch.owners), dtype=torch.int64)
        if self._group.rank == 0:
            tokens.copy_(torch.from_numpy(sampled.tokens))
        return Sampled(self._group.broadcast(tokens).numpy())

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        raise AssertionError("steps follow each other here")

    def resize(self, num_pages: int, copies: tuple[PageCopy, ...]) -> None:
        raise AssertionError("nothing is resized here")


def body(
    recipe: Recipe, world: Group, num_requests: int, num_rounds: int
) -> tuple[list[tuple[Steps, Steps]], Any, float]:
    """Return, for each round, the steps of one rank and of all; the times of sums; and GB/s of a product.

    The product has one row, so its time is that of reading its weight.
    """
    shared = assemble(recipe, world, lambda: 0.0, recipe.parallel.start_timeout_s)
    alone = None
    if world.rank == 0:
        alone = assemble(replace(recipe, parallel=ParallelSection()), clock=lambda: 0.0)
    rounds = []
    for number in range(1 + num_rounds):
        one = [] if alone is None else timed(alone, ALONE, number, num_requests)
        world.least(0, torch.device("cpu"))  # the other ranks wait for the first
        rounds.append((one, timed(shared, world, number, num_requests)))
    hidden, dtype = shared.config.hidden_size, TORCH_DTYPES[shared.config.dtype]
    sums, read_gb_per_s = beside_products(world, dtype, hidden, num_rounds)
    return rounds[1:], sums, read_gb_per_s


def beside_products(
    group: Group, dtype: torch.dtype, hidden: int, num_rounds: int
) -> tuple[list[tuple[int, float]], float]:
    """Time sums that each follow a product, as in a step, and the products alone.

    Ranks that finish a product at different times wait for each other in the sum. Returns (bytes, seconds)
    for each size, and GB/s of the products alone, of one row, which all ranks compute at once.
    """
    weights = [torch.ones(READ_SIDE, READ_SIDE, dtype=dtype) for _ in range(READ_WEIGHTS)]
    row, num_bytes = torch.ones(1, READ_SIDE, dtype=dtype), sum(weight.nbytes for weight in weights)

    def seconds(x: torch.Tensor | None) -> float:
        group.least(0, torch.device("cpu"))  # all ranks begin at once
        start_s = time.perf_counter()
        for weight in weights * REPEATS:
            F.linear(row, weight)
            if x is not None:
                group.all_reduce(x)
        return (time.perf_counter() - start_s) / REPEATS

    summed = [torch.zeros(tokens, hidden, dtype=dtype) for tokens in SUMMED_TOKENS]
    taken_s = [[seconds(x) for x in (None, *summed)] for _ in range(1 + num_rounds)][1:]
    alone_s, *with_sums_s = (statistics.median(column) for column in zip(*taken_s))
    sums = [
        (x.nbytes, max(each_s - alone_s, LEAST_SUM_S) / READ_WEIGHTS)
        for x, each_s in zip(summed, with_sums_s)
    ]
    return sums, 1e-9 * num_bytes / alone_s


def timed(built: BuiltEngine, group: Group, seed: int, num_requests: int) -> Steps:
    """Return this rank's steps for requests that all come at once."""
    engine: Engine = built.engine
    engine.overlap = False  # a step is timed from its start to its tokens
    engine.runner = runner = TimedSteps(built.runner, group, engine.slots, built.config)
    serve(engine, np.random.default_rng(seed), num_requests, built.config.vocab_size)
    return runner.steps


def compared(roofline: Roofline, rounds: list[Steps]) -> dict[str, float]:
    """Return medians: seconds of a round's steps, measured and predicted, and the error of a step."""
    measured_s = [sum(taken_s for _, taken_s in steps) for steps in rounds]
    said_s = [sum(predicted_s(roofline, size) for size, _ in steps) for steps in rounds]
    errors = [predicted_s(roofline, size) / taken_s - 1 for steps in rounds for size, taken_s in steps]
    return {
        "seconds": round(statistics.median(measured_s), 3),
        "simulated_seconds": round(statistics.median(said_s), 3),
        "error": round(statistics.median(said / took for said, took in zip(said_s, measured_s)) - 1, 4),
        "error_of_a_step": round(statistics.median(map(abs, errors)), 4),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the measured and the simulated times, and the device that was fitted."""
    recipe = load(options.recipe, options.overrides, options.profile)
    ranks, fix = recipe.parallel.tensor, "set it to 2 or more, and parallel.pipeline to 1"
    if ranks < 2 or recipe.parallel.pipeline > 1:
        raise RecipeError("parallel.tensor", "ranks are held against one", fix, value=ranks)
    check_cpu(recipe)
    (rounds, sums, read_gb_per_s), *_ = in_ranks(recipe, body, options.requests, options.rounds)
    config = model_config(recipe)
    base = SimulatedDevice.load(device_name(recipe, None))
    device = fitted_device(base, config, [each for one, _ in rounds for each in one], read_gb_per_s)
    device = with_links(device, ranks, sums)
    rows = {
        name: compared(Roofline(config, device, tensor), [pair[at] for pair in rounds])
        for at, (name, tensor) in enumerate((("1", 1), (str(ranks), ranks)))
    }
    fields = ("tflop_per_s", "memory_gb_per_s", "host_us", "row_us", "link_us", "link_gb_per_s")
    said = asdict(device)
    found = {
        "requests": options.requests,
        "ranks": rows,
        "device": {name: said[name] for name in fields} | {"tflop_per_s": said["tflop_per_s"][config.dtype]},
        "sums": [{"bytes": num_bytes, "us": round(1e6 * seconds, 1)} for num_bytes, seconds in sums],
    }
    return {"ranks": found}


def print_table(result: Mapping[str, Any]) -> None:
    """Print a Markdown row for each number of ranks."""
    found = result["ranks"]
    device = found["device"]
    print(
        f"{found['requests']} requests; one rank is as {device['tflop_per_s']:.3f} TFLOP/s,"
        f" {device['memory_gb_per_s']:.1f} GB/s and {device['host_us']:.0f} us of the host a step and"
        f" {device['row_us']:.0f} a row, and a sum as hops of {device['link_us']:.0f} us and"
        f" {device['link_gb_per_s']:.2f} GB/s\n"
    )
    rows = [
        (name, f"{row['seconds']:.2f}", f"{row['simulated_seconds']:.2f}", f"{row['error']:+.1%}",
         f"{row['error_of_a_step']:.1%}")
        for name, row in found["ranks"].items()
    ]  # fmt: skip
    print(markdown(("ranks", "measured, s", "simulated, s", "error", "of a step, median"), rows))
