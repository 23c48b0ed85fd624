"""Choose the tokens that a draft model or head computes on the device.

A draft model has keys and values of its own in the same pages as the target model. Pages that others may find
there, or fork from, must hold both: so the draft model computes in the same step what the target computes of
prompts and of resumed requests. Of the tokens that decodes add it may lack the last (`SlotPool.draft_lag`)
until a row is given drafts again: these are in pages that only this row writes to, and that are not published
before. A head may lack only as many as the pages keep features for, from which it computes them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.proposer import Guesses
from kv_cache.pages import Index


class DraftSpans(Protocol):
    """Chooses the tokens computed to make drafts, in steps of at most `most` drafts a row."""

    def __call__(
        self, slots: SlotPool, rows: Index, starts: Index, stops: Index, most: int
    ) -> tuple[Index, Index]:
        """Return `Batch.draft_starts` and `Batch.draft_stops`.

        Nothing is computed for a span where they are equal.
        """
        ...


class DraftModel:
    """A proposer that always has drafts, whose tokens the device makes in the step that verifies them."""

    def guess(self, rows: Index, most: int) -> Guesses:
        """Return `most` drafts for each of these rows [N], with zeros in place of their tokens."""
        return Guesses(np.zeros((len(rows), most), dtype=np.int32), np.full(len(rows), most))


def model_spans(slots: SlotPool, rows: Index, starts: Index, stops: Index, most: int) -> tuple[Index, Index]:
    """Return the spans of a draft model.

    It is never fed the last of its drafts, because nothing follows it.
    """
    known = slots.num_tokens[rows]
    has_drafts = stops > known
    first = starts - slots.draft_lag[rows]
    is_computed = has_drafts | ~slots.decoding(rows, starts, known)
    return first, np.where(is_computed, stops - has_drafts, first)


def head_spans(slots: SlotPool, rows: Index, starts: Index, stops: Index, most: int) -> tuple[Index, Index]:
    """Return the spans of a head, whose entries for drafts do not last.

    The target has not computed the features of drafts yet. The last token of a decoding row may be known to
    the device alone, so without drafts only the tokens before it are computed, and for all rows at once when
    one lacks as many as it may. Beams share pages and have no drafts, so nothing of their answers is
    computed.
    """
    known = slots.num_tokens[rows]
    lag = slots.draft_lag[rows]
    first = starts - lag
    waits = slots.decoding(rows, starts, known) & (stops <= known)
    may_lack = waits & (slots.beam_width[rows] == 0)
    behind = np.where(may_lack & (lag[may_lack] >= most).any(), starts, first)
    return first, np.where(waits, behind, np.minimum(stops, known))
