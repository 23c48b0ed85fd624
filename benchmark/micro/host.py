"""Measure what a step costs the host.

The real scheduler, slot table and batch inputs run with a device that answers at once. Pure decode: every
slot holds a context of 1,000 to 1,300 tokens and gets one random token a step; the same is measured beside
each proposer of drafts, which finds nothing to guess and so costs the most without a gain. With a chunk: one
slot works on prompts of 16 chunks each, so that a step also computes and publishes a chunk, and every 16th
step admits and ends a request. Work that proposers do every few steps shows in the median of the means of
many consecutive steps.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark.gate.gate import with_verdict
from benchmark.micro import queues
from benchmark.options import add_json, show, verdict_line
from benchmark.run_clock import RunClock
from continuous_batching.batch import Sampled
from continuous_batching.policies.stall_free import StallFree
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.ngram import NGram
from continuous_batching.speculation.proposer import Proposer
from continuous_batching.speculation.speculation import Speculation
from continuous_batching.speculation.suffix import Suffix
from continuous_batching.speculation.throughput import Throughput
from continuous_batching.step_time import StepTime
from kv_cache.pages import PagePool
from recipes.assembly import versions
from recipes.schema.numbers import MOST_COUNT, whole, wholes

VOCAB_SIZE = 32_000
CONTEXT_TOKENS = (1000, 1300)
CHUNKS_PER_PROMPT = 16


PROPOSERS: dict[str, Callable[[SlotPool], Proposer]] = {"ngram": NGram, "suffix": Suffix}
MOST_DRAFTS = 4
STEPS_OF_A_RUN = 100  # more steps than proposers skip between two looks at many rows


def full_scheduler(
    num_slots: int, page_size: int, num_steps: int, chunk_tokens: int, proposer: str | None = None
) -> Scheduler:
    """Return a scheduler whose slots all decode, except one if there are chunks to compute."""
    random = np.random.default_rng(0)
    num_busy = num_slots - bool(chunk_tokens)
    context_tokens = CONTEXT_TOKENS[1] + num_steps + 8
    prompt_tokens = chunk_tokens * CHUNKS_PER_PROMPT + 1
    num_pages = num_busy * -(-context_tokens // page_size) + 2 * -(-prompt_tokens // page_size)
    scheduler = Scheduler(
        SlotPool(num_slots, max(context_tokens, prompt_tokens), page_size),
        PagePool(1 + num_pages),
        StallFree(),
        max_batch_tokens=num_slots * CONTEXT_TOKENS[1],  # lets one step compute all contexts
        vocab_size=VOCAB_SIZE,
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
    scheduler.max_batch_tokens = num_slots + chunk_tokens
    return scheduler


def step_us(scheduler: Scheduler, random: np.random.Generator) -> float:
    """Return the microseconds of one step's schedule, batch inputs and commit."""
    start = time.perf_counter()
    batch = scheduler.schedule(start)
    scheduler.slots.inputs(batch)
    scheduled = time.perf_counter()
    sampled = Sampled(random.integers(0, VOCAB_SIZE, len(batch.sampled)))  # the device's work
    computed = time.perf_counter()
    scheduler.commit(batch, sampled, computed)
    return 1e6 * (time.perf_counter() - computed + scheduled - start)


def median_of_runs(times: NDArray[np.float64]) -> float:
    """Return the median over means of `STEPS_OF_A_RUN` steps each, or over single steps if fewer exist."""
    runs = times[: len(times) // STEPS_OF_A_RUN * STEPS_OF_A_RUN].reshape(-1, STEPS_OF_A_RUN)
    return float(np.median(runs.mean(axis=1) if len(runs) else times))


def measure(
    num_slots: int, page_size: int, chunk_tokens: int, num_steps: int, proposer: str | None = None
) -> dict[str, Any]:
    """Return percentiles over the steps, of decodes only (`chunk_tokens` 0) or with a chunk of a prompt."""
    random = np.random.default_rng(1)
    scheduler = full_scheduler(num_slots, page_size, num_steps, chunk_tokens, proposer)
    if proposer is not None:
        step_us(scheduler, random)  # the first step stores all prompts
    gc.collect()
    times_us = []
    for number in range(num_steps):
        if chunk_tokens and len(scheduler.slots.busy) < num_slots:
            prompt = random.integers(0, VOCAB_SIZE, chunk_tokens * CHUNKS_PER_PROMPT).astype(np.int32)
            scheduler.add(Request(f"chunk {number}", prompt, SamplingParams(max_tokens=1)))
        times_us.append(step_us(scheduler, random))
    times_us = [round(each, 1) for each in times_us]
    p50, p99 = np.percentile(times_us, [50, 99])
    found = {"p50_us": p50, "p99_us": p99, "runs_us": median_of_runs(np.array(times_us))}
    return {**{name: round(float(each), 1) for name, each in found.items()}, "times_us": times_us}


def run(
    slots: list[int], page_sizes: list[int], chunk_tokens: int, num_steps: int
) -> list[dict[str, object]]:
    """Return one row for each number of slots and page size."""
    return [
        {
            "slots": num_slots,
            "page_size": page_size,
            "decode": measure(num_slots, page_size, 0, num_steps),
            **{
                f"decode_beside_{name}": measure(num_slots, page_size, 0, num_steps, name)
                for name in PROPOSERS
            },
            f"decode_and_{chunk_tokens}_token_chunk": measure(num_slots, page_size, chunk_tokens, num_steps),
        }
        for num_slots in slots
        for page_size in page_sizes
    ]


def print_table(result: dict[str, Any]) -> None:
    """Print a row for each number of slots and page size."""
    rows = result["host"]
    columns = [name for name in rows[0] if name not in ("slots", "page_size")]
    print("µs, p50 / p99 / runs".ljust(24) + "".join(name.replace("_", " ").rjust(34) for name in columns))
    for row in rows:
        texts = [
            " / ".join(str(row[name][part]) for part in ("p50_us", "p99_us", "runs_us")) for name in columns
        ]
        print(
            f"{row['slots']:>6} slots, page {row['page_size']}".ljust(24)
            + "".join(text.rjust(34) for text in texts)
        )
    print(verdict_line(result["verdict"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `host`."""
    add = parser.add_argument
    add("--slots", type=wholes(2, 2**16), default=[64, 256, 1024, 4096], metavar="N,N,...")
    add("--page-sizes", type=wholes(1, 2**16), default=[16, 128], metavar="N,N,...")
    add("--chunk", type=whole(0, 2**16), default=512, metavar="TOKENS", help="the new prompt in each step")
    add("--steps", type=whole(1, MOST_COUNT), default=300, metavar="N")
    add(
        "--waiting",
        type=whole(1, MOST_COUNT),
        metavar="N",
        help="instead: under each policy and order, while so many wait",
    )
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    described, clock = {"benchmark": "host", "machine": versions.describe()}, RunClock()
    if options.waiting is None:
        rows = run(options.slots, options.page_sizes, options.chunk, options.steps)
        show(with_verdict({**described, "clock": clock.read(), "host": rows}), options, print_table)
        return
    waited = {str(each): list(queues.run(each, options.waiting, options.steps)) for each in options.slots}
    timed = {"clock": clock.read(), "waiting": options.waiting, "slots": waited}
    result = with_verdict({**described, **timed})
    show(result, options, lambda each: queues.print_table(each, options.waiting))
