"""Make drafts on the device with a draft model or with a head, which the target's step then checks.

Keys and values of a drafter lie in pages of the same numbers as the target model's, in a cache of its own:
whatever is copied, swapped, moved or shared there goes with the target's.

A head reads what the target finds. Its entries of positions up to a step's first can be computed before the
target's step, and so are the drafts, one after the other. Entries of the rest of a prompt follow once the
target has computed it: they are keys and values alone. Drafts that turn out right are computed again with
what the target found, before the next drafts of their row.

Legend: N rows that get drafts, D drafts of all of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from continuous_batching.batch import Batch, ragged_ranges
from continuous_batching.slots import SlotPool
from kv_cache.device.storage import CacheLayers
from kv_cache.device.transfer import to_device
from kv_cache.pages import Index
from models.decoder import Decoder
from models.head import Head
from models.layers.logit_parts import LogitParts
from models.ops.reference import Ops
from models.sampling.sampler import Best
from models.step.graphs import DecodeGraphs
from models.step.inputs import LastTokens, step_inputs
from models.step_inputs import StepInputs

log = logging.getLogger(__name__)

_MOST_LAG = 2  # tokens of a row that a captured step reads first, because the last draft was never fed


class Drafter:
    """A second decoder, which proposes its best tokens one after the other.

    At most `most_tokens` are computed at once, so that rows that lack many tokens need no more memory than a
    step. A captured step reads up to `most_lag` tokens of a row.
    """

    def __init__(
        self,
        decoder: Decoder | Head,
        cache: CacheLayers,
        slots: SlotPool,
        most_tokens: int,
        most_lag: int = _MOST_LAG,
    ) -> None:
        self.decoder, self.cache = decoder, cache
        self.graphs: DecodeGraphs | None = None
        self._slots, self._most_tokens, self._most_lag = slots, most_tokens, most_lag
        self._greedy = Greedy(decoder.ops, decoder.offsets if isinstance(decoder, Head) else None)
        self._device = decoder.attention.device
        self._last = LastTokens(slots.num_slots, self._device)
        decoder.tabulate(slots.max_tokens)

    def capture(self, target: DecodeGraphs) -> None:
        """Capture graphs for the steps that make drafts, if the device can hold these too."""
        self.graphs = None
        most = self._most_lag * min(target.sizes[-1], self._slots.num_slots)
        if not target.holds_beside(self.decoder.attention, most):
            log.warning(
                "graphs: none of the draft model's steps, which the device cannot hold beside the others"
            )
            return
        parts = self.decoder, self.cache, self.decoder.attention, self._greedy, self._slots
        self.graphs = DecodeGraphs(*parts, most, 1, follow_at_once=True)
        self.graphs.capture()

    def run(self, batch: Batch) -> Tensor | None:
        """Compute what a batch asks of the draft model; return the drafts, int64 [D], span after span."""
        counts = batch.drafts_by_span
        # End of the tokens that the host knows
        stops = np.where(counts > 0, batch.stops - counts, batch.draft_stops)
        drafting = np.flatnonzero(counts)
        ends = [self._at_ends(piece) for piece in self._pieces(batch, stops, counts > 0)]
        if not len(drafting):
            return None
        counts, rows, known = counts[drafting], batch.slots[drafting], stops[drafting]
        first = counts.cumsum() - counts  # index of each row's first draft among all drafts
        made, places = [torch.cat(ends)], [first]
        self.begin(made[0], rows)
        for ahead in range(1, int(counts.max())):
            going = counts > ahead
            if not going.all():
                counts, rows, known, first = (each[going] for each in (counts, rows, known, first))
            made.append(self.follow(rows, known + ahead - 1))
            places.append(first + ahead)
        order = np.argsort(np.concatenate(places))
        return torch.cat(made)[to_device(order, self._device)]

    def finish(self) -> None:
        """Do nothing: a draft model has nothing to compute after the target model."""

    def _pieces(self, batch: Batch, stops: Index, yields: NDArray[np.bool_]) -> Iterator[Batch]:
        """Yield the spans up to `stops` in batches of at most `most_tokens`.

        Those in `yields` yield at their ends.
        """
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

    def _at_ends(self, piece: Batch) -> Tensor:
        """Return the best tokens after the spans that yield."""
        if self.graphs is not None and int((piece.stops - piece.starts).max()) <= self._most_lag:
            short = replace(piece, num_drafts=piece.num_tokens - piece.num_spans)  # a row for each token
            if self.graphs.takes(short):
                best = self.graphs.run(self.graphs.filled(short), self._last).best
                return best.tokens[to_device(piece.yielding, self._device)]
        hidden = self.decoder(step_inputs(piece, self._slots, self.decoder, self.cache))
        if not len(piece.sampled):
            return self._last.tokens[:0]
        return self._best(hidden[to_device(piece.yielding, self._device)])

    def begin(self, tokens: Tensor, rows: Index) -> None:
        """Take these tokens [N] as the first drafts of rows [N]."""
        self._last.keep(tokens, rows)

    def follow(self, rows: Index, positions: Index) -> Tensor:
        """Return the next drafts of rows [N], whose latest drafts stand at these positions."""
        each = np.arange(len(rows))
        step = Batch(rows, positions, positions + 1, each, rows, positions + 1, unknown=each)
        if self.graphs is not None and self.graphs.takes(step):
            best = self.graphs.run(self.graphs.filled(step), self._last).best
            self._last.keep(best.chosen, rows)
            return best.tokens.clone()  # the next replay overwrites them
        tokens, places = self._last.tokens, self._last.places(step)
        if len(places) < len(tokens):
            tokens = tokens[to_device(places, self._device)]
        inputs = step_inputs(step, self._slots, self.decoder, self.cache)
        tokens = self._best(self.decoder(replace(inputs, token_ids=tokens.to(inputs.token_ids.dtype))))
        self._last.keep(tokens, rows)
        return tokens

    def _best(self, hidden: Tensor) -> Tensor:
        return self._greedy.best(self.decoder.own_logits(hidden), self.decoder.parts).tokens


class Greedy:
    """Chooses the best tokens; `offsets` map tokens of a smaller vocabulary to the target's."""

    captures_draws = reads_logits = False

    def __init__(self, ops: Ops, offsets: Tensor | None = None) -> None:
        self._ops, self._offsets = ops, offsets

    def best(self, logits: Tensor, parts: LogitParts | None = None) -> Best:
        """Return the best tokens of logits [R, V]."""
        tokens, _ = self._ops.greedy(logits) if parts is None else parts.greedy(logits)
        if self._offsets is not None:
            tokens = tokens + self._offsets[tokens]
        return Best(tokens, tokens)

    def draw_columns(self, rows: Index, targets: Index, slots: SlotPool) -> None:
        """Return nothing: no token is drawn."""

    def draw(self, logits: Tensor, best: Best, columns: Tensor) -> Tensor:
        """Fail: this is never called."""
        raise AssertionError("drafts are the best tokens")


@dataclass(frozen=True, slots=True)
class _Left:
    """Entries that are computed after the target's step."""

    step: StepInputs
    known: Tensor  # features that the pages held before the step
    # Index of each entry's feature, in `known` followed by the step's features; None: in `known` alone
    places: Tensor | None


class HeadDrafter(Drafter):
    """A drafter for a head of the target's own checkpoint, with at most `most` drafts a row and step."""

    def __init__(self, head: Head, cache: CacheLayers, slots: SlotPool, most_tokens: int, most: int) -> None:
        super().__init__(head, cache, slots, most_tokens, most + 1)
        self._head = head
        # What is to be computed once the target has computed a batch, for each whose drafts are made
        self._left = deque[_Left | None]()

    def run(self, batch: Batch) -> Tensor | None:
        """Return the drafts of a batch, as `Drafter.run`.

        What rows without drafts lack is left to `finish`.
        """
        drafting = batch.drafts_by_span > 0
        self._left.append(self._lacking(batch, np.flatnonzero(~drafting)))
        if not drafting.any():
            return None
        return super().run(
            replace(batch, draft_stops=np.where(drafting, batch.draft_stops, batch.draft_starts))
        )

    def finish(self) -> None:
        """Compute the entries that rows without drafts lack, whose features are known now."""
        left = self._left.popleft()
        if left is None:
            return
        features = left.known
        if left.places is not None:
            features = torch.cat((features, self._head.fresh))[left.places]
        self._head.fill(left.step, features)

    def _lacking(self, batch: Batch, spans: Index) -> _Left | None:
        """Return the entries of these spans, and where the features are that they read."""
        starts, stops = batch.draft_starts[spans], batch.draft_stops[spans]
        spans, starts, stops = (each[stops > starts] for each in (spans, starts, stops))
        if not len(spans):
            return None
        none = np.empty(0, dtype=np.int64)
        step = step_inputs(
            Batch(batch.slots[spans], starts, stops, none, none, none), self._slots, self._head, self.cache
        )
        assert step.before_index is not None, "a head reads what lies before"
        positions = ragged_ranges(starts, stops)
        lens, first = stops - starts, batch.starts[spans]
        ahead = positions - 1 - np.repeat(first, lens)  # negative for features of an earlier step
        is_known = ahead < 0
        known = self._head.features.read(step.before_index[to_device(np.flatnonzero(is_known), self._device)])
        if is_known.all():
            return _Left(step, known, None)
        packed = np.cumsum(batch.stops - batch.starts) - (batch.stops - batch.starts)
        places = np.where(
            is_known, np.cumsum(is_known) - 1, len(known) + np.repeat(packed[spans], lens) + ahead
        )
        return _Left(step, known, to_device(places, self._device))

    def _pieces(self, batch: Batch, stops: Index, yields: NDArray[np.bool_]) -> Iterator[Batch]:
        """Yield whole spans, because the feature at the end of a part would overwrite the target's."""
        spans = np.flatnonzero(stops > batch.draft_starts)
        lens = stops[spans] - batch.draft_starts[spans]
        while len(spans):
            count = max(1, int((lens.cumsum() <= self._most_tokens).sum()))
            now, each = spans[:count], np.arange(count)
            rows = batch.slots[now]
            yield Batch(rows, batch.draft_starts[now], stops[now], each, rows, stops[now])
            spans, lens = spans[count:], lens[count:]
