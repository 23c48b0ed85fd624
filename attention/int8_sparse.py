"""Define sparse latent attention over a cache in int8, in plain torch.

A token's latent, rope key and scales lie in one row of bytes, as npu_kv_quant_sparse_flash_attention reads
them: L numbers in int8, R rope numbers in bfloat16, and a float32 scale for each tile of 128 of the L. These
are 656 bytes for a latent of 512 and a rope key of 64. An index key is X numbers in int8 and one float16
scale, in planes of their own, as npu_quant_lightning_indexer reads them. Before they are rounded, index keys
and index queries are turned by the same orthogonal matrix, which changes no product of both, and spreads a
large channel over the others. Every scale depends on its own token alone, so that every schedule stores the
same bytes.

Legend: T tokens of the step, I index heads, X width of an index key, L latent, R rope, n tokens of a request,
  P pages, B tokens a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.latent import LatentAttention
from attention.reference import AttentionMetadata, Span
from attention.sparse import SparseAttention
from devices.int8 import quantize_rows
from devices.shapes import AttentionShape, latent_row_bytes, latent_tile
from kv_cache.device.storage import zeros

ROPE_TYPE, INDEX_SCALE = torch.bfloat16, torch.float16


class Int8SparseAttention(SparseAttention):
    """Sparse attention whose layers keep rows of bytes, index keys in int8, and scales of these."""

    def __init__(self, shape: AttentionShape, device: torch.device | str = "cpu") -> None:
        super().__init__(shape, device)
        self.rotation = rotation(self.index.head_dim).to(self.device, shape.dtype)

    def new_planes(self, count: int) -> tuple[Tensor, ...]:
        """Return `count` pages of zeros for the rows of a layer, and for its index keys and their scales."""
        page = count, self.shape.page_size, 1
        keys = zeros((*page, self.index.head_dim), torch.int8, self.device)
        scales = zeros((*page, 1), INDEX_SCALE, self.device)
        return *self.new_shared_planes(count), keys, scales

    def new_shared_planes(self, count: int) -> tuple[Tensor, ...]:
        """Return the plane of a layer without an indexer of its own: rows."""
        width = latent_row_bytes(self.shape.head_dim, self.latent.rope_dim)
        page = count, self.shape.page_size, 1
        return (zeros((*page, width), torch.int8, self.device),)

    def pages_of(self, planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the rows, which hold latents and rope keys alike."""
        return planes[0], planes[0]

    def index_pages(self, planes: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the planes of index keys and of their scales."""
        return tuple(planes[1:])

    def write(
        self,
        key: Tensor,
        value: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write the step's latents [T, 1, L] and rope keys [T, 1, R] to their rows; see Attention.write."""
        count = len(metadata.write_index)
        tiles = key[:count].unflatten(-1, (-1, latent_tile(self.shape.head_dim)))
        numbers, scales = self.quantized(tiles)
        bytes_of = [each.view(torch.int8) for each in (value[:count].to(ROPE_TYPE), scales[..., 0])]
        layer_keys.flatten(0, 1)[metadata.write_index] = torch.cat((numbers.flatten(-2), *bytes_of), -1)

    def write_index(self, keys: Tensor, index_pages: Sequence[Tensor], metadata: AttentionMetadata) -> None:
        """Write the step's index keys [T, X] and their scales to their places; see SparseAttention."""
        made = self.quantized((keys[: len(metadata.write_index)] @ self.rotation)[:, None])
        for pages, new in zip(index_pages, made):
            pages.flatten(0, 1)[metadata.write_index] = new.to(pages.dtype)

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise [..., n] to int8 [..., n] with float32 scales [..., 1]; a device may override this."""
        return quantize_rows(x)

    def quantized_queries(self, query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn and quantise index queries [T, I, X].

        Returns int8 [T, I, X], and in float16 the weights of the heads [T, I] and the scales [T, I].
        """
        numbers, scales = self.quantized(query @ self.rotation)
        return numbers, weights.to(INDEX_SCALE), scales[..., 0].to(INDEX_SCALE)

    def _index_queries(self, query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return quantised index queries, and weights that include their scales, both in float32."""
        numbers, weights, scales = self.quantized_queries(query, weights)
        return numbers.float(), weights.float() * scales.float()

    def _index_keys(self, index_pages: Sequence[Tensor], span: Span) -> Tensor:
        """See SparseAttention._index_keys."""
        keys, scales = (pages[span.pages].flatten(0, 1)[: span.stop, 0].float() for pages in index_pages)
        return keys * scales

    def read(self, layer_keys: Tensor, layer_values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents [n, 1, L] and rope keys [n, 1, R] in float32 at cache places `index` [n]."""
        return self._of_rows(layer_keys.flatten(0, 1)[index])

    def _of_span(self, layer_latents: Tensor, layer_rope_keys: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Return the latents [n, 1, L] and rope keys [n, 1, R] of a span's pages."""
        return self._of_rows(layer_latents[span.pages].flatten(0, 1))

    def _of_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the float32 latents [..., L] and rope keys [..., R] of rows of bytes."""
        rank = self.shape.head_dim
        tile, rope_bytes = latent_tile(rank), ROPE_TYPE.itemsize * self.latent.rope_dim
        numbers, rope, scales = rows.split((rank, rope_bytes, rows.shape[-1] - rank - rope_bytes), -1)
        # Copied, because the bytes of a wider number may not be aligned within a row
        rope, scales = (each.clone(memory_format=torch.contiguous_format) for each in (rope, scales))
        tiles = numbers.float().unflatten(-1, (-1, tile)) * scales.view(torch.float32)[..., None]
        return tiles.flatten(-2), rope.view(ROPE_TYPE).float()


def rotation(width: int) -> Tensor:
    """Return the orthogonal matrix [X, X] by which index queries and keys are turned before rounding.

    It is Sylvester's Hadamard matrix over the root of its size, as vllm-ascend has it. Where the width is no
    power of two, blocks of the greatest one that divides it lie on the diagonal.
    """
    block = torch.ones(1, 1)
    for _ in range((width & -width).bit_length() - 1):
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    whole: Tensor = torch.block_diag(*[block / len(block) ** 0.5] * (width // len(block)))
    return whole


def latent_attention(shape: AttentionShape, device: torch.device | str = "cpu") -> LatentAttention:
    """Return latent attention in plain torch, sparse where the shape has an indexer."""
    assert shape.latent is not None, "the model has other attention"
    if shape.latent.index is None:
        return LatentAttention(shape, device)
    return (Int8SparseAttention if shape.int8_pages else SparseAttention)(shape, device)
