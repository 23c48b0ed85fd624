"""Divide each page of the cache between ranks that would hold copies of it (decode context parallelism).

C neighbouring ranks read the same latents, or the same key-value head. Position t of a request lies on the
neighbour t mod C alone, so that a page of B tokens is one of B / C on each of them; page tables, and whatever
shares, moves or keeps pages by their numbers, are the same as without it. A query that reads a request's last
tokens visits all neighbours: each attends to its own part, and the parts are joined by the sums of exponents
of their scores. For longer spans, the pages of their requests are gathered for a layer at a time. Pages in
int8 have a scale for each token, or multiples of scales for each channel: each rank reads its own.

The device's own attention computes both. It is made twice: for the parts, with the heads of all neighbours,
and for what is gathered, with this rank's.

Legend: T tokens of the step, R rows whose parts are joined, C neighbours, H query heads, K kv heads, D head
  dim, V width of what a head's parts are, P pages, B tokens a page, L latent, N and E the two parts of a
  query before it is absorbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.latent import LatentAttention, LatentProlog, LatentUp
from attention.reference import Attention, AttentionMetadata, ChannelScales, StaticDecodes, Windows
from continuous_batching.batch import Batch, ragged_ranges
from devices.shapes import AttentionShape
from kv_cache.device.transfer import to_device
from kv_cache.pages import Index

MOST_JOINED = 16  # tokens of a span that are joined from parts, each as a row of its own
MOST_ROWS = 1024  # rows that are joined at a time, which bounds the memory of their parts
GATHERED_TOKENS = 8192  # tokens that are gathered at a time, and for several requests in one call


class Neighbours(Protocol):
    """The ranks that divide pages, of which this is number `rank`."""

    rank: int
    size: int

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather [...] of each rank into [ranks, ...]."""
        ...

    def exchange(self, x: Tensor) -> Tensor:
        """Send [ranks, ...] to the ranks, one part to each; return what they have sent to this one."""
        ...


@dataclass(frozen=True, slots=True)
class Gathered:
    """Long spans whose requests' pages are gathered for one call."""

    rows: Tensor  # int64, rows of the packed query
    pages: Tensor  # int64 [P]: the pages of these requests, one after the other
    metadata: AttentionMetadata  # The gathered pages are its cache.


@dataclass(frozen=True)
class DividedMetadata(AttentionMetadata):
    """What all layers of one step share; `write_index` has the places in undivided pages.

    A part has MOST_ROWS joined rows, and the last one the rest; a captured step has one part for all rows.
    """

    own: AttentionMetadata  # the places in this rank's pages; other ranks' tokens go to the null page
    parts: tuple[AttentionMetadata, ...]
    rows: Tensor | None  # int64 [R]: their rows in the packed query; None for all
    is_without: Tensor | None  # bool [R]: whether this rank has none of their keys
    gathered: tuple[Gathered, ...] = ()

    @property
    def joined_rows(self) -> Tensor | slice:
        """The rows of the packed query that are joined from parts; padding may follow them."""
        if self.rows is not None:
            return self.rows
        return slice(0, 0 if self.is_without is None else len(self.is_without))

    def joins_all(self, query: Tensor) -> bool:
        """Whether all rows of a packed query are joined from parts, without padding."""
        return self.rows is None and self.is_without is not None and len(query) == len(self.is_without)


def check_divided(shape: AttentionShape, count: int) -> None:
    """Raise ValueError for a shape whose pages `count` ranks cannot divide, with the reason and the fix."""
    has = {
        "a sliding window": any(each is not None for each in shape.windows),
        "attention sinks": shape.has_sinks,
        "a cap of scores": shape.score_cap is not None,
        "sparse attention": shape.latent is not None and shape.latent.index is not None,
    }
    for what in (name for name, is_so in has.items() if is_so):
        raise ValueError(
            f"parallel.context is {count}, and the model has {what}, which is not divided: set it to 1"
        )
    if shape.num_kv_heads != 1:
        raise ValueError(
            f"parallel.context is {count}, and a rank holds {shape.num_kv_heads} key-value heads, of which no"
            " other has copies: set it to 1"
        )
    if shape.page_size % count:
        raise ValueError(
            f"cache.page_size is {shape.page_size}, and parallel.context {count} does not divide it: set a"
            " multiple"
        )


def shapes_of(shape: AttentionShape, count: int) -> tuple[AttentionShape, AttentionShape]:
    """Return the shapes of the attention to a part of each request's keys, and of that to gathered pages."""
    size = shape.page_size // count
    return (
        replace(shape, num_heads=count * shape.num_heads, page_size=size, first_key=0),
        replace(shape, page_size=size),
    )


def own_counts(counts: NDArray[Any], rank: int, size: int) -> NDArray[Any]:
    """Return how many of the first `counts` positions of a request lie on a rank."""
    owned: NDArray[Any] = (counts + (size - 1 - rank)) // size
    return owned


class DividedAttention(Attention):
    """Attention over pages that this rank's neighbours divide, by the device's own attention."""

    def __init__(
        self, shape: AttentionShape, parts: Attention, whole: Attention, neighbours: Neighbours
    ) -> None:
        super().__init__(shape, parts.device)
        self.parts, self.whole, self.neighbours = parts, whole, neighbours
        self.own_size = shape.page_size // neighbours.size
        self.indexed, self.order, self.head_axis = parts.indexed, parts.order, parts.head_axis

    @property
    def num_runs(self) -> int:
        """See Attention.num_runs: those of a page on this rank."""
        return self.parts.num_runs

    def check(self) -> None:
        check_divided(self.shape, self.neighbours.size)
        if not self.parts.gives_sums:
            raise ValueError(
                f"parallel.context is {self.neighbours.size}; {type(self.parts).__name__} gives no sums by"
                " which parts are joined: set it to 1, or device.attention to reference"
            )
        self.parts.check()
        self.whole.check()

    def check_longest(self, num_tokens: int) -> None:
        self.whole.check_longest(num_tokens)

    def new_planes(self, count: int) -> tuple[Tensor, ...]:
        """Return this rank's part of `count` pages of zeros."""
        return self.parts.new_planes(count)

    def graph_sizes(
        self,
        sizes: list[int],
        beside: int = 0,
        most_layers: int = 0,
        *,
        joins: bool = False,
        most_padding: int | None = None,
    ) -> list[int]:
        # Padding of a page takes as many places of all neighbours' null pages as of one that is not divided
        return self.parts.graph_sizes(
            sizes, beside, most_layers, joins=joins, most_padding=self.shape.page_size
        )

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> DividedMetadata:
        """Compute what all layers share in this step; see Attention.plan."""
        lens = batch.stops - batch.starts
        is_long = lens > MOST_JOINED
        parts: tuple[AttentionMetadata, ...] = ()
        rows, is_without = None, None
        if not is_long.all():
            parts, is_without = self._plan_parts(batch, ~is_long, page_table)
            rows = _rows(lens, ~is_long, self.device) if is_long.any() else None
        return DividedMetadata(
            to_device(write_index, self.device),
            (),
            AttentionMetadata(self.parts.places(self._own_places(write_index)), ()),
            parts,
            rows,
            is_without,
            tuple(self._plan_gathered(batch, each, page_table) for each in _together(batch, is_long)),
        )

    def _own_places(self, write_index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places in this rank's pages; other ranks' tokens have places in the null page.

        There they lie as in their own page, so that few share a place, in whatever order that is written.
        """
        size, rank, count = self.shape.page_size, self.neighbours.rank, self.neighbours.size
        pages, offsets = np.divmod(write_index, size)
        own_pages = np.where(offsets % count == rank, pages, 0)
        places: NDArray[np.int64] = own_pages * self.own_size + offsets // count
        return places

    def _plan_parts(
        self, batch: Batch, chosen: NDArray[np.bool_], page_table: NDArray[np.int32]
    ) -> tuple[tuple[AttentionMetadata, ...], Tensor]:
        """Plan a row for each token of the chosen spans, which sees this rank's keys up to the token.

        A row without keys reads the first place of the null page, to which its own token has been written.
        """
        starts, stops = batch.starts[chosen], batch.stops[chosen]
        seen = own_counts(ragged_ranges(starts, stops) + 1, self.neighbours.rank, self.neighbours.size)
        read = np.maximum(seen, 1)
        table = page_table[
            np.repeat(batch.slots[chosen], stops - starts), : -(-int(read.max()) // self.own_size)
        ]
        table[seen == 0, 0] = 0
        planned = []
        for first in range(0, len(read), MOST_ROWS):
            stop = min(first + MOST_ROWS, len(read))
            rows = _batch(np.arange(first, stop), read[first:stop] - 1, read[first:stop])
            planned.append(self.parts.plan(rows, table, np.empty(0, dtype=np.int64)))
        return tuple(planned), to_device(seen == 0, self.device)

    def _plan_gathered(self, batch: Batch, chosen: Index, page_table: NDArray[np.int32]) -> Gathered:
        """Plan the chosen spans over gathered pages, which lie one after the other."""
        starts, stops = batch.starts[chosen], batch.stops[chosen]
        num_pages = -(-stops // self.shape.page_size)
        slots = batch.slots[chosen].tolist()
        pages = np.concatenate([page_table[slot, :count] for slot, count in zip(slots, num_pages.tolist())])
        own_pages = num_pages * self.neighbours.size  # a page here is as large as a gathered page's part
        firsts = np.cumsum(own_pages) - own_pages
        table = (firsts[:, None] + np.arange(own_pages.max())).astype(np.int32)
        is_chosen = np.zeros(batch.num_spans, dtype=bool)
        is_chosen[chosen] = True
        spans = _batch(np.arange(len(chosen)), starts, stops)
        return Gathered(
            _rows(batch.stops - batch.starts, is_chosen, self.device),
            to_device(pages.astype(np.int64), self.device),
            self.whole.plan(spans, table, np.empty(0, dtype=np.int64)),
        )

    def plan_static(self, decodes: StaticDecodes, windows: Windows = None) -> DividedMetadata:
        """Plan a captured step, whose rows are joined from parts."""
        size, rank, count = self.shape.page_size, self.neighbours.rank, self.neighbours.size
        index = decodes.write_index
        offsets = index % size
        pages = (index // size).masked_fill(offsets % count != rank, 0)
        places = pages * self.own_size + offsets // count
        seen = (decodes.kv_lens + (count - 1 - rank)) // count
        table = decodes.page_table
        first = table[:, :1].masked_fill(seen[:, None] == 0, 0)
        table = torch.cat((first, table[:, 1:]), 1)
        parts = self.parts.plan_static(StaticDecodes(places, table, seen.clamp(min=1)))
        own = AttentionMetadata(parts.write_index, ())
        return DividedMetadata(index, (), own, (parts,), None, seen == 0)

    def replay(self, graph: Any, metadata: Sequence[AttentionMetadata], kv_lens: list[int]) -> None:
        """Run a captured step, with this rank's numbers of keys."""
        rank, count = self.neighbours.rank, self.neighbours.size
        own = [max(1, (length + count - 1 - rank) // count) for length in kv_lens]
        self.parts.replay(graph, [part for each in metadata for part in _divided(each).parts], own)

    def write(
        self,
        key: Tensor,
        value: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write those of the step's keys and values that lie on this rank."""
        self.parts.write(key, value, layer_keys, layer_values, _divided(metadata).own)

    def pack_scales(self, keys: Tensor, values: Tensor) -> ChannelScales:
        """See Attention.pack_scales."""
        return self.parts.pack_scales(keys, values)

    def write_by_channel(
        self,
        key: Tensor,
        value: Tensor,
        scales: ChannelScales,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write those of the step's keys and values that lie on this rank; see Attention.write_by_channel."""
        own = _divided(metadata).own
        self.parts.write_by_channel(key, value, scales, layer_keys, layer_values, own)

    def attend(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        """Let each query [T, H, D] attend to its request's positions up to its own; see Attention.attend."""
        return self._attended(query, None, layer_keys, layer_values, metadata, layer)

    def attend_by_channel(
        self,
        query: Tensor,
        scales: ChannelScales,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
        layer: int,
    ) -> Tensor:
        """See Attention.attend_by_channel."""
        return self._attended(query, scales, layer_keys, layer_values, metadata, layer)

    def _attended(
        self,
        query: Tensor,
        scales: ChannelScales | None,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
        layer: int,
    ) -> Tensor:
        made = _divided(metadata)
        if made.joins_all(query):
            return self.joined(query, layer_keys, layer_values, made, layer, scales)
        output = torch.zeros_like(query)
        if made.parts:
            rows = query[made.joined_rows]
            output[made.joined_rows] = self.joined(rows, layer_keys, layer_values, made, layer, scales)
        for each in made.gathered:
            rows = query[each.rows]
            keys, values = (
                self.all_of(pages, each.pages, at) for at, pages in enumerate((layer_keys, layer_values))
            )
            read = keys, values, each.metadata, layer
            if scales is None:
                output[each.rows] = self.whole.attend(rows, *read)
            else:
                output[each.rows] = self.whole.attend_by_channel(rows, scales, *read)
        return output

    def joined(
        self,
        query: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: DividedMetadata,
        layer: int,
        scales: ChannelScales | None = None,
    ) -> Tensor:
        """Attend from queries [R, H, D] to the parts of all neighbours; returns [R, H, V]."""
        assert metadata.is_without is not None, "these rows were planned"
        pages, most = (layer_keys, layer_values), MOST_ROWS if len(metadata.parts) > 1 else len(query)
        pieces = zip(query.split(most), metadata.parts, metadata.is_without.split(most), strict=True)
        made = [self._joined(rows, *pages, part, absent, layer, scales) for rows, part, absent in pieces]
        return made[0] if len(made) == 1 else torch.cat(made)

    def _joined(
        self,
        query: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        part: AttentionMetadata,
        is_without: Tensor,
        layer: int,
        scales: ChannelScales | None,
    ) -> Tensor:
        """Compute `joined` for the rows of one part."""
        count, num_heads = self.neighbours.size, query.shape[1]
        asked = self.neighbours.all_gather(query).transpose(0, 1).flatten(1, 2)  # [R, C * H, D]
        read = layer_keys, layer_values, part, layer
        if scales is None:
            found, sums = self.parts.attend_with_sums(asked, *read)
        else:
            found, sums = self.parts.attend_with_sums_by_channel(asked, scales, *read)
        absent = is_without[:, None]
        found = found.float().masked_fill(absent[..., None], 0)
        sums = sums.masked_fill(absent, -torch.inf)
        parts = torch.cat((found, sums[..., None]), -1).unflatten(1, (count, num_heads))
        parts = self.neighbours.exchange(parts.transpose(0, 1).contiguous())  # [C, R, H, V + 1]
        output, sums = parts[..., :-1], parts[..., -1:]
        total = sums.logsumexp(0)
        output = (output * (sums - total).exp()).sum(0)
        if self.shape.first_key:  # zeros before it have a score of 0, and take a share of the weights
            output = torch.where(total > 0, output / -torch.expm1(-total), 0)
        return output.to(query.dtype)

    def all_of(self, plane: Tensor, pages: Tensor, number: int) -> Tensor:
        """Return all neighbours' parts of some pages [P] of plane `number`, as C * P pages of B / C tokens.

        They are gathered in pieces, so that little more than the result is held.
        """
        count = self.neighbours.size
        made = plane.new_empty(len(pages), plane.shape[1], count, *plane.shape[2:])
        most = max(1, GATHERED_TOKENS // self.shape.page_size)
        for first in range(0, len(pages), most):
            own = plane.index_select(0, pages[first : first + most])
            if self.order is not None:
                own = self.order.by_token(own, number)
            made[first : first + most] = self.neighbours.all_gather(own).movedim(0, 2)
        whole = made.view(-1, *plane.shape[1:])
        return whole if self.order is None else self.order.from_tokens(whole, number)


class DividedLatentAttention(DividedAttention, LatentAttention):
    """Latent attention over pages that this rank's neighbours divide, by the device's own attention."""

    parts: LatentAttention
    whole: LatentAttention

    def __init__(
        self, shape: AttentionShape, parts: Attention, whole: Attention, neighbours: Neighbours
    ) -> None:
        assert isinstance(parts, LatentAttention), "latents are read by attention to latents"
        super().__init__(shape, parts, whole, neighbours)
        self.normalizes = parts.normalizes

    def write_raw(
        self,
        kv: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        layer_latents: Tensor,
        layer_rope_keys: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Normalise, rotate and write those latents and rope keys that lie on this rank."""
        own = _divided(metadata).own
        self.parts.write_raw(kv, norm, eps, cos, sin, layer_latents, layer_rope_keys, own)

    def joins(self, hidden_size: int, query_rank: int | None) -> bool:
        return self.parts.joins(hidden_size, query_rank)

    def is_joined(self, metadata: AttentionMetadata) -> bool:
        """Whether every query is absorbed."""
        return not _divided(metadata).gathered

    def write_joined(
        self,
        x: Tensor,
        row_scale: Tensor | None,
        prolog: LatentProlog,
        cos: Tensor,
        sin: Tensor,
        layer_latents: Tensor,
        layer_rope_keys: Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See LatentAttention.write_joined."""
        own = _divided(metadata).own
        return self.parts.write_joined(x, row_scale, prolog, cos, sin, layer_latents, layer_rope_keys, own)

    def attend_joined(
        self,
        query: Tensor,
        rope: Tensor,
        up: LatentUp,
        layer_latents: Tensor,
        layer_rope_keys: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See LatentAttention.attend_joined."""
        whole = torch.cat((query, rope), -1)
        return up.raised(self.joined(whole, layer_latents, layer_rope_keys, _divided(metadata), 0))

    def attend_heads(
        self,
        nope: Tensor,
        rope: Tensor,
        up: LatentUp,
        layer_latents: Tensor,
        layer_rope_keys: Tensor,
        metadata: AttentionMetadata,
        layer: int,
    ) -> Tensor:
        """Let each query, of parts [T, H, N] and [T, H, E], attend to its request's positions up to its own.

        Returns [T, H, V].
        """
        made, planes = _divided(metadata), (layer_latents, layer_rope_keys)
        if made.joins_all(nope):
            query = torch.cat((up.absorbed(nope), rope), -1)
            return up.raised(self.joined(query, *planes, made, layer))
        output = nope.new_zeros(*nope.shape[:2], self.latent.value_dim)
        if made.parts:
            rows = made.joined_rows
            query = torch.cat((up.absorbed(nope[rows]), rope[rows]), -1)
            output[rows] = up.raised(self.joined(query, *planes, made, layer))
        for each in made.gathered:
            latents, rope_keys = (self.all_of(plane, each.pages, at) for at, plane in enumerate(planes))
            output[each.rows] = self.whole.attend_heads(
                nope[each.rows], rope[each.rows], up, latents, rope_keys, each.metadata, layer
            )
        return output


def _divided(metadata: AttentionMetadata) -> DividedMetadata:
    assert isinstance(metadata, DividedMetadata), "it was planned here"
    return metadata


def _rows(lens: NDArray[np.int64], chosen: NDArray[np.bool_], device: torch.device) -> Tensor:
    """Return the int64 rows of the packed query that belong to the chosen spans of these lengths."""
    ends = np.cumsum(lens)
    return to_device(ragged_ranges((ends - lens)[chosen], ends[chosen]), device)


def _together(batch: Batch, is_long: NDArray[np.bool_]) -> list[Index]:
    """Return the long spans, in lists whose requests are gathered for one call."""
    lists: list[list[int]] = []
    held = 0
    for span in np.flatnonzero(is_long).tolist():
        length = int(batch.stops[span])
        if not lists or held + length > GATHERED_TOKENS:
            lists.append([])
            held = 0
        lists[-1].append(span)
        held += length
    return [np.array(each, dtype=np.int64) for each in lists]


def _batch(slots: Index, starts: Index, stops: Index) -> Batch:
    """Return a batch of spans that yield no tokens."""
    none = np.empty(0, dtype=np.int64)
    return Batch(slots, starts, stops, none, none, none)
