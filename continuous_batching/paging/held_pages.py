"""Which pages does no row hold, and the cache not alone? Those that another engine fills, or is sent.

Pages of a prompt that another engine computes are taken before it sends them. They are published when all of
them have arrived whole, never before; where they do not, they are free again, as if nothing had been asked.

Pages that are to be sent to another engine stay held when their request ends, on a lease.

Neither stands in the way of who runs: where pages run short, these holds end first. Their pages never move,
because somebody may be about to write or read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from continuous_batching.counters import Counters
from continuous_batching.paging.page_tables import EMPTY, PageTables
from kv_cache.page_keys import TokenIds, page_keys
from kv_cache.pages import Index
from kv_cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Arrival:
    """Pages of a prompt, from its first on: those that were found here, then those that are being filled."""

    tokens: TokenIds
    cache_salt: str
    keys: list[bytes]
    pages: Index
    num_found: int

    @property
    def filled(self) -> Index:
        """The pages that another engine fills."""
        return self.pages[self.num_found :]


class HeldPages:
    """Holds pages by the names of the requests that they are for."""

    def __init__(self, tables: PageTables, prefix: PrefixCache, counters: Counters) -> None:
        self._tables = tables
        self._prefix = prefix
        self._counters = counters
        self._arriving: dict[str, Arrival] = {}
        self._leased: dict[str, Index] = {}

    @property
    def pages(self) -> Index:
        """All pages that are held so, once for each hold."""
        held = [*(each.pages for each in self._arriving.values()), *self._leased.values()]
        return np.concatenate(held) if held else EMPTY

    def expect(
        self, name: str, tokens: TokenIds, cache_salt: str, num_spare: int, known: list[bytes]
    ) -> Arrival | None:
        """Take pages for those of a prompt's `tokens` that are not found here; None if nothing is missing, or
        if that takes more than `num_spare` pages. `known` are keys of the first pages.
        """
        assert name not in self._arriving, f"pages of {name} are expected already"
        tables, pool, size = self._tables, self._tables.pool, self._tables.slots.page_size
        keys = page_keys(tokens, size, cache_salt, known[: len(tokens) // size])
        found = self._prefix.find(keys, tokens, cache_salt)
        found = found[found > 0]
        missing = len(keys) - len(found)
        num_idle = int((pool.holders[found] == 1).sum())  # these count as spare, too
        if not missing or missing + num_idle > num_spare:
            return None
        self._prefix.share(found)
        if missing > pool.num_free:
            tables.evict(missing - pool.num_free)
        arrival = Arrival(tokens, cache_salt, keys, np.concatenate([found, pool.take(missing)]), len(found))
        self._arriving[name] = arrival
        self._pin()
        return arrival

    def arriving(self, name: str) -> Arrival | None:
        """The pages that are being filled for a request, unless they had to give way."""
        return self._arriving.get(name)

    def arrived(self, name: str, *, is_whole: bool) -> None:
        """Let all pages of a prompt be found if all of them came whole; otherwise those are free that did."""
        arrival = self._arriving.pop(name, None)
        if arrival is None:
            return
        pages = arrival.pages
        if not is_whole:
            self._counters.missed_pages += len(arrival.filled)
        else:
            self._counters.arrived_pages += len(arrival.filled)
            standing = self._prefix.publish(
                arrival.keys, arrival.tokens, pages, arrival.num_found, arrival.cache_salt
            )
            doubles = standing != arrival.filled
            self._prefix.share(standing[doubles])  # so that a chain is used as a whole
            self._prefix.release(arrival.filled[doubles])
            pages = np.concatenate([pages[: arrival.num_found], standing])
        self._prefix.release(pages)
        self._pin()

    def lease(self, name: str, pages: Index) -> None:
        """Hold the pages of a request that ends."""
        self._prefix.share(pages)
        self._leased[name] = pages
        self._pin()

    def leased(self, name: str) -> Index | None:
        """The pages that are held of a request that has ended, unless they had to give way."""
        return self._leased.get(name)

    def release(self, name: str) -> None:
        """End a lease."""
        pages = self._leased.pop(name, None)
        if pages is not None:
            self._prefix.release(pages)
            self._pin()

    def give_way(self) -> bool:
        """End the hold that began last, of pages that arrive if there are any; False if there is none."""
        if self._arriving:
            self.arrived(next(reversed(self._arriving)), is_whole=False)
        elif self._leased:
            self.release(next(reversed(self._leased)))
        else:
            return False
        return True

    def _pin(self) -> None:
        self._tables.pinned = self.pages
