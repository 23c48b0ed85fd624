"""Learn how long prefixes wait until a request goes on from them, by how often that has happened before.

What is least recently used is not always what is needed least: a conversation that has ended was used as
lately as one that goes on, and a document about which all was asked as lately as one that was read for the
first time. How often a prefix was gone on from tells them apart, as far as prefixes of one number behave
alike, which is learned here from all that are known, kept or not: the turns that they have waited, by the
times that one of them was gone on from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_TIMES = 31  # prefixes that were gone on from more often count as if it had been so often
# They stand in the place of times: for the mean of all, and where nobody is expected
UNKNOWN, NOBODY = MOST_TIMES + 1, MOST_TIMES + 2
MEMORY = 4096  # returns after which what was learned counts half


class Returns:
    """Ends of conversations by the key of their last page, and how often each was gone on from.

    At most `most` of them are known, the latest. A turn is a request that arrives.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: OrderedDict[bytes, int] = OrderedDict()
        self._num = np.zeros(MOST_TIMES + 1)  # known ends, by times
        self._waited, self._returned = np.zeros_like(self._num), np.zeros_like(self._num)
        self.turn = 0

    def arrive(self, keys: Sequence[bytes]) -> tuple[bytes | None, int]:
        """Return the end from which a request with these keys goes on, and how often that one now was.

        None, and 0 times, if none is known. One that is no longer kept is gone on from, too.
        """
        self.turn += 1
        self._waited += self._num
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
        """Know an end that was gone on from so often, in place of the one `before` it."""
        for each in {key, before or key}:
            if each in self._times:
                self._num[self._times.pop(each)] -= 1
        if len(self._times) == self._most:
            self._num[self._times.popitem(last=False)[1]] -= 1
        self._times[key] = min(times, MOST_TIMES)
        self._num[self._times[key]] += 1

    def waits(self) -> NDArray[np.float64]:
        """Return the mean turns from one return to the next, by times, and for `UNKNOWN` and `NOBODY`.

        The mean of all stands for one more return of each, so that few of them prove little.
        """
        mean = (self._waited.sum() + 1) / (self._returned.sum() + 1)
        return np.array([*(self._waited + mean) / (self._returned + 1), mean, np.inf])
