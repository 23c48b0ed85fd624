"""What are weights that a checkpoint holds in 8-bit floats, with a scale for each block?

DeepSeek-V3's own form (arXiv 2412.19437, quant_method fp8 of config.json): `X.weight` in E4M3 beside
`X.weight_scale_inv`, float32, a number for each block of rows and columns, which its weights are multiplied
with. It is read into the model's type, and into int8 from there: no Ascend product before the 950 multiplies
such floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.quantization import BlockScales

SUFFIX = "_scale_inv"
STORED = "F8_E4M3"  # name of the type in safetensors


def scaled(weight: Tensor, scales: Tensor, blocks: BlockScales, first: tuple[int, int] = (0, 0)) -> Tensor:
    """Return a part of a weight [out, in] in float32.

    `first` is its row and column; `scales` are those of all blocks.
    """
    of_rows = (first[0] + torch.arange(weight.shape[0])) // blocks.rows
    of_columns = (first[1] + torch.arange(weight.shape[1])) // blocks.columns
    return weight.float() * scales.float()[of_rows][:, of_columns]
