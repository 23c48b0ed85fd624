"""Which of Ascend's fused operators write and read the paged cache?

One call of npu_fused_infer_attention_score (op-plugin, docs/zh/custom_APIs/torch_npu) takes prompts, chunks
and decodes together. Lengths are lists on the host, for they fix the operator's tiling when it is called.

Legend: T tokens of the step, S spans, H query heads, K kv heads, D head dim, P pages, B tokens a page,
N slots, R rows of a captured step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch_npu
from numpy.typing import NDArray
from torch import Tensor

from attention.npu.ascend_attention import MASK_SIDE, AscendAttention
from attention.reference import AttentionMetadata, StaticDecodes
from continuous_batching.batch import Batch
from devices.products import AscendProduct
from devices.shapes import AttentionShape

CAUSAL, BAND = 3, 4  # sparse_mode: up to the last key, and of these the last pre_tokens + 1


@dataclass(frozen=True, slots=True)
class FusedSpans:
    """Spans that one call takes."""

    rows: slice  # of the packed query
    query_ends: list[int]  # cumulative, from the part's first row
    kv_lens: list[int]  # of each span
    page_table: Tensor  # int32 [S, pages]


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A captured call whose lengths are told anew at each replay."""

    event: Any  # the replay waits for it
    handle: Any
    arguments: dict[str, Any]


@dataclass(frozen=True)
class FusedMetadata(AttentionMetadata):
    """What the layers of one step share."""

    parts: tuple[FusedSpans, ...] = ()
    tasks: list[CapturedCall] = field(default_factory=list)  # of a captured step, a layer each
    workspaces: dict[int | None, Tensor] = field(default_factory=dict)  # of captured calls, by pre_tokens


class FusedAttention(AscendAttention):
    """Attention on an NPU that has npu_fused_infer_attention_score."""

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device | str,
        product: AscendProduct,
        *,
        takes_float32: bool = False,
    ) -> None:
        super().__init__(shape, device, product, takes_float32=takes_float32)
        self.mask = torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.int8).triu(1).to(self.device)
        self.update_stream = torch.npu.Stream(self.device)

    def plan(
        self, batch: Batch, page_table: NDArray[np.int32], write_index: NDArray[np.int64]
    ) -> FusedMetadata:
        """Make what all layers of this step need; see Attention.plan."""
        table, lens = self.page_table(batch, page_table), batch.stops - batch.starts
        parts = tuple(
            FusedSpans(rows, np.cumsum(lens[spans]).tolist(), batch.stops[spans].tolist(), table[spans])
            for spans, rows in self.cuts(batch)
        )
        return FusedMetadata(self.places(write_index), (), parts)

    def write(
        self, key: Tensor, value: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: FusedMetadata
    ) -> None:
        """Put the step's keys and values, both [T, K, D], in their places of the layer's [P, B, K, D]."""
        key, value = key.contiguous(), value.contiguous()
        if hasattr(torch_npu, "npu_scatter_pa_kv_cache"):
            torch_npu.npu_scatter_pa_kv_cache(
                key, value, layer_keys, layer_values, metadata.write_index, cache_mode="Norm"
            )
        else:
            index = metadata.write_index[:, None]
            torch_npu.npu_scatter_nd_update_(layer_keys.flatten(0, 1), index, key)
            torch_npu.npu_scatter_nd_update_(layer_values.flatten(0, 1), index, value)

    def attend(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: FusedMetadata, layer: int
    ) -> Tensor:
        """Each query [T, H, D] over its own request's positions up to its own; the same shape back."""
        calls = [
            self._arguments(query, layer_keys, layer_values, part, self.shape.windows[layer])
            for part in metadata.parts
        ]
        if torch.npu.is_current_stream_capturing():
            return self._capture(calls[0], metadata.tasks, metadata.workspaces)
        parts = [torch_npu.npu_fused_infer_attention_score(**call)[0] for call in calls]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _arguments(
        self, query: Tensor, keys: Tensor, values: Tensor, part: FusedSpans, window: int | None
    ) -> dict[str, Any]:
        arguments = {
            "query": query[part.rows],
            "key": keys.flatten(2),  # [P, B, K * D]
            "value": values.flatten(2),
            "atten_mask": self.mask,
            "actual_seq_lengths": part.query_ends,
            "actual_seq_lengths_kv": part.kv_lens,
            "block_table": part.page_table,
            "num_heads": self.shape.num_heads,
            "num_key_value_heads": self.shape.num_kv_heads,
            "scale": self.shape.scale,
            "input_layout": "TND",
            "block_size": self.shape.page_size,
            "sparse_mode": CAUSAL,
        }
        if window is not None:
            arguments |= {"sparse_mode": BAND, "pre_tokens": window - 1, "next_tokens": 0}
        return arguments

    def plan_static(self, decodes: StaticDecodes) -> FusedMetadata:
        """One decode a row, to be captured; the lengths on the host are those of `replay`."""
        rows = len(decodes.kv_lens)
        part = FusedSpans(slice(0, rows), list(range(1, rows + 1)), [1] * rows, decodes.page_table)
        return FusedMetadata(decodes.write_index, (), (part,))

    def _capture(
        self, call: dict[str, Any], tasks: list[CapturedCall], workspaces: dict[int | None, Tensor]
    ) -> Tensor:
        """The call as a task group, which the replay enters when its event is recorded."""
        kind = call.get("pre_tokens")
        if kind not in workspaces:
            workspaces[kind] = torch_npu._npu_fused_infer_attention_score_get_max_workspace(**call)
        output, lse = torch.empty_like(call["query"]), torch.empty(1, dtype=torch.float32, device=self.device)
        call |= {"workspace": workspaces[kind], "out": [output, lse]}
        stream, event = torch.npu.current_stream(), torch.npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch_npu.npu_fused_infer_attention_score.out(**call)
        tasks.append(CapturedCall(event, torch.npu.graph_task_group_end(stream), call))
        return output

    def replay(self, graph: Any, metadata: FusedMetadata, kv_lens: list[int]) -> None:
        """Run a captured step, telling each of its calls the lengths of this time."""
        torch.npu.current_stream().synchronize()  # no call may be at work while it is told
        graph.replay()
        with torch.npu.stream(self.update_stream):
            for task in metadata.tasks:
                torch.npu.graph_task_update_begin(self.update_stream, task.handle)
                call = task.arguments | {"actual_seq_lengths_kv": kv_lens}
                torch_npu.npu_fused_infer_attention_score.out(**call)
                torch.npu.graph_task_update_end(self.update_stream)
                task.event.record(self.update_stream)
