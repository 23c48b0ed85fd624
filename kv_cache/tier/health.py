"""Is a store to be asked at all, and what has come of it so far?"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

PAUSE_S = 5.0  # for which a store that failed is left alone

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TierCounters:
    """Each only grows; pages but for the lookups and failures."""

    written: int = 0
    known: int = 0  # not written, because they were there
    dropped: int = 0  # not written: too many wait for it, or the store fails
    found: int = 0
    refused: int = 0  # found, and not used: damaged, or of another model
    hits: int = 0  # lookups that found something
    misses: int = 0
    late: int = 0  # that had not ended when their time was over; what they had found until then was used
    skipped: int = 0  # that were not begun: the store fails, or too many wait for it
    read_failures: int = 0
    write_failures: int = 0


class StoreHealth:
    """Leaves a store alone for a while after it failed; says so once, and once more when it is well again.

    What is read and what is written are two things: a full disk can still be read. `name` says which.
    """

    def __init__(self, name: str, pause_s: float = PAUSE_S) -> None:
        self._name, self._pause_s = name, pause_s
        self._lock = threading.Lock()
        self._until_s = 0.0
        self.is_well = True  # as of the last call to it
        self.num_failures = 0

    @property
    def may_be_asked(self) -> bool:
        """Whether it is well, or has been left alone for long enough."""
        return self.is_well or time.monotonic() >= self._until_s

    def failed(self, why: str) -> None:
        """It could not be read from or written to."""
        with self._lock:
            self.num_failures += 1
            if self.is_well:
                log.warning("%s fails, and is done without: %s", self._name, why)
            self.is_well = False
            self._until_s = time.monotonic() + self._pause_s

    def worked(self) -> None:
        """It did what it was asked for."""
        with self._lock:
            if not self.is_well:
                log.warning("%s works again", self._name)
            self.is_well = True
