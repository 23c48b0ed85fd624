"""Connect an engine and its device to a page store.

The engine looks pages up and receives what was found; the device makes the copies that the scheduler
requests, in order: published pages are written to the store, and found pages are put into the host's pool.
Reading and writing happen in threads (`reads`, `writes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kv_cache.pages import Index, PageCopy
from kv_cache.tier.health import PAUSE_S, StoreHealth, TierCounters
from kv_cache.tier.reads import Lookup, PageReads
from kv_cache.tier.store import PageStore
from kv_cache.tier.writes import MOST_QUEUED_BYTES, Contents, PageWrites

CLOSE_S = 0.2  # time for what is still queued at the end


class PagesAsBytes(Protocol):
    """Converts pages of the device and of the host's pool to bytes, `page_bytes` each."""

    @property
    def page_bytes(self) -> int: ...

    def read(self, pages: Index) -> Contents:
        """Start to copy pages of the device to the host; the function returned waits for them."""
        ...

    def write_host(self, pages: Index, contents: Sequence[bytes]) -> None:
        """Write contents to pages of the host's pool."""
        ...


class PageTier:
    """Keeps the pages of one engine in a store.

    `identity` stands for everything that pages depend on except their tokens and salt (see `identity_of`). A
    lookup takes at most `wait_s`. `make` makes copies as a step of the device does, and calls `apply` for
    those of the tier. `name` is the store's name in the log.
    """

    def __init__(
        self,
        store: PageStore,
        pages: PagesAsBytes,
        make: Callable[[tuple[PageCopy, ...]], None],
        identity: bytes,
        wait_s: float,
        name: str,
        *,
        pause_s: float = PAUSE_S,
        most_queued_bytes: int = MOST_QUEUED_BYTES,
    ) -> None:
        self.make = make
        self._store, self._pages = store, pages
        self._counters = TierCounters()
        self._reading = StoreHealth(f"reading pages from {name}", pause_s)
        self._writing = StoreHealth(f"writing pages to {name}", pause_s)
        what = self._counters, identity, pages.page_bytes
        self._writes = PageWrites(store, self._writing, *what, most_queued_bytes)
        self._reads = PageReads(store, self._reading, *what, wait_s, self._writes.remove)
        self._handed = deque[bytes]()

    @property
    def counters(self) -> TierCounters:
        """The totals so far."""
        return replace(
            self._counters,
            read_failures=self._reading.num_failures,
            write_failures=self._writing.num_failures,
        )

    @property
    def is_well(self) -> bool:
        """Whether the last uses of the store succeeded."""
        return self._reading.is_well and self._writing.is_well

    def look_up(self, keys: Sequence[bytes]) -> Lookup | None:
        """Start a lookup of chained pages; return None if the store is not used now."""
        return self._reads.begin(keys)

    def is_over(self, lookup: Lookup) -> bool:
        """Whether a lookup has ended or reached its time limit."""
        return self._reads.is_over(lookup)

    def hand_over(self, contents: Sequence[bytes]) -> None:
        """Take the content of found pages, in the order of their copies."""
        self._handed.extend(contents)

    def apply(self, copy: PageCopy) -> None:
        """Make a copy to or from the tier, without waiting for the store."""
        if copy.way == "to_tier":
            room = self._writes.room(len(copy.keys))
            if room:
                self._writes.put(copy.keys[:room], self._pages.read(copy.sources[:room]))
        elif copy.way == "off_tier":
            self._writes.remove(copy.keys)
        else:
            assert copy.way == "from_tier", f"{copy.way} is no copy of a tier"
            self._pages.write_host(copy.targets, [self._handed.popleft() for _ in copy.targets.tolist()])

    def settle(self, limit_s: float) -> bool:
        """Wait until everything queued is written; return False if that takes longer than `limit_s`."""
        return self._writes.settle(limit_s)

    def close(self) -> None:
        """Write what is queued within a short time limit, and end the threads."""
        self._writes.close(CLOSE_S)
        self._reads.close(CLOSE_S)
        self._store.close()
