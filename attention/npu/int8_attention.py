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

from typing import Any

import numpy as np
import torch
import torch_npu
from numpy.typing import NDArray
from torch import Tensor

from attention.npu.fused_attention import CAUSAL, LongSpans, long_calls
from attention.npu.single_queries import SingleMetadata, SingleQueries, SingleQueryAttention
from attention.reference import AttentionMetadata, ChannelScales
from continuous_batching.batch import Batch


class Int8FusedAttention(SingleQueryAttention[LongSpans]):
    """Attention on an NPU whose fused attention reads pages in int8, which are [P, B, K, D]."""

    gives_sums = True

    def _plane(self, count: int, width: int) -> Tensor:
        page = (count, self.shape.page_size, self.shape.num_kv_heads, width)
        return torch.zeros(page, dtype=torch.int8, device=self.device)

    def pack_scales(self, keys: Tensor, values: Tensor) -> ChannelScales:
        """Return the scales [1, K, 1, D] in the queries' type, the only one that the operators take."""
        axes = 1, self.shape.num_kv_heads, 1, self.shape.head_dim
        return ChannelScales(*(each.view(axes).to(self.shape.dtype) for each in (keys, values)))

    def _long_calls(
        self, batch: Batch, chosen: NDArray[np.int64], page_table: NDArray[np.int32]
    ) -> tuple[LongSpans, ...]:
        """Return the calls of spans whose keys and values are gathered."""
        return long_calls(batch, chosen, page_table, self.shape.page_size, self.device)

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
        read = scales, layer_keys, layer_values
        return self._in_calls(
            query,
            metadata,
            layer,
            lambda rows, singles: self._scaled(rows, *read, singles),
            lambda rows, spans: self._gathered(rows, *read, spans),
        )

    def attend_with_sums_by_channel(
        self,
        query: Tensor,
        scales: ChannelScales,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """See Attention.attend_with_sums_by_channel; every span is a single query."""
        assert isinstance(metadata, SingleMetadata)
        singles = metadata.singles
        assert singles is not None, "a row that is joined from parts is a span of its own"
        assert singles.rows is None, "all rows are joined from parts"
        call = self._scaled(query, scales, layer_keys, layer_values, singles) | {"softmax_lse_flag": True}
        if torch_npu.npu.is_current_stream_capturing():
            output, sums = self._capture(call, metadata.captured, metadata.workspaces, layer)
        else:
            output, sums = self._operator(**call)[:2]
        return output.view_as(query), sums.view(query.shape[:2])  # [n, H, 1, D] and [n, H, 1, 1]

    def _numbers(self, stored: Tensor) -> Tensor:
        """Return stored keys or values [n, K, D] in units of their channels' scales."""
        return stored.float()

    def _scaled(
        self, query: Tensor, scales: ChannelScales, keys: Tensor, values: Tensor, singles: SingleQueries
    ) -> dict[str, Any]:
        """Return the arguments for queries [n, H, D], each of which is a sequence of its own."""
        return self._single(query, keys, values, singles) | {
            "key_antiquant_scale": scales.keys,
            "value_antiquant_scale": scales.values,
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
