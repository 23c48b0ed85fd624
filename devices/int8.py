"""Quantise rows to int8, each with a scale of its own."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127  # -128 is not used, so that the range is symmetric


def quantize_rows(x: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise [..., n] to int8 [..., n] with float32 scales [..., 1], whose product is nearest to x.

    A row that is not finite gets a scale that is not finite, so that results computed from it are not either.
    If x is a part of longer rows, `largest` [..., 1] is the greatest magnitude of those.
    """
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) if largest is None else largest) / LARGEST
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # avoids a division by zero for rows of zeros
    return (wide / scale).round().to(torch.int8), scale
