"""Convert pages of a cache to bytes and back.

The bytes of a page are all planes of all layers of its group, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kv_cache.device.storage import KVCache
from kv_cache.pages import Index


class PageBytes:
    """Reads pages of a cache on the device, and writes pages of its host pools."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.layout = [
            [(tuple(plane.shape[1:]), str(plane.dtype)) for plane in planes] for planes in cache.planes
        ]
        self._sizes = [
            [each[0].numel() * each.element_size() for each in cache.of_group(group)[0]]
            for group in range(cache.num_groups)
        ]

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of a page of each group of layers."""
        return [sum(sizes) for sizes in self._sizes]

    def read(self, pages: Index, group: int = 0) -> Callable[[], list[bytes]]:
        """Start to copy pages of a group from the device, in order with its other work.

        The function returned waits for the bytes.
        """
        parts, count = self._cache.copied_out(pages, group), len(pages)
        device = self._cache.device
        if device.type == "cpu":
            return lambda: _joined(parts, count)
        event = torch.get_device_module(device).Event()
        event.record()

        def wait() -> list[bytes]:
            event.synchronize()
            return _joined(parts, count)

        return wait

    def write_host(self, pages: Index, contents: Sequence[bytes], group: int = 0) -> None:
        """Write contents to pages of a group's host pool, once earlier copies to or from it are done."""
        (_, tensors), sizes = self._cache.of_group(group), self._sizes[group]
        self._cache.wait_for_swaps()
        for page, content in zip(pages.tolist(), contents):
            assert len(content) == sum(sizes), f"{len(content)} bytes are no page"
            data, at = np.frombuffer(content, dtype=np.uint8), 0
            for tensor, size in zip(tensors, sizes):
                _as_bytes(tensor)[page] = data[at : at + size]
                at += size


def _joined(parts: list[Tensor], count: int) -> list[bytes]:
    """Return the bytes of `count` pages, of each all planes; a group may have no layer."""
    arrays = [_as_bytes(part) for part in parts]
    return [b"".join(array[index] for array in arrays) for index in range(count)]


def _as_bytes(pages: Tensor) -> np.ndarray:
    """View pages [n, ...] in the host's memory as their bytes [n, size]."""
    return pages.flatten(1).view(torch.uint8).numpy()
