"""Decide whether a page store may be used, and count the results of its use."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

PAUSE_S = 5.0  # time for which a store that failed is left alone

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TierCounters:
    """Totals that only grow, of pages unless a lookup or a failure is named."""

    written: int = 0
    known: int = 0  # not written, because the store had them
    dropped: int = 0  # not written, because too many are queued or the store fails
    found: int = 0
    refused: int = 0  # found and not used, because they are damaged or of another model
    hits: int = 0  # lookups that found something
    misses: int = 0
    # Lookups that exceeded their time; what they had found by then was used
    late: int = 0
    # Lookups that were not started, because the store fails or too many are queued
    skipped: int = 0
    read_failures: int = 0
    write_failures: int = 0


class StoreHealth:
    """Leaves a store alone for a while after a failure; logs the first failure, and the recovery.

    Reading and writing have a health of their own, because a full disk can still be read. `name` says which
    it is.
    """

    def __init__(self, name: str, pause_s: float = PAUSE_S) -> None:
        self._name, self._pause_s = name, pause_s
        self._lock = threading.Lock()
        self._until_s = 0.0
        self.is_well = True  # state after the last call to the store
        self.num_failures = 0

    @property
    def may_be_asked(self) -> bool:
        """Whether the store works, or has been left alone for long enough."""
        return self.is_well or time.monotonic() >= self._until_s

    def failed(self, why: str) -> None:
        """Note that the store could not be read or written."""
        with self._lock:
            self.num_failures += 1
            if self.is_well:
                log.warning("%s fails, and is done without: %s", self._name, why)
            self.is_well = False
            self._until_s = time.monotonic() + self._pause_s

    def worked(self) -> None:
        """Note that the store did what was asked."""
        with self._lock:
            if not self.is_well:
                log.warning("%s works again", self._name)
            self.is_well = True
