"""Implement latent attention by Ascend's fused operators.

As vllm-ascend's attention/mla_v1.py, it calls npu_fused_infer_attention_score with the rope parts of queries
and keys apart. Short spans are absorbed and read the pages; for long ones the latents of their requests are
gathered and expanded, those of several requests for one call up to a bound. npu_kv_rmsnorm_rope_cache
normalises, rotates and writes latents. If all spans are short, npu_mla_prolog_v3 does that and computes the
absorbed queries, too.

Legend: T tokens of the step, H heads, L latent, R rope, N the other part of a query (nope), V value of a
  head, S spans, n tokens of the requests of long spans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch_npu
from numpy.typing import NDArray
from torch import Tensor

from attention.latent import LatentAttention, LatentProlog, LatentUp
from attention.npu.fused_attention import (
    ALL,
    CAUSAL,
    FusedAttention,
    FusedMetadata,
    FusedSpans,
    LongSpans,
    long_calls,
)
from attention.reference import AttentionMetadata, StaticDecodes, Windows
from continuous_batching.batch import Batch
from devices.ascend_limits import MOST_LATENT_QUERIES, takes_prolog
from kv_cache.device.transfer import to_device

INT8_WEIGHTS = 2  # value of weight_quant_mode of npu_mla_prolog_v3
SCALES_OF_WEIGHTS = ("dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")


@dataclass(frozen=True)
class FusedLatentMetadata(FusedMetadata):
    """What all layers of one step share; `parts` holds the call of the short spans, if there are any."""

    short_rows: Tensor | None = None  # int64, rows of the packed query; None for all
    long: tuple[LongSpans, ...] = ()  # calls of long spans
    # Results of captured calls, by whether they have sums and by shape; layers write them one after the other
    results: dict[tuple[bool, torch.Size], tuple[Tensor, Tensor]] = field(default_factory=dict)


class FusedLatentAttention(LatentAttention, FusedAttention):
    """Latent attention on an NPU whose fused attention takes latents."""

    normalizes = True
    # The zeros before a head's first key are seen, with a score of 0: for latents, the operator returns no
    # sums of weights by which they could be removed. Drafts may differ because of that, but no token does
    leaves_first_out = False

    @property
    def gives_sums(self) -> bool:  # type: ignore[override]  # what a device has answered, and no class says
        """Whether the operator returns sums of exponents beside latents."""
        return self.product.sums_latents

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> FusedLatentMetadata:
        """Compute what all layers of this step share; see Attention.plan."""
        index = self.places(write_index)
        table, lens = self.page_table(batch, page_table), batch.stops - batch.starts
        is_long = lens > MOST_LATENT_QUERIES
        parts: tuple[FusedSpans, ...] = ()
        short_rows = None
        if not is_long.all():
            ends = np.cumsum(lens[~is_long]).tolist()
            short = table if not is_long.any() else table[to_device(np.flatnonzero(~is_long), self.device)]
            parts = (FusedSpans(slice(0, ends[-1]), ends, batch.stops[~is_long].tolist(), short),)
        if is_long.any():
            short_rows = self._rows(lens, ~is_long)
        chosen = np.flatnonzero(is_long)
        long = long_calls(batch, chosen, page_table, self.shape.page_size, self.device)
        return FusedLatentMetadata(index, (), parts, short_rows=short_rows, long=long)

    def places(self, write_index: NDArray[np.int64]) -> Tensor:
        """Return the cache places [T] on the device, in int64, which these operators take."""
        return to_device(write_index, self.device)

    def plan_static(self, decodes: StaticDecodes, windows: Windows = None) -> FusedLatentMetadata:
        """Plan a captured step; `replay` gives the lengths on the host."""
        made = super().plan_static(decodes, windows)
        return FusedLatentMetadata(made.write_index.long(), (), made.parts)

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
        """Normalise, rotate and write the step's latents and rope keys [T, L + R] in one launch.

        Each row is a sequence of its own, as other engines pass rows, unless there are fewer pages. The
        operator's page asks for pages of each sequence, which rows of one sequence share.
        """
        axes = (None, None, slice(None)) if len(kv) > len(layer_latents) else (slice(None), None, None)
        torch_npu.npu_kv_rmsnorm_rope_cache(
            kv.contiguous()[axes],
            norm,
            cos[axes],
            sin[axes],
            metadata.write_index,
            layer_rope_keys,
            layer_latents,
            epsilon=eps,
            cache_mode="PA",
        )

    def joins(self, hidden_size: int, query_rank: int | None) -> bool:
        """Whether npu_mla_prolog_v3 takes inputs and heads of these widths and is faster."""
        sizes = hidden_size, query_rank, self.latent.nope_dim
        return self.product.joins_latents and takes_prolog(
            self.shape.dtype, *sizes, takes_float32=self.takes_float32
        )

    def is_joined(self, metadata: AttentionMetadata) -> bool:
        """Whether every query is absorbed."""
        assert isinstance(metadata, FusedLatentMetadata)
        return not metadata.long

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
        linears, more = prolog.linears, {}
        down, up, latent_down = linears.weights
        if linears.scales is not None:
            assert row_scale is not None, "rows in int8 come with scales"
            more = {
                "weight_quant_mode": INT8_WEIGHTS,
                "dequant_scale_x": row_scale[:, None],
                **{name: each[None] for name, each in zip(SCALES_OF_WEIGHTS, linears.scales)},
            }
        reads = self.latent.index is not None  # whether an indexer reads the compressed queries
        query, rope, _, normed, scales = torch_npu.npu_mla_prolog_v3(
            x.contiguous(),
            down,
            up,
            prolog.up.keys,
            latent_down,
            prolog.query_norm,
            prolog.latent_norm,
            sin,
            cos,
            layer_latents,
            layer_rope_keys,
            cache_index=metadata.write_index,
            rmsnorm_epsilon_cq=prolog.eps,
            rmsnorm_epsilon_ckv=prolog.eps,
            cache_mode="PA_BSND",
            query_norm_flag=reads,
            **more,
        )
        if not reads:
            return query, rope, None
        return query, rope, normed if linears.scales is None else (normed * scales).to(query.dtype)

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
        assert isinstance(metadata, FusedLatentMetadata)
        return self._absorbed(query, rope, up, layer_latents, layer_rope_keys, metadata)

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
        """Let each query, of parts [T, H, N] and [T, H, R], attend to its request's positions up to its own.

        Returns [T, H, V].
        """
        assert isinstance(metadata, FusedLatentMetadata)
        pages = layer_latents, layer_rope_keys
        if not metadata.long:
            return self._absorbed(up.absorbed(nope), rope, up, *pages, metadata)
        output = nope.new_empty(*nope.shape[:2], self.latent.value_dim)
        if metadata.parts:
            rows = metadata.short_rows
            query = up.absorbed(nope[rows])
            output[rows] = self._absorbed(query, rope[rows], up, *pages, metadata)
        for long in metadata.long:
            output[long.rows] = self._expanded(nope[long.rows], rope[long.rows], up, *pages, long)
        return output

    def _absorbed(
        self,
        query: Tensor,
        rope: Tensor,
        up: LatentUp,
        layer_latents: Tensor,
        layer_rope_keys: Tensor,
        metadata: FusedLatentMetadata,
    ) -> Tensor:
        """Attend from all spans of `metadata.parts`, whose queries [T, H, L] are in the space of latents."""
        call = self._absorbed_call(query, rope, layer_latents, layer_rope_keys, metadata)
        return up.raised(self._called(call, metadata)[0])

    def attend_with_sums(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> tuple[Tensor, Tensor]:
        """See Attention.attend_with_sums.

        The operator's page excludes sums for latents; the answer `sums_latents` says what a device does. In
        a captured step, the next layer's call writes the same two tensors.
        """
        assert isinstance(metadata, FusedLatentMetadata)
        latents, rope = query.split((self.shape.head_dim, self.latent.rope_dim), -1)
        call = self._absorbed_call(latents, rope, layer_keys, layer_values, metadata)
        output, sums = self._called(call | {"softmax_lse_flag": True}, metadata)
        return output, sums[..., 0]

    def _absorbed_call(
        self,
        query: Tensor,
        rope: Tensor,
        layer_latents: Tensor,
        layer_rope_keys: Tensor,
        metadata: FusedLatentMetadata,
    ) -> dict[str, Any]:
        """Return the operator's arguments for queries in the space of latents."""
        (part,) = metadata.parts
        latents = layer_latents.flatten(2)  # [P, B, L]
        call = self._shared(part.query_ends, part.kv_lens) | {
            "query": query.contiguous(),
            "key": latents,
            "value": latents,
            "query_rope": rope.contiguous(),
            "key_rope": layer_rope_keys.flatten(2),
            "block_table": part.page_table,
            "num_key_value_heads": 1,
            "block_size": self.shape.page_size,
        }
        if part.is_decodes and self.product.unmasks_decodes:
            del call["atten_mask"]
            call["sparse_mode"] = ALL
        return call

    def _called(self, call: dict[str, Any], metadata: FusedLatentMetadata) -> tuple[Tensor, Tensor]:
        """Return the operator's two results, which a captured step computes anew at each replay.

        A captured step's are those of all its layers, and are read before the next layer's call: of 61 layers
        of 16 heads in bfloat16 they would take 1 MB for each row of a graph, which could not reuse it.
        """
        if torch_npu.npu.is_current_stream_capturing():
            # All latent layers are one group, in which the calls run in the order of their capture
            captured, kind = metadata.captured, ("softmax_lse_flag" in call, call["query"].shape)
            earlier = metadata.results.get(kind)
            made = self._capture(call, captured, metadata.workspaces, len(captured), earlier)
            metadata.results[kind] = made
            return made
        output, sums = torch_npu.npu_fused_infer_attention_score(**call)[:2]
        return output, sums

    def _expanded(
        self,
        nope: Tensor,
        rope: Tensor,
        up: LatentUp,
        layer_latents: Tensor,
        layer_rope_keys: Tensor,
        long: LongSpans,
    ) -> Tensor:
        """Attend from long spans, with the keys and values of each head."""
        latents, rope_keys = (
            pages.flatten(0, 1).index_select(0, long.places) for pages in (layer_latents, layer_rope_keys)
        )
        keys, values = up.expanded(latents[:, 0])
        call = self._shared(long.query_ends, long.kv_ends) | {
            "query": nope.contiguous(),
            "key": keys.contiguous(),
            "value": values.contiguous(),
            "query_rope": rope.contiguous(),
            "key_rope": rope_keys.expand(-1, keys.shape[1], -1).contiguous(),
            "num_key_value_heads": self.shape.num_heads,
        }
        attended: Tensor = torch_npu.npu_fused_infer_attention_score(**call)[0]
        return attended

    def _shared(self, query_ends: list[int], kv_lens: list[int]) -> dict[str, Any]:
        return {
            "actual_seq_lengths": query_ends,
            "actual_seq_lengths_kv": kv_lens,
            "num_heads": self.shape.num_heads,
            "scale": self.shape.scale,
            "input_layout": "TND",
            "sparse_mode": CAUSAL,
            "atten_mask": self.mask,
        }
