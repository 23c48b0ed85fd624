"""Admit waiting requests to free slots.

A request is admitted if the policy grants it tokens of the step, a slot is free, and there are pages for its
reservation after its prefix hits. The first request of the queue that does not fit holds back those behind
it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from continuous_batching.counters import Counters
from continuous_batching.paging.page_tables import EMPTY
from continuous_batching.paging.prefix_matching import MOST_FORESEEN
from continuous_batching.paging.slot_lifecycle import SlotLifecycle
from continuous_batching.policies.policy import ALL, Busy, Policy, Room, Waiting
from continuous_batching.queueing import WaitingQueue
from continuous_batching.request import Request
from continuous_batching.samples.beam_search import BeamSearches
from continuous_batching.scheduling.preemption import Preemption
from continuous_batching.scheduling.validation import longest_tokens
from kv_cache.pages import Index

# What the head of the queue waits for: a slot, tokens of the step, the policy, pages, or a lookup in the tier
# below
HeldBack = Literal["slots", "tokens", "policy", "pages", "tier"]


class Admission:
    """Admits waiting requests to free rows while the policy, the slots and the pages allow it.

    `held_back` says why the last `admit` left requests waiting, or is None if it left none. With `outrank`,
    the head of the queue preempts running requests of lower priority if slots or pages run short.
    """

    def __init__(
        self,
        lifecycle: SlotLifecycle,
        waiting: WaitingQueue,
        beam_searches: BeamSearches,
        preemption: Preemption,
        counters: Counters,
        policy: Policy,
        *,
        outrank: bool,
    ) -> None:
        self._lifecycle = lifecycle
        self._waiting = waiting
        self._beam_searches = beam_searches
        self._preemption = preemption
        self._counters = counters
        self._policy = policy
        self._outrank = outrank
        self.held_back: HeldBack | None = None
        # (arrival number, cache version, matched pages) of the head of the queue at its last lookup
        self._head: tuple[int, int, Index] = (-1, -1, EMPTY)
        # Where tenants take turns, the request for which others were preempted last, until it is admitted
        self._first: Request | None = None

    def admit(self, max_batch_tokens: int, now_s: float) -> None:
        """Admit requests for a step of at most `max_batch_tokens` tokens."""
        waiting, slots = self._waiting, self._lifecycle.slots
        self.held_back = "slots"
        if not slots.num_free and not self._is_outranked():
            return
        room = self._room(max_batch_tokens, now_s)
        tokens_left, requests_left, longs_left = room.tokens, room.requests, room.long_requests
        of_longs = room.long_tokens
        if tokens_left <= 0 or requests_left <= 0:
            return
        spare = self._lifecycle.tables.num_spare()
        while tokens_left > 0 and requests_left > 0:
            short_only = longs_left <= 0
            if waiting.shares:
                waiting.shares.short_only = short_only
            request = self._next(short_only)
            if request is None:
                break
            if request.awaits_pages:
                self.held_back = "tier"
                return
            lacks_slots = slots.num_free < max(1, request.params.beam_width)
            if lacks_slots and not self._outrank:
                self.held_back = "slots"
                return
            matched = self._match(request)
            # the last token is never cached
            reserved = min(self._policy.reserve(request), longest_tokens(request) - 1)
            wanted = self._pages(request, matched, reserved)
            if room.whole and len(request.tokens) - len(matched) * slots.page_size > tokens_left:
                self.held_back = "tokens"  # nobody is preempted for what this step cannot compute
                return
            if lacks_slots:
                if self._makes_way(request):
                    spare = self._lifecycle.tables.num_spare()
                    continue
                self.held_back = "slots"
                return
            if (wanted > spare).any():
                # Less is promised to rows that share pages, also where a leader has just been preempted or
                # layers have windows or states, for which `num_spare` foresees nothing
                if self._lifecycle.share_published():
                    spare = self._lifecycle.tables.num_spare()
                    continue
                # If nothing runs whose end could be waited for, pages held for other engines give way
                if self._makes_way(request) or (not len(slots.busy) and self._lifecycle.held.give_way()):
                    spare = self._lifecycle.tables.num_spare()
                    continue
                self.held_back = "pages"
                return
            spare -= wanted
            longs_left -= (is_long := waiting.is_long(request))
            row = self._enter(request, matched, reserved, now_s)
            requests_left -= 1
            if not self._lifecycle.matching.is_blocked(row):
                most = min(room.chunk, of_longs) if is_long else room.chunk
                taken = min(int(slots.num_tokens[row] - slots.num_computed[row]), most)
                tokens_left, of_longs = tokens_left - taken, of_longs - is_long * taken
        self.held_back = ("tokens" if tokens_left <= 0 else "policy") if len(waiting) else None

    def _is_outranked(self) -> bool:
        """Whether the head of the queue would preempt a running request."""
        request = self._next() if self._outrank else None
        return request is not None and self._preemption.outranked(request) is not None

    def _next(self, short_only: bool = False) -> Request | None:
        """Return the request that is admitted next, or None.

        Who was made room for has it, whose turn ever it is then: the tenant of those that gave it would take
        it back. Only those that outrank that request go before it, and short ones where it has no place.
        """
        waiting, first = self._waiting, self._first
        request = waiting.peek(short_only)
        if first is None or request is None:
            return request
        if waiting.find(first.id) is not first:
            self._first = None
            return request
        if short_only and waiting.is_long(first):
            return request
        goes_before = request.priority > first.priority and waiting.place(request) < waiting.place(first)
        return request if goes_before else first

    def _makes_way(self, request: Request) -> bool:
        """Preempt a running request for one that outranks it; return whether there was any."""
        if not (self._outrank and self._preemption.make_way(request)):
            return False
        if self._waiting.shares:  # Otherwise the order alone puts whoever was preempted behind it
            self._first = request
        return True

    def _room(self, max_batch_tokens: int, now_s: float) -> Room:
        slots, running = self._lifecycle.slots, self._lifecycle.runnable()
        computed, known = slots.num_computed[running], slots.num_tokens[running]
        decodes, num_others = slots.decoding(running, computed, known), len(slots.busy) - len(running)
        busy = Busy(known - computed, computed, decodes, num_others)
        queue = Waiting(len(self._waiting), now_s - self._waiting.longest_since_s)
        self.held_back = "tokens" if int(busy.todo.sum()) >= max_batch_tokens else "policy"
        room = self._policy.room(busy, max_batch_tokens, queue)
        if num_others and room.long_requests < ALL:
            room = room._replace(long_requests=room.long_requests - self._num_other_longs(running))
        return room

    def _num_other_longs(self, running: Index) -> int:
        """Return how many long prompts are computed in rows that cannot run now.

        Beams that wait are left out, because their leader computes the prompt for them.
        """
        slots = self._lifecycle.slots
        rows = slots.busy[~np.isin(slots.busy, [*running.tolist(), *self._lifecycle.waiting_beams])]
        computed, known = slots.num_computed[rows], slots.num_tokens[rows]
        # A row that has ended in flight has nothing left to compute
        is_prompt = ~slots.decoding(rows, computed, known) & (computed < known)
        return int(np.count_nonzero(is_prompt & (known > self._waiting.long_tokens)))

    def _enter(self, request: Request, matched: Index, reserved: int, now_s: float) -> int:
        """Give a request a row; on its first admission, count its prompt and its hits."""
        lifecycle, first_time = self._lifecycle, not request.num_preemptions
        self._head = (-1, -1, EMPTY)  # it may come back with other tokens, as a beam, and find others
        if first_time:
            request.admitted_s = now_s
            lifecycle.matching.count_lookup(request, matched)
        if request is self._first:
            self._first = None
        self._waiting.remove(request)
        row = lifecycle.enter(request, matched, reserved)
        if lifecycle.matching.checkpoints is not None:
            lifecycle.matching.foresee(row, self._waiting.oldest(MOST_FORESEEN))
        if request.params.beam_width:
            self._beam_searches.take_rows(request, row, reserved)
        if first_time:
            self._counters.prompt_tokens += request.num_prompt_tokens
            if self._waiting.shares:
                missing = len(request.tokens) - int(lifecycle.slots.num_computed[row])
                self._waiting.shares.charge_prompt(request, missing)
        return row

    def _pages(self, request: Request, matched: Index, reserved: int) -> Index:
        """Return how many of each group's available pages a new request takes for so many tokens."""
        groups, comes_back = self._lifecycle.tables.groups, self._lifecycle.comes_back(request, matched)
        wanted = [group.wanted(matched, reserved, comes_back=comes_back) for group in groups]
        if request.params.beam_width:
            extra, others = self._beam_searches.extra_pages(request, reserved), request.params.beam_width - 1
            for at, group in enumerate(groups):
                wanted[at] += others * min(extra, group.needed(reserved))
        return np.array(wanted)

    def _match(self, request: Request) -> Index:
        """Return the cached pages that the head of the queue can share.

        They are looked up again only if the cache has changed.
        """
        number, version, matched = self._head
        if number != request.number or version != self._lifecycle.prefix.version:
            matched = self._lifecycle.find(request, self._beam_searches.most_found(request))
            self._head = (request.number, self._lifecycle.prefix.version, matched)
        return matched
