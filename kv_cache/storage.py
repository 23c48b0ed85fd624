"""Where do keys and values live on the device?

Legend: P pages, B tokens a page, K kv heads, D head dim.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class KVCache:
    """Keys and values of all layers, allocated once; `keys[layer]` and `values[layer]` are [P, B, K, D].

    Page 0 is the null page: no request ever owns it, so an operator may be given it as filler. All
    places start at zero, but a page that comes back into use holds what its last owner left.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @staticmethod
    def page_bytes(
        num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one page: its keys and its values, over all layers."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    def copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy page sources[i] to targets[i], all layers; all are read before any is written."""
        read = torch.from_numpy(sources).to(self.keys[0].device)
        written = torch.from_numpy(targets).to(read.device)
        for tensor in (*self.keys, *self.values):
            tensor[written] = tensor[read]
