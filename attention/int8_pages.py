"""Store keys and values in pages of int8.

Each head of a token is its D numbers followed by the four bytes of the float32 scale that they share. A scale
for each token and head needs no calibration, and depends on nothing but that token's own keys, so that every
schedule stores the same bytes. It lies in the page, so that whatever copies, moves, swaps or resizes pages
includes it. A scale for each channel (Liu et al., "KIVI", 2024) follows channels that are large in every
token more closely, but it has to be known before the first token is written: where a checkpoint has such
scales (C8), keys and values come divided by them, and the scale of each head of a token is one. An NPU, which
reads only these, stores the numbers alone (attention/npu/int8_attention.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from devices.int8 import quantize_rows

SCALE = torch.float32


def row_bytes(head_dim: int) -> int:
    """Return the bytes of the keys, or of the values, of one head of a token."""
    return head_dim + SCALE.itemsize


def packed(x: Tensor) -> Tensor:
    """Quantise [..., D] to int8 [..., D + 4]."""
    numbers, scale = quantize_rows(x)
    return torch.cat((numbers, scale.view(torch.int8)), -1)


def packed_units(x: Tensor) -> Tensor:
    """Round [..., D], which is in units of the channels' scales, to int8 [..., D + 4].

    A head that is not finite gets a scale that is not finite, as in `packed`.
    """
    wide = x.float()
    numbers = wide.round().clamp(-128, 127).to(torch.int8)
    scale = torch.where(wide.isfinite().all(-1, keepdim=True), 1.0, torch.nan).to(SCALE)
    return torch.cat((numbers, scale.view(torch.int8)), -1)


def unpacked(rows: Tensor) -> Tensor:
    """Dequantise int8 [..., D + 4] to float32 [..., D]."""
    numbers, scale = rows.split((rows.shape[-1] - SCALE.itemsize, SCALE.itemsize), dim=-1)
    # Cloned, because the bytes of a scale may not be aligned for a float32
    dequantized: Tensor = numbers.float() * scale.clone(memory_format=torch.contiguous_format).view(SCALE)
    return dequantized
