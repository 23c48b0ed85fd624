"""Estimate how many requests arrive before a cached conversation is continued.

The least recently used state is not always the one that is needed last: a conversation that has ended was
used as recently as one that continues, and a document about which every question has been asked as recently
as one that was read for the first time. How often a conversation has been continued tells them apart, since
conversations that were continued equally often behave alike. For each such number this module sums the turns
that all known conversations waited, and counts how often one of them was continued, whether its state is
still cached or not. The quotient is the expected wait, by which states.py evicts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_TIMES = 31  # a conversation that was continued more often counts as one that was continued so often
# Two indices behind those of the numbers of times: the mean of all conversations, and no return at all
UNKNOWN, NOBODY = MOST_TIMES + 1, MOST_TIMES + 2
MEMORY = 4096  # number of returns after which all counts are halved, so that older ones weigh less


class Returns:
    """How often each conversation was continued, by the key of the last page of its end.

    The `most` conversations that were noted last are known. A turn is the arrival of one request.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: OrderedDict[bytes, int] = OrderedDict()
        # Arrays by the number of times that conversations were continued: how many of them are known, the
        # turns that they waited together, and how often one was continued once more
        self._num_known = np.zeros(MOST_TIMES + 1)
        self._waited, self._returned = np.zeros_like(self._num_known), np.zeros_like(self._num_known)
        self.turn = 0

    def arrive(self, keys: Sequence[bytes]) -> tuple[bytes | None, int]:
        """Count a request with these keys; return the end that it continues, and how often that happened.

        The number includes this request. Returns None and 0 if no known conversation is continued. An end
        whose state is no longer cached counts, too.
        """
        self.turn += 1
        self._waited += self._num_known
        found = self._times.keys() & set(keys)
        if not found:
            return None, 0
        end = next(key for key in reversed(keys) if key in found)
        times = self._times[end]
        self._returned[times] += 1
        if self._returned.sum() > MEMORY:
            self._returned /= 2
            self._waited /= 2
        self.note(end, times + 1)
        return end, self._times[end]

    def note(self, key: bytes, times: int, before: bytes | None = None) -> None:
        """Record that the end `key` was continued so many times; it replaces the end `before` it."""
        for each in {key, before or key}:
            if each in self._times:
                self._num_known[self._times.pop(each)] -= 1
        if len(self._times) == self._most:
            self._num_known[self._times.popitem(last=False)[1]] -= 1
        self._times[key] = min(times, MOST_TIMES)
        self._num_known[self._times[key]] += 1

    def waits(self) -> NDArray[np.float64]:
        """Return the mean number of turns between two returns, by times, and for `UNKNOWN` and `NOBODY`.

        Each number of times counts one more return after the mean of all, so that few returns change little.
        """
        mean = (self._waited.sum() + 1) / (self._returned.sum() + 1)
        return np.array([*(self._waited + mean) / (self._returned + 1), mean, np.inf])
