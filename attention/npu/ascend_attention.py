"""Share what attention on all Ascend products has in common.

This covers the limits of a product, the division of a step into calls, and the tables on the device.

Legend: T tokens of the step, S spans, N slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.reference import Attention
from continuous_batching.batch import Batch
from devices.ascend_limits import AscendProduct
from devices.shapes import AttentionShape
from kv_cache.device.transfer import to_device

MASK_SIDE = 2048  # side of the mask that the operators take for sequences of any length


class AscendAttention(Attention):
    """Attention on an NPU, within the limits of a product."""

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device | str,
        product: AscendProduct,
        *,
        takes_float32: bool = False,
    ) -> None:
        super().__init__(shape, device)
        self.product, self.takes_float32 = product, takes_float32

    def check(self) -> None:
        super().check()
        self.product.check(self.shape, takes_float32=self.takes_float32)

    def check_longest(self, num_tokens: int) -> None:
        self.product.check_longest(num_tokens)

    def graph_sizes(
        self,
        sizes: list[int],
        beside: int = 0,
        most_layers: int = 0,
        *,
        joins: bool = False,
        most_padding: int | None = None,
    ) -> list[int]:
        num_layers = max(len(self.shape.windows), most_layers)
        most_padding = most_padding or self.shape.page_size
        return self.product.graph_sizes(sizes, num_layers, most_padding, beside, joins=joins)

    def cuts(self, batch: Batch) -> Iterator[tuple[slice, slice]]:
        """Yield the spans of each call, and their rows of the packed query."""
        lens = batch.stops - batch.starts
        ends = np.append(0, np.cumsum(lens)).tolist()
        for first, last in self.product.cuts(lens):
            yield slice(first, last), slice(ends[first], ends[last])

    def page_table(self, batch: Batch, page_table: NDArray[np.int32]) -> Tensor:
        """Return the spans' rows of the page table, up to the longest span's last page. int32 [S, pages]"""
        width = -(-int(batch.stops.max()) // self.shape.page_size)
        return to_device(page_table[batch.slots, :width], self.device)

    def places(self, write_index: NDArray[np.int64]) -> Tensor:
        """Return the cache places [T] of the step's tokens on the device, in the operators' int32."""
        return to_device(write_index.astype(np.int32), self.device)
