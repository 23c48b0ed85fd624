"""Simulate thousands of engines under millions of requests, all of them or a sample.

A router that takes the engines in turn makes them independent: each is simulated alone, in one of several
processes, from its first request to its last, and then dropped. The load is drawn, not read: a process keeps
16 bytes for each request of all engines, and no token.

With a sample, only the drawn engines are simulated, each with exactly its own share of the fleet's requests.
Engines are drawn without replacement, so that only the draw is left to chance; the spread between groups of
them measures it. Intervals of means and totals are those of ratio estimators (Cochran 1977, chapter 6); those
of percentiles are Woodruff's (1952), which bound the share below a value. They use Student's t and are
narrowed by the share that was drawn: a sample of all engines has intervals of no width. The 99th percentile
of a few hundred requests, with three or four beyond it, gets an interval that is too narrow. Figures that
depend on the fleet's last request, its duration and throughput, are not in a sample and are not estimated.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from benchmark.gate.gate import with_verdict
from benchmark.options import recipe_of
from benchmark.processes import process_pool
from benchmark.simulate.deployment import SIMULATED, place
from benchmark.workloads.synthetic import lengths
from continuous_batching.request import Request, SamplingParams
from recipes.assembly.scheduler import SchedulerLimits, scheduler_of
from recipes.schema.recipe import CacheSection
from recipes.schema.scheduler_section import SchedulerSection
from simulation.replica import CostModel, serve
from simulation.run_totals import RunTotals, Sketch

MOST_GROUPS = 30
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NORMAL = 1.959964  # 95 % of a normal distribution lie within this bound on both sides
Estimate = dict[str, float]
Ends = tuple[float, float, float]  # a value, and the ends of its interval


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


def run_shard(shard: Shard) -> list[RunTotals]:
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


def run(options: argparse.Namespace) -> dict[str, object]:
    """Simulate a fleet and return its figures; raises ValueError for what is not possible."""
    recipe = recipe_of(options)
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
        all_totals = [totals for found in processes.map(run_shard, shards) for totals in found]
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


def draw(num_engines: int, count: int, seed: int) -> list[list[int]]:
    """Draw the numbers of `count` engines, in groups of nearly equal size."""
    order = np.random.default_rng([seed, num_engines]).permutation(num_engines)[:count]
    return [group.tolist() for group in np.array_split(order, min(count, MOST_GROUPS))]


def estimates(groups: Sequence[RunTotals], num_drawn: int, num_engines: int) -> dict[str, Estimate]:
    """Return figures of the fleet, each with its 95 % interval; at least two groups are needed."""
    times = student(len(groups) - 1) * math.sqrt(1 - num_drawn / num_engines)
    ends = {}
    for name in ("completed", "output_tokens"):
        sums = num_engines / num_drawn * np.array([float(getattr(each, name)) for each in groups])
        half = times * math.sqrt(len(groups) * sums.var(ddof=1))
        ends[name] = float(sums.sum()), float(sums.sum() - half), float(sums.sum() + half)
    for name in ("ttft", "tpot", "itl", "e2e"):
        for part, each in _durations([getattr(group, name) for group in groups], times).items():
            ends[f"{name}_ms {part}"] = each
    steps = [group.steps for group in groups]
    ends["mean_batch"] = _ratio([group.spans for group in groups], steps, times)
    ends["mean_page_use"] = _ratio([group.held_share for group in groups], steps, times)
    return {
        f"fleet {name}": dict(zip(("value", "low", "high"), (round(each, 4) for each in found)))
        for name, found in ends.items()
    }


def student(freedom: int) -> float:
    """Return the bound that holds 95 % of Student's t on both sides (Abramowitz and Stegun, 26.7.5)."""
    z = NORMAL
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / freedom + second / freedom**2 + third / freedom**3 + fourth / freedom**4


def _durations(sketches: Sequence[Sketch], times: float) -> dict[str, Ends]:
    """Return milliseconds; empty where the sketches hold no value."""
    whole = Sketch()
    for each in sketches:
        whole.merge(each)
    if not whole.count:
        return {}
    counts = [each.count for each in sketches]
    found = {"mean": _ratio([1e3 * each.total_s for each in sketches], counts, times)}
    for part, share in SHARES.items():
        value_s = whole.quantile_s(share)
        within = [each.count * each.share_within(value_s) for each in sketches]
        value, low, _ = _ratio(within, counts, times)
        shares = share, max(0.0, share - (value - low)), min(1.0, share + (value - low))
        middle, least, most = (1e3 * whole.quantile_s(each) for each in shares)
        found[part] = middle, least, most
    return found


def _ratio(above: Sequence[float], below: Sequence[float], times: float) -> Ends:
    """Return a ratio of sums over groups, and its ends at `times` standard errors."""
    tops, bottoms = np.array(above, dtype=np.float64), np.array(below, dtype=np.float64)
    total = max(1.0, float(bottoms.sum()))
    value = float(tops.sum()) / total
    rest = tops - value * bottoms
    half = times * math.sqrt(len(rest) / (len(rest) - 1) * float((rest**2).sum())) / total
    return value, value - half, value + half
