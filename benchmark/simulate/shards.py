"""Simulate thousands of engines under millions of requests.

A router that takes the engines in turn makes them independent: each is simulated alone, in one of several
processes, from its first request to its last, and then dropped. The load is drawn, not read: a process keeps
16 bytes for each request of all engines, and no token. With a sample, only the drawn engines are simulated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from benchmark.gate.gate import with_verdict
from benchmark.processes import process_pool
from benchmark.simulate.deployment import SIMULATED
from benchmark.simulate.fleet_estimates import draw, estimates
from benchmark.simulate.placement import place
from benchmark.workloads.lengths import lengths
from continuous_batching.request import Request, SamplingParams
from recipes.assembly.scheduler import SchedulerLimits, scheduler_of
from recipes.schema.reader import read
from recipes.schema.recipe import CacheSection
from recipes.schema.scheduler_section import SchedulerSection
from simulation.run_totals import RunTotals
from simulation.runner import CostModel
from simulation.serve import serve


@dataclass(frozen=True, slots=True)
class Drawn:
    """Poisson arrivals, and lengths as `scripts.trace` names them."""

    count: int
    rate_per_s: float
    prompt_tokens: str
    output_tokens: str
    seed: int

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return arrival times, prompts' lengths and answers' lengths."""
        arrival, prompt, output = (np.random.default_rng([self.seed, each]) for each in range(3))
        times_s = np.cumsum(arrival.exponential(1 / self.rate_per_s, self.count))
        num_prompt = lengths(self.prompt_tokens)(prompt, self.count).astype(np.int32)
        return times_s, num_prompt, lengths(self.output_tokens)(output, self.count).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Shard:
    """Groups of engines, by their numbers among `replicas`."""

    groups: list[list[int]]
    replicas: int
    drawn: Drawn
    asked: SchedulerSection
    cache: CacheSection
    limits: SchedulerLimits
    costs: CostModel


def run(shard: Shard) -> list[RunTotals]:
    """Return the totals of each group's requests."""
    columns = shard.drawn.columns()
    return [_run(shard, group, columns) for group in shard.groups]


def _run(shard: Shard, group: list[int], columns: tuple[np.ndarray, np.ndarray, np.ndarray]) -> RunTotals:
    totals, zeros = RunTotals(), np.zeros(shard.limits.longest_tokens, dtype=np.int32)
    for replica in group:
        times_s, num_prompt, num_output = (each[replica :: shard.replicas].tolist() for each in columns)

        def requests(
            times_s: list[float] = times_s, prompts: list[int] = num_prompt, outputs: list[int] = num_output
        ) -> Iterator[Request]:
            for index, (at_s, prompt, output) in enumerate(zip(times_s, prompts, outputs)):
                yield Request(str(index), zeros[:prompt], params(output), arrival_s=at_s)

        scheduler = scheduler_of(shard.asked, shard.cache, shard.limits)
        totals.merge(serve(requests(), scheduler, shard.costs, overlap=shard.asked.overlap))
    return totals


@lru_cache(maxsize=4096)
def params(max_tokens: int) -> SamplingParams:
    """Return the sampling parameters of an answer of so many tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def fleet_main(options: argparse.Namespace) -> dict[str, object]:
    """Simulate a fleet and return its figures; raises ValueError for what is not possible."""
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    planned = place(recipe, options.device, options.tp)
    drawn = Drawn(options.requests, options.rate, options.prompt_tokens, options.output_tokens, options.seed)
    cache, limits = replace(recipe.cache, prefix_sharing=False), planned.limits()
    count = options.sample or options.dp
    if count > options.dp or count < 2 <= options.dp:
        raise ValueError(f"--sample is {count}; it must be from 2 to --dp ({options.dp})")
    groups = draw(options.dp, count, options.seed)
    each_one = [groups[number :: options.processes] for number in range(options.processes)]
    shards = [
        Shard(part, options.dp, drawn, recipe.scheduler, cache, limits, planned.costs()) for part in each_one
    ]
    began_s = time.perf_counter()
    with process_pool(options.processes) as processes:
        all_totals = [totals for found in processes.map(run, shards) for totals in found]
    took_s = time.perf_counter() - began_s
    totals = RunTotals()
    sampled: dict[str, object] = {}
    for each in all_totals:
        totals.merge(each)
    if count < options.dp:
        sampled = {
            "SAMPLED": f"{count} of {options.dp} engines; figures are theirs, but where `fleet` estimates"
            " those of all, with intervals of 95 %",
            **estimates(all_totals, count, options.dp),
        }
    return with_verdict(
        {
            "SIMULATED": SIMULATED,
            **sampled,
            "recipe": options.recipe,
            "overrides": list(options.overrides),
            **planned.facts(),
            "devices": planned.num_devices * count,
            "slots": recipe.scheduler.num_slots * count,
            "max_tokens_per_step": 1,
            "warm_up_counted": 0,
            **totals.figures(),
            "wall_s": round(took_s, 3),
            "simulated_output_tokens_per_wall_s": round(totals.output_tokens / took_s),
            "simulated_requests_per_wall_s": round(totals.requests / took_s, 1),
        }
    )
