"""Measure the latency of one batch of requests repeatedly, in the terms of `vllm bench latency`.

The engine is in this process. --batch-size requests of one size come at once; the latency is the time until
the last has ended, in seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmark.gate.gate import with_verdict
from benchmark.offline import offline
from benchmark.offline.accounts import hardware
from benchmark.offline.throughput import jobs
from benchmark.offline.timeline import Timeline, summarise
from benchmark.options import add_json, print_figures, show
from benchmark.run_clock import RunClock
from continuous_batching.request import Request
from recipes.assembly import versions
from recipes.assembly.engine import build
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import MOST_COUNT, MOST_SEED, MOST_TOKENS, whole
from recipes.schema.reader import read
from serving.answers.jobs import Job

PERCENTILES = (10, 25, 50, 75, 90, 99)
COLUMNS = (  # columns of one batch
    *("latency_s", "first_step_s", "wall_s", "ttft_ms", "tpot_ms", "e2e_ms"),
    *("steps", "mean_batch", "prompt_tokens", "output_tokens", "completed"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `latency`."""
    add_recipe(parser)
    add = parser.add_argument
    add("--batch-size", type=whole(1, MOST_COUNT), default=8, metavar="N")
    add("--input-len", type=whole(1, MOST_TOKENS), default=32, metavar="TOKENS")
    add("--output-len", type=whole(1, MOST_TOKENS), default=128, metavar="TOKENS")
    add("--num-iters", type=whole(1, MOST_COUNT), default=30, metavar="N", help="batches that are counted")
    add(
        "--num-iters-warmup",
        type=whole(0, MOST_COUNT),
        default=10,
        metavar="N",
        help="batches before, not counted",
    )
    add("--seed", type=whole(0, MOST_SEED), default=0)
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    built = build(recipe)
    engine = built.engine
    runs: list[dict[str, Any]] = []
    clock = RunClock()
    for number in range(options.num_iters_warmup + options.num_iters):
        size = (options.batch_size, options.input_len, options.output_len)
        batch = jobs(built, *size, options.seed)
        timeline, records = offline.serve(engine, None, batch)
        refused = [record["error"] for record in records if "error" in record]
        if refused:
            raise ValueError(f"{options.recipe} cannot serve such a batch: {refused[0]}")
        engine.forget_prefixes()
        if number == options.num_iters_warmup - 1:
            clock = RunClock()
        if number >= options.num_iters_warmup:
            requests = [job.request for job in batch if isinstance(job, Job)]
            runs.append(summarise(engine, requests, timeline) | by_the_wall(requests, timeline))
    where = versions.describe(built.device_name)
    result: dict[str, object] = {
        "recipe": options.recipe,
        "overrides": options.overrides,
        "machine": where,
        "batch_size": options.batch_size,
        "input_len": options.input_len,
        "output_len": options.output_len,
        **figures(runs),
        "clock": clock.read(),
        "batches": batches(runs),
        "warm_up_runs": options.num_iters_warmup,
        "warm_up_counted": 0,
        "max_tokens_per_step": 1,
        **hardware(built, recipe, where),
    }
    show(with_verdict(result), options, print_figures)


def by_the_wall(requests: Sequence[Request], timeline: Timeline) -> dict[str, float]:
    """Return the time from the arrival to the end of the first step, and from there to the last's.

    The second time is taken from the wall clock, the first from the engine's clock.
    """
    first, last = timeline.steps[0], timeline.steps[-1]
    arrival_s = min(request.arrival_s for request in requests)
    return {
        "first_step_s": round(first.end_s - arrival_s, 6),
        "wall_s": round(last.wall_s - first.wall_s, 6),
    }


def batches(runs: list[dict[str, Any]]) -> dict[str, object]:
    """Return one reading for each batch, against which the figures of all batches are checked."""

    def cell(run: dict[str, Any], name: str) -> object:
        found = run["duration_s"] if name == "latency_s" else run[name]
        return found.get("mean") if isinstance(found, dict) else found

    return {"columns": list(COLUMNS), "readings": [[cell(run, name) for name in COLUMNS] for run in runs]}


def figures(runs: list[dict[str, Any]]) -> dict[str, object]:
    """Return the latencies of the batches, and their summary."""
    latencies = [run["duration_s"] for run in runs]
    counts = {name: sum(run[name] for run in runs) for name in ("requests", "completed", "failed")}
    tokens = {name: sum(run[name] for run in runs) for name in ("prompt_tokens", "output_tokens")}
    spent_ms = [run["tpot_ms"]["mean"] for run in runs if run["tpot_ms"]]
    return {
        "avg_latency": round(float(np.mean(latencies)), 6),
        "latencies": latencies,
        "percentiles": {
            str(part): round(float(value), 6)
            for part, value in zip(PERCENTILES, np.percentile(latencies, PERCENTILES))
        },
        **counts,
        **tokens,
        "duration_s": round(sum(latencies), 4),
        "output_tokens_per_s": round(tokens["output_tokens"] / sum(latencies), 2),
        **({"tpot_ms": {"mean": round(float(np.mean(spent_ms)), 3)}} if spent_ms else {}),
    }
