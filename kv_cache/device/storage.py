"""Store what layers remember in the device's memory, and copy pages within it and to and from the host.

A layer has planes, which are tensors of pages, and belongs to a group (`kv_cache/groups.py`), whose pages all
its layers share. The scheduler decides which pages are copied; the cache makes the copies, in order, in all
planes of all layers of a group.

Legend: P pages.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_cache.device.huge_pages import huge_zeros
from kv_cache.device.transfer import queued, to_device
from kv_cache.pages import Index, PageCopy
from kv_cache.tier.page_tier import PageTier

Bytes = NDArray[np.uint8]
CHUNK_BYTES = 4 * 2**20  # bytes copied at a time, so that what is written is still in the processor's cache
LEAST_MAPPED = 2**20  # bytes; smaller tensors come from the allocator
WIDE = torch.complex128  # the widest type, as which a CPU copies pages


class PageOrder(Protocol):
    """An order of numbers within a page that is not that of its tokens."""

    @property
    def name(self) -> str:
        """What tells pages in this order from others of the same size."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers."""
        ...

    def resized(self, page_size: int, num_heads: int) -> PageOrder:
        """Return the order of other pages of the same attention."""
        ...

    def by_token(self, pages: Tensor, plane: int) -> Tensor:
        """Return pages of a plane with the numbers of a token behind one another: [P, B, K, ...]."""
        ...

    def from_tokens(self, pages: Tensor, plane: int) -> Tensor:
        """Return in this order what `by_token` has returned, in the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class LayerPages:
    """How the pages of one layer are made, and the group they belong to (`kv_cache/groups.py`).

    `new_planes` returns the zeros of a number of pages, one tensor for each plane: keys and values, a latent
    and rope keys, or a head's features. Attention may use its own order within a page or its own type: only
    the first axis matters to the cache, and whatever a page holds, such as scales, is copied with it.
    """

    new_planes: Callable[[int], tuple[Tensor, ...]]
    group: int = 0
    # The heads of the layer here, which divide this axis of each plane evenly; one: it is not divided.
    # A page is `num_runs` runs, in each of which the heads lie one after the other; they are the axis before
    # that of the heads, or else the order within the page is attention's own. None: as the axes say
    num_heads: int = 1
    head_axis: int = 1
    num_runs: int | None = None
    holds_state: bool = False  # a page is the whole state of a request, and no token's
    order: PageOrder | None = None  # attention's own order within a page; None: that of its tokens

    def runs_of(self, plane: Tensor) -> int:
        """Return the runs of each page of a plane."""
        return self.num_runs or math.prod(plane.shape[1 : self.head_axis])


class CacheLayers:
    """Consecutive layers of a cache, counted from 0: those of one model, which reads and writes them.

    The tensors are looked up each time, because a resize replaces them.
    """

    def __init__(
        self,
        layers: Sequence[LayerPages],
        planes: list[tuple[Tensor, ...]],
        page_size: int,
        first: int = 0,
    ) -> None:
        self.layers = tuple(layers)
        self.page_size = page_size
        # Those of the whole cache, and where these layers begin among them
        self._planes, self._first = planes, first

    def of(self, layer: int) -> tuple[Tensor, ...]:
        """Return the planes of a layer, [P, ...] each."""
        return self._planes[self._first + layer]

    @property
    def planes(self) -> list[tuple[Tensor, ...]]:
        """The planes of each layer."""
        return [self.of(layer) for layer in range(len(self.layers))]

    @property
    def tensors(self) -> list[Tensor]:
        """All planes of all layers, layer after layer."""
        return [plane for planes in self.planes for plane in planes]

    @property
    def device(self) -> torch.device:
        return self.of(0)[0].device

    def scratch(self, num_places: int) -> CacheLayers:
        """Return pages of at least `num_places` tokens, each in a row of its own, for work without requests.

        Layers that make their planes in the same way share them. A row has a state of its own: operators may
        take no more rows than there are states.
        """
        num_pages = -(-num_places // self.page_size)
        kinds = {(each.new_planes, each.holds_state) for each in self.layers}
        made = {new: new(num_places if is_state else num_pages) for new, is_state in kinds}
        return CacheLayers(self.layers, [made[each.new_planes] for each in self.layers], self.page_size)

    def clear_null_page(self) -> None:
        """Reset page 0 to zero after work without requests has written to it."""
        for tensor in self.tensors:
            tensor[:1].zero_()


class KVCache(CacheLayers):
    """What all layers remember, allocated once: those of the model first, then those of its drafter.

    `num_pages` and `num_host_pages` have an entry for each group of layers; without the latter there are no
    host pages. Page 0 is the null page: no request owns it, so it serves as padding for operators. A page
    that is reused still holds what its last owner wrote. Host pages lie in the host's memory, where no
    operator reads them. If the cache is not `indexed`, pages are reached by slices only (torch_npu converts a
    whole tensor in FRACTAL_NZ for an index, which it reads on the host). A `tier` makes the copies to a tier
    below.
    """

    def __init__(
        self,
        layers: Sequence[LayerPages],
        page_size: int,
        num_pages: Sequence[int],
        num_host_pages: Sequence[int] = (),
        *,
        indexed: bool = True,
    ) -> None:
        planes = [each.new_planes(num_pages[each.group]) for each in layers]
        super().__init__(layers, planes, page_size)
        self.num_pages = tuple(num_pages)
        self._indexed = indexed
        self.tier: PageTier | None = None
        self._released: list[tuple[int, int]] | None = None  # pages of each layer that were given back
        self._swapped: Callable[[], None] = _nothing  # waits for the last copies to or from the host
        counts = num_host_pages or [0] * len(num_pages)
        self._host_planes = [
            tuple(_host_zeros(plane, counts[each.group]) for plane in of_layer)
            for each, of_layer in zip(layers, planes)
        ]

    def part(self, first: int, count: int) -> CacheLayers:
        """Return `count` layers from `first` on, for the model that owns them."""
        return CacheLayers(self.layers[first : first + count], self._planes, self.page_size, first)

    @property
    def layout(self) -> list[str]:
        """The layout of a page in each layer; caches with the same layout may exchange page bytes."""
        return [
            layout_of([(plane.dtype, plane.shape[1:]) for plane in planes], made.order)
            for made, planes in zip(self.layers, self.planes)
        ]

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of a page in each layer, all planes together."""
        return [sum(map(_page_bytes, planes)) for planes in self.planes]

    @property
    def are_states(self) -> list[bool]:
        """Whether a page of each layer is the whole state of a request."""
        return [each.holds_state for each in self.layers]

    @property
    def is_behind(self) -> bool:
        """Whether more is to be written than there is time for: never, since a device queues it itself."""
        return False

    def read_layer(self, layer: int, pages: Index, heads: range | None = None) -> Callable[[], Bytes]:
        """Start to copy some pages of a layer to the host; the function returned waits for the bytes.

        The bytes are the first plane of all these pages, then the next; of some `heads` of this layer alone,
        if they are given.
        """
        parts = self._copied(self.of(layer), pages)
        done = queued(self.device)

        def wait() -> Bytes:
            done()
            return np.concatenate(
                [_bytes_of(self._of_heads(layer, part, heads).contiguous()) for part in parts]
            )

        return wait

    def write_layer(self, layer: int, pages: Index, data: Bytes, heads: range | None = None) -> None:
        """Write bytes, as `read_layer` returns them, to some pages of a layer, or to some of its heads there.

        The bytes may change afterwards, and a device is not waited for.
        """
        at = 0
        for tensor in self.of(layer):
            whole = self._of_heads(layer, tensor, heads)
            part, count = _host_pages(whole, len(pages)), len(pages) * _page_bytes(whole)
            _bytes_of(part)[:] = data[at : at + count]
            if whole is tensor:
                _exchange(part, np.arange(len(pages)), tensor, pages, to_host=False, indexed=self._indexed)
            elif self._indexed:
                whole.index_copy_(0, _index(pages, whole), part.to(whole.device, non_blocking=True))
            else:
                _copy_slices(part, np.arange(len(pages)), whole, pages)
            at += count
        assert at == len(data), f"{len(data)} bytes are not those of {len(pages)} pages"

    def _of_heads(self, layer: int, pages: Tensor, heads: range | None) -> Tensor:
        """Return a view of some heads of a layer's pages, and the pages themselves for all of them."""
        made = self.layers[layer]
        if heads is None or len(heads) == made.num_heads:
            return pages
        runs = made.runs_of(pages)
        if runs != math.prod(pages.shape[1 : made.head_axis]):
            return pages.view(len(pages), runs, made.num_heads, -1).narrow(2, heads.start, len(heads))
        width = pages.shape[made.head_axis] // made.num_heads
        return pages.narrow(made.head_axis, heads.start * width, len(heads) * width)

    def apply(self, copies: Sequence[PageCopy]) -> None:
        """Make page copies, one after the other. Off the CPU they are only queued, in that order."""
        for each in copies:
            if each.way == "within":
                self.copy(each.sources, each.targets, each.group)
            elif each.way in ("to_host", "from_host"):
                self._swap(each)
                self._swapped = queued(self.device)
            else:
                assert self.tier is not None, f"{len(each.keys)} pages go {each.way}, and there is none"
                self.tier.apply(each)

    @property
    def num_groups(self) -> int:
        """The number of groups of layers, of which the first may have no layer."""
        return 1 + max(each.group for each in self.layers)

    def of_group(self, group: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the planes of a group's layers, on the device and on the host."""
        own = [layer for layer, each in enumerate(self.layers) if each.group == group]
        device = [plane for layer in own for plane in self.of(layer)]
        return device, [plane for layer in own for plane in self._host_planes[layer]]

    def copied_out(self, pages: Index, group: int) -> list[Tensor]:
        """Copy pages of a group's layers to the host's memory; off the CPU the copies are only queued."""
        return self._copied(self.of_group(group)[0], pages)

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
        for tensor in self.of_group(group)[0]:
            pages = _flat(tensor)
            for read, written in _chunks(pages, sources, targets):
                _copy(pages, read, pages, written, indexed=self._indexed)

    def resize(self, num_pages: Sequence[int]) -> None:
        """Change the number of pages of each group; pages that remain keep their content.

        Tensors are copied layer by layer, and memory that is no longer needed is returned to the system.
        Layers that shrink come first, so that those that grow find room.
        """
        grows = [new - old for new, old in zip(num_pages, self.num_pages)]
        for layer in sorted(range(len(self.layers)), key=lambda layer: grows[self.layers[layer].group]):
            group = self.layers[layer].group
            if grows[group]:
                kept = np.arange(min(num_pages[group], self.num_pages[group]))
                self._planes[layer] = self._resized(layer, num_pages[group], kept)
        self.num_pages = tuple(num_pages)
        _release_memory(self.device)

    def release(self) -> None:
        """Give back the memory of all pages but the null page, on the device and on the host.

        Their content is lost, and no page may be used until `restore`.
        """
        assert self._released is None, "the pages have been given back already"
        self.wait_for_swaps()
        self._released = [
            (len(planes[0]), len(host[0])) for planes, host in zip(self._planes, self._host_planes)
        ]
        for layer in range(len(self.layers)):
            self._allocate(layer, 1, 0)
        _release_memory(self.device)

    def restore(self) -> None:
        """Allocate again, as zeros, what was given back.

        Raises MemoryError, with everything still given back.
        """
        assert self._released is not None, "no pages have been given back"
        counts = self._released
        try:
            for layer, count in enumerate(counts):
                self._allocate(layer, *count)
        except RuntimeError as error:  # torch raises it where memory is missing
            for layer in range(len(counts)):
                self._allocate(layer, 1, 0)
            _release_memory(self.device)
            raise MemoryError(f"the pages cannot be allocated: {error}") from error
        self._released = None

    def _allocate(self, layer: int, num_pages: int, num_host_pages: int) -> None:
        """Replace the pages of a layer by so many of zeros; the old ones are let go first."""
        self._planes[layer] = self._host_planes[layer] = ()
        self._planes[layer] = self.layers[layer].new_planes(num_pages)
        self._host_planes[layer] = tuple(_host_zeros(each, num_host_pages) for each in self._planes[layer])

    @property
    def num_bytes(self) -> int:
        """The bytes that all pages take, on the device and on the host."""
        on_host = (plane for planes in self._host_planes for plane in planes)
        return sum(each.untyped_storage().nbytes() for each in (*self.tensors, *on_host))

    def _resized(self, layer: int, num_pages: int, kept: Index) -> tuple[Tensor, ...]:
        """Return new planes of a layer, with the content of the pages that remain.

        Nothing holds the old ones when this has returned and they are replaced, so that they can be released.
        """
        new = self.layers[layer].new_planes(num_pages)
        for old, made in zip(self.of(layer), new):
            for read, written in _chunks(old, kept, kept):
                _copy(old, read, made, written, indexed=self._indexed)
        return new

    def _swap(self, copy: PageCopy) -> None:
        to_host = copy.way == "to_host"
        order = np.argsort(copy.targets if to_host else copy.sources)  # host pages are then in runs
        sources, targets = copy.sources[order], copy.targets[order]
        device, host = self.of_group(copy.group)
        for source, target in zip(*((device, host) if to_host else (host, device))):
            _exchange(source, sources, target, targets, to_host=to_host, indexed=self._indexed)


def layout_of(planes: Sequence[tuple[torch.dtype, Sequence[int]]], order: PageOrder | None) -> str:
    """Name how a page of planes of these types and shapes lies."""
    shapes = " and ".join(f"{dtype} {[*shape]}".removeprefix("torch.") for dtype, shape in planes)
    return shapes if order is None else f"{shapes} {order.name}"


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; large ones on a CPU in huge pages: decodes of many requests read these 1.1 to 1.2 times
    as fast.

    Raises RuntimeError where there is no memory.
    """
    if device.type != "cpu" or math.prod(shape) * dtype.itemsize < LEAST_MAPPED:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return huge_zeros(shape, dtype)


def _host_zeros(like: Tensor, count: int) -> Tensor:
    """Allocate pages of zeros in the host's memory, pinned if a device copies to them.

    Such copies do not involve the host.
    """
    shape = count, *like.shape[1:]
    if like.device.type == "cpu":
        return zeros(shape, like.dtype, like.device)
    return torch.zeros(*shape, dtype=like.dtype, pin_memory=True)


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


def _bytes_of(pages: Tensor) -> Bytes:
    """View pages of the host as bytes, without a copy."""
    return pages.view(-1).view(torch.uint8).numpy()


def _nothing() -> None:
    """Wait for nothing: there is no copy."""


def _release_memory(device: torch.device) -> None:
    """Make the allocator return the memory that it keeps for later use."""
    if device.type != "cpu":
        # torch.accelerator.empty_cache takes no allocator of torch_npu up to 2.10
        torch.get_device_module(device).empty_cache()
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
