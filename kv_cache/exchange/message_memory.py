"""Bound the memory of messages from other engines that have not been handled.

All connections share the pool of long messages. A connection takes from it as bytes arrive, never for what is
only announced, and at most its share. Incomplete messages cannot wait for each other for ever, because one at
a time may complete itself beyond the pool.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable


class UnhandledBytes:
    """A pool of memory that several connections share.

    `most_of_one` is the share of one connection, and at least its longest message; at most one such message
    may exceed `num_bytes`.
    """

    def __init__(self, num_bytes: int, most_of_one: int | None = None) -> None:
        self._num_left = num_bytes
        self._most_of_one = num_bytes if most_of_one is None else most_of_one
        self._num_of = Counter[object]()
        self._overdrawn_by: object | None = None
        self._has_room = threading.Condition()

    def take(self, holder: object, count: int, is_open: Callable[[], bool]) -> None:
        """Wait for so many bytes; raises ConnectionError if the connection that needs them ends."""
        with self._has_room:
            while not self._may_take(holder, count):
                if not is_open():
                    raise ConnectionError("the connection has ended")
                self._has_room.wait(1.0)  # the end of a connection is not notified
            if self._num_left < count:
                self._overdrawn_by = holder
            self._num_left -= count
            self._num_of[holder] += count

    def complete(self, holder: object) -> None:
        """Note that a holder's message is complete, or will never be."""
        with self._has_room:
            if self._overdrawn_by is holder:
                self._overdrawn_by = None
                self._has_room.notify_all()

    def give_back(self, holder: object, count: int) -> None:
        """Return `count` bytes to the pool."""
        with self._has_room:
            self._num_left += count
            self._num_of[holder] -= count
            if not self._num_of[holder]:
                del self._num_of[holder]
            self._has_room.notify_all()

    def _may_take(self, holder: object, count: int) -> bool:
        if self._num_of[holder] + count > self._most_of_one:
            return False
        if self._num_left >= count or self._overdrawn_by is holder:
            return True
        # An overdraft must be paid back before the next
        return self._overdrawn_by is None and self._num_left >= 0
