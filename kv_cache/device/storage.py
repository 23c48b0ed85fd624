"""Store keys and values in the device's memory, and copy pages within it and to and from the host.

Layers belong to groups (`kv_cache/groups.py`), each with pages of its own. The scheduler decides which pages
are copied; the cache makes the copies, in order, in all layers of a group.

Legend: P pages, B tokens a page, K kv heads, D head dim.
"""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_cache.device.transfer import to_device
from kv_cache.pages import Index, PageCopy
from kv_cache.tier.page_tier import PageTier

Bytes = NDArray[np.uint8]
CHUNK_BYTES = 4 * 2**20  # bytes copied at a time, so that what is written is still in the processor's cache
WIDE = torch.complex128  # the widest type, as which a CPU copies pages


class KVCache:
    """Keys and values of all layers, allocated once; `keys[layer]` and `values[layer]` are [P, B, K, D].

    Layer i belongs to group `groups[i]`, and all to group 0 by default. Group 0 has `num_pages` pages, and
    the groups of windows `window_pages`; `window_host_pages` of these lie in the host's memory.

    `allocate` makes such a tensor of a given number of pages, filled with zeros, for attention that uses its
    own order within a page or its own type: only the first axis matters here, and whatever a page holds, such
    as scales, is copied with it; `allocate_values` does so if values differ from keys. If the cache is not
    `indexed`, pages are reached by slices only (torch_npu converts a whole tensor in FRACTAL_NZ for an index,
    which it reads on the host). Page 0 is the null page: no request owns it, so it serves as padding for
    operators. A page that is reused still holds what its last owner wrote. `num_host_pages` further pages lie
    in the host's memory, where no operator reads them. A cache `beside` it has pages of the same numbers, for
    other layers: whatever happens to pages here happens to them there. With `keys_only` it has no values, for
    other per-token data that lies in pages. A `tier` makes the copies to a tier below, for all these caches
    together.
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
        groups: Sequence[int] | None = None,
        window_pages: Sequence[int] = (),
        window_host_pages: Sequence[int] = (),
        allocate: Callable[[int], Tensor] | None = None,
        allocate_values: Callable[[int], Tensor] | None = None,
        indexed: bool = True,
        beside: KVCache | None = None,
        keys_only: bool = False,
    ) -> None:
        device = torch.device(device)

        def plain(count: int) -> Tensor:
            return torch.zeros(count, page_size, num_kv_heads, head_dim, dtype=dtype, device=device)

        def on_host(layer: int, pages: Tensor) -> Tensor:
            pinned = device.type != "cpu"  # so that the device copies without involving the host
            count = (num_host_pages, *window_host_pages)[self.groups[layer]]
            return torch.zeros(count, *pages.shape[1:], dtype=pages.dtype, pin_memory=pinned)

        self.groups = tuple(groups or [0] * num_layers)
        counts = (num_pages, *window_pages)
        self.num_pages = num_pages
        self.page_size = page_size
        self.beside = beside
        self._indexed, self._allocate = indexed, allocate or plain
        self._allocate_values = allocate_values or self._allocate
        self.keys = [self._allocate(counts[group]) for group in self.groups]
        self.values = [self._allocate_values(counts[group]) for group in self.groups if not keys_only]
        self.tier: PageTier | None = None
        self._swapped: Callable[[], None] = _nothing  # waits for the last copies to or from the host
        self._host_keys, self._host_values = (
            [on_host(layer, pages) for layer, pages in enumerate(each)] for each in (self.keys, self.values)
        )

    @staticmethod
    def page_bytes(
        num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Return the bytes of one page: its keys and its values, over all layers."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    @property
    def layout(self) -> list[str]:
        """The layout of a page in each layer; caches with the same layout may exchange page bytes."""
        return [
            " and ".join(f"{each.dtype} {[*each.shape[1:]]}".removeprefix("torch.") for each in tensors)
            for tensors in map(self._of_layer, range(len(self.keys)))
        ]

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of a page in each layer, keys and values together."""
        return [sum(map(_page_bytes, self._of_layer(layer))) for layer in range(len(self.keys))]

    def read_layer(self, layer: int, pages: Index) -> Callable[[], Bytes]:
        """Start to copy some pages of a layer to the host; the function returned waits for the bytes.

        The bytes are the keys of all these pages, then the values.
        """
        parts = self._copied(self._of_layer(layer), pages)
        done = _queued(self.keys[layer].device)

        def wait() -> Bytes:
            done()
            return np.concatenate([_bytes_of(part) for part in parts])

        return wait

    def write_layer(self, layer: int, pages: Index, data: Bytes) -> None:
        """Write bytes, as `read_layer` returns them, to some pages of a layer.

        The bytes may change afterwards, and a device is not waited for.
        """
        at = 0
        for tensor in self._of_layer(layer):
            part, count = _host_pages(tensor, len(pages)), len(pages) * _page_bytes(tensor)
            _bytes_of(part)[:] = data[at : at + count]
            _exchange(part, np.arange(len(pages)), tensor, pages, to_host=False, indexed=self._indexed)
            at += count
        assert at == len(data), f"{len(data)} bytes are not those of {len(pages)} pages"

    def _of_layer(self, layer: int) -> list[Tensor]:
        return [self.keys[layer], *self.values[layer : layer + 1]]

    def apply(self, copies: Sequence[PageCopy]) -> None:
        """Make page copies, one after the other. Off the CPU they are only queued, in that order."""
        for each in copies:
            if each.way in ("within", "to_host", "from_host"):
                for cache in self.all if each.group == 0 else [self]:
                    cache._make(each)
            else:
                assert self.tier is not None, f"{len(each.keys)} pages go {each.way}, and there is none"
                self.tier.apply(each)

    @property
    def all(self) -> list[KVCache]:
        """This cache, and those beside it."""
        return [self, *([] if self.beside is None else self.beside.all)]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of its own pages, in all layers."""
        return [*self.keys, *self.values]

    def _of_group(self, group: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of a group's own pages, on the device and on the host."""
        pairs = [*zip(self.keys, self._host_keys), *zip(self.values, self._host_values)]
        groups = [*self.groups, *self.groups[: len(self.values)]]
        own = [pair for pair, each in zip(pairs, groups) if each == group]
        return [device for device, _ in own], [host for _, host in own]

    @property
    def host_tensors(self) -> list[Tensor]:
        """The tensors of its own pages in the host's memory, in the order of `tensors`."""
        return [*self._host_keys, *self._host_values]

    def copied_out(self, pages: Index) -> list[Tensor]:
        """Copy its own pages to the host's memory; off the CPU the copies are only queued."""
        return self._copied(self.tensors, pages)

    def _copied(self, tensors: Sequence[Tensor], pages: Index) -> list[Tensor]:
        copies = [_host_pages(each, len(pages)) for each in tensors]
        for tensor, copied in zip(tensors, copies):
            _exchange(tensor, pages, copied, np.arange(len(pages)), to_host=True, indexed=self._indexed)
        return copies

    def wait_for_swaps(self) -> None:
        """Wait until the requested copies to and from the host's memory are done."""
        self._swapped()

    def copy(self, sources: Index, targets: Index, group: int = 0) -> None:
        """Copy page sources[i] to targets[i] in all layers of a group.

        No page is both a source and a target.
        """
        for tensor in self._of_group(group)[0]:
            pages = _flat(tensor)
            for read, written in _chunks(pages, sources, targets):
                _copy(pages, read, pages, written, indexed=self._indexed)

    def scratch(self, num_places: int) -> KVCache:
        """Return a cache of at least `num_places` tokens for work without requests.

        All layers share its pages.
        """
        made, layers = copy.copy(self), len(self.keys)
        made.beside = None
        made.num_pages = -(-num_places // self.page_size)
        made.keys, made.values = (
            [allocate(made.num_pages)] * layers for allocate in (self._allocate, self._allocate_values)
        )
        return made

    def clear_null_page(self) -> None:
        """Reset page 0 to zero after work without requests has written to it."""
        for tensor in (*self.keys, *self.values):
            tensor[:1].zero_()
        if self.beside is not None:
            self.beside.clear_null_page()

    def resize(self, num_pages: int) -> None:
        """Change the number of pages of group 0; pages that remain keep their content.

        Tensors are copied one by one, and memory that is no longer needed is returned to the system.
        """
        kept = np.arange(min(num_pages, self.num_pages))
        for tensors, allocate in ((self.keys, self._allocate), (self.values, self._allocate_values)):
            for layer, group in enumerate(self.groups[: len(tensors)]):
                if group == 0:
                    tensors[layer] = self._resized(tensors[layer], allocate(num_pages), kept)
        self.num_pages = num_pages
        _release_memory(self.keys[0].device)
        if self.beside is not None:
            self.beside.resize(num_pages)

    def _resized(self, old: Tensor, new: Tensor, kept: Index) -> Tensor:
        for read, written in _chunks(old, kept, kept):
            _copy(old, read, new, written, indexed=self._indexed)
        return new

    def _make(self, copy: PageCopy) -> None:
        if copy.way == "within":
            self.copy(copy.sources, copy.targets, copy.group)
            return
        self._swap(copy)
        device = self.keys[0].device
        if device.type != "cpu":
            event = torch.get_device_module(device).Event()
            event.record()
            self._swapped = event.synchronize

    def _swap(self, copy: PageCopy) -> None:
        to_host = copy.way == "to_host"
        order = np.argsort(copy.targets if to_host else copy.sources)  # host pages are then in runs
        sources, targets = copy.sources[order], copy.targets[order]
        device, host = self._of_group(copy.group)
        for source, target in zip(*((device, host) if to_host else (host, device))):
            _exchange(source, sources, target, targets, to_host=to_host, indexed=self._indexed)


def _host_pages(like: Tensor, count: int) -> Tensor:
    """Allocate uninitialised pages in the host's memory, pinned if a device copies to them."""
    return torch.empty(count, *like.shape[1:], dtype=like.dtype, pin_memory=like.device.type != "cpu")


def _exchange(
    source: Tensor, sources: Index, target: Tensor, targets: Index, *, to_host: bool, indexed: bool
) -> None:
    """Copy pages between a device and the host, which may be the same."""
    stays = source.device == target.device
    source, target = _flat(source, stays=stays), _flat(target, stays=stays)
    for read, written in _chunks(source, sources, targets):
        if stays or not indexed:
            _copy(source, read, target, written, indexed=indexed)
        elif to_host:
            _to_host(source, read, target, written)
        else:
            _from_host(source, read, target, written)


def _queued(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for all work queued on the device so far."""
    if device.type == "cpu":
        return lambda: None
    event = torch.get_device_module(device).Event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def _bytes_of(pages: Tensor) -> Bytes:
    """View pages of the host as bytes, without a copy."""
    return pages.view(-1).view(torch.uint8).numpy()


def _nothing() -> None:
    """Wait for nothing: there is no copy."""


def _release_memory(device: torch.device) -> None:
    """Make the allocator return the memory that it keeps for later use."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    elif hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # a function of glibc
        libc.malloc_trim(0)


def _flat(tensor: Tensor, *, stays: bool = True) -> Tensor:
    """View a tensor with as few elements a page as possible, for copies within the CPU.

    Otherwise return it as is.
    """
    wide = stays and tensor.device.type == "cpu" and _page_bytes(tensor) % WIDE.itemsize == 0
    return tensor.flatten(1).view(WIDE) if wide else tensor


def _page_bytes(pages: Tensor) -> int:
    return math.prod(pages.shape[1:]) * pages.itemsize


def _chunks(pages: Tensor, sources: Index, targets: Index) -> Iterator[tuple[Index, Index]]:
    size = max(1, CHUNK_BYTES // _page_bytes(pages))
    for at in range(0, len(sources), size):
        yield sources[at : at + size], targets[at : at + size]


def _copy(source: Tensor, read: Index, target: Tensor, written: Index, *, indexed: bool) -> None:
    """Copy pages within one device.

    This takes one pass if one side is a run of pages; otherwise it needs a temporary copy or, if pages cannot
    be `indexed`, a pass for each run.
    """
    if not indexed:
        _copy_slices(source, read, target, written)
        return
    (low, high), (first, last) = _ends(read), _ends(written)
    reads_run, writes_run = _is_run(read), _is_run(written)
    if reads_run and writes_run:
        target[first:last].copy_(source[low:high])
    # An operator must not write to memory that it may still read
    elif source is target and low < last and first < high:
        target.index_copy_(0, _index(written, target), source.index_select(0, _index(read, source)))
    elif writes_run:
        torch.index_select(source[low:high], 0, _index(read - low, source), out=target[first:last])
    elif reads_run:
        target[first:last].index_copy_(0, _index(written - first, target), source[low:high])
    else:
        target.index_copy_(0, _index(written, target), source.index_select(0, _index(read, source)))


def _copy_slices(source: Tensor, read: Index, target: Tensor, written: Index) -> None:
    """Copy pages by slices, also between host and device, without waiting for the device."""
    for start, stop in _runs(read, written):
        pages = source[read[start] : read[stop - 1] + 1]
        target[written[start] : written[stop - 1] + 1].copy_(pages, non_blocking=True)


def _to_host(device: Tensor, read: Index, host: Tensor, written: Index) -> None:
    """Copy rows from a device to the host, without waiting for the device."""
    rows = device.index_select(0, _index(read, device))
    for start, stop in _runs(written):
        host[written[start] : written[stop - 1] + 1].copy_(rows[start:stop], non_blocking=True)


def _from_host(host: Tensor, read: Index, device: Tensor, written: Index) -> None:
    """Copy rows from the host to a device, without waiting for the device."""
    rows = torch.empty(len(read), *device.shape[1:], dtype=device.dtype, device=device.device)
    for start, stop in _runs(read):
        rows[start:stop].copy_(host[read[start] : read[stop - 1] + 1], non_blocking=True)
    device.index_copy_(0, _index(written, device), rows)


def _index(pages: Index, like: Tensor) -> Tensor:
    return to_device(pages, like.device)


def _ends(pages: Index) -> tuple[int, int]:
    return int(pages.min()), int(pages.max()) + 1


def _is_run(pages: Index) -> bool:
    return bool((np.diff(pages) == 1).all())


def _runs(*lists: Index) -> list[tuple[int, int]]:
    """Return the bounds of each run of numbers that are consecutive in all of these lists."""
    jumps = np.any([np.diff(pages) != 1 for pages in lists], axis=0)
    breaks = np.flatnonzero(jumps) + 1
    return list(zip([0, *breaks.tolist()], [*breaks.tolist(), len(lists[0])]))
