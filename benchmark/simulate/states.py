"""Compare what must be computed of prompts by where a model's recurrent states are kept, on five workloads.

Ours is the real scheduler on a simulated device, with the default of `cache.state_fraction` and with the best
of several fractions, beside what pages in the rest of the memory would find if no states were needed, and
what could be found in all of it by whoever knows the turns to come. Rules of other engines run in a loop
without a scheduler, each with the best of the same fractions. Sizes are those of Qwen3-Next-80B-A3B; memory
is that for pages and kept states, without one state for each running request.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmark.options import markdown
from benchmark.simulate.deployment import SIMULATED
from continuous_batching.scheduling.scheduler import Scheduler
from recipes.assembly.memory_plan import GIB
from recipes.assembly.scheduler import SchedulerLimits, scheduler_of
from recipes.schema.recipe import CacheSection
from recipes.schema.scheduler_section import SchedulerSection
from simulation.shared_prompts import FULL_COUNTS, VOCAB_SIZE, WORKLOADS, Turn
from simulation.state_rules import (
    SGLANG,
    STATELESS,
    UNBOUNDED,
    VLLM,
    VLLM_BRANCHES,
    SplitMemory,
    foreseen_share,
    ruled_share,
    served_share,
)

PAGE_TOKENS, STEP_TOKENS = 128, 2048
FRACTIONS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.75)
PEERS = (VLLM, VLLM_BRANCHES, SGLANG)
SEEDS = (40,)
Row = dict[str, Any]

NO_HOST = SplitMemory(0, 0)


def scheduler(
    turns: Sequence[Turn], memory: SplitMemory, num_slots: int, host: SplitMemory = NO_HOST
) -> Scheduler:
    """Return a scheduler as a recipe makes it, with so much memory for pages and kept states.

    What is evicted comes to rest in the memory of the `host`, if there is any.
    """
    most = max(len(turn.prompt) + len(turn.answer) for turn in turns)
    limits = SchedulerLimits(
        num_pages=memory.num_tokens // PAGE_TOKENS + 1,
        num_host_pages=host.num_tokens // PAGE_TOKENS + 1 if host.num_tokens else 0,
        longest_tokens=-(-most // PAGE_TOKENS) * PAGE_TOKENS,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        max_shared_tokens=None,
        num_states=memory.num_states + num_slots + 1,
        num_host_states=host.num_states + 1 if host.num_states else 0,
    )
    section = SchedulerSection(num_slots=num_slots, max_batch_tokens=STEP_TOKENS)
    return scheduler_of(section, CacheSection(page_size=PAGE_TOKENS, num_pages=limits.num_pages), limits)


def shares(
    turns: Sequence[Turn], memory_gib: int, fractions: Sequence[float], num_slots: int, host_gib: int = 0
) -> Row:
    """Return the shares of one workload in one memory; those of the scheduler, and of its pages, by fraction.

    The scheduler alone has a host tier of `host_gib`, which it divides as the device's memory. Rules of other
    engines have the split of the memory that is best for them.
    """
    num_bytes, split = memory_gib * GIB, SplitMemory.split

    def served(fraction: float) -> float:
        memory, host = split(num_bytes, fraction), split(host_gib * GIB, fraction)
        return served_share(turns, scheduler(turns, memory, num_slots, host))

    return {
        "everything kept": ruled_share(turns, STATELESS, UNBOUNDED),
        STATELESS.name: ruled_share(turns, STATELESS, split(num_bytes, 0.0)),
        "all foreseen": foreseen_share(turns, num_bytes),
        "pages alone": {each: ruled_share(turns, STATELESS, split(num_bytes, each)) for each in fractions},
        "ours": {each: served(each) for each in fractions},
        **{
            rule.name: min(ruled_share(turns, rule, split(num_bytes, each)) for each in FRACTIONS)
            for rule in PEERS
        },
    }


def run(options: argparse.Namespace) -> Row:
    """Return the means over the seeds, for each workload and memory."""
    default = CacheSection.__dataclass_fields__["state_fraction"].default
    assert isinstance(default, float), "the default fraction is a number"
    fractions = sorted({default, *FRACTIONS})
    seeds = options.seeds or SEEDS
    rows = []
    for name, draw in WORKLOADS.items():
        drawn = [draw(np.random.default_rng(seed), FULL_COUNTS[name]) for seed in seeds]
        for memory_gib in options.memory_gib:
            asked = memory_gib, fractions, options.slots, options.host_gib
            found = [shares(turns, *asked) for turns in drawn]
            rows.append({"workload": name, "memory_gib": memory_gib, **mean(found)})
    return {
        "SIMULATED": SIMULATED,
        "seeds": list(seeds),
        "slots": options.slots,
        "host_gib": options.host_gib,
        "default_fraction": default,
        "rows": rows,
    }


def mean(found: Sequence[Mapping[str, Any]]) -> Row:
    """Return the means of the shares of several draws of one workload."""

    def of(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Mapping):
            return {key: of([each[key] for each in values]) for key in values[0]}
        return round(float(np.mean(values)), 4)

    means: Row = of(found)
    return means


def print_table(result: Mapping[str, Any]) -> None:
    """Print a line for each workload and memory, in percent of all prompt tokens."""
    default = result["default_fraction"]
    seeds = ", ".join(map(str, result["seeds"]))
    host = f", ours with a host tier of {result['host_gib']} GiB" if result["host_gib"] else ""
    print(f"SIMULATED: {result['SIMULATED']}; percent of prompt tokens computed, seeds {seeds}{host}")
    peers = [each.name for each in PEERS]
    heads = ["workload", "GiB", "everything kept", STATELESS.name, "all foreseen"]
    heads += ["ours, best split", "its pages alone", f"ours, {default:g} for states", "the default loses"]
    lines = []
    for row in result["rows"]:
        best = min(row["ours"], key=lambda each: (row["ours"][each], each != default))
        ours, best_ours = row["ours"][default], row["ours"][best]
        bounds = [row["everything kept"], row[STATELESS.name], row["all foreseen"]]
        shown = [*bounds, best_ours, row["pages alone"][best], ours]
        cells = [f"{100 * each:.1f}" for each in [*shown, ours - best_ours, *(row[each] for each in peers)]]
        cells[len(bounds)] += f" ({best:g})"
        lines.append([row["workload"], row["memory_gib"], *cells])
    print(markdown([*heads, *peers], lines))
