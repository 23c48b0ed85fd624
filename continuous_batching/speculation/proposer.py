"""Define what proposes drafts of rows, and two proposers: prompt lookup, and drafts that the device makes.

Prompt lookup proposes what followed a row's last tokens when they stood there before: if an answer quotes its
prompt or repeats itself, its last `LENGTH` tokens have stood in the row before, and what followed them then
is likely to follow again. Matching over the tokens of all requests is in `suffix`.

A draft model has keys and values of its own in the same pages as the target model. Pages that others may find
there, or fork from, must hold both: so the draft model computes in the same step what the target computes of
prompts and of resumed requests. Of the tokens that decodes add it may lack the last (`SlotPool.draft_lag`)
until a row is given drafts again: these are in pages that only this row writes to, and that are not published
before. A head may lack only as many as the pages keep features for, from which it computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from continuous_batching.slots import SlotPool
from kv_cache.pages import Index


@dataclass(frozen=True, slots=True)
class Guesses:
    """The drafts of N rows."""

    tokens: NDArray[np.int32]  # [N, most]; entries beyond `counts` have no meaning
    counts: Index  # [N] number of drafts of each row


class Proposer(Protocol):
    """Proposes tokens as a function of the slot table alone, without a clock or randomness.

    It is not told when rows are taken and left: it finds the tokens that came since it last looked at a row,
    and recognises a new request by its number.
    """

    def guess(self, rows: Index, most: int) -> Guesses:
        """Return at most `most` tokens to follow the known ones of each of these rows [N], which decode."""
        ...


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


LENGTH = 3  # tokens that must be equal
# Entries of all tables together, 4 bytes each, unless each row's minimum needs more
_MOST_ENTRIES = 2**22
_LEAST_BITS, _MOST_BITS = 8, 15  # bounds of the table size of a row
_BLOCK = 64  # new tokens that are indexed for many rows at once; more are indexed row by row
_ROWS_PER_LOOK = 32  # a lookup costs the host much the same for one row as for so many
_MOST_ASKED = 32  # calls between two lookups, so that the tokens between them fit a block


class NGram:
    """Proposes the tokens behind the most recent earlier occurrence of a row's last tokens.

    Each row has a hash table from any `LENGTH` consecutive tokens to the position behind their last
    occurrence. The tables have a fixed size, and of two colliding entries the later one stays; what is found
    is compared with the tokens themselves.

    A draft that was right continues from its source and is not looked up again. Rows without a source are
    looked up all together; while other rows have one, and so ask after each step, only once every few calls.
    """

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        fitting = (_MOST_ENTRIES // slots.num_slots).bit_length() - 1
        useful = slots.max_tokens.bit_length()
        self._bits = max(_LEAST_BITS, min(fitting, useful, _MOST_BITS))
        # Position behind each hash; 0: none
        self._tables = np.zeros(slots.num_slots << self._bits, dtype=np.int32)
        self._number = np.full(slots.num_slots, -1, dtype=np.int64)  # number of the request that is indexed
        # The next position to be entered into the table
        self._indexed = np.zeros(slots.num_slots, dtype=np.int64)
        # The draft for position `known` is the token at `source`; 0: there is none
        self._known = np.zeros(slots.num_slots, dtype=np.int64)
        self._source = np.zeros(slots.num_slots, dtype=np.int64)
        self._flat: NDArray[np.int32] = slots.token_ids.reshape(-1)  # a view
        self._until_look = 0

    def guess(self, rows: Index, most: int) -> Guesses:
        """Return up to `most` tokens that followed the last tokens of these rows [N] before."""
        slots = self._slots
        known = slots.num_tokens.take(rows)
        source = self._source.take(rows)
        is_new = slots.number.take(rows) != self._number.take(rows)
        if is_new.any():
            self._forget(rows[is_new])
            source[is_new] = 0
            self._until_look = 0  # a new request may quote its prompt at once
        found = source.nonzero()[0]
        if len(found):
            source[found] = self._followed(rows[found], known[found], source[found])
        self._until_look -= 1
        if self._until_look < 0 or not len(found):
            self._until_look = min(len(rows) // _ROWS_PER_LOOK, _MOST_ASKED)
            lost = np.flatnonzero((source == 0) & (known > LENGTH))
            if len(lost):
                source[lost] = self._look(rows[lost], known[lost])
        self._source[rows], self._known[rows] = source, known
        found = source.nonzero()[0]
        tokens = np.zeros((len(rows), most), dtype=np.int32)
        counts = np.zeros(len(rows), dtype=np.int64)
        if len(found):
            first, last = source[found], known[found]
            counts[found] = np.minimum(last - first, most)
            places = np.minimum(first[:, None] + np.arange(most), last[:, None] - 1)
            tokens[found] = slots.token_ids[rows[found, None], places]
        return Guesses(tokens, counts)

    def _forget(self, rows: Index) -> None:
        """Reset rows that hold another request than before."""
        self._tables.reshape(len(self._number), -1)[rows] = 0
        self._number[rows] = self._slots.number[rows]
        self._indexed[rows] = LENGTH
        self._source[rows] = 0

    def _followed(self, rows: Index, known: Index, source: Index) -> Index:
        """Return the sources advanced as far as their rows, or 0 if a row continued differently."""
        moved = source + known - self._known[rows]
        return np.where(self._is_same(rows, moved, known), moved, 0)

    def _look(self, rows: Index, known: Index) -> Index:
        """Return the positions behind the most recent earlier occurrence of the rows' last tokens; 0: none.

        Tokens that came since the last lookup are entered into the tables first.
        """
        pending = known - self._indexed.take(rows)
        width = int(pending.max())
        if width > _BLOCK:
            width = _BLOCK
            for at in np.flatnonzero(pending > _BLOCK).tolist():
                self._index_all(int(rows[at]), int(known[at] - pending[at]), int(known[at]))
        # Every row enters the same number of tokens: if fewer are new, the ones before them are entered again
        positions = known + np.arange(-width - LENGTH, 1)[:, None]  # [LENGTH + width + 1, N]
        if positions[0].min() < 0:
            np.maximum(positions, 0, out=positions)
        entries = self._hashed(self._flat.take(positions[:-1] + rows * self._slots.max_tokens))
        entries += rows << self._bits  # [width + 1, N]
        # The tables' own type, for which numpy needs no buffer
        self._tables[entries[:-1]] = positions[LENGTH:-1].astype(np.int32)
        self._indexed[rows] = known
        found: Index = self._tables.take(entries[-1]).astype(np.int64)
        likely = np.flatnonzero(found)
        is_same = self._is_same(rows[likely], found[likely], known[likely])
        found[likely[~is_same]] = 0
        return found

    def _index_all(self, row: int, start: int, stop: int) -> None:
        """Enter the positions from `start` to `stop` of a row, such as a prompt, into its table."""
        tokens = self._slots.token_ids[row, start - LENGTH : stop - 1]
        self._tables[(row << self._bits) + self._hashed(tokens)] = np.arange(start, stop)

    def _hashed(self, tokens: NDArray[np.int32]) -> Index:
        """Hash every `LENGTH` consecutive tokens along the first axis to an index of a row's table."""
        words, last = tokens.view(np.uint32), len(tokens) - LENGTH + 1
        hashed = words[:last] * np.uint32(0x9E3779B1)
        for at in range(1, LENGTH):
            hashed += words[at : at + last]
            hashed *= np.uint32(0x9E3779B1)
        hashed >>= np.uint32(32 - self._bits)  # the high bits depend on all tokens
        return hashed.astype(np.int64)

    def _is_same(self, rows: Index, positions: Index, known: Index) -> NDArray[np.bool_]:
        """Whether the tokens before these positions equal those at the ends of their rows."""
        first = rows * self._slots.max_tokens
        at, last = first + np.maximum(positions, LENGTH), first + known
        same = positions >= LENGTH
        for back in range(1, LENGTH + 1):
            same &= self._flat.take(at - back) == self._flat.take(last - back)
        return same
