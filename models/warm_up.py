"""What is done once, so that no request waits for it?"""

from __future__ import annotations

import numpy as np

from continuous_batching.batch import Batch, Index
from models.runner import ModelRunner

PROMPT = 40  # tokens: longer than what any device reads as a decode


def warm_up(runner: ModelRunner, max_batch_tokens: int) -> None:
    """Run prompts, chunks and decodes once, over the null page, so that nothing is compiled while serving.

    The slots must be free: their page tables are all null.
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
        runner.run(_batch(rows, starts, np.full_like(rows, stop)))
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor[0].zero_()


def _batch(rows: Index, starts: Index, stops: Index) -> Batch:
    none = np.empty(0, dtype=np.int64)
    return Batch(rows, starts, stops, np.arange(len(rows)), rows, (none, none, none))
