"""Measure what a step costs the host.

The real scheduler, slot table and batch inputs run with a device that answers at once. Pure decode: every
slot holds a context of 1,000 to 1,300 tokens and gets one random token a step; the same is measured beside
each proposer of drafts, which finds nothing to guess and so costs the most without a gain. With a chunk: one
slot works on prompts of 16 chunks each, so that a step also computes and publishes a chunk, and every 16th
step admits and ends a request; prompts are hashed before, as a server does in another thread. Work that
proposers do every few steps shows in the median of the means of many consecutive steps. The same decodes are
measured with recurrent states, of which there is room for those that prompts and answers leave, in turns with
steps without: the median of the ratios of both counts.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmark.options import verdict_line
from continuous_batching.batch import Sampled
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Throughput
from continuous_batching.speculation.proposer import NGram, Proposer
from continuous_batching.speculation.speculation import Speculation
from continuous_batching.speculation.suffix import Suffix
from continuous_batching.step_time import StepTime
from kv_cache.pages import PagePool
from kv_cache.states import StateGroup

VOCAB_SIZE = 32_000
CONTEXT_TOKENS = (1000, 1300)
CHUNKS_PER_PROMPT = 16
PROPOSERS: dict[str, Callable[[SlotPool], Proposer]] = {"ngram": NGram, "suffix": Suffix}
MOST_DRAFTS = 4
STATES_OF_A_SLOT = 4  # the live one, that of its prompt's end, its answer's last, and one to spare
STEPS_OF_A_RUN = 100  # more steps than proposers skip between two looks at many rows


def full_scheduler(
    num_slots: int,
    page_size: int,
    num_steps: int,
    chunk_tokens: int,
    proposer: str | None = None,
    *,
    has_states: bool = False,
) -> Scheduler:
    """Return a scheduler whose slots all decode, except one if there are chunks to compute."""
    random = np.random.default_rng(0)
    num_busy = num_slots - bool(chunk_tokens)
    context_tokens = CONTEXT_TOKENS[1] + num_steps + 8
    prompt_tokens = chunk_tokens * CHUNKS_PER_PROMPT + 1
    num_pages = num_busy * -(-context_tokens // page_size) + 2 * -(-prompt_tokens // page_size)
    states = PagePool(1 + STATES_OF_A_SLOT * num_slots)
    group = StateGroup(1, page_size, num_slots, states, None, 1 + num_pages, 0)
    scheduler = Scheduler(
        SlotPool(num_slots, max(context_tokens, prompt_tokens), page_size),
        PagePool(1 + num_pages),
        StallFree(),
        max_batch_tokens=num_slots * CONTEXT_TOKENS[1],  # lets one step compute all contexts
        vocab_size=VOCAB_SIZE,
        groups=[group] if has_states else [],
    )
    if proposer is not None:
        slots = scheduler.slots
        scheduler.step_time = StepTime()
        lengths = Throughput(slots, scheduler.step_time)
        scheduler.speculation = Speculation(slots, PROPOSERS[proposer](slots), lengths, MOST_DRAFTS)
    params = SamplingParams(max_tokens=num_steps + 8, temperature=0.0)
    for number in range(num_busy):
        prompt = random.integers(0, VOCAB_SIZE, int(random.integers(*CONTEXT_TOKENS))).astype(np.int32)
        scheduler.add(Request(str(number), prompt, params))
    step_us(scheduler, random)
    assert len(scheduler.slots.busy) == num_busy, "not every slot decodes"
    assert not scheduler.lifecycle.matching.blocked, "prompts wait for each other"
    scheduler.max_batch_tokens = num_busy + chunk_tokens
    return scheduler


def step_us(scheduler: Scheduler, random: np.random.Generator) -> float:
    """Return the microseconds of one step's schedule, batch inputs and commit.

    They are of the processor, whose time other work on the machine disturbs least.
    """
    start = time.thread_time()
    batch = scheduler.schedule(start)
    scheduler.slots.inputs(batch)
    if scheduler.slots.state_pages is not None:
        scheduler.slots.state_pages[batch.slots].astype(np.int64)  # models/step/inputs.py reads them so
    scheduled = time.thread_time()
    sampled = Sampled(random.integers(0, VOCAB_SIZE, len(batch.sampled)))  # the device's work
    computed = time.thread_time()
    scheduler.commit(batch, sampled, computed)
    return 1e6 * (time.thread_time() - computed + scheduled - start)


def measure(
    num_slots: int, page_size: int, chunk_tokens: int, num_steps: int, proposer: str | None = None
) -> dict[str, Any]:
    """Return percentiles over the steps, of decodes only (`chunk_tokens` 0) or with a chunk of a prompt."""
    random = np.random.default_rng(1)
    scheduler = full_scheduler(num_slots, page_size, num_steps, chunk_tokens, proposer)
    if proposer is not None:
        step_us(scheduler, random)  # the first step stores all prompts
    prompts = []
    for number in range(num_steps // CHUNKS_PER_PROMPT + 1 if chunk_tokens else 0):
        prompt = random.integers(0, VOCAB_SIZE, chunk_tokens * CHUNKS_PER_PROMPT).astype(np.int32)
        prompts.append(Request(f"chunk {number}", prompt, SamplingParams(max_tokens=1)))
        prompts[-1].page_keys = scheduler.page_keys(prompts[-1])  # No server hashes in the engine's thread
    gc.collect()
    times_us = []
    for _ in range(num_steps):
        if chunk_tokens and len(scheduler.slots.busy) < num_slots:
            scheduler.add(prompts.pop())
        times_us.append(step_us(scheduler, random))
    return percentiles(times_us)


def percentiles(times_us: list[float]) -> dict[str, Any]:
    """Return what is shown of the steps' times, and these.

    `runs_us` is the median over means of `STEPS_OF_A_RUN` steps each, or over single steps if fewer exist.
    """
    times_us = [round(each, 1) for each in times_us]
    num_runs = len(times_us) // STEPS_OF_A_RUN
    runs_us = np.array(times_us[: num_runs * STEPS_OF_A_RUN]).reshape(-1, STEPS_OF_A_RUN).mean(axis=1)
    p50, p99 = np.percentile(times_us, [50, 99])
    found = {"p50_us": p50, "p99_us": p99, "runs_us": np.median(runs_us if num_runs else times_us)}
    return {**{name: round(float(each), 1) for name, each in found.items()}, "times_us": times_us}


def measure_states(num_slots: int, page_size: int, num_steps: int) -> dict[str, Any]:
    """Return percentiles over steps of decodes with states, and how they compare with steps without."""
    random = np.random.default_rng(1)
    plain, kept = (
        full_scheduler(num_slots, page_size, num_steps, 0, has_states=has) for has in (False, True)
    )
    gc.collect()
    pairs = [(step_us(plain, random), step_us(kept, random)) for _ in range(num_steps)]
    ratio = round(statistics.median(kept_us / plain_us for plain_us, kept_us in pairs), 3)
    return {**percentiles([kept_us for _, kept_us in pairs]), "times_the_plain": ratio}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each number of slots and page size."""
    num_steps, chunk, rows = options.steps, options.chunk, []
    for num_slots, page_size in itertools.product(options.slots, options.page_sizes):
        row: dict[str, Any] = {"slots": num_slots, "page_size": page_size}
        row["decode"] = measure(num_slots, page_size, 0, num_steps)
        for name in PROPOSERS:
            row[f"decode_beside_{name}"] = measure(num_slots, page_size, 0, num_steps, name)
        row["decode_with_states"] = measure_states(num_slots, page_size, num_steps)
        row[f"decode_and_{chunk}_token_chunk"] = measure(num_slots, page_size, chunk, num_steps)
        rows.append(row)
    return {"host": rows}


def print_table(result: Mapping[str, Any]) -> None:
    """Print a row for each number of slots and page size."""
    columns = [name for name in result["host"][0] if name not in ("slots", "page_size")]
    titles = "".join(name.replace("_", " ").rjust(34) for name in columns)
    print("µs, p50 / p99 / runs".ljust(24) + titles)
    for row in result["host"]:
        parts = [[str(row[name][part]) for part in ("p50_us", "p99_us", "runs_us")] for name in columns]
        cells = "".join(" / ".join(each).rjust(34) for each in parts)
        print(f"{row['slots']:>6} slots, page {row['page_size']}".ljust(24) + cells)
        print(f"{'':>24}with states: {row['decode_with_states']['times_the_plain']} times without")
    print(verdict_line(result["verdict"]))
