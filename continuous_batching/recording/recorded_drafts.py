"""Which drafts did a recording's batches have?

Who follows a recording proposes nothing: what a proposer guesses, and how many guesses are checked, depends
on all that the engine had learnt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.recording.format import Committed, Entry, Scheduled, unpacked
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Offers, Verdicts
from continuous_batching.speculation.proposer import Guesses
from continuous_batching.speculation.speculation import Speculation
from kv_cache.pages import Index


class RecordedDrafts:
    """A proposer, and lengths, that read the drafts of the next batch; `upcoming` is its entry, if any.

    It waits for the tokens of the batch in flight where the recorded engine did: there the next entry is what
    the device answered.
    """

    asks = True

    def __init__(self, slots: SlotPool, upcoming: Callable[[], Entry | None]) -> None:
        self._slots = slots
        self._upcoming = upcoming

    @property
    def is_hopeful(self) -> bool:
        """Whether the recorded engine made no batch now."""
        return isinstance(self._upcoming(), Committed)

    def guess(self, rows: Index, most: int) -> Guesses:
        """The recorded drafts of these rows [N]; those of others are left out, which shows in the digest.

        Of those that the device made, the tokens are in what it answered.
        """
        tokens, counts = np.zeros((len(rows), most), dtype=np.int32), np.zeros(len(rows), dtype=np.int64)
        entry = self._upcoming()
        if not isinstance(entry, Scheduled) or entry.spans is None or entry.samples is None:
            return Guesses(tokens, counts)  # a span with drafts does not go on by one token, nor yield one
        stops = unpacked(entry.spans[2])
        sampled, owners, targets = map(unpacked, entry.samples)
        is_draft = targets < stops[sampled]
        owners, targets = owners[is_draft], targets[is_draft]
        at = np.full(self._slots.num_slots, -1, dtype=np.int64)
        at[rows] = np.arange(len(rows))
        ahead = targets - self._slots.num_tokens[owners]
        fits = (at[owners] >= 0) & (ahead >= 0) & (ahead < most)
        if entry.drafts is not None:
            tokens[at[owners[fits]], ahead[fits]] = unpacked(entry.drafts)[fits]
        np.add.at(counts, at[owners[fits]], 1)
        return Guesses(tokens, counts)

    def choose(self, offers: Offers) -> Index:
        """All of them."""
        return offers.counts

    def learn(self, verdicts: Verdicts) -> None:
        """Nothing is learnt."""

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """Nothing is learnt."""


def recorded_speculation(
    slots: SlotPool, asked: Speculation, upcoming: Callable[[], Entry | None]
) -> Speculation:
    """Speculation that gives rows the drafts of a recording, in place of what was asked for; see
    `RecordedDrafts`."""
    drafts = RecordedDrafts(slots, upcoming)
    return Speculation(slots, drafts, drafts, asked.most, rows_per_pause=sys.maxsize, spans=asked.spans)
