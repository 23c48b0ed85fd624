"""Plan a batch for the attention under test, with the cache places that a slot table would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from attention.reference import Attention, StaticDecodes
from continuous_batching.batch import Batch, ragged_ranges

Read = TypeVar("Read")


def planned(attention: Attention, batch: Batch, page_table: NDArray[np.int32]) -> Any:
    """The metadata of the implementation under test."""
    page, offset = np.divmod(ragged_ranges(batch.starts, batch.stops), attention.shape.page_size)
    slots = np.repeat(batch.slots, batch.stops - batch.starts)
    write_index = page_table[slots, page].astype(np.int64) * attention.shape.page_size + offset
    return attention.plan(batch, page_table, write_index)


def eager(attention: Any, batch: Batch, page_table: NDArray[np.int32], read: Callable[[Any], Read]) -> Read:
    """What `read` makes of a step of these rows."""
    return read(planned(attention, batch, page_table))


def replayed(
    attention: Any, batch: Batch, page_table: NDArray[np.int32], read: Callable[[Any], Read]
) -> Read:
    """What `read` makes, on an NPU, of a captured step of these rows once it is replayed at their lengths."""
    places = torch.zeros(int((batch.stops - batch.starts).sum()), dtype=torch.int32, device=attention.device)
    table = torch.from_numpy(page_table[batch.slots]).to(attention.device)
    metadata = attention.plan_static(StaticDecodes(places, table, places))
    npu: Any = torch.get_device_module("npu")
    graph = npu.NPUGraph()
    with npu.graph(graph):
        found = read(metadata)
    attention.replay(graph, [metadata], batch.stops.tolist())
    return found
