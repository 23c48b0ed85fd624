"""Lay out the parameters of a captured draw for the transfer to the device.

They are columns of the one buffer that a captured step reads, int32 for each row; floats keep their bits.

Legend: R rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_cache.device.transfer import Arrays, Tensors

FLOATS = ("uniform", "sharpness", "excess", "k_share", "min_p")
COLUMNS = len(FLOATS) + 3  # two places of top_k, and whether the row is drawn at all


def packed(arrays: Arrays, num_rows: int) -> NDArray[np.int32]:
    """Return the columns int32 [COLUMNS, R] of all R rows; a parameter that is left out changes nothing."""
    columns = np.zeros((COLUMNS, num_rows), dtype=np.int32)
    for at, name in enumerate(FLOATS):
        if name in arrays:
            columns[at] = arrays[name].view(np.int32)
    if "k_places" in arrays:
        columns[-3:-1] = arrays["k_places"].reshape(2, num_rows)
    columns[-1] = arrays.get("drawn", 1)
    return columns


def unpacked(columns: Tensor) -> Tensors:
    """Return the parameters in columns [COLUMNS, R] on the device, as `packed` stored them."""
    tensors = {name: columns[at].view(torch.float32) for at, name in enumerate(FLOATS)}
    return tensors | {"k_places": columns[-3:-1].long().flatten(), "drawn": columns[-1]}
