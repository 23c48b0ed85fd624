"""When does a draft model, or a head, guess, and which tokens does it compute for that?

It has keys and values of its own in the same pages as the target model. What others may find there, or fork
from, must hold both: so it computes what the target computes of prompts, and of requests that come back, in
the same step. Of the tokens that decodes add it may lack the last (`SlotPool.draft_lag`) until a row is given
drafts again: these lie in pages that the row alone writes to, and are not published before. A head may
lack only as many as the pages keep features for, from which it computes them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.proposer import Guesses
from kv_cache.pages import Index


class DraftSpans(Protocol):
    """Which tokens are computed on the device to make drafts, in steps of at most `most` drafts a row."""

    def __call__(
        self, slots: SlotPool, rows: Index, starts: Index, stops: Index, most: int
    ) -> tuple[Index, Index]:
        """`Batch.draft_starts` and `Batch.draft_stops` of spans; nothing is computed where both are equal."""
        ...


class DraftModel:
    """Always has guesses, whose tokens it makes in the step that checks them."""

    def guess(self, rows: Index, most: int) -> Guesses:
        """As many as there may be for each of these rows [N]; zeros stand for their tokens."""
        return Guesses(np.zeros((len(rows), most), dtype=np.int32), np.full(len(rows), most))


def model_spans(slots: SlotPool, rows: Index, starts: Index, stops: Index, most: int) -> tuple[Index, Index]:
    """Of a draft model, which is never fed the last of its drafts: nothing follows it."""
    known = slots.num_tokens[rows]
    has_drafts = stops > known
    first = starts - slots.draft_lag[rows]
    is_computed = has_drafts | ~slots.decoding(rows, starts, known)
    return first, np.where(is_computed, stops - has_drafts, first)


def head_spans(slots: SlotPool, rows: Index, starts: Index, stops: Index, most: int) -> tuple[Index, Index]:
    """Of a head, whose entries for drafts do not last: the target has not found their features yet.

    The last token of a row that decodes may be known to the device alone, so that without drafts only those
    before it are computed, for all rows once one lacks as many as it may. Beams share pages, and have no
    drafts: nothing is computed of their answers.
    """
    known = slots.num_tokens[rows]
    lag = slots.draft_lag[rows]
    first = starts - lag
    waits = slots.decoding(rows, starts, known) & (stops <= known)
    may_lack = waits & (slots.beam_width[rows] == 0)
    behind = np.where(may_lack & (lag[may_lack] >= most).any(), starts, first)
    return first, np.where(waits, behind, np.minimum(stops, known))
