"""Keep the pages of preempted requests in the host's memory until they resume.

Only pages that no other request shares are kept here; shared ones are found again in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from continuous_batching.counters import Counters
from continuous_batching.request import Request
from kv_cache.pages import Index, PagePool
from kv_cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Swapped:
    """The pages that one request left in the host pool."""

    # Index of its first swapped page; pages before it are shared and looked up again
    first: int
    pages: Index  # host pages
    num_computed: int  # tokens computed in the shared and swapped pages together
    draft_lag: int  # copied from SlotPool.draft_lag
    # For each group of windows: the index of the first page that the next query sees, and its host pages
    windows: tuple[tuple[int, Index], ...] = ()


class SwapTier:
    """Swapped pages of waiting requests in a host pool; without a pool nothing is kept.

    Pages of `prefix` that rest in the same pool give way to them.
    """

    def __init__(self, pool: PagePool | None, prefix: PrefixCache, counters: Counters) -> None:
        self.pool = pool
        self._prefix = prefix
        self._counters = counters
        self._left: dict[int, Swapped] = {}  # keyed by the request's arrival number

    def leave(
        self,
        request: Request,
        first: int,
        num_pages: int,
        num_computed: int,
        draft_lag: int,
        seen: Sequence[tuple[int, Index]] = (),
    ) -> Swapped | None:
        """Allocate host pages for `num_pages` pages of a request, or return None if they do not fit.

        `seen` are the pages that its windows see, whose copies need host pages of their groups.
        """
        if self.pool is None or not num_pages:
            return None
        groups = self._prefix.groups
        fits = all(group.yield_host(len(pages)) for group, (_, pages) in zip(groups, seen))
        if not fits or not self._prefix.yield_host(num_pages):
            self._counters.refused_swaps += 1
            return None
        windows = tuple((at, group.swap_out(len(pages))) for group, (at, pages) in zip(groups, seen))
        left = Swapped(first, self.pool.take(num_pages), num_computed, draft_lag, windows)
        self._left[request.number] = left
        self._counters.swapped_out_pages += num_pages
        return left

    def left(self, request: Request) -> Swapped | None:
        """The pages that a request left, or None."""
        return self._left.get(request.number)

    def forget(self, request: Request) -> None:
        """Free the host pages of a request that has resumed or ended.

        A copy out of these pages, if there is one, has been requested before any copy into them can be.
        """
        swapped = self._left.pop(request.number, None)
        if swapped is not None and self.pool is not None:
            self.pool.release(swapped.pages)
            for group, (_, pages) in zip(self._prefix.groups, swapped.windows):
                group.release_host(pages)

    @property
    def all_left(self) -> dict[int, Swapped]:
        """The pages that all waiting requests left, by arrival number."""
        return dict(self._left)
