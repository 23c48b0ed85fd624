"""What must attention over the paged cache compute?

Plain torch, the same on every device, one span after the other: the definition that every faster
implementation is held against.

Legend: T tokens of the step, S spans, H query heads, K kv heads, D head dim, P pages, B tokens a
page, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from continuous_batching.batch import Batch
from devices.shapes import AttentionShape
from kv_cache.transfer import to_device

QUERY_ROWS = 256  # query positions whose scores are held at once: a long prompt's mask is quadratic


@dataclass(frozen=True, slots=True)
class Span:
    """One span of the step: its rows of the packed query, its positions, its request's pages."""

    first_row: int
    start: int
    stop: int
    pages: Tensor  # int64 [ceil(stop / B)]


@dataclass(frozen=True)
class AttentionMetadata:
    """What the layers of one step share. An implementation may add fields in a subclass."""

    write_index: Tensor  # int64 [T]: cache place, page * B + offset, of every token of the step
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class StaticDecodes:
    """What a captured step reads, one decode a row, at addresses that stay.

    A row of filling is the first token of the null page, and writes to a place of it.
    """

    write_index: Tensor  # int32 [R]
    page_table: Tensor  # int32 [R, max_pages]
    kv_lens: Tensor  # int32 [R], the token itself among them


class Attention:
    """Causal attention over the paged cache: plan once a step, then write and attend once a layer.

    A subclass for a device overrides what it does faster, and `check` to refuse what it cannot do.
    """

    sliced: ClassVar[bool] = True  # a slice of its pages is a view of them

    def __init__(self, shape: AttentionShape, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.device = torch.device(device)

    def check(self) -> None:
        """Raise ValueError, with the limit, the value and the mend, for a shape that cannot be served."""
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
        """Raise ValueError for requests of up to so many tokens; here they may have any number."""

    def new_pages(self, count: int) -> Tensor:
        """So many pages at zero, for the keys or the values of a layer: [P, B, K, D].

        A subclass may order the places of a page in its own way.
        """
        shape = self.shape
        page = (shape.page_size, shape.num_kv_heads, shape.head_dim)
        return torch.zeros(count, *page, dtype=shape.dtype, device=self.device)

    def plan(
        self, batch: Batch, page_table: NDArray[np.int32], write_index: NDArray[np.int64]
    ) -> AttentionMetadata:
        """Make what all layers of this step need.

        `page_table` [N, max_pages] and `write_index` [T], the cache place of every token, are the host's.
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

    def write(
        self,
        key: Tensor,
        value: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Put the step's keys and values, both [T, K, D], in their places of the layer's [P, B, K, D].

        There may be more rows than the step has tokens; these are filling.
        """
        num_tokens = len(metadata.write_index)
        layer_keys.flatten(0, 1)[metadata.write_index] = key[:num_tokens]
        layer_values.flatten(0, 1)[metadata.write_index] = value[:num_tokens]

    def read(self, layer_keys: Tensor, layer_values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, K, D] at cache places `index` [n].

        A subclass that orders the places of a page in its own way says so here.
        """
        return layer_keys.flatten(0, 1)[index], layer_values.flatten(0, 1)[index]

    def attend(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        """Each query [T, H, D] over its own request's positions up to its own; the same shape back.

        With the layer's window w, the query at position p sees positions p-w+1 to p. Only places that
        the request has written are read: elsewhere in the cache there may be NaN.
        """
        window = self.shape.windows[layer]
        output = torch.empty_like(query)
        for span in metadata.spans:
            keys = layer_keys[span.pages].flatten(0, 1)
            values = layer_values[span.pages].flatten(0, 1)
            for start in range(span.start, span.stop, QUERY_ROWS):
                stop = min(start + QUERY_ROWS, span.stop)
                seen = 0 if window is None else max(0, start - window + 1)
                rows = slice(span.first_row + start - span.start, span.first_row + stop - span.start)
                output[rows] = self._dense(query[rows], keys[seen:stop], values[seen:stop], window)
        return output

    def check_graphs(self, num_graphs: int) -> None:
        """Raise ValueError if so many steps of decodes cannot be captured as graphs here."""
        raise ValueError(
            f"device.graphs: {type(self).__name__} asks the host at each span and cannot be captured: set it"
            " to 0"
        )

    def plan_static(self, decodes: StaticDecodes) -> AttentionMetadata:
        """As `plan`, for a step that is captured: what it computes with is what `decodes` then holds."""
        raise AssertionError("check_graphs refuses what has no plan for a captured step")

    def replay(self, graph: Any, metadata: AttentionMetadata, kv_lens: list[int]) -> None:
        """Run a captured step; `kv_lens` [R] are those on the device, for who wants them here."""
        graph.replay()

    def _dense(self, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Queries [t, H, D] at the last t of the L positions of `keys` and `values` [L, K, D]."""
        num_rows, length = len(query), len(keys)
        grouped = query.float().unflatten(1, (self.shape.num_kv_heads, -1))
        scores = torch.einsum("tkgd,lkd->kgtl", grouped, keys.float()) * self.shape.scale
        last = torch.arange(length - num_rows, length, device=query.device)[:, None]
        position = torch.arange(length, device=query.device)
        hidden = position > last
        if window is not None:
            hidden |= position <= last - window
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        return torch.einsum("kgtl,lkd->tkgd", weights, values.float()).flatten(1, 2).to(query.dtype)
