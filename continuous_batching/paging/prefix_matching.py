"""Match prompts against the prefix cache, and publish the pages that rows have computed in it.

A request whose next page is being computed by another row waits for that page instead of computing it twice,
if it could then share it.
The cache itself is `kv_cache.prefix_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from continuous_batching.counters import Counters
from continuous_batching.paging.checkpoints import Checkpoints, num_equal
from continuous_batching.paging.page_tables import EMPTY, PageTables
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.page_keys import key_of_group, page_keys
from kv_cache.pages import Index, PageCopy
from kv_cache.prefix_cache import PrefixCache
from kv_cache.tier.lookup import FoundPages, PageName, Sought, SoughtBeside

MOST_FORESEEN = 64  # waiting requests for whose beginnings a new row looks


class Wait(NamedTuple):
    """What a blocked row waits for; without a `leader`, for its next lookup."""

    version: int  # the prefix cache's at its last lookup
    leader: Request | None = None
    row: int = -1  # the leader's
    num_pages: int = 0  # pages of the prompt, the last of which the leader has yet to publish


class PrefixMatching:
    """Matches the prompts of requests against the prefix cache, and publishes the pages of rows in it.

    A row whose next page is being computed by another row is blocked until that page is published, unless
    it came back with a last page that is not cached, behind which nothing is found.
    `max_shared_tokens` and `has_tier` are as in `Scheduler`.
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
        self.checkpoints: Checkpoints | None = None
        if tables.states is not None:
            self.checkpoints = Checkpoints(slots, tables.states, prefix, tables.copy, shares=prefix_sharing)
        self._blocked: dict[int, Wait] = {}  # keyed by row
        tables.num_to_share = self._num_to_share
        # Row of a resumed search's leader -> the pages from which its other beams start, while they wait
        self.most_found: dict[int, int] = {}

    def keys(self, request: Request) -> list[bytes]:
        """Return the keys of a request's full known pages, as far as they may be shared.

        Only pages whose keys the request does not carry yet are hashed.
        """
        if not self._prefix_sharing:
            return []
        tokens = request.tokens
        if self._max_shared_tokens is not None:
            if request.num_prompt_tokens > self._max_shared_tokens:
                return []
            tokens = tokens[: self._max_shared_tokens]
        if len(request.page_keys) == len(tokens) // self._slots.page_size:
            return request.page_keys  # not copied: a long prompt has thousands
        return page_keys(tokens, self._slots.page_size, request.cache_salt, request.page_keys)

    def find(self, request: Request) -> Index:
        """Return the cached pages of a request (see `PrefixCache.find`).

        A request may start from as many of them as `PageTables.resumable` returns.
        """
        findable = request.tokens[: request.num_findable]
        return self._prefix.find(request.page_keys, findable, request.cache_salt)

    def sought(self, request: Request) -> Sought:
        """Return what a new request could find in the tier, as far as the host's pool can take it in."""
        if any(group.host is None for group in self._tables.beside):
            return Sought(())  # nothing could be resumed from without their pages
        entries = self.find(request)
        keys = self._usable_keys(request)[: len(entries) + self._prefix.num_host_pages]
        beside = [
            SoughtBeside(group.number, group.seen_after, group.is_here(entries))
            for group in self._tables.beside
        ]
        return Sought(keys, len(entries), tuple(beside))

    def arrive(self, request: Request, found: FoundPages) -> list[PageName]:
        """End a waiting request's wait for the tier.

        The pages that it found rest in the host's pool as far as there is room. Returns those that were taken
        in, in the order in which their content must be handed over before the next batch runs. Pages that can
        be found already are not taken in again, nor are pages behind a gap.
        """
        request.awaits_pages = False
        keys, matched = self._usable_keys(request), self.find(request)
        at = len(matched)
        if at < found.first:  # the pages that these were to continue have been evicted
            return []
        most = max(0, found.first + found.count - at)
        pages = self._prefix.take_in(keys, request.tokens, matched, most, request.cache_salt)
        entries = np.concatenate([matched, -pages])
        taken = self._take_in(0, np.arange(at, len(entries)), pages)
        for group in self._tables.beside:
            places = [each.at for each in found.beside if each.group == group.number]
            indexes = np.array([at for at in places if at < len(entries)], dtype=np.int64)
            taken += self._take_in(group.number, *group.take_in(entries, indexes))
        return taken

    def _take_in(self, group: int, indexes: Index, pages: Index) -> list[PageName]:
        """Have the host's pages of a group filled with what the tier found at these indexes of a request."""
        if len(pages):
            self._tables.copy(PageCopy(pages, pages, "from_tier", group=group))
            self._counters.fetched_pages += len(pages)
        return [PageName(group, index) for index in indexes.tolist()]

    def count_lookup(self, request: Request, matched: Index) -> None:
        """Count the outcome of a new request's lookup, unless another row is computing its next page."""
        if self._prefix_sharing and not self._leader_of(request, len(matched), self._computing()):
            num_usable, checkpoints = self._num_usable(request), self.checkpoints
            most = num_usable if checkpoints is None else checkpoints.usable(num_usable)
            self._prefix.count_lookup(request.page_keys, request.tokens, request.cache_salt, matched, most)

    def start_from(self, row: int, pages: Index, *, comes_back: bool = False) -> None:
        """Let a row that has computed nothing itself continue from these cached pages.

        If it `comes_back`, more of its pages are swapped in.
        """
        slots = self._slots
        self._tables.resume(row, pages, comes_back=comes_back)
        slots.num_published[row] = slots.num_pages[row]
        slots.num_computed[row] = slots.num_pages[row] * slots.page_size
        request: Request = slots.requests[row]
        if request.num_preemptions:
            self._counters.refound_tokens += len(pages) * slots.page_size
        else:
            at = np.arange(slots.num_pages[row] - len(pages), slots.num_pages[row])
            # A known beginning of the answer is no part of the prompt tokens, of which hits are a share
            of_prompt = np.clip(request.num_prompt_tokens - at * slots.page_size, 0, slots.page_size)
            request.num_cached_tokens += int(of_prompt.sum())
            self._counters.hit_tokens += int(of_prompt.sum())
            self._counters.host_hit_tokens += int(of_prompt[pages < 0].sum())

    def begin(self, row: int) -> None:
        """Block a row that has just entered while another row computes the page that it needs next.

        Where layers keep states, say which of them are wanted of this row, and of rows that it waits for.
        """
        computing = self._computing()
        if self.checkpoints is not None:
            request: Request = self._slots.requests[row]
            keys = self._usable_keys(request)
            self.checkpoints.enter(row, keys, self.find(request) if keys else EMPTY, computing)
            self.checkpoints.ask_leader(request, keys, int(self._slots.num_pages[row]), computing)
        self._block_if_in_progress(row, computing)

    def arrives(self, request: Request) -> None:
        """Have a running prompt leave the state from which a request that has just come can go on."""
        if self.checkpoints is not None:
            self.checkpoints.ask_leader(request, self._usable_keys(request), 0, self._computing())

    def foresee(self, row: int, waiting: Sequence[Request]) -> None:
        """Have a row leave the states from which the next of the waiting requests can go on."""
        if self.checkpoints is not None:
            self.checkpoints.foresee(row, [(each, self._num_usable(each)) for each in waiting])

    def block_until_looked_up(self, row: int) -> None:
        """Block a row until the next `unblock`, which looks its prompt up again."""
        self._blocked[row] = Wait(-1)  # matches no version of the cache

    def is_blocked(self, row: int) -> bool:
        """Whether the row waits for a page that another row computes."""
        return row in self._blocked

    @property
    def blocked(self) -> list[int]:
        """All rows that wait for a page that another row computes."""
        return list(self._blocked)

    def unblock(self, rows: Index, *, at_once: bool = False) -> bool:
        """Let blocked rows share the pages that they waited for; return whether any did.

        Each becomes runnable once nobody computes its next page. While what it waits for is still to come,
        nothing is looked up for it, unless all are to share `at_once` what has been published: many rows may
        wait for a long prompt, of which each step publishes pages.
        """
        computing, any_did = self._computing(), False
        for row in rows.tolist():
            if at_once or not self._is_to_come(row):
                any_did |= self._look_up(row)
                self._block_if_in_progress(row, computing)
                if row not in self._blocked:
                    computing.append(row)
        return any_did

    def _is_to_come(self, row: int) -> bool:
        """Whether another row has yet to publish the last page that a blocked row waits for."""
        wait, slots = self._blocked[row], self._slots
        if wait.leader is None or slots.requests[wait.row] is not wait.leader or wait.row in self._blocked:
            return False
        if not slots.num_published[wait.row] < wait.num_pages <= slots.num_shareable[wait.row]:
            return False
        if self.checkpoints is not None:
            return self.checkpoints.is_to_leave(wait.row, wait.num_pages)
        # It may also have come from a tier, or from another row
        return self._prefix.index.page_of(wait.leader.page_keys[wait.num_pages - 1]) is None

    def _num_to_share(self) -> int:
        """Return how many pages of group 0 blocked rows lack that their leaders have published and hold.

        None are counted where other groups must be resumed from, too, which may allow fewer.
        """
        slots = self._slots
        if self._tables.beside:
            return 0
        waits = [
            (row, wait.row, min(wait.num_pages, self.most_found.get(row, wait.num_pages)))
            for row, wait in self._blocked.items()
            if wait.leader is not None and slots.requests[wait.row] is wait.leader
        ]
        if not waits:
            return 0
        rows, leaders, stops = np.array(waits).T
        held, published = slots.num_pages[rows], np.zeros_like(slots.num_pages)
        for leader in set(leaders.tolist()):
            pages = slots.pages(leader)[: slots.num_published[leader]]
            published[leader] = self._prefix.is_cached(pages).sum()
        return int(np.maximum(np.minimum(published[leaders], stops) - held, 0).sum())

    def _look_up(self, row: int) -> bool:
        """End a row's wait, and share the pages published since its last lookup; return whether any were."""
        slots = self._slots
        request: Request = slots.requests[row]
        if self._blocked.pop(row).version == self._prefix.version:
            return False
        findable, held = request.tokens[: request.num_findable], slots.pages(row)
        pages = self._prefix.find(request.page_keys, findable, request.cache_salt, held)
        if (most := self.most_found.get(row)) is not None:
            pages = pages[: max(0, most - len(held))]
        pages = self._tables.resumable(pages, row)
        if len(pages):
            self.start_from(row, pages)
        return len(pages) > 0

    def _block_if_in_progress(self, row: int, computing: Sequence[int]) -> None:
        """Block a row while another row computes the page that it needs next.

        A row that came back with a page of its own that is not cached finds nothing behind that, and goes on.
        """
        request: Request = self._slots.requests[row]
        if not self._prefix.is_cached(self._slots.pages(row)[-1:]).all():
            return
        found = self._leader_of(request, int(self._slots.num_pages[row]), computing)
        if found is None:
            return
        leader, count = found
        self._blocked[row] = Wait(self._prefix.version, self._slots.requests[leader], leader, count)

    def publish_prompts(self, rows: Index) -> None:
        """Publish the prompt pages of these rows that have been computed."""
        slots = self._slots
        ripe = np.minimum(slots.num_computed[rows] // slots.page_size, slots.num_shareable[rows])
        due = ripe > slots.num_published[rows]
        for row, stop in zip(rows[due].tolist(), ripe[due].tolist()):
            self._publish(row, stop)

    def publish_all(self, row: int) -> None:
        """Publish all full pages that a row has computed, of its answer too.

        With a draft model only pages that it has computed as well are published.
        """
        slots = self._slots
        if self.checkpoints is not None:
            self.checkpoints.keep_last(row)
        num_keys = len(slots.requests[row].page_keys)
        num_whole = int(slots.num_computed[row] - slots.draft_lag[row])
        self._publish(row, min(num_whole // slots.page_size, num_keys))
        if self.checkpoints is not None:
            self.checkpoints.renew_last(row)

    def forget(self, row: int) -> None:
        """Remove everything that the row found or published from the cache, because it may be wrong."""
        keys = self._prefix.forget(self._slots.pages(row)[: self._slots.num_published[row]])
        self._end_waits()
        if self._has_tier and keys:
            numbers = [group.number for group in self._tables.groups]
            wrong = tuple(key_of_group(key, number) for number in numbers for key in keys)
            self._tables.copy(PageCopy(EMPTY, EMPTY, "off_tier", wrong))

    def forget_all(self) -> None:
        """Empty the prefix cache, but not the tier below."""
        self._prefix.forget_all()
        self._end_waits()

    def _end_waits(self) -> None:
        """Look all blocked rows up next: what a row computes behind forgotten pages is not published."""
        self._blocked = dict.fromkeys(self._blocked, Wait(-1))

    def leave(self, row: int) -> None:
        """Drop the row's wait: it is being freed."""
        self._blocked.pop(row, None)
        self.most_found.pop(row, None)
        if self.checkpoints is not None:
            self.checkpoints.leave(row)

    def _computing(self) -> list[int]:
        """Return the rows that compute prompts and wait for nobody, where layers keep states; else none."""
        if self.checkpoints is None:
            return []
        slots, busy = self._slots, self._slots.busy
        rows = busy[slots.num_published[busy] < slots.num_shareable[busy]].tolist()
        return [row for row in rows if row not in self._blocked]

    def _usable_keys(self, request: Request) -> list[bytes]:
        return request.page_keys[: self._num_usable(request)]

    def _num_usable(self, request: Request) -> int:
        """Return how many pages a request can use, without copying their keys, of which it may have many."""
        return min(len(request.page_keys), request.num_findable // self._slots.page_size)

    def _leader_of(self, request: Request, index: int, computing: Sequence[int]) -> tuple[int, int] | None:
        """Return the row that is about to publish the page that `request` needs at `index`, or None.

        With it comes how many pages the request waits for. `computing` are the rows of `_computing`, of which
        one may leave a state.
        """
        slots, keys, num_usable = self._slots, request.page_keys, self._num_usable(request)
        if index >= num_usable:
            return None
        if self.checkpoints is not None:  # pages alone are no use, and each is found with a state or not
            return self.checkpoints.awaited(request, self._usable_keys(request), index, computing)
        key = keys[index]
        candidates = (slots.num_shareable > index) & (slots.num_published <= index)
        for row in candidates.nonzero()[0].tolist():
            leader: Request = slots.requests[row]
            if row not in self._blocked and leader is not request and leader.page_keys[index] == key:
                return row, num_equal(keys, leader.page_keys, min(num_usable, int(slots.num_shareable[row])))
        return None

    def _publish(self, row: int, stop: int) -> None:
        """Publish the row's pages before page `stop`."""
        slots = self._slots
        first = int(slots.num_published[row])
        if stop <= first:
            return
        request: Request = slots.requests[row]
        pages = slots.pages(row)[:stop]
        were_found = self._prefix.is_cached(pages[first:])
        standing = self._prefix.publish(
            request.page_keys, slots.token_ids[row], pages, first, request.cache_salt
        )
        slots.num_published[row] = stop
        published = self._tables.publish(row, first, standing, were_found)
        if self.checkpoints is not None and self._tables.states is not None:
            self.checkpoints.published(row, first, published[self._tables.states.number][0])
        if self._has_tier:
            self._save(request.page_keys[first:], published)

    def _save(self, keys: Sequence[bytes], published: Sequence[tuple[Index, Index]]) -> None:
        """Have the tier save the pages of each group that a row has just published under some of `keys`."""
        for group, (new, pages) in zip(self._tables.groups, published):
            if len(new):
                names = tuple(key_of_group(keys[index], group.number) for index in new.tolist())
                self._tables.copy(PageCopy(pages, pages, "to_tier", names, group.number))
                self._counters.saved_pages += len(new)
