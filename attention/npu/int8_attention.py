"""Implement attention over pages of int8 by Ascend's fused operators.

A page holds keys and values as multiples of scales that the checkpoint has for each channel (C8 of
msModelSlim). npu_quantize makes them, npu_scatter_pa_kv_cache writes them, and
npu_fused_infer_attention_score reads them for batches of single queries, multiplied by the scales
(op-plugin: pages in int8 are for one query a sequence; vllm-ascend, attention_v1.py). Each token of a short
span is such a query, with the keys up to its own. For longer spans the keys and values of their requests are
gathered and multiplied first, so that every query reads the same numbers, however a prompt is cut.

Legend: T tokens of the step, H query heads, K kv heads, D head dim, P pages, B tokens a page, n tokens of the
  requests of long spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_npu
from numpy.typing import NDArray
from torch import Tensor

from attention.npu.fused_attention import CAUSAL, FusedAttention, FusedMetadata, LongSpans, long_spans
from attention.reference import AttentionMetadata, ChannelScales, StaticDecodes, Windows
from continuous_batching.batch import Batch, ragged_ranges
from devices.ascend_limits import MOST_GATHERED
from kv_cache.device.transfer import to_device

MOST_SINGLES = 16  # most tokens of a span that are read as single queries: those of a step with drafts


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """Tokens that one call reads as sequences of one query."""

    rows: Tensor | None  # int64, rows of the packed query; None for all
    kv_lens: list[int]  # number of keys of each
    page_table: Tensor  # int32, a row for each


@dataclass(frozen=True)
class Int8Metadata(FusedMetadata):
    """What all layers of one step share: the tokens of short spans, and the calls of the longer ones."""

    singles: SingleQueries | None = None
    long: tuple[LongSpans, ...] = ()
    width: int = 1  # tokens of each row of a captured step


class Int8FusedAttention(FusedAttention):
    """Attention on an NPU whose fused attention reads pages in int8, which are [P, B, K, D]."""

    def _plane(self, count: int, width: int) -> Tensor:
        page = (count, self.shape.page_size, self.shape.num_kv_heads, width)
        return torch.zeros(page, dtype=torch.int8, device=self.device)

    def pack_scales(self, keys: Tensor, values: Tensor) -> ChannelScales:
        """Return the scales [1, K, 1, D] in the queries' type, the only one that the operators take."""
        axes = 1, self.shape.num_kv_heads, 1, self.shape.head_dim
        return ChannelScales(*(each.view(axes).to(self.shape.dtype) for each in (keys, values)))

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> Int8Metadata:
        """Compute what all layers of this step share; see Attention.plan."""
        lens = batch.stops - batch.starts
        is_long = lens > MOST_SINGLES
        singles = self._singles(batch, ~is_long, page_table) if not is_long.all() else None
        size = self.shape.page_size
        long = tuple(
            long_spans(batch, chosen, page_table, size, self.device)
            for chosen in _divided(np.flatnonzero(is_long), batch.stops)
        )
        return Int8Metadata(self.places(write_index), (), singles=singles, long=long)

    def _singles(
        self, batch: Batch, chosen: NDArray[np.bool_], page_table: NDArray[np.int32]
    ) -> SingleQueries:
        starts, stops, slots = batch.starts[chosen], batch.stops[chosen], batch.slots[chosen]
        width = -(-int(stops.max()) // self.shape.page_size)
        table = page_table[np.repeat(slots, stops - starts), :width]
        rows = None
        if not chosen.all():
            ends = np.cumsum(batch.stops - batch.starts)[chosen]
            rows = to_device(ragged_ranges(ends - (stops - starts), ends), self.device)
        kv_lens = ragged_ranges(starts + 1, stops + 1).tolist()
        return SingleQueries(rows, kv_lens, to_device(table, self.device))

    def plan_static(self, decodes: StaticDecodes, windows: Windows = None) -> Int8Metadata:
        """Plan a captured step; `replay` gives the lengths on the host."""
        num_tokens, num_rows = len(decodes.write_index), len(decodes.page_table)
        width = num_tokens // num_rows
        table = decodes.page_table
        if width > 1:
            table = table.repeat_interleave(width, 0)
        singles = SingleQueries(None, [1] * num_tokens, table)
        return Int8Metadata(decodes.write_index, (), singles=singles, width=width)

    def replay(self, graph: Any, metadata: Sequence[AttentionMetadata], kv_lens: list[int]) -> None:
        """Run a captured step; each token of a row has one key more than the token before it."""
        first = metadata[0]
        assert isinstance(first, Int8Metadata)
        lens = [each - behind for each in kv_lens for behind in range(first.width - 1, -1, -1)]
        super().replay(graph, metadata, lens)

    def write_by_channel(
        self,
        key: Tensor,
        value: Tensor,
        scales: ChannelScales,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """See Attention.write_by_channel."""
        keys, values = (
            torch_npu.npu_quantize(new.flatten(1), scale.flatten(), None, torch.qint8, -1, True).view_as(new)
            for new, scale in ((key, scales.keys), (value, scales.values))
        )
        self.write(keys, values, layer_keys, layer_values, metadata)

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
        assert isinstance(metadata, Int8Metadata)
        singles, read = metadata.singles, (scales, layer_keys, layer_values)
        if singles is not None and singles.rows is None:
            call = self._single(query, *read, singles)
            if torch_npu.npu.is_current_stream_capturing():
                return self._capture(call, metadata.captured, metadata.workspaces, layer)[0][:, :, 0]
            return self._attended(call)[:, :, 0]
        output = torch.empty_like(query)
        if singles is not None:
            output[singles.rows] = self._attended(self._single(query[singles.rows], *read, singles))[:, :, 0]
        for spans in metadata.long:
            output[spans.rows] = self._attended(self._gathered(query[spans.rows], *read, spans))
        return output

    def _numbers(self, stored: Tensor) -> Tensor:
        """Return stored keys or values [n, K, D] in units of their channels' scales."""
        return stored.float()

    def _attended(self, call: dict[str, Any]) -> Tensor:
        attended: Tensor = self._operator(**call)[0]
        return attended

    def _single(
        self, query: Tensor, scales: ChannelScales, keys: Tensor, values: Tensor, singles: SingleQueries
    ) -> dict[str, Any]:
        """Return the arguments for queries [n, H, D], each of which is a sequence of its own."""
        return self._heads() | {
            "query": query[:, :, None],  # [n, H, 1, D]
            "key": keys.flatten(2),  # [P, B, K * D]
            "value": values.flatten(2),
            "key_antiquant_scale": scales.keys,
            "value_antiquant_scale": scales.values,
            "actual_seq_lengths_kv": singles.kv_lens,
            "block_table": singles.page_table,
            "block_size": self.shape.page_size,
            "input_layout": "BNSD",
        }

    def _gathered(
        self, query: Tensor, scales: ChannelScales, keys: Tensor, values: Tensor, spans: LongSpans
    ) -> dict[str, Any]:
        """Return the arguments for queries [T, H, D] of spans whose keys and values are gathered."""
        wide = [
            pages.flatten(0, 1).index_select(0, spans.places) * scale[0, :, 0]  # [n, K, D]
            for pages, scale in ((keys, scales.keys), (values, scales.values))
        ]
        return self._heads() | {
            "query": query,
            "key": wide[0],
            "value": wide[1],
            "actual_seq_lengths": spans.query_ends,
            "actual_seq_lengths_kv": spans.kv_ends,
            "sparse_mode": CAUSAL,
            "atten_mask": self.mask,
            "input_layout": "TND",
        }

    def _heads(self) -> dict[str, Any]:
        return {
            "num_heads": self.shape.num_heads,
            "num_key_value_heads": self.shape.num_kv_heads,
            "scale": self.shape.scale,
        }


def _divided(spans: NDArray[np.int64], stops: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield some of the spans at a time, whose requests together have at most so many tokens, or one has."""
    first, total = 0, 0
    for number, span in enumerate(spans.tolist()):
        if number > first and total + stops[span] > MOST_GATHERED:
            yield spans[first:number]
            first, total = number, 0
        total += stops[span]
    if len(spans):
        yield spans[first:]
