"""Implement attention that Ascend's fused operators read from pages for one query a sequence.

npu_fused_infer_attention_score takes a packed batch of any spans only for heads of 64 and 128 in 16 bits
(op-plugin; vllm-ascend #9632). With an axis for sequences it takes other heads, and pages in int8, for
sequences of a single query. Each token of a short span is then such a sequence, with the keys up to its own,
and one call, which a graph captures, takes all of them. What a longer span costs is left to a subclass: for
wide heads it is a call of its own.

Legend: T tokens of the step, H query heads, K kv heads, D head dim, P pages, B tokens a page, n tokens of
  some spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch_npu
from numpy.typing import NDArray
from torch import Tensor

from attention.npu.fused_attention import CAUSAL, FusedAttention, FusedMetadata
from attention.reference import AttentionMetadata, StaticDecodes, Windows
from continuous_batching.batch import Batch, ragged_ranges
from kv_cache.device.transfer import to_device

MOST_SINGLES = 16  # most tokens of a span that are read as single queries: those of a step with drafts


class LongCall(Protocol):
    """A call of longer spans, which reads these rows of the packed query."""

    @property
    def rows(self) -> Any: ...


Long = TypeVar("Long", bound=LongCall)


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """Tokens that one call reads as sequences of one query."""

    rows: Tensor | None  # int64, rows of the packed query; None for all
    kv_lens: list[int]  # number of keys of each
    page_table: Tensor  # int32, a row for each


@dataclass(frozen=True)
class SingleMetadata(FusedMetadata, Generic[Long]):
    """What all layers of one step share: the tokens of short spans, and the calls of the longer ones."""

    singles: SingleQueries | None = None
    long: tuple[Long, ...] = ()
    width: int = 1  # tokens of each row of a captured step


class SingleQueryAttention(FusedAttention, Generic[Long]):
    """Attention on an NPU whose fused attention reads these pages, [P, B, K, D], for single queries."""

    gives_sums = False

    def _long_calls(
        self, batch: Batch, chosen: NDArray[np.int64], page_table: NDArray[np.int32]
    ) -> tuple[Long, ...]:
        """Return the calls of the chosen spans, which are longer than MOST_SINGLES."""
        raise NotImplementedError

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> SingleMetadata[Long]:
        """Compute what all layers of this step share; see Attention.plan."""
        lens = batch.stops - batch.starts
        is_long = lens > MOST_SINGLES
        singles = self._singles(batch, ~is_long, page_table) if not is_long.all() else None
        long = self._long_calls(batch, np.flatnonzero(is_long), page_table)
        return SingleMetadata(self.places(write_index), (), singles=singles, long=long)

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

    def plan_static(self, decodes: StaticDecodes, windows: Windows = None) -> SingleMetadata[Long]:
        """Plan a captured step; `replay` gives the lengths on the host."""
        num_tokens, num_rows = len(decodes.write_index), len(decodes.page_table)
        width = num_tokens // num_rows
        table = decodes.page_table
        if width > 1:
            table = table.repeat_interleave(width, 0)
        singles = SingleQueries(None, [1] * num_tokens, table)
        return SingleMetadata(decodes.write_index, (), singles=singles, width=width)

    def replay(self, graph: Any, metadata: Sequence[AttentionMetadata], kv_lens: list[int]) -> None:
        """Run a captured step; each token of a row has one key more than the token before it."""
        first = metadata[0]
        assert isinstance(first, SingleMetadata)
        lens = [each - behind for each in kv_lens for behind in range(first.width - 1, -1, -1)]
        super().replay(graph, metadata, lens)

    def _in_calls(
        self,
        query: Tensor,
        metadata: AttentionMetadata,
        layer: int,
        single: Callable[[Tensor, SingleQueries], dict[str, Any]],
        long: Callable[[Tensor, Long], dict[str, Any]],
    ) -> Tensor:
        """Return what queries [T, H, D] read by the step's calls, whose arguments these functions make."""
        assert isinstance(metadata, SingleMetadata)
        singles = metadata.singles
        if singles is not None and singles.rows is None:
            call = single(query, singles)
            if torch_npu.npu.is_current_stream_capturing():
                return self._capture(call, metadata.captured, metadata.workspaces, layer)[0].view_as(query)
            return self._attended(call).view_as(query)
        output = torch.empty_like(query)
        if singles is not None:
            rows = query[singles.rows]
            output[singles.rows] = self._attended(single(rows, singles)).view_as(rows)
        for spans in metadata.long:
            rows = query[spans.rows]
            output[spans.rows] = self._attended(long(rows, spans)).view_as(rows)
        return output

    def _attended(self, call: dict[str, Any]) -> Tensor:
        attended: Tensor = self._operator(**call)[0]
        return attended

    def _single(self, query: Tensor, keys: Tensor, values: Tensor, singles: SingleQueries) -> dict[str, Any]:
        """Return the arguments for queries [n, H, D], each of which is a sequence of its own."""
        return self._heads() | {
            "query": query[:, :, None],  # [n, H, 1, D]
            "key": keys.flatten(2),  # [P, B, K * D]
            "value": values.flatten(2),
            "actual_seq_lengths_kv": singles.kv_lens,
            "block_table": singles.page_table,
            "block_size": self.shape.page_size,
            "input_layout": "BNSD",
        }

    def _heads(self) -> dict[str, Any]:
        return {
            "num_heads": self.shape.num_heads,
            "num_key_value_heads": self.shape.num_kv_heads,
            "scale": self.shape.scale,
        }


@dataclass(frozen=True, slots=True)
class WideSpan:
    """A long span, which one call reads from the pages."""

    rows: slice  # rows of the packed query
    kv_len: int  # number of keys
    page_table: Tensor  # int32 [1, pages]


class WideHeadAttention(SingleQueryAttention[WideSpan]):
    """Attention on an NPU by heads that no packed batch may have, without windows and sinks."""

    # The zeros before a head's first key count with a score of 0, as with latents: drafts may differ by it,
    # and no token does
    leaves_first_out = False

    def _long_calls(
        self, batch: Batch, chosen: NDArray[np.int64], page_table: NDArray[np.int32]
    ) -> tuple[WideSpan, ...]:
        """Return a call for each span; see SingleQueryAttention."""
        ends = np.cumsum(batch.stops - batch.starts)
        calls = []
        for span in chosen.tolist():
            stop, count = int(batch.stops[span]), int(batch.stops[span] - batch.starts[span])
            width = -(-stop // self.shape.page_size)
            table = page_table[batch.slots[span : span + 1], :width]
            rows = slice(int(ends[span]) - count, int(ends[span]))
            calls.append(WideSpan(rows, stop, to_device(table, self.device)))
        return tuple(calls)

    def attend(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        """See Attention.attend."""
        pages = layer_keys, layer_values
        return self._in_calls(
            query.contiguous(),
            metadata,
            layer,
            lambda rows, singles: self._single(rows, *pages, singles),
            lambda rows, span: self._whole(rows, *pages, span),
        )

    def _whole(self, query: Tensor, keys: Tensor, values: Tensor, span: WideSpan) -> dict[str, Any]:
        """Return the arguments for the queries [n, H, D] of one span."""
        return self._heads() | {
            "query": query[None],  # [1, n, H, D]
            "key": keys.flatten(2),
            "value": values.flatten(2),
            "actual_seq_lengths": [len(query)],
            "actual_seq_lengths_kv": [span.kv_len],
            "block_table": span.page_table,
            "block_size": self.shape.page_size,
            "sparse_mode": CAUSAL,
            "atten_mask": self.mask,
            "input_layout": "BSND",
        }
