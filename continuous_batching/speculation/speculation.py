"""Turn proposed tokens into drafts of a step, and learn from the tokens that the model samples.

Drafts are proposed tokens of a row, which follow its known tokens in the slot table. They never change a
token: one counts only if it equals the token that the row samples at its position anyway. So this decides
only how many tokens a step brings, and how long it takes. What is proposed is left to a `Proposer`, and how
many drafts are verified to `Lengths`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import LATE, Batch, Sampled, ragged_ranges
from continuous_batching.counters import Counters
from continuous_batching.paging.page_tables import EMPTY
from continuous_batching.paging.slot_lifecycle import SlotLifecycle
from continuous_batching.policies.policy import in_order
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Lengths, Offers, Verdicts
from continuous_batching.speculation.proposer import DraftSpans, Guesses, Proposer
from kv_cache.pages import Index

# One step in so many is skipped for each group of this many rows while none has a proposal
ROWS_PER_PAUSE = 16
MOST_PAUSE_STEPS = 32  # bounds the tokens that proposers have not seen yet


class Speculation:
    """Asks a proposer for at most `most` drafts a row, and `lengths` for how many of them to verify.

    While none of many rows has a proposal, the proposer is asked only after one step for every
    `rows_per_pause` rows, because asking costs the host as much for a few rows as for one.

    With `spans`, a draft model or a head makes the tokens of drafts on the device, in the step that verifies
    them. The host gets them with the step's answer; until then zeros stand in their places.
    """

    def __init__(
        self,
        slots: SlotPool,
        proposer: Proposer,
        lengths: Lengths,
        most: int,
        *,
        rows_per_pause: int = ROWS_PER_PAUSE,
        spans: DraftSpans | None = None,
    ) -> None:
        assert most >= 1, "speculation without a draft"
        self.lengths = lengths
        self.most = most
        self.spans = spans
        # Number of accepted drafts that were the first, second, ... of their span
        self.accepted_by_position = [0] * most
        self._slots, self._proposer, self._rows_per_pause = slots, proposer, rows_per_pause
        self._pause = 0  # steps until the proposer is asked again
        self._num_booked = 0  # tokens committed from the last batch
        self._has_guesses = False  # whether the last step may bring a verdict
        # The last proposals of each row, whether they became drafts or not, and the position of the first
        self._tokens = np.zeros((slots.num_slots, most), dtype=np.int32)
        self._counts = np.zeros(slots.num_slots, dtype=np.int64)
        self._known = np.zeros(slots.num_slots, dtype=np.int64)

    @property
    def is_hopeful(self) -> bool:
        """Whether the next step should wait for the tokens in flight, which drafts must follow."""
        return self.lengths.is_hopeful and bool(self._slots.most_drafts[self._slots.busy].any())

    def propose(
        self, rows: Index, starts: Index, stops: Index, spare_tokens: int, in_flight: Index = EMPTY
    ) -> bool:
        """Give drafts to the spans of a step, which rows compute from `starts` to `stops`, where that pays.

        Only decodes may have drafts, and never at the last position of a request: each step brings a row at
        least one sampled token. `spare_tokens` is what the step's budget leaves. For rows that are
        `in_flight` in other batches, earlier proposals still wait for their verdict. Returns whether any row
        has drafts.
        """
        slots = self._slots
        if self._has_guesses:
            slots.drop_drafts()
            kept = self._counts[in_flight]
            self._counts[:] = 0
            self._counts[in_flight] = kept
            self._has_guesses = bool(kept.any())
        if self._pause > 0 or not self.lengths.asks:
            return False
        known = slots.num_tokens[rows]
        may = slots.decoding(rows, starts, known) & (stops == known) & (slots.beam_width[rows] == 0)
        room = np.minimum(np.minimum(slots.limit[rows] - known - 1, self.most), slots.most_drafts[rows])
        decoding = np.flatnonzero(may & (room > 0))
        if not len(decoding):
            return False
        asked = rows[decoding]
        guesses = self._proposer.guess(asked, self.most)
        if self.spans is None and slots.constrained[asked].any():
            guesses = self._led_by_grammars(asked, guesses)
        counts = np.minimum(guesses.counts, room[decoding])
        if not counts.any():
            self._pause = min(len(asked) // self._rows_per_pause, MOST_PAUSE_STEPS)
            return False
        self._has_guesses = True
        self._tokens[asked], self._counts[asked], self._known[asked] = guesses.tokens, counts, known[decoding]
        if spare_tokens <= 0:
            return False
        drafts = self.lengths.choose(Offers(asked, counts, starts, stops, spare_tokens))
        slots.set_drafts(asked, guesses.tokens, drafts)
        return bool(drafts.any())

    def _led_by_grammars(self, rows: Index, guesses: Guesses) -> Guesses:
        """Cut proposals for rows [N] where a row's grammar refuses them, or replace them by forced text."""
        slots, tokens, counts = self._slots, guesses.tokens.copy(), guesses.counts.copy()
        for at in np.flatnonzero(slots.constrained[rows]).tolist():
            row = rows[at]
            constraint = slots.requests[row].constraint
            answer = slots.token_ids[row, slots.num_prompt[row] : slots.num_tokens[row]]
            forced = constraint.forced(answer)[: self.most]
            if forced:
                tokens[at, : len(forced)], counts[at] = forced, len(forced)
            else:
                counts[at] = constraint.num_possible(answer, tokens[at, : counts[at]].tolist())
        return Guesses(tokens, counts)

    def draft_spans(self, rows: Index, starts: Index, stops: Index) -> tuple[Index, Index] | tuple[()]:
        """Return `Batch.draft_starts` and `Batch.draft_stops` of spans, or nothing if the host proposes."""
        return () if self.spans is None else self.spans(self._slots, rows, starts, stops, self.most)

    def learn(self, batch: Batch, rows: Index, positions: Index, tokens: Index, counters: Counters) -> None:
        """Compare proposals with the `tokens` [A] that were committed at these positions of rows [A]."""
        self._pause -= 1
        self._num_booked = len(rows)
        if not self._has_guesses or not len(rows):
            return
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        owners, booked = rows[first], np.diff(first, append=len(rows))
        num_drafts = self._drafts_of(batch, owners) if batch.num_drafts else np.zeros_like(owners)
        if self.spans is not None:  # only tokens that became drafts were made on the device
            compared = num_drafts
        else:  # the first proposal is compared with the sampled token, which costs nothing
            compared = np.minimum(np.maximum(num_drafts, 1), self._counts[owners])
        compared = np.where(self._known[owners] == positions[first], np.minimum(compared, booked), 0)
        self._counts[owners] = 0
        ahead = positions - np.repeat(positions[first], booked)
        is_compared = ahead < np.repeat(compared, booked)
        is_right = np.zeros(len(rows), dtype=np.int64)
        at = np.flatnonzero(is_compared)
        if self.spans is not None:
            is_right[at] = self._slots.token_ids[rows[at], positions[at]] == tokens[at]
        else:
            is_right[at] = self._tokens[rows[at], ahead[at]] == tokens[at]
        # A token behind a wrong draft is not committed, so right ones come first
        right: Index = np.add.reduceat(is_right, first)
        self._count(counters, owners, num_drafts, right)
        learnt = np.flatnonzero(compared)
        if len(learnt):
            self.lengths.learn(Verdicts(owners[learnt], compared[learnt], right[learnt]))

    def observe(self, batch: Batch, took_s: float) -> None:
        """Learn from the time of the step whose batch was passed to `learn` last."""
        self.lengths.observe(batch, took_s, self._num_booked)

    def _drafts_of(self, batch: Batch, owners: Index) -> Index:
        yielded = np.zeros(self._slots.num_slots, dtype=np.int64)
        np.add.at(yielded, batch.owners, 1)
        drafts: Index = yielded[owners] - 1
        return drafts

    def _count(self, counters: Counters, owners: Index, num_drafts: Index, right: Index) -> None:
        has_drafts = num_drafts > 0
        if not has_drafts.any():
            return
        counters.drafts += int(has_drafts.sum())
        counters.draft_tokens += int(num_drafts.sum())
        rows, accepted = owners[has_drafts], right[has_drafts]
        self._slots.num_drafted[rows] += num_drafts[has_drafts]
        self._slots.num_accepted[rows] += accepted
        counters.accepted_tokens += int(accepted.sum())
        for position in range(int(accepted.max())):
            self.accepted_by_position[position] += int((accepted > position).sum())


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
    if batch.num_drafts:  # a state stands behind the last token that was known
        known = batch.stops - batch.drafts_by_span
        slots.state_lag[batch.slots] = np.maximum(slots.num_computed[batch.slots] - known, 0)
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
