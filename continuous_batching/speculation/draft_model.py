"""When does a draft model guess, and which tokens does it compute for that?

It has keys and values of its own in the same pages as the target model. What others may find there, or fork
from, must hold both: so it computes what the target computes of prompts, and of requests that come back, in
the same step. Of the tokens that decodes add it may lack the last (`SlotPool.draft_lag`) until a row is given
drafts again: these lie in pages that the row alone writes to, and are not published before.
"""

from __future__ import annotations

import numpy as np

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.proposer import Guesses
from kv_cache.pages import Index


class DraftModel:
    """Always has guesses, whose tokens it makes in the step that checks them."""

    def guess(self, rows: Index, most: int) -> Guesses:
        """As many as there may be for each of these rows [N]; zeros stand for their tokens."""
        return Guesses(np.zeros((len(rows), most), dtype=np.int32), np.full(len(rows), most))


def draft_spans(slots: SlotPool, rows: Index, starts: Index, stops: Index) -> tuple[Index, Index]:
    """Where the draft model starts and stops in these spans; it computes nothing where both are equal.

    It is never fed the last of its drafts: nothing follows it.
    """
    known = slots.num_tokens[rows]
    has_drafts = stops > known
    first = starts - slots.draft_lag[rows]
    is_computed = has_drafts | ~slots.decoding(rows, starts, known)
    return first, np.where(is_computed, stops - has_drafts, first)
