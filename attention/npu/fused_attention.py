"""Implement attention over the paged cache by Ascend's fused operators.

One call of npu_fused_infer_attention_score (op-plugin, docs/zh/custom_APIs/torch_npu) takes prompts, chunks
and decodes together. Lengths are lists on the host, because they fix the operator's tiling when it is called.

Legend: T tokens of the step, S spans, H query heads, K kv heads, D head dim, P pages, B tokens a page,
  N slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch_npu
from numpy.typing import NDArray
from torch import Tensor

from attention.npu.ascend_attention import MASK_SIDE, AscendAttention
from attention.reference import AttentionMetadata, StaticDecodes, Windows
from continuous_batching.batch import Batch, ragged_ranges
from devices.ascend_limits import MOST_GATHERED, AscendProduct
from devices.shapes import AttentionShape
from kv_cache.device.transfer import to_device

# Values of sparse_mode: all keys, those up to a query's own, or the last pre_tokens + 1 of these
ALL, CAUSAL, BAND = 0, 3, 4
# Names of the first version's arguments in the operator's second version, which alone takes sinks
SECOND_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
}


@dataclass(frozen=True, slots=True)
class FusedSpans:
    """The spans of one call."""

    rows: slice  # rows of the packed query
    query_ends: list[int]  # running sum of lengths, counted from the first of `rows`
    kv_lens: list[int]  # number of keys of each span
    page_table: Tensor  # int32 [S, pages]

    @property
    def is_decodes(self) -> bool:
        """Whether every span is one query, which sees all of its request's keys."""
        return self.query_ends[-1] == len(self.query_ends)


@dataclass(frozen=True, slots=True)
class LongSpans:
    """Spans whose requests' keys and values are read from the pages before attention, for one call."""

    rows: Tensor  # int64, rows of the packed query
    query_ends: list[int]  # running sum of lengths
    places: Tensor  # int64 [n]: cache places of all tokens of their requests, one request after the other
    kv_ends: list[int]  # running sum of tokens


def long_calls(
    batch: Batch,
    chosen: NDArray[np.int64],
    page_table: NDArray[np.int32],
    page_size: int,
    device: torch.device,
) -> tuple[LongSpans, ...]:
    """Return the calls of the chosen spans of the batch; `page_table` is the whole table on the host."""
    return tuple(
        _long_spans(batch, some, page_table, page_size, device) for some in _divided(chosen, batch.stops)
    )


def _long_spans(
    batch: Batch,
    chosen: NDArray[np.int64],
    page_table: NDArray[np.int32],
    page_size: int,
    device: torch.device,
) -> LongSpans:
    """Return one call of these spans."""
    starts, stops = batch.starts[chosen], batch.stops[chosen]
    first_rows = np.cumsum(batch.stops - batch.starts)[chosen] - (stops - starts)
    rows = ragged_ranges(first_rows, first_rows + stops - starts)
    pages, offsets = np.divmod(ragged_ranges(np.zeros_like(stops), stops), page_size)
    places = page_table[np.repeat(batch.slots[chosen], stops), pages] * np.int64(page_size) + offsets
    return LongSpans(
        to_device(rows, device),
        np.cumsum(stops - starts).tolist(),
        to_device(places, device),
        np.cumsum(stops).tolist(),
    )


def _divided(spans: NDArray[np.int64], stops: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield some of the spans at a time, whose requests have at most MOST_GATHERED tokens, or one alone."""
    first, total = 0, 0
    for number, span in enumerate(spans.tolist()):
        if number > first and total + stops[span] > MOST_GATHERED:
            yield spans[first:number]
            first, total = number, 0
        total += stops[span]
    if len(spans):
        yield spans[first:]


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A captured call, which is given new lengths at each replay."""

    event: Any  # recorded when the lengths have been updated; the replay waits for it
    handle: Any  # handle of its task group
    arguments: dict[str, Any]
    layer: int  # orders the calls of several groups; 0 if there is one group


@dataclass(frozen=True)
class FusedMetadata(AttentionMetadata):
    """What all layers of one step share."""

    parts: tuple[FusedSpans, ...] = ()
    captured: list[CapturedCall] = field(default_factory=list)  # calls of a captured step, one for each layer
    # Workspaces of captured calls, by pre_tokens
    workspaces: dict[int | None, Tensor] = field(default_factory=dict)


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
        self.captures_spans = product.is_mixed
        self.update_stream = torch_npu.npu.Stream(self.device)

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> FusedMetadata:
        """Compute what all layers of this step share; see Attention.plan."""
        table, lens = self.page_table(batch, page_table), batch.stops - batch.starts
        parts = tuple(
            FusedSpans(rows, np.cumsum(lens[spans]).tolist(), batch.stops[spans].tolist(), table[spans])
            for spans, rows in self.cuts(batch)
        )
        return FusedMetadata(self.places(write_index), (), parts)

    def write(
        self,
        key: Tensor,
        value: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write the step's keys and values, both [T, K, D], to their places in the layer's [P, B, K, D]."""
        torch_npu.npu_scatter_pa_kv_cache(
            key.contiguous(),
            value.contiguous(),
            layer_keys,
            layer_values,
            metadata.write_index,
            cache_mode="Norm",
        )

    def attend(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        """Let each query [T, H, D] attend to its request's positions up to its own; see Attention.attend."""
        assert isinstance(metadata, FusedMetadata)
        calls = [self._arguments(query, layer_keys, layer_values, part, layer) for part in metadata.parts]
        if torch_npu.npu.is_current_stream_capturing():
            return self._seen(*self._capture(calls[0], metadata.captured, metadata.workspaces, layer))
        parts = [self._seen(*self._operator(**call)) for call in calls]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_with_sums(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> tuple[Tensor, Tensor]:
        """See Attention.attend_with_sums."""
        assert isinstance(metadata, FusedMetadata)
        calls = [
            self._arguments(query, layer_keys, layer_values, part, layer) | {"softmax_lse_flag": True}
            for part in metadata.parts
        ]
        if torch_npu.npu.is_current_stream_capturing():
            output, sums = self._capture(calls[0], metadata.captured, metadata.workspaces, layer)
            return output, sums[..., 0]
        outputs, sums_of = zip(*(self._operator(**call)[:2] for call in calls))
        return torch.cat(outputs), torch.cat(sums_of)[..., 0]

    @property
    def _operator(self) -> Any:
        if self.shape.has_sinks:
            return torch_npu.npu_fused_infer_attention_score_v2
        return torch_npu.npu_fused_infer_attention_score

    @property
    def leaves_first_out(self) -> bool:
        """Whether positions before the first key exist and must not count."""
        return self.shape.first_key > 0

    def _seen(self, output: Tensor, lse: Tensor) -> Tensor:
        """Remove the position before the first key from the output [T, H, D], with weights of sum exp(lse).

        The operator reads all positions. A position of zeros has the score 0, and so the weight 1, and adds
        nothing to the sum of values.
        """
        if not self.leaves_first_out:
            return output
        seen = -torch.expm1(-lse.view(*output.shape[:2], 1))  # share of the other weights
        return (output / seen.clamp_min(torch.finfo(torch.float32).tiny)).to(output.dtype)

    def _arguments(
        self, query: Tensor, keys: Tensor, values: Tensor, part: FusedSpans, layer: int
    ) -> dict[str, Any]:
        arguments = self._unsunk(query, keys, values, part, self.shape.windows[layer])
        if not self.shape.has_sinks:
            return arguments
        sinks = self.sinks[layer].to(torch.bfloat16)  # the only type that the operator takes
        return {SECOND_NAMES.get(name, name): each for name, each in arguments.items()} | {
            "learnable_sink": sinks
        }

    def _unsunk(
        self, query: Tensor, keys: Tensor, values: Tensor, part: FusedSpans, window: int | None
    ) -> dict[str, Any]:
        """Return the arguments of the operator's first version, which takes no sinks."""
        arguments = {
            "query": query[part.rows],
            "key": keys.flatten(2),  # [P, B, K * D]
            "value": values.flatten(2),
            "actual_seq_lengths": part.query_ends,
            "actual_seq_lengths_kv": part.kv_lens,
            "block_table": part.page_table,
            "num_heads": self.shape.num_heads,
            "num_key_value_heads": self.shape.num_kv_heads,
            "scale": self.shape.scale,
            "input_layout": "TND",
            "block_size": self.shape.page_size,
        }
        if self.leaves_first_out:
            arguments["softmax_lse_flag"] = True
        if window is not None:
            before = window if self.product.counts_own_key else window - 1
            band = {"sparse_mode": BAND, "pre_tokens": before, "next_tokens": 0}
            return arguments | band | {"atten_mask": self.mask}
        if part.is_decodes and self.product.unmasks_decodes:  # vllm-ascend #10302: up to 12 % faster
            return arguments | {"sparse_mode": ALL}
        return arguments | {"sparse_mode": CAUSAL, "atten_mask": self.mask}

    def plan_static(self, decodes: StaticDecodes, windows: Windows = None) -> FusedMetadata:
        """Plan a captured step; `replay` gives the lengths on the host."""
        num_tokens, num_rows = len(decodes.write_index), len(decodes.page_table)
        width = num_tokens // num_rows
        ends = list(range(width, num_tokens + 1, width))
        part = FusedSpans(slice(0, num_tokens), ends, [width] * num_rows, decodes.page_table)
        return FusedMetadata(decodes.write_index, (), (part,))

    def _capture(
        self,
        call: dict[str, Any],
        captured: list[CapturedCall],
        workspaces: dict[int | None, Tensor],
        layer: int = 0,
        results: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Capture the call as a task group, which a replay enters once its event is recorded.

        Returns its two results, of which the second has a value only if the call asks for it. They are
        written to `results`, those of a call of the same kind that nobody reads any more, or to new tensors,
        which are held as long as the graph.
        """
        kind = call.get("pre_tokens")
        if kind not in workspaces:
            measure = torch_npu._npu_fused_infer_attention_score_get_max_workspace
            if self.shape.has_sinks:
                measure = torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace
            workspaces[kind] = measure(**call)
        if results is None:
            query = call["query"]
            num_sums = (*query.shape[:-1], 1) if call.get("softmax_lse_flag") else (1,)
            results = torch.empty_like(query), torch.empty(num_sums, dtype=torch.float32, device=self.device)
        output, lse = results
        call |= {"workspace": workspaces[kind], "out": [output, lse]}
        stream, event = torch_npu.npu.current_stream(), torch_npu.npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        torch_npu.npu.graph_task_group_begin(stream)
        self._operator.out(**call)
        captured.append(CapturedCall(event, torch_npu.npu.graph_task_group_end(stream), call, layer))
        return output, lse

    def replay(self, graph: Any, metadata: Sequence[AttentionMetadata], kv_lens: list[int]) -> None:
        """Run a captured step, and update its calls with the lengths of this step."""
        current = torch_npu.npu.current_stream()
        calls: list[CapturedCall] = []
        for group in metadata:
            assert isinstance(group, FusedMetadata)
            calls += group.captured
        if len(metadata) > 1:  # the layers of all groups run in this order
            calls.sort(key=lambda call: call.layer)
        # Torch hands out the streams of a pool in turn. On the current stream, updates would wait behind the
        # replay that waits for them.
        while self.update_stream == current:
            self.update_stream = torch_npu.npu.Stream(self.device)
        # No call may be running while it is updated. The device waits, so that the host can go on, and it
        # waits before the replay, which itself waits for the updates
        self.update_stream.wait_stream(current)
        graph.replay()
        lengths = "actual_seq_kvlen" if self.shape.has_sinks else "actual_seq_lengths_kv"
        with torch_npu.npu.stream(self.update_stream):
            for call in calls:
                torch_npu.npu.graph_task_update_begin(self.update_stream, call.handle)
                self._operator.out(**call.arguments | {lengths: kv_lens})
                torch_npu.npu.graph_task_update_end(self.update_stream)
                call.event.record(self.update_stream)
