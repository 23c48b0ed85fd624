"""Propose the drafts of a recording during its replay.

A follower does not run the proposer itself, because its drafts, and how many of them are verified, depend on
everything that the recorded engine had learnt.
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
    """A proposer and length control that reads the drafts of the next recorded batch from its entry.

    `upcoming` returns that entry, if any. It waits for the tokens of the batch in flight where the recorded
    engine did: there the next entry is the device's answer.
    """

    asks = True

    def __init__(self, slots: SlotPool, upcoming: Callable[[], Entry | None]) -> None:
        self._slots = slots
        self._upcoming = upcoming

    @property
    def is_hopeful(self) -> bool:
        """Whether the recorded engine made no batch at this point."""
        return isinstance(self._upcoming(), Committed)

    def guess(self, rows: Index, most: int) -> Guesses:
        """Return the recorded drafts of these rows [N].

        Drafts of other rows are left out, which shows in the digest. If the device proposed the drafts, only
        their number is recorded here and their tokens are in its answer.
        """
        tokens, counts = np.zeros((len(rows), most), dtype=np.int32), np.zeros(len(rows), dtype=np.int64)
        entry = self._upcoming()
        if not isinstance(entry, Scheduled) or entry.spans is None or entry.samples is None:
            # A span with drafts neither continues by one token nor yields one token
            return Guesses(tokens, counts)
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
        """Choose all of them."""
        return offers.counts

    def learn(self, verdicts: Verdicts) -> None:
        """Learn nothing."""

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """Learn nothing."""


def recorded_speculation(
    slots: SlotPool, asked: Speculation, upcoming: Callable[[], Entry | None]
) -> Speculation:
    """Return a Speculation that gives rows the drafts of a recording in place of what was configured.

    See `RecordedDrafts`.
    """
    drafts = RecordedDrafts(slots, upcoming)
    return Speculation(slots, drafts, drafts, asked.most, rows_per_pause=sys.maxsize, spans=asked.spans)
