"""A step over decodes works on columns of the slot table where they lie, and copies no row and no context."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from benchmark.micro import host
from benchmark.micro.host import full_scheduler, step_us
from continuous_batching.scheduling.scheduler import Scheduler

NUM_STEPS = 40
RANDOM = np.random.default_rng(0)


def decoding(num_slots: int) -> Scheduler:
    """A scheduler whose slots all decode."""
    scheduler = full_scheduler(num_slots, 16, NUM_STEPS, 0)
    step_us(scheduler, RANDOM)
    return scheduler


def num_calls(scheduler: Scheduler) -> int:
    """How many functions a step enters, Python's and C's."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection enters functions of what earlier tests have left
    sys.setprofile(note)
    try:
        step_us(scheduler, RANDOM)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def peak_bytes(scheduler: Scheduler) -> int:
    """The most that a step holds at once, beside what was there before it."""
    tracemalloc.start()
    try:
        step_us(scheduler, RANDOM)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def least(measure: Callable[[Scheduler], int], scheduler: Scheduler) -> int:
    """Of some steps: one in which rows take new pages does more."""
    return min(measure(scheduler) for _ in range(8))


def test_a_step_enters_as_many_functions_however_many_slots_decode() -> None:
    assert least(num_calls, decoding(256)) == least(num_calls, decoding(1024))


def test_a_step_holds_some_numbers_a_slot_however_long_the_contexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_slots, peaks = 512, []
    for context in (200, 1000):
        monkeypatch.setattr(host, "CONTEXT_TOKENS", (context, context + 100))
        peaks.append(least(peak_bytes, decoding(num_slots)))
    # a copy of a column is 4 or 8 bytes a slot; one of the table would be 1,400 and 5,000, as its rows are
    assert max(peaks) < 20 * 8 * num_slots
    assert peaks[1] < 1.05 * peaks[0]


def test_a_batch_of_decodes_is_the_table_s_own_rows() -> None:
    scheduler = decoding(64)
    slots = scheduler.slots
    batch = scheduler.schedule(0.0)
    assert batch.slots is slots.busy
    assert np.shares_memory(slots.inputs(batch).positions, batch.starts)


def test_states_kept_of_answers_add_few_functions_to_a_step() -> None:
    """Once each answer has kept one, in steps in which some reach the end of a page."""
    plain = num_calls(decoding(128))
    kept = full_scheduler(128, 16, 3 * NUM_STEPS, 0, has_states=True)
    for _ in range(2 * NUM_STEPS):
        step_us(kept, RANDOM)
    assert plain < max(num_calls(kept) for _ in range(NUM_STEPS - 1)) <= 1.2 * plain
