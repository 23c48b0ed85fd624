"""Implement attention over the paged cache for the 310P, by operators of ATB.

A 310P has no npu_fused_infer_attention_score but CANN's PagedAttentionOperation, in one form for decodes and
in one for spans of any length together with decodes. It reads the lengths of queries on the host and those of
keys on the device (ascend-transformer-boost, PagedAttentionOpsRunner910A), so a captured step needs no
update.

Legend: T tokens of the step, S spans, H query heads, K kv heads, D head dim, P pages, B tokens a page,
  C = K * D / 16, N slots, R rows of a captured step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch_npu
from numpy.typing import NDArray
from torch import Tensor

from attention.npu.ascend_attention import MASK_SIDE, AscendAttention
from attention.reference import AttentionMetadata, StaticDecodes, Windows
from continuous_batching.batch import Batch
from devices.ascend_limits import FRACTAL_NZ, AscendProduct
from devices.shapes import AttentionShape
from kv_cache.device.transfer import to_device

COLUMN = 16  # numbers of a token that are contiguous in a page
HIDDEN = -10000.0  # added by the mask to a hidden score (vllm-ascend, _310p/attention/attention_mask.py)


@dataclass(frozen=True, slots=True)
class AtbSpans:
    """The spans of one call of ATB."""

    rows: slice  # rows of the packed query
    query_lens: Tensor | None  # int32 [S] on the host; None if all are decodes
    kv_lens: Tensor  # int32 [S] on the device
    page_table: Tensor  # int32 [S, pages]


@dataclass(frozen=True)
class AtbMetadata(AttentionMetadata):
    """What all layers of one step share."""

    parts: tuple[AtbSpans, ...] = ()


class AtbAttention(AscendAttention):
    """Attention on a 310P, which stores pages as [P, C, B, 16] in the format FRACTAL_NZ."""

    gives_sums = False

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device | str,
        product: AscendProduct,
        *,
        takes_float32: bool = False,
    ) -> None:
        super().__init__(shape, device, product, takes_float32=takes_float32)
        self.indexed = not product.slices_tiles
        mask = torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.float16).triu(1) * HIDDEN
        self.mask = mask.to(self.device)

    def check(self) -> None:
        super().check()
        if self.shape.first_key:
            raise ValueError(
                f"attention of the {self.product.name} reads every position, and a head has no key at the"
                " first: set device.attention to reference, or speculation.kind to ngram, suffix or draft"
            )

    def new_planes(self, count: int) -> tuple[Tensor, ...]:
        """Return `count` pages of zeros for the keys, and as many for the values: [P, C, B, 16]."""
        return self._columns(count), self._columns(count)

    head_axis = 1

    @property
    def num_runs(self) -> int:
        """See Attention.num_runs: one, because the columns of all tokens of a head lie together."""
        return 1

    def _columns(self, count: int) -> Tensor:
        shape = self.shape
        page = (shape.num_kv_heads * shape.head_dim // COLUMN, shape.page_size, COLUMN)
        torch_npu.npu.config.allow_internal_format = True  # the format is ignored without this setting
        pages: Tensor = torch_npu.empty_with_format(
            (count, *page), dtype=shape.dtype, device=self.device, acl_format=FRACTAL_NZ
        )
        return pages.zero_()

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> AtbMetadata:
        """Compute what all layers of this step share; see Attention.plan."""
        table, lens = self.page_table(batch, page_table), (batch.stops - batch.starts).astype(np.int32)
        kv_lens = to_device(batch.stops.astype(np.int32), self.device)
        parts = tuple(
            AtbSpans(
                rows,
                torch.from_numpy(lens[spans]) if (lens[spans] > 1).any() else None,
                kv_lens[spans],
                table[spans],
            )
            for spans, rows in self.cuts(batch)
        )
        return AtbMetadata(self.places(write_index), (), parts)

    def plan_static(self, decodes: StaticDecodes, windows: Windows = None) -> AtbMetadata:
        """Plan a captured step with one decode for each row."""
        part = AtbSpans(slice(0, len(decodes.kv_lens)), None, decodes.kv_lens, decodes.page_table)
        return AtbMetadata(decodes.write_index, (), (part,))

    def write(
        self,
        key: Tensor,
        value: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write the step's keys and values, both [T, K, D], to their places in the layer's [P, C, B, 16]."""
        torch_npu._npu_reshape_and_cache(
            key.contiguous(), value.contiguous(), layer_keys, layer_values, metadata.write_index
        )

    def read(self, layer_keys: Tensor, layer_values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [n, K, D] at cache places `index` [n], page * B + offset."""
        page, offset = index // self.shape.page_size, index % self.shape.page_size
        heads = (self.shape.num_kv_heads, self.shape.head_dim)
        keys, values = (
            each[page, :, offset].flatten(1).unflatten(1, heads) for each in (layer_keys, layer_values)
        )
        return keys, values

    def attend(
        self, query: Tensor, layer_keys: Tensor, layer_values: Tensor, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        """Let each query [T, H, D] attend to its request's positions up to its own; see Attention.attend."""
        assert isinstance(metadata, AtbMetadata)
        output = torch.empty_like(query)
        for part in metadata.parts:
            call = {
                "query": query[part.rows],
                "key_cache": layer_keys,
                "value_cache": layer_values,
                "num_kv_heads": self.shape.num_kv_heads,
                "num_heads": self.shape.num_heads,
                "scale_value": self.shape.scale,
                "block_table": part.page_table,
                "context_lens": part.kv_lens,
                "out": output[part.rows],
            }
            if part.query_lens is None:
                torch_npu._npu_paged_attention(**call)
            else:
                call |= {"seq_len": part.query_lens, "mask": self.mask}
                torch_npu._npu_paged_attention_splitfuse_v2(**call)
        return output
