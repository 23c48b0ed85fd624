"""Look pages up in a store, in a thread beside the engine.

Lookups run one after the other, and each ends at the first page that is missing. A request waits for a
bounded time: what was found by then is used, and a store that has not answered for so long is left alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kv_cache.page_keys import KEY_BYTES
from kv_cache.tier.entries import WrongEntry, content_of
from kv_cache.tier.health import StoreHealth, TierCounters
from kv_cache.tier.store import PageStore, StoreFailed

MOST_LOOKUPS = 1024  # lookups that may be queued
READ_BYTES = 2**23  # bytes requested at once, or one page if that is larger
NO_KEY = bytes(KEY_BYTES)

log = logging.getLogger(__name__)


class Lookup:
    """A lookup of pages in the order of their request, with the content found so far."""

    def __init__(self, keys: Sequence[bytes], until_s: float) -> None:
        self.keys, self.until_s = keys, until_s
        self.contents: list[bytes] = []
        self.has_ended = False


class PageReads:
    """Reads pages of `page_bytes` from a store; a lookup may take `wait_s`.

    The keys of entries that must not be used are passed to `take_off`.
    """

    def __init__(
        self,
        store: PageStore,
        health: StoreHealth,
        counters: TierCounters,
        identity: bytes,
        page_bytes: int,
        wait_s: float,
        take_off: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._store, self._health, self._counters = store, health, counters
        self._identity, self._page_bytes = identity, page_bytes
        self._wait_s, self._take_off = wait_s, take_off
        self._queue = deque[Lookup]()
        # Start of the call that the store has not answered yet, on the monotonic clock
        self._asked_s: float | None = None
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="tier-reads", daemon=True)
        self._thread.start()

    def begin(self, keys: Sequence[bytes]) -> Lookup | None:
        """Start a lookup; return None if it would be futile or take too long."""
        if not self._health.may_be_asked or len(self._queue) >= MOST_LOOKUPS or self._is_stuck():
            self._counters.skipped += 1
            return None
        lookup = Lookup(keys, time.monotonic() + self._wait_s)
        with self._changed:
            self._queue.append(lookup)
            self._changed.notify()
        return lookup

    def is_over(self, lookup: Lookup) -> bool:
        """Whether a lookup has ended or reached its time limit, which ends it with what it has found."""
        if lookup.has_ended:
            return True
        if time.monotonic() < lookup.until_s:
            return False
        if self._is_stuck() and self._health.may_be_asked:  # only once, however many requests wait for it
            self._health.failed(f"no answer within {self._wait_s:g} s")
        self._end(lookup, is_late=True)
        return True

    def close(self, limit_s: float) -> None:
        """End the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(limit_s)

    def _is_stuck(self) -> bool:
        asked_s = self._asked_s
        return asked_s is not None and time.monotonic() - asked_s >= self._wait_s

    def _end(self, lookup: Lookup, *, is_late: bool = False) -> None:
        with self._changed:  # either the thread or the waiting engine may end it
            if lookup.has_ended:
                return
            lookup.has_ended = True
            counters = self._counters
            counters.found += len(lookup.contents)
            counters.late += is_late
            counters.hits += not is_late and bool(lookup.contents)
            counters.misses += not is_late and not lookup.contents

    def _run(self) -> None:
        # Connect now, so that no request waits for a connection and a failure is logged at the start
        self._read([NO_KEY])
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if self._is_closing:
                    return
                lookup = self._queue.popleft()
            if not lookup.has_ended:
                self._look(lookup)
            self._end(lookup)

    def _look(self, lookup: Lookup) -> None:
        keys, at_once = lookup.keys, max(1, READ_BYTES // self._page_bytes)
        for at in range(0, len(keys), at_once):
            for key, entry in zip(keys[at:], self._read(keys[at : at + at_once])):
                content = None if entry is None else self._checked(key, entry)
                if content is None:
                    return
                with self._changed:
                    if lookup.has_ended:
                        return
                    lookup.contents.append(content)

    def _read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self._asked_s = time.monotonic()
        try:
            entries = self._store.read(keys)
        except StoreFailed as error:
            self._health.failed(str(error))
            return [None]
        finally:
            self._asked_s = None
        self._health.worked()
        return entries

    def _checked(self, key: bytes, entry: bytes) -> bytes | None:
        """Return the content of an entry, or None if it must not be used."""
        try:
            return content_of(entry, key, self._identity, self._page_bytes)
        except WrongEntry as error:
            if not self._counters.refused:
                log.warning("an entry of the tier is not used: %s; further ones are only counted", error)
            self._counters.refused += 1
            self._take_off([key])
            return None
