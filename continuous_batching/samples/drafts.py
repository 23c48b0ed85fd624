"""Add drafts to a batch, and accept those that equal what the model samples.

Drafts are proposed tokens of a row, which follow its known tokens in the slot table. Who proposes them and
how many are verified is decided in `speculation`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import LATE, Batch, Sampled, ragged_ranges
from continuous_batching.paging.slot_lifecycle import SlotLifecycle
from continuous_batching.policies.policy import in_order
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index


def extend_by_drafts(lifecycle: SlotLifecycle, rows: Index, stops: Index, left: int) -> tuple[Index, int]:
    """Extend the spans that reach their row's last known token by its drafts, before pages are taken.

    The drafts take no more than the `left` tokens of the step's budget, oldest row first, and only pages that
    are free and promised to nobody: nothing is evicted for a draft, and if there is no room for all of them
    there are none. Returns the ends of the spans, and the number of drafts in them.
    """
    slots, tables = lifecycle.slots, lifecycle.tables
    wanted = np.where(stops == slots.num_tokens[rows], slots.num_drafts[rows], 0)
    drafts = in_order(wanted, max(0, left))
    longer: Index = stops + drafts
    if not tables.has_free(rows, stops, longer):
        return stops, 0
    return longer, int(drafts.sum())


def yield_at_drafts(
    slots: SlotPool, sampled: Index, owners: Index, targets: Index
) -> tuple[Index, Index, Index]:
    """Let spans that sample at their last position also sample before each of their drafts (see `Batch`)."""
    known = np.minimum(slots.num_tokens[owners], targets)
    counts = targets + 1 - known
    return np.repeat(sampled, counts), np.repeat(owners, counts), ragged_ranges(known, targets + 1)


def book_drafts(slots: SlotPool, batch: Batch, sampled: Sampled, over: dict[int, str]) -> Index:
    """Return the indices of a batch's tokens that count: those behind accepted drafts, up to a request's end.

    `over` holds the indices of tokens that would end their row; a LATE token does not count. Keys and values
    of rejected drafts no longer count as computed. Drafts that the device proposed are entered into the slot
    table.
    """
    if batch.makes_drafts:
        guessed = batch.is_draft
        slots.token_ids[batch.owners[guessed], batch.targets[guessed]] = sampled.drafts
    ended: set[int] = set()
    kept = []
    for index in accepted(batch, sampled.tokens, slots.token_ids).tolist():
        row = int(batch.owners[index])
        if row not in ended and sampled.tokens[index] != LATE:
            kept.append(index)
            if index in over:
                ended.add(row)
    counted = np.array(kept, dtype=np.int64)
    slots.num_computed[batch.owners[counted]] = batch.targets[counted]
    if batch.makes_drafts:
        rows = batch.slots
        slots.draft_lag[rows] = np.maximum(slots.num_computed[rows] - batch.draft_stops, 0)
    return counted


def accepted(batch: Batch, tokens: Index, token_ids: NDArray[np.int32]) -> Index:
    """Return the indices of a batch's accepted tokens, ascending.

    A span with drafts yields a token at each of its last positions. A token counts if every draft before it
    in its span equals the token that was sampled for the same position. The first of a span always counts;
    one behind a rejected draft was computed from a token that the model did not choose. `token_ids` are the
    slot table's, which still hold the drafts.
    """
    is_right = tokens == token_ids[batch.owners, batch.targets]
    wrong = np.cumsum(~is_right) - ~is_right  # number of rejected drafts before each token, over all spans
    is_first = np.diff(batch.owners, prepend=-1) != 0
    span = np.cumsum(is_first) - 1
    return np.flatnonzero(wrong == wrong[is_first][span])
