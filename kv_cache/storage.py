"""Where do keys and values live on the device?

Legend: P pages, B tokens a page, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_cache.pages import PageCopy


class KVCache:
    """Keys and values of all layers, allocated once; `keys[layer]` and `values[layer]` are [P, B, K, D].

    Page 0 is the null page: no request ever owns it, so an operator may be given it as filler. All
    places start at zero, but a page that comes back into use holds what its last owner left. With
    `num_host_pages`, as many pages more lie in the host's memory, where no operator reads them.
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
        *,
        num_host_pages: int = 0,
    ) -> None:
        page = (page_size, num_kv_heads, head_dim)
        device = torch.device(device)
        pinned = device.type != "cpu"  # so that the device copies it by itself

        def tensors(count: int, place: torch.device, *, pin_memory: bool = False) -> list[Tensor]:
            return [
                torch.zeros(count, *page, dtype=dtype, device=place, pin_memory=pin_memory)
                for _ in range(num_layers)
            ]

        self.num_pages = num_pages
        self.page_size = page_size
        self.keys, self.values = tensors(num_pages, device), tensors(num_pages, device)
        host = torch.device("cpu")
        self._host_keys = tensors(num_host_pages, host, pin_memory=pinned)
        self._host_values = tensors(num_host_pages, host, pin_memory=pinned)

    @staticmethod
    def page_bytes(
        num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one page: its keys and its values, over all layers."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    def apply(self, copies: Iterable[PageCopy]) -> None:
        """Make page copies, one after the other."""
        for copy in copies:
            if copy.way == "within":
                self.copy(copy.sources, copy.targets)
            else:
                self._swap(copy)

    def copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy page sources[i] to targets[i], all layers; all are read before any is written."""
        read = torch.from_numpy(sources).to(self.keys[0].device)
        written = torch.from_numpy(targets).to(read.device)
        for tensor in (*self.keys, *self.values):
            tensor[written] = tensor[read]

    def resize(self, num_pages: int) -> None:
        """Change the number of pages; the low ones keep what they hold. Tensors are copied one by one."""
        kept = min(num_pages, self.num_pages)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = old.new_zeros(num_pages, *old.shape[1:])
                new[:kept] = old[:kept]
                tensors[layer] = new
        self.num_pages = num_pages

    def _swap(self, copy: PageCopy) -> None:
        device = [*self.keys, *self.values]
        host = [*self._host_keys, *self._host_values]
        sources, targets = (device, host) if copy.way == "to_host" else (host, device)
        read, written = torch.from_numpy(copy.sources), torch.from_numpy(copy.targets)
        for source, target in zip(sources, targets):
            target[written.to(target.device)] = source[read.to(source.device)].to(target.device)
