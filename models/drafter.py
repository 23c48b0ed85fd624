"""What would a smaller model say next? It guesses on the device what a step then checks.

Its keys and values lie in pages of the same numbers as the target model's, in a cache of its own: whatever
is copied, swapped, moved or shared there goes with the target's.

Legend: N rows that get drafts, D drafts of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index
from kv_cache.storage import KVCache
from kv_cache.transfer import to_device
from models.decoder import Decoder
from models.inputs import step_inputs

_NONE: Index = np.empty(0, dtype=np.int64)


class Drafter:
    """A second decoder, which says its best tokens one after the other.

    `most_tokens` are computed at once, so that rows that lack much need no more memory than a step.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, slots: SlotPool, most_tokens: int) -> None:
        self.decoder, self.cache = decoder, cache
        self._slots, self._most_tokens = slots, most_tokens
        self._device = decoder.attention.device
        decoder.rope.tabulate(slots.max_tokens, decoder.embedding.dtype)

    def run(self, batch: Batch) -> Tensor | None:
        """Compute what a batch asks of the draft model; returns the drafts, int64 [D], span after span."""
        counts = batch.drafts_by_span
        stops = np.where(counts > 0, batch.stops - counts, batch.draft_stops)  # of what the host knows
        drafting = np.flatnonzero(counts)
        ends = [self._hidden_at_ends(piece) for piece in self._pieces(batch, stops, counts > 0)]
        if not len(drafting):
            return None
        tokens = self._best(torch.cat(ends))
        counts, rows, known = counts[drafting], batch.slots[drafting], stops[drafting]
        first = counts.cumsum() - counts  # of each row's drafts among all
        made, places = [tokens], [first]
        for ahead in range(1, int(counts.max())):
            going = counts > ahead
            if not going.all():
                tokens = tokens[to_device(np.flatnonzero(going), self._device)]
                counts, rows, known, first = (each[going] for each in (counts, rows, known, first))
            tokens = self._next(rows, known + ahead - 1, tokens)
            made.append(tokens)
            places.append(first + ahead)
        order = np.argsort(np.concatenate(places))
        return torch.cat(made)[to_device(order, self._device)]

    def _pieces(self, batch: Batch, stops: Index, yields: NDArray[np.bool_]) -> Iterator[Batch]:
        """The spans up to `stops`, in batches of at most `most_tokens`; some of them yield at their ends."""
        spans = np.flatnonzero(stops > batch.draft_starts)
        starts, ends = batch.draft_starts[spans], stops[spans]
        while len(spans):
            taken = np.clip(
                self._most_tokens - ((ends - starts).cumsum() - (ends - starts)), 0, ends - starts
            )
            now = np.flatnonzero(taken)
            upto = starts[now] + taken[now]
            is_end = (upto == ends[now]) & yields[spans[now]]
            rows = batch.slots[spans[now]]
            sampled = np.flatnonzero(is_end)
            yield Batch(rows, starts[now], upto, sampled, rows[sampled], upto[sampled])
            starts = starts + taken
            kept = starts < ends
            spans, starts, ends = spans[kept], starts[kept], ends[kept]

    def _hidden_at_ends(self, piece: Batch) -> Tensor:
        hidden = self.decoder(step_inputs(piece, self._slots, self.decoder, self.cache))
        if not len(piece.sampled):
            return hidden[:0]
        return hidden[to_device(piece.yielding, self._device)]

    def _next(self, rows: Index, positions: Index, tokens: Tensor) -> Tensor:
        """What follows these tokens [N], which stand at these positions of rows [N]."""
        step = Batch(rows, positions, positions + 1, _NONE, _NONE, _NONE)
        inputs = step_inputs(step, self._slots, self.decoder, self.cache)
        return self._best(self.decoder(replace(inputs, token_ids=tokens.to(inputs.token_ids.dtype))))

    def _best(self, hidden: Tensor) -> Tensor:
        return self.decoder.ops.greedy(self.decoder.logits(hidden))[0]
