"""Define multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in plain torch for every device.

All heads read one latent of each token. A layer's keys are latents [P, B, 1, L], from which its values are
computed too; in the place of values it has the rope keys [P, B, 1, R], the part of a key that carries the
position. Short spans project their queries into the space of latents ("absorbed"), so that a latent is read
once for all heads. Long ones expand the latents to keys and values of each head once, which then takes a
fraction of the products.

Legend: T tokens of the step, H heads, L latent, R rope, N the other part of a query (nope), V value of a
  head, n tokens of a request, P pages, B tokens a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from attention.reference import Attention, AttentionMetadata, Span, Windows
from continuous_batching.batch import Batch, ragged_ranges
from devices.shapes import LatentShape
from kv_cache.device.transfer import to_device


@dataclass(frozen=True, slots=True)
class LatentUp:
    """The projection from latents up to the keys [H, N, L] and the values [H, L, V] of each head."""

    keys: Tensor
    values: Tensor

    def absorbed(self, query: Tensor) -> Tensor:
        """Project queries [T, H, N] of expanded keys to queries of latents [T, H, L]."""
        return torch.bmm(query.transpose(0, 1), self.keys).transpose(0, 1)

    def raised(self, x: Tensor) -> Tensor:
        """Project weighted sums of latents [T, H, L] to those of values [T, H, V]."""
        return torch.bmm(x.transpose(0, 1), self.values).transpose(0, 1)

    def expanded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Project latents [n, L] to the keys [n, H, N] and the values [n, H, V] of each head."""
        keys = F.linear(latents, self.keys.flatten(0, 1)).unflatten(1, (len(self.keys), -1))
        return keys, torch.matmul(latents, self.values).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class LatentLinears:
    """The three linears before attention, [in, out], in the form of a device that fuses them.

    They project hidden states to compressed queries, these to queries, whose heads have both parts side by
    side, and hidden states to latents and rope keys. The two numbers that rope rotates together are
    neighbours.
    """

    weights: tuple[Tensor, Tensor, Tensor]
    scales: tuple[Tensor, Tensor, Tensor] | None  # float32 [out], the scales of int8 weights


@dataclass(frozen=True, slots=True)
class LatentProlog:
    """The weights that turn hidden states into a step's queries, latents and rope keys."""

    linears: LatentLinears
    query_norm: Tensor
    latent_norm: Tensor
    eps: float  # eps of both norms
    up: LatentUp


@dataclass(frozen=True)
class LatentMetadata(AttentionMetadata):
    """What all layers of one step share.

    `spans` are the short ones, numbered within the rows that are taken out of the step for them.
    """

    short_rows: Tensor  # int64 [rows of short spans], rows of the packed query
    long_spans: tuple[Span, ...]


class LatentAttention(Attention):
    """Causal latent attention over the paged cache, as `Attention` for queries in the space of latents.

    `attend` maps queries [T, H, L + R] to weighted sums of latents [T, H, L].
    """

    normalizes = False  # whether `write_raw` includes the norm and the rotation that precede `write`

    @property
    def latent(self) -> LatentShape:
        """The part of the shape that describes latents."""
        assert self.shape.latent is not None, "other attention reads keys and values of heads"
        return self.shape.latent

    def new_planes(self, count: int) -> tuple[Tensor, ...]:
        """Return `count` pages of zeros for the latents of a layer, and as many for its rope keys."""
        return self._plane(count, self.shape.head_dim), self._plane(count, self.latent.rope_dim)

    def pages_of(self, planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return what holds the latents, and what holds the rope keys, among the planes of a layer."""
        return planes[0], planes[1]

    def expands(self, num_tokens: int) -> bool:
        """Whether a span of so many tokens is cheaper with its request's latents expanded.

        Absorbed, each query and key take L + R and L products a head in place of N + R and V; to expand a
        latent takes L products for each of its numbers.
        """
        latent, width = self.latent, self.shape.head_dim
        saved = 2 * width - latent.nope_dim - latent.value_dim
        return num_tokens * saved > width * (latent.nope_dim + latent.value_dim)

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> AttentionMetadata:
        """Compute what all layers of this step share; see Attention.plan."""
        whole = super().plan(batch, page_table, write_index, windows)
        return self._split(whole, batch, np.ones(batch.num_spans, dtype=bool))

    def _split(self, whole: AttentionMetadata, batch: Batch, among: NDArray[np.bool_]) -> LatentMetadata:
        """Return the plan of those spans of a step that are `among` all, the short ones apart."""
        lens = batch.stops - batch.starts
        is_long = np.array([self.expands(each) for each in lens.tolist()], dtype=bool)
        is_short, is_long = among & ~is_long, among & is_long
        # First row of each short span among the rows of all short spans
        taken_rows = np.cumsum(lens[is_short]) - lens[is_short]
        short = [span for span, each in zip(whole.spans, is_short) if each]
        return LatentMetadata(
            whole.write_index,
            tuple(replace(span, first_row=row) for span, row in zip(short, taken_rows.tolist())),
            self._rows(lens, is_short),
            tuple(span for span, each in zip(whole.spans, is_long) if each),
        )

    def _rows(self, lens: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Tensor:
        """Return the int64 rows of the packed query that belong to the chosen spans of these lengths."""
        first_rows = np.cumsum(lens) - lens
        return to_device(ragged_ranges(first_rows[chosen], (first_rows + lens)[chosen]), self.device)

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
        """Normalise, rotate and write latents and rope keys [T, L + R] in one launch.

        Only a device that `normalizes` has this. The rotation is of pairs of neighbours; otherwise as
        `write`.
        """
        raise NotImplementedError

    def joins(self, hidden_size: int, query_rank: int | None) -> bool:
        """Whether `write_joined` computes everything that precedes attention, for inputs of this width."""
        return False

    def is_joined(self, metadata: AttentionMetadata) -> bool:
        """Whether `write_joined` applies to this step, if the device `joins`."""
        raise NotImplementedError

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
        """Compute queries, latents and rope keys from hidden states in one launch, and write the latter two.

        The hidden states [T, hidden] may be int8 with scales [T]. Returns the queries in the space of latents
        [T, H, L], their rotated parts [T, H, R], and, where an indexer reads them, the normed compressed
        queries [T, query rank] in the model's type.
        """
        raise NotImplementedError

    def attend_joined(
        self,
        query: Tensor,
        rope: Tensor,
        up: LatentUp,
        layer_latents: Tensor,
        layer_rope_keys: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Attend from the queries that `write_joined` returned; otherwise as `attend_heads`."""
        raise NotImplementedError

    def attend(
        self,
        query: Tensor,
        layer_keys: Tensor,
        layer_values: Tensor,
        metadata: AttentionMetadata,
        layer: int,
    ) -> Tensor:
        """Let each query [T, H, L + R] attend to its request's latents and rope keys.

        Returns weighted sums of the latents [T, H, L].
        """
        output = query.new_zeros(*query.shape[:2], self.shape.head_dim)
        for span in metadata.spans:
            keys, latents = self._of_pages(layer_keys, layer_values, span)
            self._attend_span(query, keys, latents, span, None, output)
        return output

    def _of_pages(self, layer_keys: Tensor, layer_values: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Return the keys [n, 1, L + R] and the values [n, 1, L] of absorbed queries."""
        latents, rope_keys = self._of_span(layer_keys, layer_values, span)
        return torch.cat((latents, rope_keys), -1), latents

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
        assert isinstance(metadata, LatentMetadata)
        output = nope.new_zeros(*nope.shape[:2], self.latent.value_dim)
        if metadata.spans:
            rows = metadata.short_rows
            query = torch.cat((up.absorbed(nope[rows]), rope[rows]), -1)
            output[rows] = up.raised(self.attend(query, layer_latents, layer_rope_keys, metadata, layer))
        for span in metadata.long_spans:
            latents, rope_keys = self._of_span(layer_latents, layer_rope_keys, span)
            keys, values = up.expanded(latents[: span.stop, 0].to(nope.dtype))
            rope_keys = rope_keys[: span.stop].expand(-1, keys.shape[1], -1)
            keys = torch.cat((keys, rope_keys.to(keys.dtype)), -1)
            self._attend_span(torch.cat((nope, rope), -1), keys, values, span, None, output)
        return output

    def _of_span(self, layer_latents: Tensor, layer_rope_keys: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Return the latents [n, 1, L] and rope keys [n, 1, R] of a span's pages."""
        latents, rope_keys = (
            self._numbers(pages[span.pages].flatten(0, 1)) for pages in (layer_latents, layer_rope_keys)
        )
        return latents, rope_keys
