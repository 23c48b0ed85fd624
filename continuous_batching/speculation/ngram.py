"""What followed the last tokens of a row when the same row held them before?

Where an answer quotes its prompt or repeats itself, the last `LENGTH` tokens have stood in the row before,
and what followed them then is likely to follow again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.proposer import Guesses
from kv_cache.pages import Index

LENGTH = 3  # tokens that must be equal
_MOST_ENTRIES = 2**22  # of all tables together, 4 bytes each, as long as a row has its least
_LEAST_BITS, _MOST_BITS = 8, 15  # of the entries of a row
_BLOCK = 64  # tokens that are new in many rows at once; more are a row's own business
_ROWS_PER_LOOK = 32  # a look costs the host much the same for one row as for so many
_MOST_ASKED = 32  # times between two looks: what comes meanwhile fits a block


class NGram:
    """Guesses from the most recent earlier place where the last tokens of a row stood.

    Each row has a hash table, from any `LENGTH` tokens in a row to the position after their last place. The
    tables have a fixed size: where two entries meet, the later one stays. What is found is compared with the
    tokens themselves.

    A guess that was right goes on where it came from, and is not looked up again. Rows without one are looked
    up all together; beside rows that have one, and ask after each step, only every so many times.
    """

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        fitting = (_MOST_ENTRIES // slots.num_slots).bit_length() - 1
        useful = slots.max_tokens.bit_length()
        self._bits = max(_LEAST_BITS, min(fitting, useful, _MOST_BITS))
        self._tables = np.zeros(slots.num_slots << self._bits, dtype=np.int32)  # 0: no such place
        self._number = np.full(slots.num_slots, -1, dtype=np.int64)  # of the request that was indexed
        self._indexed = np.zeros(slots.num_slots, dtype=np.int64)  # the next position to go into the table
        # A guess for position `known` is what stands at `source`; 0: there is none
        self._known = np.zeros(slots.num_slots, dtype=np.int64)
        self._source = np.zeros(slots.num_slots, dtype=np.int64)
        self._flat: NDArray[np.int32] = slots.token_ids.reshape(-1)  # a view
        self._until_look = 0

    def guess(self, rows: Index, most: int) -> Guesses:
        """What followed the last tokens of these rows [N] before, up to `most` tokens."""
        slots = self._slots
        known = slots.num_tokens.take(rows)
        source = self._source.take(rows)
        is_new = slots.number.take(rows) != self._number.take(rows)
        if is_new.any():
            self._forget(rows[is_new])
            source[is_new] = 0
            self._until_look = 0  # what a new request quotes, it may quote at once
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
        """These rows hold other requests than they did."""
        self._tables.reshape(len(self._number), -1)[rows] = 0
        self._number[rows] = self._slots.number[rows]
        self._indexed[rows] = LENGTH
        self._source[rows] = 0

    def _followed(self, rows: Index, known: Index, source: Index) -> Index:
        """The sources of guesses, as far on as their rows; 0 where a row said something else."""
        moved = source + known - self._known[rows]
        return np.where(self._is_same(rows, moved, known), moved, 0)

    def _look(self, rows: Index, known: Index) -> Index:
        """The positions after the most recent earlier places of the last tokens of rows; 0: none is known.

        What came since the last time goes into the tables before.
        """
        pending = known - self._indexed.take(rows)
        width = int(pending.max())
        if width > _BLOCK:
            width = _BLOCK
            for at in np.flatnonzero(pending > _BLOCK).tolist():
                self._index_all(int(rows[at]), int(known[at] - pending[at]), int(known[at]))
        # Of each row as many tokens: where fewer are new, the last ones before them are entered again
        positions = known + np.arange(-width - LENGTH, 1)[:, None]  # [LENGTH + width + 1, N]
        if positions[0].min() < 0:
            np.maximum(positions, 0, out=positions)
        entries = self._hashed(self._flat.take(positions[:-1] + rows * self._slots.max_tokens))
        entries += rows << self._bits  # [width + 1, N]
        # Of the tables' own type: numpy then needs no buffer
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
        """Of `LENGTH` tokens each along the first axis: where a row's table holds what followed them."""
        words, last = tokens.view(np.uint32), len(tokens) - LENGTH + 1
        hashed = words[:last] * np.uint32(0x9E3779B1)
        for at in range(1, LENGTH):
            hashed += words[at : at + last]
            hashed *= np.uint32(0x9E3779B1)
        hashed >>= np.uint32(32 - self._bits)  # the high bits depend on all tokens
        return hashed.astype(np.int64)

    def _is_same(self, rows: Index, positions: Index, known: Index) -> NDArray[np.bool_]:
        """Whether the tokens before these positions are those at the ends of their rows."""
        first = rows * self._slots.max_tokens
        at, last = first + np.maximum(positions, LENGTH), first + known
        same = positions >= LENGTH
        for back in range(1, LENGTH + 1):
            same &= self._flat.take(at - back) == self._flat.take(last - back)
        return same
