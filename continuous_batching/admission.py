"""Who comes in now?"""

from __future__ import annotations

from typing import Literal

from continuous_batching.counters import Counters
from continuous_batching.door import longest_tokens
from continuous_batching.policies.policy import Busy, Policy, Waiting
from continuous_batching.queue import WaitingQueue
from continuous_batching.request import Request
from continuous_batching.residency import Residency
from continuous_batching.searches import Searches
from continuous_batching.tables import EMPTY
from kv_cache.pages import Index

# What the head of the queue waits for: a slot, a share of the step's tokens, its policy's leave, or pages
HeldBack = Literal["slots", "tokens", "policy", "pages"]


class Admission:
    """Brings waiting requests into free rows while the policy, the slots and the pages allow it.

    `held_back` says why the last `admit` left some waiting; None where it left none.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        policy: Policy,
        residency: Residency,
        searches: Searches,
        counters: Counters,
    ) -> None:
        self._waiting = waiting
        self._policy = policy
        self._residency = residency
        self._searches = searches
        self._counters = counters
        self.held_back: HeldBack | None = None
        self._head: tuple[int, int, Index] = (-1, -1, EMPTY)  # the refused head, and what it would share

    def admit(self, max_batch_tokens: int, now_s: float) -> dict[str, int]:
        """Fill rows; returns the row of each request that came in."""
        residency, waiting, slots = self._residency, self._waiting, self._residency.slots
        entered: dict[str, int] = {}
        running = residency.runnable()
        computed = slots.num_computed[running]
        todo = slots.num_tokens[running] - computed
        queue = Waiting(len(waiting), now_s - waiting.longest_since_s)
        room = self._policy.room(Busy(todo, computed), max_batch_tokens, queue)
        tokens_left, requests_left = room.tokens, room.requests
        if tokens_left <= 0 or requests_left <= 0:
            self.held_back = "tokens" if int(todo.sum()) >= max_batch_tokens else "policy"
            return entered
        if not slots.num_free:
            self.held_back = "slots"
            return entered
        # pages that are neither held nor promised to a row for what it knows already
        spare = residency.tables.num_available - residency.num_promised()
        while tokens_left > 0 and requests_left > 0 and slots.num_free and len(waiting) and spare > 0:
            request = waiting.peek()
            matched = self._match(request)
            # the last token is never cached
            reserved = min(self._policy.reserve(request), longest_tokens(request) - 1)
            if request.params.beam_width > slots.num_free:
                break
            wanted = self._pages(request, matched, reserved)
            if wanted > spare:
                spare = 0
                break
            if room.whole and len(request.tokens) - len(matched) * slots.page_size > tokens_left:
                tokens_left = 0
                break
            spare -= wanted
            if not request.num_preemptions:
                residency.count_lookup(request, matched)
            waiting.remove(request)
            entered[request.id] = row = residency.enter(request, matched, reserved)
            if request.params.beam_width:
                self._searches.seat(request, row, reserved)
            if not request.num_preemptions:
                self._counters.prompt_tokens += request.num_prompt_tokens
            requests_left -= 1
            if not residency.is_blocked(row):
                tokens_left -= min(int(slots.num_tokens[row] - slots.num_computed[row]), room.chunk)
        if not len(waiting):
            self.held_back = None
        elif slots.num_free < max(1, waiting.peek().params.beam_width):
            self.held_back = "slots"
        else:
            self.held_back = "tokens" if tokens_left <= 0 else "pages" if requests_left > 0 else "policy"
        return entered

    def _pages(self, request: Request, matched: Index, reserved: int) -> int:
        """Pages that a newcomer takes from those that are available, for so many tokens."""
        shared = matched[matched > 0]  # resting ones take pages like what is computed
        idle = int((self._residency.tables.pool.holders[shared] == 1).sum())  # these counted as available
        wanted = -(-reserved // self._residency.slots.page_size) - len(shared) + idle
        return wanted + self._searches.extra_pages(request, reserved) if request.params.beam_width else wanted

    def _match(self, request: Request) -> Index:
        """What the head of the queue can share; searched again only when the cache has changed."""
        number, version, matched = self._head
        if number != request.number or version != self._residency.prefix.version:
            matched = self._residency.find(request)
            self._head = (request.number, self._residency.prefix.version, matched)
        return matched
