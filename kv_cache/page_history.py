"""What became of cached pages? Ages, events and misses, for metrics and routers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kv_cache.pages import Index
from kv_cache.prefix_index import Miss, resized

BOUNDS_S = (0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0)  # upper bounds of an age's buckets; one more is open
_BOUNDS_S = np.array(BOUNDS_S)


class Ages:
    """How long something lasted, in seconds, as counts by bucket."""

    def __init__(self) -> None:
        self.counts = np.zeros(len(BOUNDS_S) + 1, dtype=np.int64)
        self.sum_s = 0.0

    def observe(self, ages_s: NDArray[np.float64]) -> None:
        """Count some ages; an age of exactly a bound is in the bucket that ends there."""
        self.counts += np.bincount(_BOUNDS_S.searchsorted(ages_s), minlength=len(self.counts))
        self.sum_s += float(ages_s.sum())


@dataclass(frozen=True, slots=True)
class PageEvent:
    """A change of what can be found: a router that follows them knows which prefixes are here."""

    kind: Literal["stored", "removed", "moved"]
    key: bytes
    page: int  # where it is now, or was
    medium: Literal["device", "host"] = "device"  # whose page that is
    parent: bytes | None = None  # of what was stored: the key before it in its chain


class PageHistory:
    """Follows the prefix cache, which tells it of every change; `now_s` is set once a step.

    Pages go by their names (see `PrefixIndex`). One that comes to rest in the host's pool has moved; it is
    evicted when it can no longer be found.
    """

    def __init__(self, num_pages: int, num_host_pages: int = 0) -> None:
        self.now_s = 0.0
        self.lifetime = Ages()  # from publication to eviction
        self.idle_before_eviction = Ages()
        self.reuse_gap = Ages()  # idle, then shared again
        self.num_whole_hits = 0  # lookups that found all they could use
        self.misses: Counter[Miss] = Counter()  # lookups that did not find all they could use, by reason
        self.events: list[PageEvent] | None = None  # a list: what happened since it was last emptied
        self._num_host_pages = num_host_pages
        self._stored_s = np.zeros(num_pages + num_host_pages)
        self._idle_since_s = np.zeros(num_pages + num_host_pages)
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # keys of late, the oldest first

    def was_evicted(self, key: bytes) -> bool:
        """Whether a page of this key was evicted, as far back as the pools' worth of evictions."""
        return key in self._evicted

    def stored(self, keys: Sequence[bytes], pages: Index, parent: bytes | None) -> None:
        """Pages were published, each continuing the one before; `parent` is the first one's."""
        self._stored_s[pages] = self.now_s
        if not self._evicted.keys().isdisjoint(keys):
            for key in keys:
                self._evicted.pop(key, None)
        if self.events is not None:
            for key, page in zip(keys, pages.tolist()):
                self.events.append(PageEvent("stored", key, page, parent=parent))
                parent = key

    def idled(self, pages: Index) -> None:
        """The last slot let go of cached pages."""
        self._idle_since_s[pages] = self.now_s

    def reused(self, pages: Index) -> None:
        """Idle pages were shared again."""
        if len(pages):
            self.reuse_gap.observe(self.now_s - self._idle_since_s[pages])

    def evicted(self, keys: Iterable[bytes], pages: Index) -> None:
        """Idle pages went because room was needed."""
        self.lifetime.observe(self.now_s - self._stored_s[pages])
        self.idle_before_eviction.observe(self.now_s - self._idle_since_s[pages])
        self._evicted.update(dict.fromkeys(keys))
        for _ in range(len(self._evicted) - len(self._stored_s)):
            self._evicted.popitem(last=False)

    def removed(self, keys: Iterable[bytes], pages: Index) -> None:
        """Pages can no longer be found, for whatever reason."""
        self._tell("removed", keys, pages)

    def moved(self, keys: Iterable[bytes], sources: Index, targets: Index) -> None:
        """Cached pages moved, within the device or between it and the host."""
        for column in (self._stored_s, self._idle_since_s):
            column[targets] = column[sources]
        self._tell("moved", keys, targets)

    def resize(self, num_pages: int) -> None:
        """Follow the pool to another number of pages."""
        self._stored_s = resized(self._stored_s, num_pages, self._num_host_pages)
        self._idle_since_s = resized(self._idle_since_s, num_pages, self._num_host_pages)

    def _tell(self, kind: Literal["removed", "moved"], keys: Iterable[bytes], pages: Index) -> None:
        if self.events is not None:
            for key, name in zip(keys, pages.tolist()):
                self.events.append(PageEvent(kind, key, abs(name), "device" if name > 0 else "host"))
