"""Plan a batch for the attention under test, with the cache places that a slot table would give."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention.reference import Attention
from continuous_batching.batch import Batch, ragged_ranges


def planned(attention: Attention, batch: Batch, page_table: NDArray[np.int32]) -> Any:
    """The metadata of the implementation under test."""
    page, offset = np.divmod(ragged_ranges(batch.starts, batch.stops), attention.shape.page_size)
    slots = np.repeat(batch.slots, batch.stops - batch.starts)
    write_index = page_table[slots, page].astype(np.int64) * attention.shape.page_size + offset
    return attention.plan(batch, page_table, write_index)
