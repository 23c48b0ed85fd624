"""Project queries into the space of latents, and results out of it, on an NPU.

Legend: T tokens of the step, H query heads, L latent, N the other part of a query (nope), V value of a head.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from attention.latent import LatentUp

# Limits of npu_transpose_batchmatmul: the most heads x width of a row, the step of a weight's two sides
MOST_PRODUCT_ROW, PRODUCT_STEP = 65535, 16


class NpuLatentUp(LatentUp):
    """The projection by heads, without copies, for queries and results with the axes of attention."""

    def absorbed(self, query: Tensor) -> Tensor:
        """Project queries [T, H, N] of expanded keys to queries of latents [T, H, L]."""
        return self._by_heads(query, self.keys)

    def raised(self, x: Tensor) -> Tensor:
        """Project weighted sums of latents [T, H, L] to those of values [T, H, V]."""
        return self._by_heads(x, self.values)

    def _by_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        is_even = not any(size % PRODUCT_STEP for size in weight.shape[1:])
        if x.shape[1] * x.shape[2] > MOST_PRODUCT_ROW or not is_even:
            return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
        made: Tensor = torch_npu.npu_transpose_batchmatmul(x, weight, perm_x1=(1, 0, 2), perm_y=(1, 0, 2))
        return made
