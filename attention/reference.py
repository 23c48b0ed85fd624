"""Define attention over the paged cache, in plain torch.

It is the same on every device and computes one span after the other: the definition against which every
faster implementation is tested.

Legend: T tokens of the step, S spans, H query heads, K kv heads, D head dim, P pages, B tokens a
  page, N slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.int8_pages import packed, packed_units, row_bytes, unpacked
from continuous_batching.batch import Batch
from devices.shapes import AttentionShape
from kv_cache.device.storage import PageOrder, zeros
from kv_cache.device.transfer import to_device

# Query positions computed at a time, because the scores of a long prompt grow with its square
QUERY_ROWS = 256


Windows = Sequence[int | None] | None  # windows that the layers of a group have


@dataclass(frozen=True, slots=True)
class Span:
    """One span of the step: its first row in the packed query, its positions, its request's pages."""

    first_row: int
    start: int
    stop: int
    pages: Tensor  # int64 [ceil(stop / B)]


@dataclass(frozen=True)
class AttentionMetadata:
    """What all layers of one step share; an implementation may add fields in a subclass."""

    write_index: Tensor  # int64 [T]: cache place of every token of the step, page * B + offset
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class StaticDecodes:
    """What a captured step reads, for R rows of W tokens each, at addresses that do not change.

    The last token of a row sees all of its keys. A padding row is the first token of the null page W times,
    and writes into that page. W is 1 unless attention captures spans.
    """

    write_index: Tensor  # int32 [R * W]
    page_table: Tensor  # int32 [R, max_pages]
    kv_lens: Tensor  # int32 [R * W], the token itself included


@dataclass(frozen=True, slots=True)
class ChannelScales:
    """Scales of the keys and the values of one layer, each for a channel of a key-value head: both [K, D].

    A device may hold them in another form; see Attention.pack_scales.
    """

    keys: Tensor
    values: Tensor


class Attention:
    """Causal attention over the paged cache: plan once a step, then write and attend once a layer.

    A device's subclass overrides what it does faster, and `check` to refuse what it cannot do.
    """

    indexed: bool = True  # whether pages of a tensor may be read and written by their numbers
    captures_spans: bool = False  # whether a captured step may have several tokens of a row
    gives_sums: bool = True  # whether it has `attend_with_sums`
    order: PageOrder | None = None  # its own order within a page; None: tokens lie one after the other

    def __init__(self, shape: AttentionShape, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.sinks: dict[int, Tensor] = {}  # sink weights [H] of the decoder by layer, if the shape has them

    def check(self) -> None:
        """Raise ValueError for a shape that cannot be served, with the value, the limit and the fix."""
        shape = self.shape
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError(
                f"num_attention_heads is {shape.num_heads} and num_key_value_heads {shape.num_kv_heads}; "
                "the first must be a multiple of the second: correct the model's configuration"
            )
        if shape.page_size < 1:
            raise ValueError(f"cache.page_size is {shape.page_size}; it must be at least 1: choose 16 to 128")
        for layer, window in enumerate(shape.windows):
            if window is not None and window < 1:
                raise ValueError(
                    f"the sliding window of layer {layer} is {window}; it must be at least 1: "
                    "correct the model's configuration, or leave the window out"
                )

    def check_longest(self, num_tokens: int) -> None:
        """Raise ValueError if requests of `num_tokens` tokens are too long; here any length is allowed."""

    def new_planes(self, count: int) -> tuple[Tensor, ...]:
        """Return `count` pages of zeros for the keys of a layer, and as many for the values.

        They are [P, B, K, D], or [P, B, K, D + 4] in int8 (`int8_pages`). A subclass may have other planes,
        or arrange the numbers within a page in its own order.
        """
        return self._plane(count, self.shape.head_dim), self._plane(count, self.shape.head_dim)

    # The axis of a plane along which the heads of a run lie one after the other
    head_axis = 2

    @property
    def num_runs(self) -> int:
        """The runs of a page, in each of which the heads lie one after the other: its tokens."""
        return self.shape.page_size

    def _plane(self, count: int, width: int) -> Tensor:
        shape = self.shape
        page = (count, shape.page_size, shape.num_kv_heads)
        if shape.int8_pages:
            return zeros((*page, row_bytes(width)), torch.int8, self.device)
        return zeros((*page, width), shape.dtype, self.device)

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> AttentionMetadata:
        """Compute what all layers of a group share in this step.

        `page_table` [N, max_pages] and `write_index` [T], the cache place of every token, are the group's, on
        the host. Its layers have these `windows`; None: any that the shape has. Entries of the table before
        what a window sees may be the null page, whose content is not read, or counts nothing.
        """
        num_pages = -(-batch.stops // self.shape.page_size)
        first_rows = np.cumsum(batch.stops - batch.starts) - (batch.stops - batch.starts)
        spans = tuple(
            Span(row, start, stop, to_device(page_table[slot, :pages].astype(np.int64), self.device))
            for slot, row, start, stop, pages in zip(
                batch.slots.tolist(),
                first_rows.tolist(),
                batch.starts.tolist(),
                batch.stops.tolist(),
                num_pages.tolist(),
            )
        )
        return AttentionMetadata(to_device(write_index, self.device), spans)

    def places(self, write_index: NDArray[np.int64]) -> Tensor:
        """Return the cache places [T] of the step's tokens on the device, in the type that `write` takes."""
        return to_device(write_index, self.device)

    def write(
        self,
        key: Tensor,
        value: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write the step's keys and values, both [T, K, D], to their places in the layer's [P, B, K, D].

        There may be more rows than the step has tokens; the rest are padding.
        """
        num_tokens = len(metadata.write_index)
        for pages, new in ((layer_keys, key[:num_tokens]), (layer_values, value[:num_tokens])):
            pages.flatten(0, 1)[metadata.write_index] = packed(new) if self.shape.int8_pages else new

    def pack_scales(self, keys: Tensor, values: Tensor) -> ChannelScales:
        """Return the scales of a layer, both float32 [K * D], in the form that this attention reads."""
        heads = self.shape.num_kv_heads, self.shape.head_dim
        return ChannelScales(keys.view(heads), values.view(heads))

    def write_by_channel(
        self,
        key: Tensor,
        value: Tensor,
        scales: ChannelScales,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write keys and values into pages in int8 as multiples of their channels' scales; see `write`."""
        assert self.shape.int8_pages, "scales of a checkpoint are those of pages in int8"
        num_tokens = len(metadata.write_index)
        for pages, new, scale in ((layer_keys, key, scales.keys), (layer_values, value, scales.values)):
            pages.flatten(0, 1)[metadata.write_index] = packed_units(new[:num_tokens].float() / scale)

    def attend_by_channel(
        self,
        query: Tensor,
        scales: ChannelScales,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
        layer: int,
    ) -> Tensor:
        """Attend as `attend` does, to what `write_by_channel` has written.

        Queries are multiplied by the scales of the keys that they read, and results by those of the values.
        """
        units = _scaled(query, scales.keys)
        return _scaled(self.attend(units, layer_keys, layer_values, metadata, layer), scales.values)

    def read(self, layer_keys: Tensor, layer_values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [n, K, D] at cache places `index` [n].

        A subclass with its own order within a page overrides this.
        """
        keys, values = (pages.flatten(0, 1)[index] for pages in (layer_keys, layer_values))
        return self._numbers(keys), self._numbers(values)

    def attend(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        """Let each query [T, H, D] attend to its request's positions up to its own; returns the same shape.

        With the layer's window w, the query at position p sees positions p-w+1 to p. A layer's sink is one
        more score of each row, whose share of the weights goes to no value (arXiv 2309.17453). Only places
        that the request has written are read: other places of the cache may hold NaN. Rows that pad a step
        are zeros: by AMX, oneDNN lets what is not finite in a row reach the row before it (torch 2.13).
        """
        window, sinks = self.shape.windows[layer], self.sinks.get(layer)
        output = torch.zeros_like(query)
        for span in metadata.spans:
            keys, values = self._of_pages(layer_keys, layer_values, span)
            self._attend_span(query, keys, values, span, window, output, sinks)
        return output

    def attend_with_sums(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Attend as `attend` does, to a part of the keys of requests; no layer has a window or sinks.

        Returns the output of each query, and the logarithm of the sum of the exponents of its scores, float32
        [T, H], by which the outputs of several parts are joined.
        """
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        output: Tensor | None = None
        for span in metadata.spans:
            keys, values = self._of_pages(layer_keys, layer_values, span)
            if output is None:
                output = query.new_empty(*query.shape[:2], values.shape[-1])
            self._attend_span(query, keys, values, span, None, output, None, sums)
        assert output is not None, "a step has spans"
        return output, sums

    def attend_with_sums_by_channel(
        self,
        query: Tensor,
        scales: ChannelScales,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Attend as `attend_with_sums` does, to what `write_by_channel` has written."""
        units = _scaled(query, scales.keys)
        output, sums = self.attend_with_sums(units, layer_keys, layer_values, metadata, layer)
        return _scaled(output, scales.values), sums

    def _of_pages(self, layer_keys: Tensor, layer_values: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Return the keys and the values [n, K, D] of a span's pages."""
        keys, values = (
            self._numbers(pages[span.pages].flatten(0, 1)) for pages in (layer_keys, layer_values)
        )
        return keys, values

    def _attend_span(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        span: Span,
        window: int | None,
        output: Tensor,
        sinks: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> None:
        """Write the span's rows of the output, given keys and values of its request from the first on.

        If there are `sums`, the logarithms of the sums of exponents of their scores are written there.
        """
        for start in range(span.start, span.stop, QUERY_ROWS):
            stop = min(start + QUERY_ROWS, span.stop)
            # The padding of a captured step lies before the first key
            seen = min(self.shape.first_key, start)
            if window is not None:
                seen = max(seen, start - window + 1)
            rows = slice(span.first_row + start - span.start, span.first_row + stop - span.start)
            read = keys[seen:stop], values[seen:stop]
            of_rows = None if sums is None else sums[rows]
            output[rows] = self._dense(query[rows], *read, window, sinks, of_rows)

    def graph_sizes(
        self,
        sizes: list[int],
        beside: int = 0,
        most_layers: int = 0,
        *,
        joins: bool = False,
        most_padding: int | None = None,
    ) -> list[int]:
        """Return which of these numbers of decodes are captured as graphs, the largest always among them.

        `beside` further graphs are held on the device, and another stage may have as many as `most_layers`
        layers. With `joins`, each size has a second graph, which joins the logits of several ranks. Where the
        device holds fewer graphs, a step is padded by up to `most_padding` rows, a page of them unless it is
        given. Raises ValueError if none can be captured.
        """
        raise ValueError(
            f"device.graphs: {type(self).__name__} needs the host at each span and cannot be captured: set it"
            " to 0"
        )

    def holds(self, sizes: list[int], beside: int, *, joins: bool = False) -> bool:
        """Whether the device can hold graphs of all these sizes, beside so many others."""
        try:
            return self.graph_sizes(sizes, beside, joins=joins) == sizes
        except ValueError:
            return False

    def plan_static(self, decodes: StaticDecodes, windows: Windows = None) -> AttentionMetadata:
        """Plan a step that is captured, as `plan` does: a replay computes with what `decodes` then holds."""
        raise AssertionError("graph_sizes refuses an attention without plan_static")

    def replay(self, graph: Any, metadata: Sequence[AttentionMetadata], kv_lens: list[int]) -> None:
        """Run a captured step, with the metadata of each group.

        `kv_lens` [R] equal those on the device, for operators that read them on the host.
        """
        graph.replay()

    def _numbers(self, stored: Tensor) -> Tensor:
        """Return the numbers [n, K, D] that stored places of the cache represent."""
        return unpacked(stored) if self.shape.int8_pages else stored

    def _capped(self, scores: Tensor) -> Tensor:
        """Return scores of any shape within the cap, if there is one (arXiv 2408.00118)."""
        cap = self.shape.score_cap
        return scores if cap is None else (scores / cap).tanh() * cap

    def _dense(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        sinks: Tensor | None,
        sums: Tensor | None = None,
    ) -> Tensor:
        """Attend from queries [t, H, D] at the last t of the L positions of `keys` and `values` [L, K, D].

        The logarithms of the sums of exponents are written to `sums` [t, H].
        """
        num_rows, length = len(query), len(keys)
        grouped = query.float().unflatten(1, (keys.shape[1], -1))
        scores = self._capped(torch.einsum("tkgd,lkd->kgtl", grouped, keys.float()) * self.shape.scale)
        last = torch.arange(length - num_rows, length, device=query.device)[:, None]
        position = torch.arange(length, device=query.device)
        hidden = position > last
        if window is not None:
            hidden |= position <= last - window
        scores = scores.masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            of_head = sinks.float().view(*scores.shape[:2], 1, 1).expand(-1, -1, num_rows, 1)
            scores = torch.cat((scores, of_head), -1)
        if sums is not None:
            sums.copy_(scores.logsumexp(-1).flatten(0, 1).t())
        weights = scores.softmax(-1)[..., :length]
        return torch.einsum("kgtl,lkd->tkgd", weights, values.float()).flatten(1, 2).to(query.dtype)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply query heads [T, H, D] with scales [K, D] of the key-value heads that they read."""
    heads = x.float().unflatten(1, (len(scale), -1))
    scaled: Tensor = (heads * scale[:, None]).flatten(1, 2)
    return scaled.to(x.dtype)
