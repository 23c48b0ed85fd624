"""Which pages does each occupied row hold, and what is known of them?"""

from __future__ import annotations

import numpy as np

from continuous_batching.batch import Index, NewPages, ragged_ranges
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from kv_cache.prefix import PrefixCache, page_keys

EMPTY: Index = np.empty(0, dtype=np.int64)


class Residency:
    """Rows, pages and the prefix cache, changed together: enter, grow, publish, leave.

    Every change keeps the ledger true: a page's holders are the rows whose table names it and the
    prefix cache, if it is cached. `max_shared_tokens` as in `Scheduler`.
    """

    def __init__(
        self, slots: SlotPool, pool: PagePool, *, prefix_sharing: bool, max_shared_tokens: int | None
    ) -> None:
        self.slots = slots
        self.pool = pool
        self.prefix = PrefixCache(pool, slots.page_size)
        self.num_evicted = 0  # pages, since the start
        self._prefix_sharing = prefix_sharing
        self._max_shared_tokens = max_shared_tokens
        self._new_pages: list[NewPages] = []

    @property
    def num_available(self) -> int:
        """Pages that can be had without taking any from a row."""
        return self.pool.num_free + self.prefix.num_idle

    def pages_for(self, tokens: Index) -> Index:
        """Pages that hold so many tokens."""
        return -(-tokens // self.slots.page_size)

    def num_promised(self) -> int:
        """Pages that busy rows will still take for what they know or reserved at admission."""
        slots, busy = self.slots, self.slots.busy
        wanted = self.pages_for(np.maximum(slots.reserved[busy], slots.num_tokens[busy]))
        return int(np.maximum(wanted - slots.num_pages[busy], 0).sum())

    def keys(self, request: Request) -> list[bytes]:
        """Keys of the full pages of its known tokens, as far as they may be shared."""
        if not self._prefix_sharing:
            return []
        tokens = request.tokens
        if self._max_shared_tokens is not None:
            if request.num_prompt_tokens > self._max_shared_tokens:
                return []
            tokens = tokens[: self._max_shared_tokens]
        return page_keys(tokens, self.slots.page_size, request.cache_salt, request.page_keys)

    def find(self, request: Request) -> Index:
        """Cached pages that it can start from: all but its last known token, which is always computed,
        because the next one comes from it."""
        keys = request.page_keys[: (len(request.tokens) - 1) // self.slots.page_size]
        return self.prefix.find(keys, request.tokens, request.cache_salt)

    def enter(self, request: Request, matched: Index, reserved: int) -> int:
        """Give a request a row that starts from `matched` pages; returns the row."""
        slots, count = self.slots, len(matched)
        row = slots.take(request)
        slots.reserved[row] = reserved
        if count:
            self.prefix.share(matched)
            slots.page_table[row, :count] = matched
            slots.num_pages[row] = slots.num_matched[row] = slots.num_published[row] = count
            slots.num_computed[row] = count * slots.page_size
            slots.tail[row] = self.prefix.tail(matched)
            self._new_pages.append((np.full(count, row), np.arange(count), matched))
        return row

    def missing(self, rows: Index, stops: Index) -> Index:
        """Pages that each row lacks to hold its first `stops` tokens."""
        lacking: Index = np.maximum(self.pages_for(stops) - self.slots.num_pages[rows], 0)
        return lacking

    def grow(self, rows: Index, counts: Index) -> None:
        """Give each row so many more pages, evicting idle ones where none is free."""
        slots = self.slots
        growing = counts > 0
        rows, counts = rows[growing], counts[growing]
        total = int(counts.sum())
        short = total - self.pool.num_free
        if short > 0:
            self.prefix.evict(short)
            self.num_evicted += short
        held = slots.num_pages[rows]
        owners, indexes, pages = (
            np.repeat(rows, counts),
            ragged_ranges(held, held + counts),
            self.pool.take(total),
        )
        slots.page_table[owners, indexes] = pages
        slots.num_pages[rows] += counts
        self._new_pages.append((owners, indexes, pages))

    def publish_prompts(self, rows: Index) -> None:
        """Make the pages of prompts findable that are computed by now."""
        slots = self.slots
        ripe = np.minimum(slots.num_computed[rows] // slots.page_size, slots.num_shareable[rows])
        due = ripe > slots.num_published[rows]
        for row, stop in zip(rows[due].tolist(), ripe[due].tolist()):
            self._publish(row, stop)

    def leave(self, row: int, *, failed: bool = False) -> Request:
        """Free a row and its pages, after its tokens went back to the request.

        Its computed pages stay findable while nobody needs them for something else; those of a
        failed request are forgotten, and so is the token it failed with.
        """
        slots = self.slots
        request: Request = slots.requests[row]
        request.tokens = slots.token_ids[row, : int(slots.num_tokens[row]) - failed].copy()
        del request.logprobs[len(request.answer) :]
        pages = slots.pages(row)
        if failed:  # what it computed may be as wrong as what it answered
            self.prefix.forget(pages[slots.num_matched[row] : slots.num_published[row]])
        else:
            request.page_keys = self.keys(request)
            self._publish(row, min(int(slots.num_computed[row]) // slots.page_size, len(request.page_keys)))
        self.prefix.release(pages)
        slots.release(row)
        return request

    def take_new_pages(self) -> NewPages:
        """Page-table entries set since the last call."""
        new, self._new_pages = self._new_pages, []
        if not new:
            return EMPTY, EMPTY, EMPTY
        rows, indexes, pages = zip(*new)
        return np.concatenate(rows), np.concatenate(indexes), np.concatenate(pages)

    def _publish(self, row: int, stop: int) -> None:
        """Make the row's pages before its page `stop` findable."""
        slots = self.slots
        first = int(slots.num_published[row])
        if stop <= first:
            return
        request: Request = slots.requests[row]
        slots.tail[row] = self.prefix.publish(
            request.page_keys,
            slots.token_ids[row],
            slots.pages(row)[:stop],
            first,
            int(slots.tail[row]),
            request.cache_salt,
        )
        slots.num_published[row] = stop
