"""Write pages to a store, in a thread beside the engine.

The queue is bounded in bytes, and pages that do not fit are dropped. It is processed in order, so that a page
that turned out wrong is removed after it was written.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kv_cache.tier.entries import entry_of
from kv_cache.tier.health import StoreHealth, TierCounters
from kv_cache.tier.store import PageStore, StoreFailed

MOST_QUEUED_BYTES = 2**28

log = logging.getLogger(__name__)

Contents = Callable[[], Sequence[bytes]]  # waits until the contents are ready


class PageWrites:
    """Writes pages of `page_bytes` to a store."""

    def __init__(
        self,
        store: PageStore,
        health: StoreHealth,
        counters: TierCounters,
        identity: bytes,
        page_bytes: int,
        most_queued_bytes: int = MOST_QUEUED_BYTES,
    ) -> None:
        self._store, self._health, self._counters = store, health, counters
        self._identity = identity
        self._most_queued = max(1, most_queued_bytes // page_bytes)
        self._num_queued = 0  # queued pages, including those being written
        # Entries without contents are removals
        self._queue = deque[tuple[Sequence[bytes], Contents | None]]()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="tier-writes", daemon=True)
        self._thread.start()

    def room(self, wanted: int) -> int:
        """Return how many of `wanted` pages may be queued now; the others count as dropped."""
        with self._changed:
            room = min(wanted, self._most_queued - self._num_queued) if self._health.may_be_asked else 0
            self._counters.dropped += wanted - room
        return room

    def put(self, keys: Sequence[bytes], contents: Contents) -> None:
        """Queue pages, for which there is room, to be written when `contents` returns."""
        with self._changed:
            self._num_queued += len(keys)
            self._queue.append((keys, contents))
            self._changed.notify_all()

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove pages, after all writes queued so far."""
        with self._changed:
            self._queue.append((keys, None))
            self._changed.notify_all()

    def settle(self, limit_s: float) -> bool:
        """Wait until everything is written; return False if that takes longer than `limit_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._num_queued, limit_s)

    def close(self, limit_s: float) -> None:
        """Write what is queued as far as the time allows, and end the thread."""
        self.settle(limit_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if self._is_closing:
                    return
                keys, contents = self._queue.popleft()
            if contents is None:
                self._take_off(keys)
                continue
            for key, content in zip(keys, contents()):
                is_new = self._written(key, content)
                with self._changed:
                    self._counters.written += is_new is True
                    self._counters.known += is_new is False
                    self._counters.dropped += is_new is None
                    self._num_queued -= 1
                    self._changed.notify_all()

    def _written(self, key: bytes, content: bytes) -> bool | None:
        """Write a page; return False if the store has it or it is too large, and None if the store fails."""
        if self._is_closing or not self._health.may_be_asked:
            return None
        try:
            is_new = self._store.write(key, entry_of(content, key, self._identity))
        except StoreFailed as error:
            self._health.failed(str(error))
            return None
        self._health.worked()
        return is_new

    def _take_off(self, keys: Sequence[bytes]) -> None:
        """Remove entries, even if the store is failing.

        A wrong page must not be found when the store works again.
        """
        try:
            self._store.remove(keys)
        except StoreFailed as error:
            self._health.failed(str(error))
            log.error("%d pages that turned out wrong could not be taken off the tier: %s", len(keys), error)
