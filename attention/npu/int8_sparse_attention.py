"""Implement sparse latent attention over a cache in int8 by Ascend's operators for it.

npu_quant_lightning_indexer scores index queries in int8 with the index keys in the pages, and
npu_kv_quant_sparse_flash_attention reads rows of latents in int8, rope keys and scales. npu_dynamic_quant
rounds what is written. Fused attention reads no such rows, so that layers choose in every step, however few
tokens it sees, and prompts are absorbed too.

Legend: T tokens of the step, I index heads, X width of an index key, H heads, L latent, R rope.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_npu
from torch import Tensor

from attention.int8_sparse import Int8SparseAttention, rotation
from attention.latent import LatentUp
from attention.npu.fused_attention import CAUSAL
from attention.npu.latent_attention import FusedLatentMetadata
from attention.npu.sparse_attention import (
    ABSORBED,
    PACKED,
    PAGED,
    FusedSparseAttention,
    FusedSparseMetadata,
)
from continuous_batching.batch import Batch
from devices.ascend_limits import AscendProduct
from devices.shapes import LATENT_TILE, AttentionShape
from devices.torch_npu_calls import ON_INT8_SPARSE

BY_TOKEN = 0  # value of query_quant_mode and key_quant_mode: a scale for each token and head
BY_TILE = 2  # value of key_quant_mode and value_quant_mode: a scale for each tile of a token
WITHIN_ROWS = 1  # value of quant_scale_repo_mode: scales lie in the rows


class Int8FusedSparseAttention(Int8SparseAttention, FusedSparseAttention):
    """Sparse attention on an NPU over rows and index keys in int8."""

    normalizes = False  # the operator that writes latents and rope keys writes no rows
    calls = ON_INT8_SPARSE

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device | str,
        product: AscendProduct,
        *,
        takes_float32: bool = False,
    ) -> None:
        FusedSparseAttention.__init__(self, shape, device, product, takes_float32=takes_float32)
        self.rotation = rotation(self.index.head_dim).to(self.device, shape.dtype)

    def joins(self, hidden_size: int, query_rank: int | None) -> bool:
        """Whether one launch computes everything before attention: none writes rows."""
        return False

    def _reads_all(self, batch: Batch) -> bool:
        """Whether plain latent attention computes this step, which reads no rows."""
        return False

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See Int8SparseAttention.quantized."""
        numbers, scales = torch_npu.npu_dynamic_quant(x.contiguous())
        return numbers, scales[..., None]

    def _indexed(
        self,
        query: Tensor,
        weights: Tensor,
        index_pages: Sequence[Tensor],
        lengths: dict[str, Tensor],
        kv_lens: Tensor,
    ) -> Tensor:
        """See FusedSparseAttention._indexed."""
        keys, scales = index_pages
        numbers, weights, query_scales = self.quantized_queries(query, weights)
        chosen: Tensor = torch_npu.npu_quant_lightning_indexer(
            numbers.contiguous(),
            keys,
            weights.contiguous(),
            query_scales.contiguous(),
            scales.flatten(2),
            BY_TOKEN,
            BY_TOKEN,
            actual_seq_lengths_key=kv_lens,
            layout_query=PACKED,
            layout_key=PAGED,
            sparse_count=self.index.top_k,
            sparse_mode=CAUSAL,
            **lengths,
        )
        return chosen

    def _absorbed(
        self,
        query: Tensor,
        rope: Tensor,
        up: LatentUp,
        layer_latents: Tensor,
        layer_rope_keys: Tensor,
        metadata: FusedLatentMetadata,
    ) -> Tensor:
        """Attend from queries [T, H, L] in the space of latents to what was chosen."""
        assert isinstance(metadata, FusedSparseMetadata)
        positions = metadata.choice.positions
        assert positions is not None, "a layer with an indexer chooses before"
        attended = torch_npu.npu_kv_quant_sparse_flash_attention(
            torch.cat((query, rope), -1),
            layer_latents,
            layer_latents,
            positions[:, None],
            self.shape.scale,
            BY_TILE,
            BY_TILE,
            actual_seq_lengths_kv=metadata.kv_lens,
            layout_query=PACKED,
            layout_kv=PAGED,
            sparse_mode=CAUSAL,
            attention_mode=ABSORBED,
            quant_scale_repo_mode=WITHIN_ROWS,
            tile_size=LATENT_TILE,
            rope_head_dim=self.latent.rope_dim,
            **metadata.lengths,
        )
        return up.raised(attended)
