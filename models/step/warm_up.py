"""Run steps once before serving, so that no request waits for a compiler or finds the memory full.

The steps run on the null page of an idle engine. The caller times them, captures graphs and measures memory
with the functions here; sizes are planned elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from continuous_batching.batch import Batch, ragged_ranges
from kv_cache.pages import Index
from models.step.runner import ModelRunner

DECODES = 16  # decodes of a step that is timed
PROMPT = 40  # tokens; longer than what any device computes as a decode


def warm_up(runner: ModelRunner, max_batch_tokens: int) -> None:
    """Run prompts, chunks and decodes once, on the null page, so that nothing is compiled while serving.

    All slots must be free, so that their page tables name only the null page.
    """
    slots = runner.slots
    assert not len(slots.busy), "warm up before the first request"
    rows = np.arange(min(3, slots.num_slots), dtype=np.int64)
    stop = max(1, min(PROMPT, slots.max_tokens, max_batch_tokens // len(rows)))
    for starts in (
        np.zeros_like(rows),
        np.full_like(rows, stop - 1),
        np.where(rows == 0, stop // 2, stop - 1),
    ):
        runner.run(_batch(runner, rows, starts, np.full_like(rows, stop)))
    runner.cache.clear_null_page()


def decode_step(runner: ModelRunner) -> Callable[[], object]:
    """Return a step of some decodes, to be timed. The slots must be free.

    It writes into the null page, which the caller clears after the last step.
    """
    slots = runner.slots
    rows = np.arange(min(DECODES, slots.num_slots), dtype=np.int64)
    stops = np.full_like(rows, max(1, min(PROMPT, slots.max_tokens)))
    return lambda: runner.run(_batch(runner, rows, stops - 1, stops))


def capture(runner: ModelRunner, most: int, width: int) -> int:
    """Capture steps as `ModelRunner.capture` does; return the bytes of device memory that they hold."""
    device = runner.attention.device
    memory = torch.get_device_module(device)
    memory.empty_cache()
    before = int(memory.memory_reserved(device))
    runner.capture(most, width)
    # What captured steps hold stays; later steps use again what their first runs have left free
    memory.empty_cache()
    return max(0, int(memory.memory_reserved(device)) - before)


def largest_step_bytes(runner: ModelRunner, max_batch_tokens: int, most_sampled: int = 1) -> int | None:
    """Return the most memory that a step of the whole budget needs beyond what was held; None if unknown.

    The spans are as long as possible, on the null page, and every slot samples with top-p: at its last
    position, or as where guesses are checked at each of its last `most_sampled` ones, as far as the budget
    allows. A drafter takes part in a step without guesses alone. On a CPU it is the growth of the process, so
    memory that an earlier step has used does not count; on other devices it is the allocated memory.
    """
    device = runner.attention.device
    slots = runner.slots
    rows = np.arange(min(slots.num_slots, max_batch_tokens), dtype=np.int64)
    longest = max(1, slots.max_tokens - 1)
    counts = _shared_out(max_batch_tokens, np.ones_like(rows), min(most_sampled, longest))
    lens = _shared_out(max_batch_tokens, counts, longest)
    batch = _batch(runner, rows, np.zeros_like(rows), lens)
    if most_sampled > 1:
        sampled, targets = np.repeat(rows, counts), ragged_ranges(lens + 1 - counts, lens + 1)
        num_drafts = len(sampled) - len(rows)
        batch = Batch(rows, batch.starts, lens, sampled, sampled, targets, num_drafts=num_drafts)
    before = _held_bytes(device)
    slots.temperature[rows], slots.top_p[rows] = 1.0, 0.9  # both are set again when a slot is taken
    runner.run(batch)
    slots.temperature[rows], slots.top_p[rows] = 0.0, 1.0
    runner.cache.clear_null_page()
    peak = _peak_bytes(device)
    return None if before is None or peak is None else max(0, peak - before)


def _shared_out(total: int, lens: Index, most: int) -> Index:
    """Return lengths that are up to `most` each and `total` in all, the first ones first."""
    made = lens.copy()
    for at in range(len(made)):
        made[at] += min(total - int(made.sum()), most - int(made[at]))
    return made


def _held_bytes(device: torch.device) -> int | None:
    """Return the memory in use now, and count the peak from here on."""
    if device.type == "cpu":
        return _process_bytes("VmRSS", reset_peak=True)
    memory = torch.get_device_module(device)
    memory.reset_peak_memory_stats(device)
    return int(memory.memory_allocated(device))


def _peak_bytes(device: torch.device) -> int | None:
    if device.type == "cpu":
        return _process_bytes("VmHWM")
    return int(torch.get_device_module(device).max_memory_allocated(device))


def _process_bytes(name: str, *, reset_peak: bool = False) -> int | None:
    """Return a memory figure of this process; None if the system has none, or its peak cannot be reset."""
    try:
        if reset_peak:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(found[0]) if found else None


def _batch(runner: ModelRunner, rows: Index, starts: Index, stops: Index) -> Batch:
    batch = Batch(rows, starts, stops, np.arange(len(rows)), rows, stops)
    return batch if runner.drafter is None else replace(batch, draft_starts=starts, draft_stops=stops)
