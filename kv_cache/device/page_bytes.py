"""Convert pages of a cache to bytes and back.

The bytes of a page are all planes of all layers, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kv_cache.device.storage import KVCache
from kv_cache.pages import Index


class PageBytes:
    """Reads pages of a cache on the device, and writes pages of its host pool."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.layout = [
            [(tuple(plane.shape[1:]), str(plane.dtype)) for plane in planes] for planes in cache.planes
        ]
        self._sizes = [each[0].numel() * each.element_size() for each in cache.tensors]

    @property
    def page_bytes(self) -> int:
        return sum(self._sizes)

    def read(self, pages: Index) -> Callable[[], list[bytes]]:
        """Start to copy pages from the device, in order with its other work.

        The function returned waits for the bytes.
        """
        parts = self._cache.copied_out(pages)
        device = self._cache.device
        if device.type == "cpu":
            return lambda: self._joined(parts)
        event = torch.get_device_module(device).Event()
        event.record()

        def wait() -> list[bytes]:
            event.synchronize()
            return self._joined(parts)

        return wait

    def write_host(self, pages: Index, contents: Sequence[bytes]) -> None:
        """Write contents to pages of the host pool, once earlier copies to or from it are done."""
        tensors = self._cache.host_tensors
        self._cache.wait_for_swaps()
        for page, content in zip(pages.tolist(), contents):
            assert len(content) == self.page_bytes, f"{len(content)} bytes are no page"
            data, at = np.frombuffer(content, dtype=np.uint8), 0
            for tensor, size in zip(tensors, self._sizes):
                _as_bytes(tensor)[page] = data[at : at + size]
                at += size

    def _joined(self, parts: list[Tensor]) -> list[bytes]:
        arrays = [_as_bytes(part) for part in parts]
        return [b"".join(array[index] for array in arrays) for index in range(len(parts[0]))]


def _as_bytes(pages: Tensor) -> np.ndarray:
    """View pages [n, ...] in the host's memory as their bytes [n, size]."""
    return pages.flatten(1).view(torch.uint8).numpy()
