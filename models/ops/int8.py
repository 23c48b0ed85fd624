"""What does an operator hand to a linear that multiplies in 8 bits?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows that an operator before a linear has quantised already."""

    rows: Tensor  # int8 [T, n]
    scale: Tensor  # float32 [T]
    dtype: torch.dtype  # type of the rows before quantisation
