"""When does a head compute its entries, which read what the target finds?

Entries of positions up to a step's first can be computed before the target's step, and so are the drafts, one
after the other. Entries of the rest of a prompt follow once the target has computed it: they are keys and
values alone. Drafts that turn out right are computed again with what the target found, before the next drafts
of their row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from continuous_batching.batch import Batch, ragged_ranges
from continuous_batching.slots import SlotPool
from kv_cache.device.storage import KVCache
from kv_cache.device.transfer import to_device
from kv_cache.pages import Index
from models.drafting.drafter import Drafter
from models.head import Head
from models.step.inputs import step_inputs
from models.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class _Left:
    """Entries that are computed after the target's step."""

    step: StepInputs
    known: Tensor  # features that the pages held before the step
    # Index of each entry's feature, in `known` followed by the step's features; None: in `known` alone
    places: Tensor | None


class HeadDrafter(Drafter):
    """A drafter for a head of the target's own checkpoint, with at most `most` drafts a row and step."""

    def __init__(self, head: Head, cache: KVCache, slots: SlotPool, most_tokens: int, most: int) -> None:
        super().__init__(head, cache, slots, most_tokens, most + 1)
        self._head = head
        self._left: _Left | None = None

    def run(self, batch: Batch) -> Tensor | None:
        """Return the drafts of a batch, as `Drafter.run`.

        What rows without drafts lack is left to `finish`.
        """
        drafting = batch.drafts_by_span > 0
        self._left = self._lacking(batch, np.flatnonzero(~drafting))
        if not drafting.any():
            return None
        return super().run(
            replace(batch, draft_stops=np.where(drafting, batch.draft_stops, batch.draft_starts))
        )

    def finish(self) -> None:
        """Compute the entries that rows without drafts lack, whose features are known now."""
        left, self._left = self._left, None
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
