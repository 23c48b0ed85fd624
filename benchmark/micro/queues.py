"""Measure what a step costs the host under each policy and queue order, while many requests wait.

Every slot is busy and requests come and go: about one decode of each step is its request's last, and a new
request is added for each that is admitted (outside the measured time, as hashing is off the step). The device
answers at once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmark.options import verdict_line
from continuous_batching.batch import Sampled
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from recipes.assembly.scheduler import SchedulerLimits, scheduler_of
from recipes.schema.recipe import CacheSection
from recipes.schema.scheduler_section import SchedulerSection

VOCAB_SIZE = 32_000
PAGE_SIZE = 16
PROMPT_TOKENS = (16, 112)
STEP_S = 0.02  # seconds of virtual time
BASE = "stall_free, fcfs"


def variants(num_slots: int) -> dict[str, dict[str, Any]]:
    """Return the scheduler's keys for each row; the others are compared with the first."""
    chunks = {"min_chunk_tokens": 32, "max_chunk_tokens": 512}
    return {
        BASE: {},
        "stall_free, sjf": {"queue": "sjf"},
        "stall_free, priority": {"queue": "priority"},
        "stall_free, priority, outrank": {"queue": "priority", "outrank": True},
        "stall_free, deadline": {"queue": "deadline", "deadline_s": 60.0},
        "stall_free, fcfs, tenants": {"fair_tenants": True},
        "stall_free, priority, tenants": {"queue": "priority", "fair_tenants": True},
        "stall_free, fcfs, long prompts": {"max_long_prefills": 2, "long_prompt_tokens": 96},
        "stall_free, dynamic": {"chunk": "dynamic", **chunks, "chunk_stages": 4, "staged_tokens": 512},
        "stall_free, adaptive": {"chunk": "adaptive", **chunks, "target_itl_ms": 50.0},
        "split, fcfs": {"policy": "split", "prompt_share": 0.5},
        "prefill_first, fcfs": {"policy": "prefill_first"},
        "orca, fcfs": {"policy": "orca"},
        "static, fcfs": {"policy": "static", "batch_size": num_slots, "max_wait_ms": 0.0},
    }


class Bench:
    """A scheduler that is kept full."""

    def __init__(self, num_slots: int, num_waiting: int, keys: dict[str, Any]) -> None:
        self._random = np.random.default_rng(0)
        # This mean lets one request of num_slots end in each step.
        self._answer = (num_slots // 2, num_slots + num_slots // 2)
        longest = PROMPT_TOKENS[1] + self._answer[1]
        budget = max(2 * num_slots, longest) + 512
        asked = SchedulerSection(num_slots=num_slots, max_batch_tokens=budget, **keys)
        pages = 1 + num_slots * -(-longest // PAGE_SIZE)
        limits = SchedulerLimits(pages, 0, longest, VOCAB_SIZE, (), None)
        self.scheduler: Scheduler = scheduler_of(
            asked, CacheSection(page_size=PAGE_SIZE, num_pages=pages), limits
        )
        self._num_waiting = num_waiting
        self._number = 0
        self._now_s = 0.0

    def fill(self) -> None:
        """Fill the queue to its length."""
        random = self._random
        while len(self.scheduler.waiting) < self._num_waiting:
            self._number += 1
            params = SamplingParams(max_tokens=int(random.integers(*self._answer)), temperature=0.0)
            prompt = random.integers(0, VOCAB_SIZE, int(random.integers(*PROMPT_TOKENS))).astype(np.int32)
            request = Request(
                str(self._number),
                prompt,
                params,
                tenant=f"tenant {random.integers(100)}",
                priority=int(random.integers(-2, 3)),
                arrival_s=self._now_s,
            )
            self.scheduler.add(request)

    def step_us(self) -> float:
        """Return the microseconds of one step's schedule, batch inputs and commit."""
        self.fill()
        self._now_s += STEP_S
        start = time.perf_counter()
        self.scheduler.expire(self._now_s)
        batch = self.scheduler.schedule(self._now_s)
        self.scheduler.slots.inputs(batch)
        scheduled = time.perf_counter()
        sampled = Sampled(np.full(len(batch.sampled), 7, dtype=np.int64))  # the device's work
        self._now_s += STEP_S
        computed = time.perf_counter()
        self.scheduler.commit(batch, sampled, self._now_s)
        return 1e6 * (time.perf_counter() - computed + scheduled - start)


def run(num_slots: int, num_waiting: int, num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield one row for each variant: microseconds of a step, also relative to the first variant."""
    base_us = 0.0
    for name, keys in variants(num_slots).items():
        bench = Bench(num_slots, num_waiting, keys)
        for _ in range(2 * num_slots):  # runs until requests end at every step
            bench.step_us()
        gc.collect()
        times_us = [bench.step_us() for _ in range(num_steps)]
        p50, p99 = np.percentile(times_us, [50, 99])
        mean_us = float(np.mean(times_us))
        base_us = base_us or mean_us
        yield {
            "variant": name,
            "mean_us": round(mean_us, 1),
            "p50_us": round(float(p50), 1),
            "p99_us": round(float(p99), 1),
            "times_the_first": round(mean_us / base_us, 2),
            "times_us": [round(each, 1) for each in times_us],
        }


def print_table(result: Mapping[str, Any], num_waiting: int) -> None:
    """Print the rows of each number of slots."""
    for num_slots, variants_of in result["slots"].items():
        head = f"{num_slots} slots, {num_waiting} waiting"
        print(head.ljust(36) + "µs a step: mean, p50, p99; times the first")
        for row in variants_of:
            name, *figures = (value for part, value in row.items() if part != "times_us")
            print(f"  {name}".ljust(36) + "".join(f"{figure:>10}" for figure in figures))
    print(verdict_line(result["verdict"]))
