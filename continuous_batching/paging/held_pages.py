"""Hold pages on behalf of other engines: pages that another engine fills, and pages that are sent to one.

Pages for the part of a prompt that another engine computes are allocated before it sends them. They are
published once all of them have arrived whole, never before; if they do not arrive, they are freed as if
nothing had been asked. Pages that are to be sent to another engine stay held on a lease when their request
ends. Where layers keep recurrent states, one more page is held of each prompt: the state behind its last
page, without which nobody could go on from there.

Neither kind of hold stands in the way of running requests: where pages run short, these holds end first.
Their pages are never moved, because a peer may be about to write or read them.
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
    """The pages of a prompt's prefix: pages that were found here, followed by pages that are being filled."""

    tokens: TokenIds
    cache_salt: str
    keys: list[bytes]
    pages: Index
    num_found: int
    state: Index  # the page of the state behind them, which another engine fills; empty if there are none

    @property
    def filled(self) -> Index:
        """The pages that another engine fills."""
        return self.pages[self.num_found :]


@dataclass(frozen=True, slots=True)
class Leased:
    """The pages of a prompt that has been computed, and the state behind them."""

    pages: Index
    state: Index  # its page; empty if there are none


class HeldPages:
    """The holds on pages, by the id of the request that they are for."""

    def __init__(self, tables: PageTables, prefix: PrefixCache, counters: Counters) -> None:
        self._tables, self._group = tables, tables.groups[0]
        self._prefix = prefix
        self._counters = counters
        self._arriving: dict[str, Arrival] = {}
        self._leased: dict[str, Leased] = {}
        self._group.pinned = lambda: self.pages
        if tables.states is not None:
            tables.states.pinned = lambda: self.states

    @property
    def pages(self) -> Index:
        """All pages held here, each listed once for every hold."""
        return np.concatenate([EMPTY, *(each.pages for each in self._all)])

    @property
    def states(self) -> Index:
        """All recurrent states held here, each listed once for every hold."""
        return np.concatenate([EMPTY, *(each.state for each in self._all)])

    @property
    def _all(self) -> list[Arrival | Leased]:
        return [*self._arriving.values(), *self._leased.values()]

    def expect(
        self, name: str, tokens: TokenIds, cache_salt: str, num_spare: Index, known: list[bytes]
    ) -> Arrival | None:
        """Allocate pages for those full pages of a prompt's `tokens` that are not found here.

        Pages behind the last position where a state may be kept are not asked for. Returns None if nothing is
        missing, or if this needs more than `num_spare` pages of a group. `known` are the keys of the first
        pages, as far as they have been hashed.
        """
        assert name not in self._arriving, f"pages of {name} are expected already"
        pool, size, states = self._group.pool, self._group.page_size, self._tables.states
        if states is not None:
            tokens = tokens[: len(tokens) // size // states.every_pages * states.every_pages * size]
        keys = page_keys(tokens, size, cache_salt, known[: len(tokens) // size])
        found = self._prefix.find(keys, tokens, cache_salt)
        found = found[found > 0]
        if states is not None and len(found) == len(keys) and not states.is_here(found[-1:]).all():
            found = found[:-1]  # a state comes with the page before it
        missing = len(keys) - len(found)
        # Idle cached pages count as spare too, and stop being so once they are held
        num_idle = int((pool.holders[found] == 1).sum())
        if not missing or missing + num_idle > num_spare[0]:
            return None
        if states is not None and num_spare[states.number] < 1:
            return None
        self._prefix.share(found)
        if missing > pool.num_free:
            self._tables.evict(missing - pool.num_free)
        pages, state = np.concatenate([found, pool.take(missing)]), EMPTY
        if states is not None:
            if not states.pool.num_free:
                self._tables.evict(1, states.number)
            state = states.pool.take(1)
        arrival = Arrival(tokens, cache_salt, keys, pages, len(found), state)
        self._arriving[name] = arrival
        return arrival

    def arriving(self, name: str) -> Arrival | None:
        """The pages being filled for a request, or None if they had to give way."""
        return self._arriving.get(name)

    def arrived(self, name: str, *, is_whole: bool) -> None:
        """End an arrival: publish the pages if all of them are whole, otherwise free them."""
        arrival = self._arriving.pop(name, None)
        if arrival is None:
            return
        pages, states = arrival.pages, self._tables.states
        if not is_whole:
            self._counters.missed_pages += len(arrival.filled)
        else:
            self._counters.arrived_pages += len(arrival.filled)
            standing = self._prefix.publish(
                arrival.keys, arrival.tokens, pages, arrival.num_found, arrival.cache_salt
            )
            doubles = standing != arrival.filled
            # Hold the pages that stand in the cache, so that a chain is used as a whole
            self._prefix.share(standing[doubles])
            self._prefix.release(arrival.filled[doubles])
            pages = np.concatenate([pages[: arrival.num_found], standing])
            if states is not None and self._prefix.is_cached(pages[-1:]).all():
                states.lay_beside(int(pages[-1]), int(arrival.state[0]))
        if states is not None:
            states.release(arrival.state)
        self._prefix.release(pages)

    def lease(self, name: str, row: int, num_pages: int) -> None:
        """Hold the first pages of a row whose request is ending, and its state, which stands behind them."""
        slots, states = self._tables.slots, self._tables.states
        leased = Leased(slots.pages(row)[:num_pages], slots.state_of(row))
        self._prefix.share(leased.pages)
        if states is not None:
            states.share(leased.state)
        self.release(name)  # an id may come again before its lease is over
        self._leased[name] = leased

    def leased(self, name: str) -> Leased | None:
        """The pages leased for an ended request, or None if they had to give way."""
        return self._leased.get(name)

    def release(self, name: str) -> None:
        """End a lease."""
        leased = self._leased.pop(name, None)
        if leased is None:
            return
        self._prefix.release(leased.pages)
        if self._tables.states is not None:
            self._tables.states.release(leased.state)

    def give_way(self) -> bool:
        """End the most recent hold, arrivals before leases; return False if there is none."""
        if self._arriving:
            self.arrived(next(reversed(self._arriving)), is_whole=False)
        elif self._leased:
            self.release(next(reversed(self._leased)))
        else:
            return False
        return True
