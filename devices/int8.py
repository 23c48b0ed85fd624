"""How are values rounded to 8 bits, each row by a scale of its own?"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127  # -128 stays unused, so that the range is symmetric


def quantize_rows(x: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[..., n] -> int8 [..., n], float32 scale [..., 1]; their product is nearest to x, row by row.

    A row that is not finite gets a scale that is not: what is computed of it stays so. Where x is a part of
    longer rows, `largest` [..., 1] is the greatest magnitude of those.
    """
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) if largest is None else largest) / LARGEST
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # a row of zeros is divided too
    return (wide / scale).round().to(torch.int8), scale
