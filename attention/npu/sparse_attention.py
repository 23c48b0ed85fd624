"""Implement sparse latent attention by Ascend's indexer and its attention to what that chose.

npu_lightning_indexer scores the index keys in the pages and returns the highest positions of each query, and
npu_sparse_flash_attention reads the latents at these. One call of each takes all spans of a step. Their
lengths are tensors on the device, so that a replay of a captured step updates no call. Steps in which every
token is read are those of plain latent attention, where its operators take the model's heads.

Legend: T tokens of the step, S spans, R rows of a captured step, W tokens of each, H heads, L latent, C the
  most tokens chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch_npu
from numpy.typing import NDArray
from torch import Tensor

from attention.latent import LatentUp
from attention.npu.fused_attention import CAUSAL
from attention.npu.latent_attention import FusedLatentAttention, FusedLatentMetadata
from attention.npu.registered import lacking_here
from attention.reference import AttentionMetadata, StaticDecodes, Windows
from attention.sparse import Choice, SparseAttention
from continuous_batching.batch import Batch
from devices.ascend_limits import LATENT_HEAD, MOST_LATENT_QUERIES
from devices.torch_npu_calls import ON_SPARSE
from kv_cache.device.transfer import to_device

PACKED, PAGED = "TND", "PA_BSND"  # layouts of queries, and of pages
ABSORBED = 2  # value of attention_mode: queries lie in the space of latents, which are keys and values


@dataclass(frozen=True)
class FusedSparseMetadata(FusedLatentMetadata):
    """What all layers of a step share in which layers choose what they read."""

    lengths: dict[str, Tensor] = field(default_factory=dict)  # int32, by the operators' names
    kv_lens: Tensor | None = None  # int32 [S], each span's own tokens included
    # The same of this rank's rows of the step, where the ranks divide the choice
    choosing: tuple[dict[str, Tensor], Tensor] | None = None
    choice: Choice = field(default_factory=Choice)


class FusedSparseAttention(FusedLatentAttention, SparseAttention):
    """Sparse latent attention on an NPU that has an indexer and attention to what it chose.

    The indexer may choose the position before the first key of a layer that drafts, whose key and value are
    zeros. Drafts may differ because of that, but no token does.
    """

    calls = ON_SPARSE  # what torch_npu has to have

    def check(self) -> None:
        super().check()
        lacks = lacking_here(self.calls)
        if lacks:
            raise ValueError(
                f"torch_npu {torch_npu.__version__} has no sparse attention; it lacks {'; '.join(lacks)}:"
                " install a release that has them, or set device.attention to reference"
            )

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> FusedLatentMetadata:
        """Compute what all layers of this step share; see Attention.plan."""
        if self._reads_all(batch):
            return super().plan(batch, page_table, write_index, windows)
        table = self.page_table(batch, page_table)
        ends = np.cumsum(batch.stops - batch.starts)
        lengths, kv_lens = self._lengths(ends, batch.stops, table)
        part, choosing = self.part_of(len(write_index)), None
        if part is not None:
            # The last query of a span's part sees the keys up to its own
            cut = np.clip(ends, part.rows.start, part.rows.stop)
            has = np.flatnonzero(np.diff(cut, prepend=part.rows.start))
            own_ends, own_stops = cut[has] - part.rows.start, (batch.stops - (ends - cut))[has]
            choosing = self._lengths(own_ends, own_stops, table[to_device(has, self.device)])
        index, choice = to_device(write_index, self.device), Choice(part=part)
        return FusedSparseMetadata(
            index, (), lengths=lengths, kv_lens=kv_lens, choosing=choosing, choice=choice
        )

    def _lengths(
        self, ends: NDArray[np.int64], kv_lens: NDArray[np.int64], table: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the operators' arguments for spans that end so, and the numbers of their keys."""
        query_ends, lens = to_device(np.stack((ends, kv_lens)).astype(np.int32), self.device)
        return {"actual_seq_lengths_query": query_ends, "block_table": table}, lens

    def _reads_all(self, batch: Batch) -> bool:
        """Whether plain latent attention computes this step: every token is read, and it takes the spans.

        Long spans have their latents expanded, which fused attention takes for heads of 128 alone.
        """
        if bool((batch.stops - self.shape.first_key > self.index.top_k).any()):
            return False
        is_short = bool((batch.stops - batch.starts <= MOST_LATENT_QUERIES).all())
        return is_short or self.latent.nope_dim == self.latent.value_dim == LATENT_HEAD

    def plan_static(self, decodes: StaticDecodes, windows: Windows = None) -> FusedLatentMetadata:
        """Plan a captured step, in which layers choose, however few tokens a replay sees.

        A padding row is one token W times. Its keys are counted as W, since each query has to see one; all
        are those of the null page.
        """
        num_tokens, num_rows = len(decodes.write_index), len(decodes.page_table)
        width = num_tokens // num_rows
        ends = torch.arange(width, num_tokens + 1, width, dtype=torch.int32, device=self.device)
        kv_lens = decodes.kv_lens
        if width > 1:
            kv_lens = kv_lens[width - 1 :: width].clamp_min(width)
        return FusedSparseMetadata(
            decodes.write_index.long(),
            (),
            lengths={"actual_seq_lengths_query": ends, "block_table": decodes.page_table},
            kv_lens=kv_lens,
        )

    def replay(self, graph: Any, metadata: Sequence[AttentionMetadata], kv_lens: list[int]) -> None:
        """Run a captured step, whose calls read their lengths on the device."""
        graph.replay()

    def choice_of(self, metadata: AttentionMetadata) -> Choice:
        """See SparseAttention.choice_of."""
        assert isinstance(metadata, FusedSparseMetadata), "nothing is chosen in other steps"
        return metadata.choice

    def is_sparse(self, metadata: AttentionMetadata) -> bool:
        """See SparseAttention.is_sparse."""
        return isinstance(metadata, FusedSparseMetadata)

    def _chosen(
        self, query: Tensor, weights: Tensor, index_pages: Sequence[Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """See SparseAttention._chosen; the positions come in the operator's own order."""
        assert isinstance(metadata, FusedSparseMetadata)
        assert metadata.kv_lens is not None, "a step that chooses has lengths"
        lengths, kv_lens = metadata.choosing or (metadata.lengths, metadata.kv_lens)
        return self._indexed(query, weights, index_pages, lengths, kv_lens)[:, 0]

    def _indexed(
        self,
        query: Tensor,
        weights: Tensor,
        index_pages: Sequence[Tensor],
        lengths: dict[str, Tensor],
        kv_lens: Tensor,
    ) -> Tensor:
        """Return the positions [t, 1, C] that the operator chooses for these queries."""
        positions: Tensor = torch_npu.npu_lightning_indexer(
            query.contiguous(),
            index_pages[0],
            weights.contiguous(),
            actual_seq_lengths_key=kv_lens,
            layout_query=PACKED,
            layout_key=PAGED,
            sparse_count=self.index.top_k,
            sparse_mode=CAUSAL,
            **lengths,
        )[0]
        return positions

    def _absorbed(
        self,
        query: Tensor,
        rope: Tensor,
        up: LatentUp,
        layer_latents: Tensor,
        layer_rope_keys: Tensor,
        metadata: FusedLatentMetadata,
    ) -> Tensor:
        """Attend from queries [T, H, L] in the space of latents to what was chosen, if layers choose."""
        if not isinstance(metadata, FusedSparseMetadata):
            return super()._absorbed(query, rope, up, layer_latents, layer_rope_keys, metadata)
        positions = metadata.choice.positions
        assert positions is not None, "a layer with an indexer chooses before"
        attended = torch_npu.npu_sparse_flash_attention(
            query.contiguous(),
            layer_latents,
            layer_latents,
            positions[:, None],
            self.shape.scale,
            actual_seq_lengths_kv=metadata.kv_lens,
            query_rope=rope.contiguous(),
            key_rope=layer_rope_keys,
            layout_query=PACKED,
            layout_kv=PAGED,
            sparse_mode=CAUSAL,
            attention_mode=ABSORBED,
            **metadata.lengths,
        )[0]
        return up.raised(attended)
