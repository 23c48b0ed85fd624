"""What do preempted requests keep in the host's memory?"""

from __future__ import annotations

from dataclasses import dataclass

from continuous_batching.counters import Counters
from continuous_batching.request import Request
from kv_cache.pages import Index, PagePool
from kv_cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Swapped:
    """What one request left."""

    first: int  # index of its first page here; those before are shared, and are looked up again
    pages: Index  # host pages
    num_computed: int  # tokens in both
    draft_lag: int  # as in SlotPool


class SwapTier:
    """Pages of waiting requests in a pool of the host's; without a pool nothing is kept.

    The pages of `prefix` that rest in the same pool give way to them.
    """

    def __init__(self, pool: PagePool | None, prefix: PrefixCache, counters: Counters) -> None:
        self.pool = pool
        self._prefix = prefix
        self._counters = counters
        self._left: dict[int, Swapped] = {}  # by arrival number

    def leave(
        self, request: Request, first: int, num_pages: int, num_computed: int, draft_lag: int
    ) -> Index | None:
        """Host pages for `num_pages` of a request, or None if they do not fit."""
        if self.pool is None or not num_pages:
            return None
        if not self._prefix.yield_host(num_pages):
            self._counters.refused_swaps += 1
            return None
        pages = self.pool.take(num_pages)
        self._left[request.number] = Swapped(first, pages, num_computed, draft_lag)
        self._counters.swapped_out_pages += num_pages
        return pages

    def left(self, request: Request) -> Swapped | None:
        """What a request left, if it left anything."""
        return self._left.get(request.number)

    def forget(self, request: Request) -> None:
        """Free what a request left: it came back, or it ended. The copy out of these pages, if there is
        one, has been asked for before anything is asked to be copied into them."""
        swapped = self._left.pop(request.number, None)
        if swapped is not None and self.pool is not None:
            self.pool.release(swapped.pages)

    @property
    def all_left(self) -> dict[int, Swapped]:
        """What all waiting requests left, by arrival number."""
        return dict(self._left)
