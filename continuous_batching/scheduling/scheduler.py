"""Who computes what in this step, and what became of it?"""

from __future__ import annotations

import numpy as np

from continuous_batching.batch import NO_BATCH, Batch, Sampled
from continuous_batching.counters import Counters
from continuous_batching.paging.compaction import Compaction
from continuous_batching.paging.page_tables import EMPTY
from continuous_batching.paging.residency import Residency
from continuous_batching.policies.policy import Busy, Policy
from continuous_batching.queueing.limits import QueueGate, QueueLimits
from continuous_batching.queueing.waiting_queue import WaitingQueue
from continuous_batching.request import Request
from continuous_batching.sampling.beam_search import BeamSearches
from continuous_batching.sampling.parallel_samples import ParallelSamples
from continuous_batching.sampling.stopping import StopConditions
from continuous_batching.scheduling.admission import Admission, HeldBack
from continuous_batching.scheduling.in_flight import InFlight
from continuous_batching.scheduling.preemption import Preemption
from continuous_batching.scheduling.validation import (
    GiveUp,
    check_budget,
    check_request,
    check_resize,
    check_samples,
)
from continuous_batching.scheduling.victims import Victim, youngest
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index, PagePool


class Scheduler:
    """Owns the slots, the pages and the waiting requests.

    It is a function of its inputs alone: requests and times in, batches out; no clock, no device, no
    chance but from `seed`.

    `vocab_size` and `eos_token_ids` are the model's. `waiting` is an empty queue of the order that is wanted
    (None: first come, first served), `bounds` what is refused or given up; with `outrank`, who is next
    preempts running requests of lower priority where slots or pages run short. `max_shared_tokens` bounds
    the prefix that may be shared and the prompts that may share (None: unbounded), for models whose keys
    depend on the length of their prompt. With a `host_pool`, what a preempted request alone has computed
    waits there, and what is evicted rests there, instead of being computed again. Every
    `compact_every_steps` steps (0: never) held pages start to move to the low end, at most
    `compact_pages_per_step` of them in a step (0: all).
    """

    def __init__(
        self,
        slots: SlotPool,
        pool: PagePool,
        policy: Policy,
        *,
        max_batch_tokens: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        waiting: WaitingQueue | None = None,
        bounds: QueueLimits | None = None,
        outrank: bool = False,
        victim: Victim = youngest,
        host_pool: PagePool | None = None,
        prefix_sharing: bool = True,
        max_shared_tokens: int | None = None,
        compact_every_steps: int = 0,
        compact_pages_per_step: int = 0,
        seed: int = 0,
    ) -> None:
        check_budget(max_batch_tokens, policy, slots)
        self.slots = slots
        self.pool = pool
        self.counters = Counters()
        self.residency = Residency(
            slots,
            pool,
            self.counters,
            prefix_sharing=prefix_sharing,
            max_shared_tokens=max_shared_tokens,
            host=host_pool,
        )
        self.waiting = WaitingQueue() if waiting is None else waiting
        self._gate = QueueGate(bounds or QueueLimits(), self.waiting)
        self._policy = policy
        self.max_batch_tokens = max_batch_tokens  # may be changed between steps
        self._vocab_size = vocab_size
        self._endings = StopConditions(slots, vocab_size, eos_token_ids)
        self._searches = BeamSearches(self.residency, self._endings, self.counters)
        self._compaction = Compaction(self.residency.tables, compact_every_steps, compact_pages_per_step)
        self._random = np.random.default_rng(seed)
        self._num_arrived = 0
        self._row_of: dict[str, int] = {}
        held = self.residency, self._searches, self.counters
        self.flight = InFlight(slots)
        self.preemption = Preemption(self.waiting, *held, victim, self._row_of, self.flight)
        self._admission = Admission(
            self.waiting, *held, policy, self.preemption, self._row_of, outrank=outrank
        )
        self._outrank = outrank
        self._committed_s = 0.0
        self._followers = ParallelSamples(self.residency, self.waiting, self._row_of)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(len(self.waiting) or len(self.slots.busy))

    @property
    def held_back(self) -> HeldBack | None:
        """Why the head of the queue was not admitted to this step; None if nobody was left waiting."""
        return self._admission.held_back if len(self.waiting) else None

    def add(self, request: Request) -> None:
        """Queue a request; raises ValueError, with nothing changed, if it could never be served, and
        QueueFull, which is one, if too much waits before it."""
        self.check(request)
        self._gate.check(request, len(self._followers))
        request.page_keys = self.residency.keys(request)
        for each in (request, *request.followers):
            each.number = self._num_arrived
            self._num_arrived += 1
            each.page_keys = list(request.page_keys)
            each.seed = each.params.seed
            if each.seed is None:
                each.seed = int(self._random.integers(2**63))
            self._gate.watch(each)
        self._followers.add(request)
        if request.params.beam_width:
            self._num_arrived += self._searches.add(request)
        self.waiting.push(request)

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that could never be served, or not beside those that are here."""
        check_samples(request)
        for each in (request, *request.followers):
            if each.id in self._row_of or each.id in self._followers or self.waiting.find(each.id):
                raise ValueError(f"request {each.id} is being served already; give each an id of its own")
            stops = self._endings.stop_tokens(each.params)
            check_request(each, self._vocab_size, stops, self.slots, self.pool)

    def end(self, request_id: str, reason: str) -> Request | None:
        """End a request now, wherever it is; None if it is not here (any more).

        A token of it that is in flight is dropped, and its row is freed when that is committed.
        """
        request = self.waiting.find(request_id)
        if request is not None:
            self.waiting.remove(request)
            self.residency.swap.forget(request)
            self._searches.end(request)
            self._followers.part(request)
            request.finish_reason = reason
            return request
        request = self._followers.end(request_id)
        if request is not None:
            request.finish_reason = reason
            return request
        row = self._row_of.get(request_id)
        if row is None:
            return None
        return self._finish(row, reason)

    def expire(self, now_s: float) -> list[Request]:
        """End who has waited or taken too long, before a step is scheduled; returns them."""
        over = [request for request in self._gate.over(now_s) if self.end(request.id, "timeout")]
        for request in over:
            request.finish_s = now_s
        return over

    @property
    def can_look_ahead(self) -> bool:
        """Whether the next batch can be made while the last is in flight.

        Not where it depends on which tokens come: forks, beams, what edits logits; nor where a row may be
        preempted, for pages or by rank, because its request would not know its last token.
        """
        slots, tables, busy = self.slots, self.residency.tables, self.slots.busy
        if len(self.flight) != 1 or len(self._followers) or len(self._searches):
            return False
        if (self._outrank and len(self.waiting)) or not slots.plain[self.flight.last.owners].all():
            return False
        missing = int(tables.missing(busy, slots.num_tokens[busy] + 1).sum())
        return missing + len(tables.forked) <= tables.num_available

    def schedule(self, now_s: float) -> Batch:
        """Admit, share the budget, make room, and only then make the batch; it may be empty.

        With a batch in flight, only where `can_look_ahead` says so.
        """
        ahead = len(self.flight) > 0
        if ahead:
            assert self.can_look_ahead, "the next batch depends on the one in flight"
            self.flight.advance()
        self.residency.withheld = self.flight.withheld() if ahead else EMPTY
        self.residency.prefix.history.now_s = now_s
        if len(self.waiting):
            self._admission.admit(self.max_batch_tokens, now_s)
            self._gate.measure(now_s)
        slots = self.slots
        if self._searches:
            self._searches.part()
        rows = self.residency.runnable()
        if not len(rows):  # nothing was decided: changes of pages wait for a batch that runs
            return NO_BATCH
        self._compaction.step(self.counters.steps)
        starts = slots.num_computed[rows]
        todo = slots.num_tokens[rows] - starts
        if todo.sum() > len(todo):
            todo = self._policy.share(Busy(todo, starts), self.max_batch_tokens)
            granted = todo > 0
            rows, starts, todo = rows[granted], starts[granted], todo[granted]
        stops = starts + todo
        if self._searches:
            rows, starts, stops = self._searches.together(rows, starts, stops)
        rows, starts, stops = self.preemption.make_room(rows, starts, stops)
        sampled = (stops == slots.num_tokens[rows]).nonzero()[0]
        owners = rows[sampled]
        in_flight = rows
        if len(self._followers):
            sampled, owners = self._followers.fork(rows, sampled)
            in_flight = np.union1d(rows, owners)
        if not len(rows):  # as above
            return NO_BATCH
        changes, unknown = self.residency.tables.take_changes(), self.flight.is_unknown(rows)
        batch = Batch(rows, starts, stops, sampled, owners, *changes, unknown)
        self.flight.launch(batch, in_flight, now_s)
        return batch

    def commit(self, batch: Batch, sampled: Sampled, now_s: float) -> list[Request]:
        """Book what the device computed; returns the requests that ended with it."""
        slots, outrun = self.slots, self.flight.outrun
        in_flight, scheduled_s = self.flight.land(batch)
        rows, failed = batch.owners, batch.owners[sampled.tokens < 0]
        # nobody may come to hold what a failed row computed, not even within this commit
        wrong = [*failed.tolist(), *(row for row, has_failed in outrun.items() if has_failed)]
        self.residency.publish_prompts(in_flight[~np.isin(in_flight, wrong)] if wrong else in_flight)
        if outrun:
            counted = np.flatnonzero(~np.isin(rows, list(outrun)))
            rows, sampled = rows[counted], sampled.take(counted)
        ends: dict[int, str] = {}
        if self._searches:
            rows, sampled, ends = self._searches.advance(rows, sampled, now_s)
        at = slots.num_tokens[rows]
        slots.token_ids[rows, at] = sampled.tokens
        slots.num_tokens[rows] = at + 1
        slots.tell(rows, sampled)
        for row in rows[at == slots.num_prompt[rows]].tolist():
            slots.requests[row].first_token_s = now_s
        counters = self.counters
        counters.steps += 1
        counters.computed_tokens += batch.num_tokens
        counters.sampled_tokens += len(batch.owners)
        self._policy.observe(batch, now_s - max(scheduled_s, self._committed_s))
        self._committed_s = now_s
        if self.waiting.shares:
            self.waiting.shares.charge_answers(batch.owners)
        finished = self._end_rows(rows, sampled.tokens, ends, now_s)
        if outrun:
            for row, has_failed in self.flight.take_landed().items():
                self.residency.vacate(row, failed=has_failed or row in failed)
        return finished

    def compact(self) -> int:
        """Bring all held pages to the low end before the next batch; returns how many move."""
        assert not len(self.flight), "pages moved under a batch in flight"
        return self.residency.tables.compact(self.pool.num_pages)

    def resize(self, num_pages: int, give_up: GiveUp = "nothing") -> None:
        """Change the number of pages while serving; raises ValueError, with nothing changed, if it cannot be.

        What is held is moved to the low end first. A smaller pool may need pages that are held now:
        `give_up` says whether idle cached pages may be evicted ("cached"), and rows preempted
        ("running"), for it. Every request that was accepted still fits.
        """
        assert not len(self.flight), "pages were cut off under a batch in flight"
        pool, prefix, tables, slots = self.pool, self.residency.prefix, self.residency.tables, self.slots
        accepted = [*self.waiting.requests, *slots.requests[slots.busy], *self._followers.requests]
        check_resize(num_pages, give_up, pool, prefix.num_idle, slots.page_size, accepted)
        self.preemption.free_pages(num_pages - 1)
        tables.evict(max(0, pool.num_held - (num_pages - 1)))
        tables.compact(pool.num_pages)
        tables.resize(num_pages)

    def _end_rows(self, rows: Index, tokens: Index, ends: dict[int, str], now_s: float) -> list[Request]:
        """End what these tokens end, beside what is to end already."""
        over = self._endings.of(rows, tokens)
        finished = [self._finish(row, reason) for row, reason in (ends | over).items()]
        for request in finished:
            request.finish_s = now_s
        return finished

    def _finish(self, row: int, reason: str) -> Request:
        rows, failed = self._searches.rows_of(row), reason == "error"
        in_flight = any(self.flight.holds(each) for each in rows) if len(self.flight) else False
        for each in rows if in_flight else ():
            self.flight.outrun_by(each, failed=failed)
        leave = self.residency.settle if in_flight else self.residency.leave
        request, *_ = [leave(each, failed=failed) for each in rows]
        self._searches.end(request)
        del self._row_of[request.id]
        self._followers.part(request)
        request.finish_reason = reason
        if reason == "error":
            request.error = f"request {request.id}: the model's logits were not finite"
        return request
