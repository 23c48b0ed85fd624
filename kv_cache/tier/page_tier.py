"""How do an engine and its device use a store of pages?

The engine looks pages up, and is handed what was found; the device makes the copies that the scheduler asks
for, in their order: what is published is written, and what was found is put into the host's pool.
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

CLOSE_S = 0.2  # for what is queued at the end


class PagesAsBytes(Protocol):
    """Pages of the device and of the host's pool as bytes, `page_bytes` each."""

    @property
    def page_bytes(self) -> int: ...

    def read(self, pages: Index) -> Contents:
        """Begin to copy pages of the device to the host; what is returned waits for them."""
        ...

    def write_host(self, pages: Index, contents: Sequence[bytes]) -> None:
        """Let pages of the host's pool hold these."""
        ...


class PageTier:
    """Keeps the pages of one engine in a store.

    `identity` is all that pages depend on but for their tokens and salt (see `identity_of`); a lookup takes
    `wait_s` at most; `make` makes copies as a step of the device does, and calls `apply` for those of the
    tier; `name` is the store's in the log.
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
        """What has come of it so far."""
        return replace(
            self._counters,
            read_failures=self._reading.num_failures,
            write_failures=self._writing.num_failures,
        )

    @property
    def is_well(self) -> bool:
        """Whether the store did what it was asked for last."""
        return self._reading.is_well and self._writing.is_well

    def look_up(self, keys: Sequence[bytes]) -> Lookup | None:
        """Begin to look for pages of which each continues the one before; None: in vain, it is not asked."""
        return self._reads.begin(keys)

    def is_over(self, lookup: Lookup) -> bool:
        """Whether a lookup has ended, or has taken as long as it may."""
        return self._reads.is_over(lookup)

    def hand_over(self, contents: Sequence[bytes]) -> None:
        """What pages hold that the scheduler was told of, in the order of their copies."""
        self._handed.extend(contents)

    def apply(self, copy: PageCopy) -> None:
        """Make a copy to the tier or from it; it waits for no store."""
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
        """Wait until all that was to be kept is written; False if that takes longer."""
        return self._writes.settle(limit_s)

    def close(self) -> None:
        """Write what is queued, as far as there is a moment for it, and end."""
        self._writes.close(CLOSE_S)
        self._reads.close(CLOSE_S)
        self._store.close()
