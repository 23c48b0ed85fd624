"""Which pages of its prompt does a row take from the cache, and which of its own do others find there?"""

from __future__ import annotations

import numpy as np

from continuous_batching.counters import Counters
from continuous_batching.paging.page_tables import EMPTY, PageTables
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.page_keys import page_keys
from kv_cache.pages import Index, PageCopy
from kv_cache.prefix_cache import PrefixCache


class PrefixMatching:
    """Matches the prompts of requests against the prefix cache, and publishes the pages of rows in it.

    A row whose next page another row is computing is blocked until that page is published.
    `max_shared_tokens` and `has_tier` as in `Scheduler`.
    """

    def __init__(
        self,
        slots: SlotPool,
        prefix: PrefixCache,
        tables: PageTables,
        counters: Counters,
        *,
        prefix_sharing: bool,
        max_shared_tokens: int | None,
        has_tier: bool,
    ) -> None:
        self._slots = slots
        self._prefix = prefix
        self._tables = tables
        self._counters = counters
        self._prefix_sharing = prefix_sharing
        self._max_shared_tokens = max_shared_tokens
        self._has_tier = has_tier
        self._blocked: dict[int, int] = {}  # row -> the version of the cache when it was last looked up

    def keys(self, request: Request) -> list[bytes]:
        """Keys of the full pages of its known tokens, as far as they may be shared; hashes only those that
        it does not carry already."""
        if not self._prefix_sharing:
            return []
        tokens = request.tokens
        if self._max_shared_tokens is not None:
            if request.num_prompt_tokens > self._max_shared_tokens:
                return []
            tokens = tokens[: self._max_shared_tokens]
        return page_keys(tokens, self._slots.page_size, request.cache_salt, request.page_keys)

    def find(self, request: Request) -> Index:
        """Cached pages that it can start from (see `PrefixCache.find`)."""
        return self._prefix.find(self._usable_keys(request), request.tokens, request.cache_salt)

    def lacking(self, request: Request) -> tuple[int, list[bytes]]:
        """How many pages are found that it can start from, and the keys of those that could follow them, as
        many as the host's pool can take in."""
        first = len(self.find(request))
        return first, self._usable_keys(request)[first : first + self._prefix.num_host_pages]

    def arrive(self, request: Request, first: int, count: int) -> slice:
        """A waiting request need not wait for the tier any longer: `count` of its pages, from its page
        `first` on, were found there, and rest in the host's pool as far as they have a place.

        Returns which of them do, by their index; their content is to be handed over before the next batch
        runs. What is found already is not taken in again, nor what follows a gap.
        """
        request.awaits_pages = False
        keys, matched = self._usable_keys(request), self.find(request)
        at = len(matched)
        if at < first:  # what they were to continue is gone
            return slice(0, 0)
        most = max(0, first + count - at)
        pages = self._prefix.take_in(keys, request.tokens, matched, most, request.cache_salt)
        if len(pages):
            self._tables.copy(PageCopy(pages, pages, "from_tier"))
            self._counters.fetched_pages += len(pages)
        return slice(at - first, at - first + len(pages))

    def count_lookup(self, request: Request, matched: Index) -> None:
        """Count what a newcomer's lookup found, unless another row is computing what comes next."""
        if self._prefix_sharing and not self._is_in_progress(request, len(matched)):
            keys = self._usable_keys(request)
            self._prefix.count_lookup(keys, request.tokens, request.cache_salt, matched)

    def start_from(self, row: int, pages: Index) -> None:
        """Let a row that has computed nothing itself continue from these cached pages."""
        slots = self._slots
        resting = pages[pages < 0]
        self._tables.extend(row, pages[: len(pages) - len(resting)])
        if len(resting):
            self._tables.bring_back(row, resting)
        slots.num_published[row] = slots.num_pages[row]
        slots.num_computed[row] = slots.num_pages[row] * slots.page_size
        request: Request = slots.requests[row]
        found = len(pages) * slots.page_size
        if request.num_preemptions:
            self._counters.refound_tokens += found
        else:
            request.num_cached_tokens += found
            self._counters.hit_tokens += found
            self._counters.host_hit_tokens += len(resting) * slots.page_size

    def block_if_in_progress(self, row: int) -> None:
        """Block a row while another computes the page that it needs next."""
        if self._is_in_progress(self._slots.requests[row], int(self._slots.num_pages[row])):
            self._blocked[row] = self._prefix.version

    def block_until_looked_up(self, row: int) -> None:
        """Block a row until the next `unblock`, which looks its prompt up once more."""
        self._blocked[row] = -1  # no version of the cache

    def is_blocked(self, row: int) -> bool:
        """Whether the row waits for a page that another computes."""
        return row in self._blocked

    @property
    def blocked(self) -> list[int]:
        """All rows that wait for a page that another computes."""
        return list(self._blocked)

    def unblock(self, row: int) -> None:
        """Share what was published since; the row runs when nobody computes its next page."""
        slots = self._slots
        request: Request = slots.requests[row]
        if self._blocked.pop(row) != self._prefix.version:
            keys, held = self._usable_keys(request), slots.pages(row)
            pages = self._prefix.find(keys, request.tokens, request.cache_salt, held)
            pages = pages[pages > 0]  # the row was not promised others to bring resting ones back to
            if len(pages):
                self.start_from(row, pages)
        self.block_if_in_progress(row)

    def publish_prompts(self, rows: Index) -> None:
        """Make the pages of prompts findable that are computed by now."""
        slots = self._slots
        ripe = np.minimum(slots.num_computed[rows] // slots.page_size, slots.num_shareable[rows])
        due = ripe > slots.num_published[rows]
        for row, stop in zip(rows[due].tolist(), ripe[due].tolist()):
            self._publish(row, stop)

    def publish_all(self, row: int) -> None:
        """Make all computed full pages of a row findable, those of its answer too, as far as a draft model
        has computed them as well."""
        slots = self._slots
        num_keys = len(slots.requests[row].page_keys)
        num_whole = int(slots.num_computed[row] - slots.draft_lag[row])
        self._publish(row, min(num_whole // slots.page_size, num_keys))

    def forget(self, row: int) -> None:
        """Make everything unfindable that the row found or published: it may be wrong."""
        keys = self._prefix.forget(self._slots.pages(row)[: self._slots.num_published[row]])
        if self._has_tier and keys:
            self._tables.copy(PageCopy(EMPTY, EMPTY, "off_tier", tuple(keys)))

    def leave(self, row: int) -> None:
        """The row is freed, and waits for no page any more."""
        self._blocked.pop(row, None)

    def _usable_keys(self, request: Request) -> list[bytes]:
        return request.page_keys[: request.num_findable // self._slots.page_size]

    def _is_in_progress(self, request: Request, index: int) -> bool:
        """Whether a row is about to compute and publish the page that `request` needs at `index`."""
        keys, slots = self._usable_keys(request), self._slots
        if index >= len(keys):
            return False
        busy = slots.busy
        computing = busy[(slots.num_published[busy] <= index) & (index < slots.num_shareable[busy])]
        return any(
            row not in self._blocked
            and slots.requests[row] is not request
            and slots.requests[row].page_keys[index] == keys[index]
            for row in computing.tolist()
        )

    def _publish(self, row: int, stop: int) -> None:
        """Make the row's pages before its page `stop` findable."""
        slots = self._slots
        first = int(slots.num_published[row])
        if stop <= first:
            return
        request: Request = slots.requests[row]
        pages = slots.pages(row)[:stop]
        standing = self._prefix.publish(
            request.page_keys, slots.token_ids[row], pages, first, request.cache_salt
        )
        slots.num_published[row] = stop
        if self._has_tier:
            self._save(request, standing, pages, first)
        doubles = np.flatnonzero(standing != pages[first:])
        if len(doubles):  # hold the cached equals instead, so that a chain's pages have the same holders
            self._prefix.share(standing[doubles])
            self._tables.replace(row, doubles + first, standing[doubles])

    def _save(self, request: Request, standing: Index, pages: Index, first: int) -> None:
        """Have the tier keep what a row has just published: its own pages, not those that stood before."""
        new = np.flatnonzero((standing == pages[first:]) & self._prefix.is_cached(standing))
        if len(new):
            keys = tuple(request.page_keys[first + index] for index in new.tolist())
            self._tables.copy(PageCopy(standing[new], standing[new], "to_tier", keys))
            self._counters.saved_pages += len(new)
