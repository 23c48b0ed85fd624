"""Define sparse latent attention (DSA; DeepSeek-V3.2-Exp, and GLM-5 after it), in plain torch.

An indexer scores for each query token every earlier token of its request, and latent attention then reads
only the `top_k` tokens with the highest scores. The index keys that it scores lie in one more plane [P, B, 1,
X] of the layer's pages. Layers without an indexer of their own have no such plane and read the tokens that
the last layer with one chose. Up to `top_k` tokens of context every token is chosen, and a span that sees no
more is plain latent attention; the lengths on the host decide that.

The score of position s for a query token is the sum over the index heads of weight * relu(query · key), in
float32. Of equal scores the lowest positions are chosen. Constant positive factors change no choice, and the
caller may leave them out.

Legend: T tokens of the step, I index heads, X width of an index key, C the most tokens chosen (`top_k`), H
  heads, L latent, R rope, N the other part of a query (nope), V value of a head, n tokens of a request, t
  rows of a tile, P pages, B tokens a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.latent import LatentAttention, LatentMetadata, LatentUp
from attention.reference import Attention, AttentionMetadata, Span, Windows
from continuous_batching.batch import Batch
from devices.shapes import DIVIDED_ROWS, IndexShape

SCORE_ROWS = 64  # query rows whose scores are held at a time, so that memory does not grow with T * context
SCORE_KEYS = 1024  # keys whose scores of each index head are held at a time
GATHERED_NUMBERS = 2**22  # numbers of gathered latents that are held at a time


class RowRanks(Protocol):
    """The ranks that compute the same layers, of which this is number `rank`."""

    rank: int
    size: int

    def exchange(self, x: Tensor) -> Tensor:
        """Send part r of `x` [ranks, ...] to rank r; return what each rank has sent here."""
        ...


@dataclass(frozen=True, slots=True)
class RowPart:
    """The `rows` of a step's `num_tokens` for which this rank chooses and, with all ranks' heads, attends.

    The last rank may have fewer.
    """

    rows: slice
    num_tokens: int
    ranks: RowRanks

    @property
    def num_rows(self) -> int:
        """Number of this rank's rows."""
        found: int = self.rows.stop - self.rows.start
        return found

    def to_rows(self, x: Tensor) -> Tensor:
        """Return this rank's rows of all heads [t, ranks * H, D], from all rows of its heads [T, H, D]."""
        size, whole = self.ranks.size, -(-self.num_tokens // self.ranks.size)  # every rank sends as many
        sent = _extended(x[: self.num_tokens], size * whole).unflatten(0, (size, whole))
        return self.ranks.exchange(sent).transpose(0, 1).flatten(1, 2)[: self.num_rows]

    def to_heads(self, x: Tensor) -> Tensor:
        """Return all rows of this rank's heads [T, H, D], from its rows of all heads [t, ranks * H, D]."""
        size, whole = self.ranks.size, -(-self.num_tokens // self.ranks.size)
        sent = _extended(x, whole).unflatten(1, (size, -1)).transpose(0, 1)
        return self.ranks.exchange(sent).flatten(0, 1)[: self.num_tokens]


@dataclass(slots=True)
class Choice:
    """What the last layer with an indexer chose in this step, for itself and the layers that share it.

    `positions` are int32 [T, C]: in each row the positions in its request, the chosen ones first, in any
    order, and then -1. T counts the padding rows of the queries, whose content means nothing. None before a
    layer has chosen, and in steps in which no layer has to. Where the ranks divide the rows, as `part` says,
    there are this rank's rows alone, and no padding.
    """

    positions: Tensor | None = None
    part: RowPart | None = None


@dataclass(frozen=True)
class SparseMetadata(LatentMetadata):
    """What all layers of one step share; spans that see more than `top_k` tokens are `sparse_spans`."""

    sparse_spans: tuple[Span, ...] = ()
    choice: Choice = field(default_factory=Choice)


class SparseAttention(LatentAttention):
    """Causal latent attention over the tokens that an indexer chose.

    Once a step: `plan`. Once a layer with an indexer: `write_index`, then, if the step `is_sparse`, `choose`
    with the queries of `own_rows`. In long steps of several `ranks` these are a part of the rows, for which
    this rank also attends, with the heads of all ranks: queries and results are exchanged, H * (2 * L + R)
    numbers a row. Ranks that divided index heads instead would have to sum scores, 4 bytes a row for every
    token of the context, and each would gather the C latents of every row for its few heads. Each row is thus
    chosen on one rank, or by the same products on all of them, and all heads read the same tokens.
    Once a layer: `write` or `write_joined` as for `LatentAttention`, then `attend_heads` or `attend_joined`,
    which read the choice from the metadata. A device's subclass keeps this order and may hold another
    metadata, as long as that has a `choice` too: a rank whose first layer shares a choice receives it there.
    """

    ranks: RowRanks | None = None  # the ranks that compute its layers, set by these; None: this one alone

    @property
    def index(self) -> IndexShape:
        """The part of the shape that describes the indexer."""
        assert self.latent.index is not None, "other attention reads all tokens"
        return self.latent.index

    def new_planes(self, count: int) -> tuple[Tensor, ...]:
        """Return `count` pages of zeros for latents, rope keys and index keys of a layer with an indexer."""
        return *super().new_planes(count), self._plane(count, self.index.head_dim)

    def index_pages(self, planes: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what holds the index keys among the planes of a layer with an indexer."""
        return tuple(planes[2:])

    def new_shared_planes(self, count: int) -> tuple[Tensor, ...]:
        """Return the planes of a layer without an indexer of its own: latents and rope keys."""
        return super().new_planes(count)

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> AttentionMetadata:
        """Compute what all layers of this step share; see Attention.plan."""
        whole = Attention.plan(self, batch, page_table, write_index, windows)
        sees_more = batch.stops - self.shape.first_key > self.index.top_k
        dense = self._split(whole, batch, ~sees_more)
        sparse = tuple(span for span, each in zip(whole.spans, sees_more) if each)
        part = self.part_of(len(write_index)) if sparse else None
        kept = whole.write_index, dense.spans, dense.short_rows, dense.long_spans
        return SparseMetadata(*kept, sparse, Choice(part=part))

    def part_of(self, num_tokens: int) -> RowPart | None:
        """Return the rows of a step that chooses for which this rank does; None if it does for all."""
        if self.ranks is None or self.ranks.size == 1 or num_tokens < DIVIDED_ROWS * self.ranks.size:
            return None
        size, rank = self.ranks.size, self.ranks.rank
        whole = -(-num_tokens // size)
        if (size - 1) * whole >= num_tokens:  # no rows would be left for the last rank
            return None
        return RowPart(slice(rank * whole, min((rank + 1) * whole, num_tokens)), num_tokens, self.ranks)

    def own_rows(self, metadata: AttentionMetadata) -> slice:
        """Return the rows of a step's queries for which this rank chooses."""
        part = self.choice_of(metadata).part
        return slice(None) if part is None else part.rows

    def num_chosen(self, metadata: AttentionMetadata, num_rows: int) -> int:
        """Return for how many of a step's rows this rank keeps a choice."""
        part = self.choice_of(metadata).part
        return num_rows if part is None else part.num_rows

    def choice_of(self, metadata: AttentionMetadata) -> Choice:
        """Return where a step's choice is kept; a device with metadata of its own overrides this."""
        assert isinstance(metadata, SparseMetadata)
        return metadata.choice

    def is_sparse(self, metadata: AttentionMetadata) -> bool:
        """Whether some span of the step sees more than `top_k` tokens, so that layers have to choose."""
        assert isinstance(metadata, SparseMetadata)
        return bool(metadata.sparse_spans)

    def write_index(self, keys: Tensor, index_pages: Sequence[Tensor], metadata: AttentionMetadata) -> None:
        """Write the step's index keys [T, X], normed and rotated, to their places.

        There may be more rows than the step has tokens; the rest are padding.
        """
        places = index_pages[0].flatten(0, 1)
        places[metadata.write_index] = keys[: len(metadata.write_index), None]

    def choose(
        self, query: Tensor, weights: Tensor, index_pages: Sequence[Tensor], metadata: AttentionMetadata
    ) -> None:
        """Choose what each query token reads, and keep it in the metadata's choice.

        The index queries [t, I, X] are those of `own_rows`, rotated. The weights [t, I] are those of the
        heads in the model's type or in float32, and may be negative. The step's own index keys have been
        written.
        """
        self.choice_of(metadata).positions = self._chosen(query, weights, index_pages, metadata)

    def _chosen(
        self, query: Tensor, weights: Tensor, index_pages: Sequence[Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """Return the positions [t, C] that are chosen for these queries; see `choose`."""
        assert isinstance(metadata, SparseMetadata)
        query, weights = self._index_queries(query, weights)
        most, first_key = self.index.top_k, self.shape.first_key
        positions = torch.full((len(query), most), -1, dtype=torch.int32, device=query.device)
        part = metadata.choice.part
        for span in metadata.sparse_spans if part is None else _within(metadata.sparse_spans, part.rows):
            keys = self._index_keys(index_pages, span)
            key_positions = torch.arange(span.stop, device=query.device)
            for rows, start, stop in _tiles(span, SCORE_ROWS):
                scores = index_scores(query[rows], weights[rows], keys[:stop])
                own = torch.arange(start, stop, device=query.device)[:, None]
                seen = key_positions[:stop]
                hidden = (seen > own) | (seen < own.clamp_max(first_key))
                positions[rows] = top_positions(scores.masked_fill_(hidden, -torch.inf), most)
        return positions

    def _index_queries(self, query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return index queries and weights of heads in the form that is scored with stored index keys."""
        return query, weights

    def _index_keys(self, index_pages: Sequence[Tensor], span: Span) -> Tensor:
        """Return the numbers [n, X] that the stored index keys of a span's request represent."""
        return index_pages[0][span.pages].flatten(0, 1)[: span.stop, 0]

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
        """Let each query, of parts [T, H, N] and [T, H, R], attend to the positions chosen for it.

        Returns [T, H, V].
        """
        assert isinstance(metadata, SparseMetadata)
        pages = layer_latents, layer_rope_keys
        output = super().attend_heads(nope, rope, up, *pages, metadata, layer)
        positions, part = metadata.choice.positions, metadata.choice.part
        if part is not None:
            return self._attend_in_part(output, nope, rope, up, *pages, metadata)
        for span in metadata.sparse_spans:
            assert positions is not None, "a layer with an indexer chooses before"
            for rows, _, _ in _tiles(span, self._gathered_rows()):
                query = torch.cat((up.absorbed(nope[rows]), rope[rows]), -1)
                output[rows] = up.raised(self._attend_chosen(query, positions[rows], span, *pages))
        return output

    def _attend_in_part(
        self,
        output: Tensor,
        nope: Tensor,
        rope: Tensor,
        up: LatentUp,
        layer_latents: Tensor,
        layer_rope_keys: Tensor,
        metadata: SparseMetadata,
    ) -> Tensor:
        """Put what this rank's rows of sparse spans attend to, and those of other ranks, into `output`."""
        positions, part = metadata.choice.positions, metadata.choice.part
        assert part is not None, "the ranks divide the rows"
        assert positions is not None, "a layer with an indexer chooses before"
        query = part.to_rows(torch.cat((up.absorbed(nope), rope), -1))
        attended = query.new_zeros(*query.shape[:2], self.shape.head_dim)
        for span in _within(metadata.sparse_spans, part.rows):
            for rows, _, _ in _tiles(span, self._gathered_rows()):
                attended[rows] = self._attend_chosen(
                    query[rows], positions[rows], span, layer_latents, layer_rope_keys
                )
        latents = part.to_heads(attended)
        for span in metadata.sparse_spans:
            of_span = slice(span.first_row, span.first_row + span.stop - span.start)
            output[of_span] = up.raised(latents[of_span])
        return output

    def _gathered_rows(self) -> int:
        """Return how many rows gather their latents at a time."""
        width = self.shape.head_dim + self.latent.rope_dim
        return max(1, GATHERED_NUMBERS // (self.index.top_k * width))

    def _attend_chosen(
        self, query: Tensor, chosen: Tensor, span: Span, layer_latents: Tensor, layer_rope_keys: Tensor
    ) -> Tensor:
        """Attend from queries [t, H, L + R] of a span to the positions chosen for each, [t, C] or -1.

        Returns weighted sums of latents [t, H, L].
        """
        is_absent = chosen < 0
        # What is absent is replaced by a position that the request has written
        at = chosen.clamp_min(0).long()
        size = self.shape.page_size
        places = (span.pages[at // size] * size + at % size).flatten()
        latents, rope_keys = (
            each[:, 0].unflatten(0, at.shape).float()
            for each in self.read(layer_latents, layer_rope_keys, places)
        )
        wide, rank = query.float(), latents.shape[-1]
        scores = torch.bmm(wide[..., :rank], latents.transpose(1, 2))
        scores += torch.bmm(wide[..., rank:], rope_keys.transpose(1, 2))
        scores = (scores * self.shape.scale).masked_fill_(is_absent[:, None], -torch.inf)
        return torch.bmm(scores.softmax(-1), latents).to(query.dtype)


def index_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return the scores [t, n] in float32 of keys [n, X] for index queries [t, I, X] and weights [t, I].

    The products of each head are held for SCORE_KEYS keys at a time.
    """
    wide, by_head = query.float().flatten(0, 1), weights.float()[:, None]
    scores = wide.new_empty(len(query), len(keys))
    for start in range(0, len(keys), SCORE_KEYS):
        tile = slice(start, start + SCORE_KEYS)
        products = (wide @ keys[tile].float().T).relu_().unflatten(0, query.shape[:2])
        scores[:, tile] = torch.bmm(by_head, products)[:, 0]
    return scores


def top_positions(scores: Tensor, most: int) -> Tensor:
    """Return the positions of the `most` highest scores of each row [t, n], of equal ones the lowest.

    A score of -inf is never chosen. Returns int32 [t, most], rising, and -1 after the last.
    """
    count = min(most, scores.shape[1])
    least = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above = scores > least
    equal = (scores == least) & (least > -torch.inf)
    lacking = count - above.sum(-1, keepdim=True)
    row, position = (above | (equal & (equal.cumsum(-1) <= lacking))).nonzero(as_tuple=True)
    counts = row.bincount(minlength=len(scores))
    rank = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    positions = torch.full((len(scores), most), -1, dtype=torch.int32, device=scores.device)
    positions[row, rank] = position.int()
    return positions


def _extended(x: Tensor, num_rows: int) -> Tensor:
    """Append zeros after the last row, up to `num_rows`."""
    missing = num_rows - len(x)
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def _within(spans: Sequence[Span], rows: slice) -> Iterator[Span]:
    """Yield the parts of spans that lie within these rows, numbered from the first of these."""
    for span in spans:
        before = max(rows.start - span.first_row, 0)
        after = min(rows.stop - span.first_row, span.stop - span.start)
        if before < after:
            first_row = span.first_row + before - rows.start
            yield Span(first_row, span.start + before, span.start + after, span.pages)


def _tiles(span: Span, most_rows: int) -> Iterator[tuple[slice, int, int]]:
    """Yield the rows of a span in the packed query, and their positions, in tiles of at most so many."""
    for start in range(span.start, span.stop, most_rows):
        stop = min(start + most_rows, span.stop)
        first = span.first_row - span.start
        yield slice(first + start, first + stop), start, stop
