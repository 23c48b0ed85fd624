"""Measure the speed of the simulation itself.

Decode: every slot decodes from the first step to the last. Trace: Poisson arrivals of random lengths, with
and without prefix sharing; prompts are random, so that pages are hashed, published and evicted, and none is
found. Seconds are given as wall time and as CPU time of this process; on a busy machine only the CPU time is
meaningful.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from benchmark.gate.gate import with_verdict
from benchmark.options import add_json, show, verdict_line
from benchmark.run_clock import RunClock
from benchmark.simulate.placement import Placement, place
from benchmark.workloads.lengths import Draw, lengths
from continuous_batching.request import Request, SamplingParams
from recipes.assembly import versions
from recipes.assembly.scheduler import scheduler_of
from recipes.schema.numbers import MOST_COUNT, RATES_PER_S, real, whole
from recipes.schema.reader import read
from simulation.serve import serve

RECIPE = "recipes/bench/llama2_7b_cuda.yaml"
DEVICE, NUM_DEVICES = "ascend910b", 8
PROMPT_TOKENS, ANSWER_TOKENS = 300, 1000  # tokens of a request in the pure decode


def decodes(num_slots: int) -> Iterator[Request]:
    """Yield as many requests as slots, all there at the start and equally long."""
    for number in range(num_slots):
        yield Request(str(number), np.zeros(PROMPT_TOKENS, dtype=np.int32), _params(ANSWER_TOKENS))


def drawn(count: int, rate_per_s: float, prompt: Draw, output: Draw, vocab_size: int) -> Iterator[Request]:
    """Yield Poisson arrivals, each with a prompt of its own."""
    arrivals, prompts, outputs, tokens = (np.random.default_rng([0, each]) for each in range(4))
    times_s = np.cumsum(arrivals.exponential(1 / rate_per_s, count)).tolist()
    asked = zip(times_s, prompt(prompts, count).tolist(), output(outputs, count).tolist())
    for number, (at_s, num_prompt, num_output) in enumerate(asked):
        prompt_ids = tokens.integers(0, vocab_size, num_prompt, dtype=np.int32)
        yield Request(str(number), prompt_ids, _params(num_output), arrival_s=at_s)


def measure(planned: Placement, trace: Iterable[Request], *, sharing: bool) -> dict[str, object]:
    """Measure the speed of one run, without the time to build an engine."""
    cache = replace(planned.recipe.cache, prefix_sharing=sharing)
    scheduler = scheduler_of(planned.recipe.scheduler, cache, planned.limits())
    costs = planned.costs()
    gc.collect()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    totals = serve(trace, scheduler, costs)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return {
        "requests": totals.completed,
        "output_tokens": totals.output_tokens,
        "steps": totals.steps,
        "mean_batch": round(totals.spans / totals.steps, 1),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "output_tokens_per_wall_s": round(totals.output_tokens / wall_s),
        "output_tokens_per_cpu_s": round(totals.output_tokens / cpu_s),
    }


def print_table(result: dict[str, Any]) -> None:
    """Print a column for each run."""
    runs = result["simulation"]
    print("".ljust(28) + "".join(name.rjust(18) for name in runs))
    for name in next(iter(runs.values())):
        print(name.ljust(28) + "".join(f"{run[name]:,}".rjust(18) for run in runs.values()))
    print(verdict_line(result["verdict"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `simulation`."""
    add = parser.add_argument
    add("--slots", type=whole(1, 2**16), default=256, metavar="N")
    add("--requests", type=whole(1, MOST_COUNT), default=23_608, metavar="N", help="of the drawn trace")
    add("--rate", type=real(*RATES_PER_S), default=20.0, metavar="R", help="its requests a second")
    add("--prompt-tokens", type=lengths, default="lognormal:300:0.8", metavar="DRAW")
    add("--output-tokens", type=lengths, default="lognormal:182:0.8", metavar="DRAW")
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    """Measure the three runs."""
    clock = RunClock()
    slots = f"scheduler.num_slots={options.slots}"
    planned = place(read(RECIPE, ["model.dtype=float16", slots], None).recipe, DEVICE, NUM_DEVICES)
    asked = options.requests, options.rate, options.prompt_tokens, options.output_tokens
    runs = {"decode": measure(planned, decodes(options.slots), sharing=False)}
    for name, sharing in (("trace", False), ("trace, sharing", True)):
        runs[name] = measure(planned, drawn(*asked, planned.config.vocab_size), sharing=sharing)
    described = {"benchmark": "simulation", "machine": versions.describe(), "clock": clock.read()}
    show(with_verdict({**described, "simulation": runs}), options, print_table)


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
