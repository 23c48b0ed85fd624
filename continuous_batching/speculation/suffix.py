"""Propose drafts by suffix matching over the tokens of all requests under the same salt.

Answers that resemble earlier ones, or quote prompts that other requests also had, continue as those did.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.proposer import Guesses
from kv_cache.pages import Index

# Lengths of the suffixes that are looked up, the longest first; each is twice the next
LENGTHS = (8, 4)
_LONGEST, _SHORTEST = LENGTHS[0], LENGTHS[-1]
_CHUNK = 256  # tokens of one request that are stored together
_BLOCK = 192  # new tokens that are stored for many rows at once; more are stored row by row
_ROWS_PER_LOOK = 32  # a lookup costs the host much the same for one row as for so many
_ROWS_PER_VAIN_LOOK = 64
# Calls between two lookups, so that the tokens between them fit a block
_MOST_ASKED, _MOST_ASKED_IN_VAIN = 64, 4
_FACTOR = np.uint32(0x9E3779B1)
CAPACITY_TOKENS = 2**20


class Suffix:
    """Proposes what followed the latest occurrence of a row's longest known suffix.

    The tokens of all requests are stored in chunks, each of which repeats the last tokens of the chunk before
    it; when `capacity_tokens` are stored, the oldest chunk is reused. For each suffix length one hash table,
    shared by all rows, leads from a suffix to the place behind its latest occurrence. What is found is
    compared with the tokens themselves, and with the salt of their request.

    A draft that was right continues from its source. Rows without a source are looked up all together; while
    other rows have one, and so ask after each step, only once every few calls.
    """

    def __init__(self, slots: SlotPool, capacity_tokens: int = CAPACITY_TOKENS) -> None:
        num_chunks = max(capacity_tokens // _CHUNK, 2 * slots.num_slots)
        self._slots = slots
        self._token_ids: NDArray[np.int32] = slots.token_ids.reshape(-1)  # a view
        self._bits = min((num_chunks * _CHUNK).bit_length(), 24)
        # One chunk more than is used: place 0, which lies in it, means that there is no place
        self._chunks = np.zeros((1 + num_chunks, _CHUNK), dtype=np.int32)
        self._flat: NDArray[np.int32] = self._chunks.reshape(-1)  # a view
        self._filled = np.zeros(1 + num_chunks, dtype=np.int64)
        self._salt_of_chunk = np.full(1 + num_chunks, -1, dtype=np.int64)
        self._next_chunk = 1
        self._tables = np.zeros((len(LENGTHS), 1 << self._bits), dtype=np.int32)
        self._salts: dict[str, int] = {}
        self._num_salts = 0
        self._number = np.full(slots.num_slots, -1, dtype=np.int64)  # number of the request that is followed
        self._salt = np.zeros(slots.num_slots, dtype=np.int64)
        self._chunk = np.zeros(slots.num_slots, dtype=np.int64)  # chunk that receives a row's next token
        self._stored = np.zeros(slots.num_slots, dtype=np.int64)  # tokens of the request that are stored
        # The draft for position `known` is the token at `source`; 0: there is none
        self._known = np.zeros(slots.num_slots, dtype=np.int64)
        self._source = np.zeros(slots.num_slots, dtype=np.int64)
        self._until_look = 0

    def guess(self, rows: Index, most: int) -> Guesses:
        """Return up to `most` tokens that followed the suffixes of these rows [N] before."""
        slots = self._slots
        known = slots.num_tokens.take(rows)
        is_new = slots.number.take(rows) != self._number.take(rows)
        if is_new.any():
            self._follow(rows[is_new])
            self._until_look = 0  # a new request may quote a stored one at once
        source = self._source.take(rows)
        found = source.nonzero()[0]
        if len(found):
            source[found] = self._followed(rows[found], known[found], source[found])
        self._until_look -= 1
        if self._until_look < 0:
            if len(found):
                self._until_look = min(len(rows) // _ROWS_PER_LOOK, _MOST_ASKED)
            else:
                self._until_look = min(len(rows) // _ROWS_PER_VAIN_LOOK, _MOST_ASKED_IN_VAIN)
            self._store(rows, known)
            if len(found):  # storing may have reused the chunks of their sources
                is_same = self._is_same(rows[found], source[found], known[found], _SHORTEST)
                source[found] = np.where(is_same, source[found], 0)
            lost = np.flatnonzero((source == 0) & (known >= _LONGEST))
            if len(lost):
                source[lost] = self._look(rows[lost], known[lost])
        self._source[rows], self._known[rows] = source, known
        tokens = np.zeros((len(rows), most), dtype=np.int32)
        counts = np.zeros(len(rows), dtype=np.int64)
        found = source.nonzero()[0]
        if len(found):
            first = source[found]
            counts[found] = np.minimum(self._ends(first) - first, most)
            places = np.minimum(first[:, None] + np.arange(most), len(self._flat) - 1)
            tokens[found] = self._flat[places]
        return Guesses(tokens, counts)

    def _follow(self, rows: Index) -> None:
        """Start to follow the new requests in these rows."""
        for row in rows.tolist():
            self._number[row] = self._slots.number[row]
            self._salt[row] = self._salt_number(self._slots.requests[row].cache_salt)
            self._chunk[row], self._stored[row], self._source[row] = 0, 0, 0

    def _salt_number(self, salt: str | None) -> int:
        """Return a number for a salt, as long as tokens under it are stored; 0: there is no salt."""
        if salt is None:
            return 0
        number = self._salts.get(salt)
        if number is None:
            if len(self._salts) > len(self._chunks):
                kept = {*self._salt_of_chunk.tolist(), *self._salt.tolist()}
                self._salts = {each: number for each, number in self._salts.items() if number in kept}
            self._num_salts += 1
            number = self._salts[salt] = self._num_salts
        return number

    def _followed(self, rows: Index, known: Index, source: Index) -> Index:
        """Return the sources advanced as far as their rows, or 0 if a row continued differently."""
        moved = source + known - self._known[rows]
        return np.where(self._is_same(rows, moved, known, _SHORTEST), moved, 0)

    def _store(self, rows: Index, known: Index) -> None:
        """Store the new tokens of rows, and enter their suffixes into the tables."""
        pending = known - self._stored[rows]
        for at in np.flatnonzero(pending > _BLOCK).tolist():
            self._store_all(int(rows[at]), int(known[at]))
        some = np.flatnonzero((pending > 0) & (pending <= _BLOCK))
        if not len(some):
            return
        rows, pending = rows[some], pending[some]
        width = int(pending.max())
        while True:
            is_open = (self._chunk[rows] > 0) & (self._filled[self._chunk[rows]] + width <= _CHUNK)
            if is_open.all():
                break
            # This may take the chunk of another of these rows, so all are checked again
            self._open_chunks(rows[~is_open])
        chunks, stored = self._chunk[rows], self._stored[rows]
        filled = self._filled[chunks]
        first = chunks * _CHUNK + filled
        sources, ahead = rows * self._slots.max_tokens + stored, np.arange(width)[:, None]
        is_new = ahead < pending
        if is_new.all() and stored.min() >= _LONGEST:  # the usual case, in which all rows decode
            of_rows = _runs(self._token_ids, _LONGEST + width)[sources - _LONGEST]
            _runs(self._flat, width)[first] = of_rows[:, _LONGEST:]
            tokens = np.ascontiguousarray(of_rows.T)
        else:
            places = sources + np.arange(-_LONGEST, width)[:, None]
            tokens = self._token_ids.take(np.clip(places, 0, len(self._token_ids) - 1, out=places))
            self._flat[(first + ahead)[is_new]] = tokens[_LONGEST:][is_new]
        self._filled[chunks] = filled + pending
        self._stored[rows] = stored + pending
        self._enter(first, filled, tokens, is_new, self._salt[rows])

    def _store_all(self, row: int, known: int) -> None:
        """Store the many new tokens of a row, such as a prompt."""
        while self._stored[row] < known:
            filled = int(self._filled[self._chunk[row]])
            if not self._chunk[row] or filled == _CHUNK:
                self._open_chunks(np.array([row]))
                filled = int(self._filled[self._chunk[row]])
            chunk, stored = int(self._chunk[row]), int(self._stored[row])
            count = min(_CHUNK - filled, known - stored)
            before = min(_LONGEST, stored)
            tokens = np.zeros((_LONGEST + count, 1), dtype=np.int32)
            tokens[_LONGEST - before :, 0] = self._slots.token_ids[row, stored - before : stored + count]
            self._chunks[chunk, filled : filled + count] = tokens[_LONGEST:, 0]
            self._filled[chunk] += count
            self._stored[row] += count
            first = np.array([chunk * _CHUNK + filled])
            is_new = np.ones((count, 1), dtype=np.bool_)
            self._enter(first, np.array([filled]), tokens, is_new, self._salt[row : row + 1])

    def _open_chunks(self, rows: Index) -> None:
        """Give rows new chunks, reusing the oldest; each begins with the row's last stored tokens."""
        num = len(self._chunks) - 1
        chunks = 1 + (self._next_chunk - 1 + np.arange(len(rows))) % num
        self._next_chunk = 1 + (int(chunks[-1]) - 1 + 1) % num
        self._chunk[np.isin(self._chunk, chunks)] = 0  # detach rows that have stored nothing for long
        overlap = np.minimum(self._stored[rows], _LONGEST)
        ahead = np.arange(_LONGEST)
        positions = np.minimum(
            self._stored[rows][:, None] - overlap[:, None] + ahead, self._slots.max_tokens - 1
        )
        self._chunks[chunks, :_LONGEST] = self._slots.token_ids[rows[:, None], positions]
        self._filled[chunks] = overlap
        self._salt_of_chunk[chunks] = self._salt[rows]
        self._chunk[rows] = chunks

    def _enter(
        self,
        first: Index,
        filled: Index,
        tokens: NDArray[np.int32],
        is_new: NDArray[np.bool_],
        salts: Index,
    ) -> None:
        """Enter the places from `first` [N] on into the tables; `filled` tokens of their chunk precede them.

        `tokens` [_LONGEST + width, N] are the tokens at these places and those before them.
        """
        ahead = np.arange(len(is_new), dtype=np.int32)[:, None]
        # [width, N] in the tables' type, for which numpy needs no buffer
        places = first.astype(np.int32) + ahead
        hashes = self._hashed(tokens[:-1], salts)
        if filled.min() >= _LONGEST and is_new.all():
            for table, hashed in zip(self._tables, hashes):
                table[hashed] = places
            return
        for table, length, hashed in zip(self._tables, LENGTHS, hashes):
            at = is_new & (filled + ahead >= length)
            table[hashed[at]] = places[at]

    def _hashed(self, tokens: NDArray[np.int32], salts: Index) -> list[Index]:
        """Return, for each length, the table entries of the suffixes that end behind these tokens [T, N]."""
        last = len(tokens) + 1 - _LONGEST
        words = tokens.view(np.uint32) + np.uint32(1)
        hashed = words[: len(words) + 1 - _SHORTEST] * _FACTOR
        for ahead in range(1, _SHORTEST):
            hashed += words[ahead : len(words) + 1 - _SHORTEST + ahead]
            hashed *= _FACTOR
        of_length = [hashed]
        for length in reversed(LENGTHS[1:]):  # a suffix of twice the length is hashed from two of this length
            hashed = (hashed[:-length] * _FACTOR ^ hashed[length:]) * _FACTOR
            of_length.insert(0, hashed)
        salted = salts.astype(np.uint32) * np.uint32(0x85EBCA6B)
        return [
            ((each[-last:] ^ salted) * _FACTOR >> np.uint32(32 - self._bits)).astype(np.int64)
            for each in of_length
        ]

    def _look(self, rows: Index, known: Index) -> Index:
        """Return the places behind the latest occurrences of the rows' longest known suffixes; 0: none."""
        positions = known + np.arange(-_LONGEST, 0)[:, None]
        hashes = self._hashed(self._slots.token_ids[rows, positions], self._salt[rows])
        best = np.zeros(len(rows), dtype=np.int64)
        for table, length, hashed in zip(self._tables, LENGTHS, hashes):
            places = table[hashed[-1]].astype(np.int64)
            likely = np.flatnonzero((best == 0) & (places > 0))
            if len(likely):
                is_same = self._is_same(rows[likely], places[likely], known[likely], length)
                best[likely[is_same]] = places[likely[is_same]]
        return best

    def _ends(self, places: Index) -> Index:
        """Return where the stored tokens end that follow these places."""
        chunks = places // _CHUNK
        ends: Index = chunks * _CHUNK + self._filled[chunks]
        return ends

    def _is_same(self, rows: Index, places: Index, known: Index, length: int) -> NDArray[np.bool_]:
        """Whether places hold a token, and before it the row's last `length` tokens under the same salt."""
        places = np.minimum(places, len(self._flat) - 1)
        same = (places % _CHUNK >= length) & (places < self._ends(places))
        same &= self._salt_of_chunk[places // _CHUNK] == self._salt[rows]
        for back in range(1, length + 1):
            same &= self._flat[places - back] == self._slots.token_ids[rows, known - back]
        return same


def _runs(tokens: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    """Return a view of every `length` consecutive tokens, by their first place.

    Each can then be copied as one.
    """
    size = tokens.itemsize
    return np.ndarray((len(tokens) + 1 - length, length), np.int32, tokens, strides=(size, size))
