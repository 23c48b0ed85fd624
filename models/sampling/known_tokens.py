"""Count the tokens that requests know, for the penalties of tokens that were seen before.

What a request with penalties knows never changes, it only grows, unless it is a beam: no batch is made ahead
of its tokens (`InFlight.takes_another`). So a row's count goes on from the last step's, and a step costs as
much as a row has distinct tokens, however often it has them.

Legend: R rows, N pairs of a row and one of its tokens.
"""

from __future__ import annotations

from copy import copy

import numpy as np
from numpy.typing import NDArray

from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index


class KnownTokens:
    """Keeps the counts of requests in slot rows, as long as they occupy these."""

    def __init__(self) -> None:
        self._of_row: dict[int, _Count] = {}
        self._has_new = False  # since the counts of rows that have ended were dropped

    def pairs(self, rows: Index, targets: Index, slots: SlotPool) -> tuple[Index, Index, NDArray[np.int32]]:
        """Return the distinct tokens before positions `targets` [R] of slot rows [R], drafts among them.

        They are an index into `rows` [N], the token [N], and how often the answer has it [N].
        """
        counts = [self._count(row, target, slots) for row, target in zip(rows.tolist(), targets.tolist())]
        if self._has_new:
            self._has_new = False
            busy = set(slots.busy.tolist())
            self._of_row = {row: count for row, count in self._of_row.items() if row in busy}
        if not counts:
            return rows, rows, rows.astype(np.int32)
        owner = np.repeat(np.arange(len(rows)), [each.size for each in counts])
        tokens, occurrences = zip(*[each.found() for each in counts])
        return owner, np.concatenate(tokens), np.concatenate(occurrences)

    def _count(self, row: int, target: int, slots: SlotPool) -> _Count:
        request, num_known = slots.requests[row], min(target, int(slots.num_tokens[row]))
        count = self._of_row.get(row)
        if count is None or count.request is not request or count.num_taken > num_known:
            count = self._of_row[row] = _Count(request, slots.token_ids[row, : slots.num_prompt[row]])
            self._has_new = True
        count.take(slots.token_ids[row, :num_known])
        if target == num_known:
            return count
        with_drafts = count.copy()  # The next step may not know them
        with_drafts.take(slots.token_ids[row, :target])
        return with_drafts


class _Count:
    """The distinct tokens of one request, in the order of their first places."""

    def __init__(self, request: Request, prompt: NDArray[np.int32]) -> None:
        self.request = request
        self.num_taken = len(prompt)
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt.tolist()))}
        self._tokens = np.fromiter(self._place, dtype=np.int64, count=self.size)
        self._occurrences = np.zeros(self.size, dtype=np.int32)

    @property
    def size(self) -> int:
        return len(self._place)

    def found(self) -> tuple[Index, NDArray[np.int32]]:
        """Return the tokens and how often the answer has them."""
        return self._tokens[: self.size], self._occurrences[: self.size]

    def take(self, known: NDArray[np.int32]) -> None:
        """Go on to all known tokens, of which the first have been taken before."""
        for token in known[self.num_taken :].tolist():
            place = self._place.setdefault(token, self.size)
            if place == len(self._tokens):
                self._tokens, self._occurrences = (
                    np.concatenate((each, np.zeros(place + 64, dtype=each.dtype)))
                    for each in (self._tokens, self._occurrences)
                )
            self._tokens[place] = token
            self._occurrences[place] += 1
        self.num_taken = len(known)

    def copy(self) -> _Count:
        """Return a count that goes on by itself."""
        other = copy(self)
        other._place = dict(self._place)
        other._tokens, other._occurrences = self._tokens.copy(), self._occurrences.copy()
        return other
