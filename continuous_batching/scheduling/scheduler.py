"""Decide the batch of each step, and book its results.

`schedule` admits requests, shares the token budget, adds drafts and makes room for pages; `commit` books the
tokens, publishes pages and ends requests. The steps themselves live in the modules of this package; the
scheduler owns them and their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from continuous_batching.batch import LATE, NO_BATCH, NOT_FINITE, Batch, Booked, Sampled, StateCut
from continuous_batching.counters import Counters
from continuous_batching.paging.page_tables import EMPTY, Compaction
from continuous_batching.paging.slot_lifecycle import SlotLifecycle
from continuous_batching.policies.policy import Busy, Policy
from continuous_batching.queueing import QueueGate, QueueLimits, WaitingQueue
from continuous_batching.request import Request
from continuous_batching.samples.beam_search import BeamSearches
from continuous_batching.samples.parallel_samples import ParallelSamples
from continuous_batching.samples.stopping import FAILURES, StopConditions, complaint
from continuous_batching.scheduling.admission import Admission, HeldBack
from continuous_batching.scheduling.in_flight import InFlight
from continuous_batching.scheduling.preemption import Preemption, Victim, youngest
from continuous_batching.scheduling.validation import (
    GiveUp,
    check_budget,
    check_request,
    check_resize,
    check_samples,
    is_here,
)
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.speculation import (
    Speculation,
    book_drafts,
    extend_by_drafts,
    yield_at_drafts,
)
from continuous_batching.step_time import StepTime
from kv_cache.groups import BesideGroup
from kv_cache.pages import Index, PagePool


class Scheduler:
    """Owns the slots, the pages and the waiting requests.

    It is a function of its inputs alone: requests and times in, batches out. It reads no clock and no device,
    and its only randomness comes from `seed`.

    `vocab_size` and `eos_token_ids` are the model's. `waiting` is an empty queue with the wanted order (None:
    first come, first served), and `limits` say what is refused or given up. With `outrank`, the head of the
    queue preempts running requests of lower priority if slots or pages run short. `max_shared_tokens` bounds
    the prefix that may be shared and the prompts that may share (None: unbounded), for models whose keys
    depend on the length of their prompt. With a `host_pool`, pages that only a preempted request has computed
    wait there, and evicted pages rest there, instead of being computed again. With `has_tier` there is a tier
    below: published pages are copied to it, and pages found there come to rest in the host pool. With
    `speculation`, decoding rows have drafts verified. With `step_time`, which the policy and the speculation
    may share, it observes each step before them. Every `compact_every_steps` steps (0: never) held pages
    start to move to the low end, at most `compact_pages_per_step` of them in a step (0: all). `depth` batches
    are in flight at once (Orca's n_workers), each with its share of the rows. `groups` are the pages of
    layers that see a window and of those that keep a state; `pool` and `host_pool` are those of all others.
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
        limits: QueueLimits | None = None,
        outrank: bool = False,
        victim: Victim = youngest,
        host_pool: PagePool | None = None,
        has_tier: bool = False,
        speculation: Speculation | None = None,
        step_time: StepTime | None = None,
        prefix_sharing: bool = True,
        max_shared_tokens: int | None = None,
        compact_every_steps: int = 0,
        compact_pages_per_step: int = 0,
        seed: int = 0,
        depth: int = 1,
        groups: Sequence[BesideGroup] = (),
    ) -> None:
        check_budget(max_batch_tokens, policy, slots)
        self.slots, self.pool, self.host_pool = slots, pool, host_pool
        self.counters = Counters()
        self.lifecycle = SlotLifecycle(
            slots,
            pool,
            self.counters,
            prefix_sharing=prefix_sharing,
            max_shared_tokens=max_shared_tokens,
            host=host_pool,
            has_tier=has_tier,
            groups=groups,
        )
        self.prefix, self.tables = self.lifecycle.prefix, self.lifecycle.tables
        self._checkpoints = self.lifecycle.matching.checkpoints
        self.waiting = WaitingQueue() if waiting is None else waiting
        self.in_flight = InFlight(slots, depth)
        self.max_batch_tokens = max_batch_tokens  # may be changed between steps
        self.speculation, self.step_time = speculation, step_time
        self.depth, self.has_tier = depth, has_tier
        self._policy = policy
        self.vocab_size, self.eos_token_ids = vocab_size, eos_token_ids
        self._counted_late = EMPTY  # late rows that are counted since the last batch was made
        self._gate = QueueGate(limits or QueueLimits(), self.waiting)
        self._stop_conditions = StopConditions(slots, vocab_size, eos_token_ids)
        self._beam_searches = BeamSearches(self.lifecycle, self._stop_conditions, self.counters)
        self._parallel_samples = ParallelSamples(self.lifecycle, self.waiting)
        held = self.lifecycle, self.waiting, self._beam_searches
        self.preemption = Preemption(*held, self.in_flight, self.counters, victim)
        self._admission = Admission(*held, self.preemption, self.counters, policy, outrank=outrank)
        compaction = Compaction(self.tables, compact_every_steps, compact_pages_per_step)
        self._compaction = compaction if compact_every_steps else None
        self._outrank = outrank
        self._random = np.random.default_rng(seed)
        self._num_arrived, self._committed_s = 0, 0.0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(len(self.waiting) or len(self.slots.busy))

    @property
    def num_waiting(self) -> int:
        """The number of samples without a row, of which some wait for their leader's prompt."""
        return len(self.waiting) + len(self._parallel_samples.leader_of)

    @property
    def held_back(self) -> HeldBack | None:
        """Why the head of the queue was not admitted to this step; None if the queue is empty."""
        return self._admission.held_back if len(self.waiting) else None

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises BadRequest, with nothing changed, if it could never be served, and QueueFull if the queue is
        too long.
        """
        self.check(request)
        self._gate.check(request, len(self._parallel_samples.leader_of))
        request.page_keys = self.page_keys(request)
        for each in (request, *request.followers):
            each.number = self._num_arrived
            self._num_arrived += 1
            each.page_keys = list(request.page_keys)
            each.seed = each.params.seed
            if each.seed is None:
                each.seed = int(self._random.integers(2**63))
            self._gate.watch(each)
        if request.followers:
            self._parallel_samples.add(request)
        if request.params.beam_width:
            self._num_arrived += self._beam_searches.add(request)
        self.lifecycle.matching.arrives(request)
        self.waiting.push(request)

    def lift_wait_limit(self) -> None:
        """Let requests that are added from now on wait for any time."""
        self._gate.lift_wait_limit()

    def page_keys(self, request: Request) -> list[bytes]:
        """Return the keys of the shareable pages of a request's prompt.

        `add` hashes nothing if the request has them.
        """
        return self.lifecycle.matching.keys(request)

    def check(self, request: Request) -> None:
        """Raise BadRequest for a request that can never be served, or whose id is in use."""
        check_samples(request)
        for each in (request, *request.followers):
            is_running = self.slots.find(each.id) is not None
            if is_running or each.id in self._parallel_samples.leader_of or self.waiting.find(each.id):
                raise is_here(each)
            stops = self._stop_conditions.stop_tokens(each.params)
            check_request(each, self.vocab_size, stops, self.slots, self.tables.groups)

    def end(self, request_id: str, reason: str) -> Request | None:
        """End a request now, wherever it is; return None if it is not here.

        A token of it that is in flight is dropped, and its row is freed when that batch is committed.
        """
        request = self.waiting.find(request_id)
        if request is not None:
            self.waiting.remove(request)
            self.lifecycle.swap.forget(request)
            self._part(request)
        else:
            request = self._parallel_samples.end(request_id)
        if request is not None:
            request.finish_reason = reason
            return request
        row = self.slots.find(request_id)
        return None if row is None else self._finish(row, reason)

    def expire(self, now_s: float) -> list[Request]:
        """End the requests that have waited or run too long, before a step is scheduled; return them."""
        over = [request for request in self._gate.over(now_s) if self.end(request.id, "timeout")]
        for request in over:
            request.finish_s = now_s
        return over

    @property
    def can_look_ahead(self) -> bool:
        """Whether the next batch can be made while the last is in flight.

        It cannot if it depends on tokens that are still unknown, as with forks, beams, drafts and changes of
        logits (the latter two are allowed if batches have no row in common). Nor can it if a row may have to
        be preempted, for pages or by priority, because the row's request would not know its last token; that
        rows take shared pages of a window which nobody used is not foreseen, and leaves the batch empty.
        """
        busy = self.slots.busy
        if self._parallel_samples.leader_of or self._beam_searches.by_number:
            return False
        is_hopeful = self.depth == 1 and self.speculation is not None and self.speculation.is_hopeful
        if is_hopeful or not self.in_flight.takes_another or (self._outrank and len(self.waiting)):
            return False
        return self.tables.can_go_on(busy)

    def schedule(self, now_s: float, late: Index = EMPTY) -> Batch:
        """Admit requests, share the budget, make room for pages, and only then make the batch.

        The batch may be empty. With a batch in flight, this may be called only if `can_look_ahead`. The rows
        `late` are left out, because their masks are not made.
        """
        ahead = len(self.in_flight) > 0
        if ahead:
            assert self.in_flight.takes_another, "the next batch depends on those in flight"
            self.in_flight.advance()
        self._count_late(late)
        self.lifecycle.withheld = np.concatenate((self.in_flight.withheld(), late)) if ahead else late
        self.tables.free_behind()
        if len(self.waiting):
            self._admission.admit(self.max_batch_tokens, now_s)
        self._gate.measure(now_s)
        slots = self.slots
        if self._beam_searches.by_number:
            self._beam_searches.start_beams()
        rows = self.lifecycle.runnable()
        if self.depth > 1 and not (self._beam_searches.by_number or self._parallel_samples.leader_of):
            # No batch takes more than its share of the busy rows, nor of those left for later batches
            most = min(-(-len(slots.busy) // self.depth), -(-len(rows) // (self.depth - len(self.in_flight))))
            rows = rows[:most]
        if not len(rows):  # nothing was decided; pending copies wait for a batch that runs
            return NO_BATCH
        if self._compaction is not None and (self.depth == 1 or not ahead):
            self._compaction.step(self.counters.steps)
        rows, starts, stops, only_decodes = self._shared(rows)
        if self._beam_searches.by_number:
            stops = self._beam_searches.wait_for_beams(rows, stops)
            rows, starts, stops = self._beam_searches.keep_together(rows, starts, stops)
        num_drafts = 0
        if self.speculation is not None and (self.depth > 1 or not ahead):
            left = self.max_batch_tokens - int((stops - starts).sum())
            flying = self.in_flight.rows if ahead else EMPTY
            if self.speculation.propose(rows, starts, stops, left, flying):
                stops, num_drafts = extend_by_drafts(self.lifecycle, rows, stops, left)
        if not self.tables.grow_to(rows, stops):
            rows, starts, stops = self.preemption.make_room(rows, starts, stops)
            num_drafts = int(np.maximum(stops - slots.num_tokens[rows], 0).sum())  # preempted rows have left
        sampled = (stops >= slots.num_tokens[rows]).nonzero()[0]
        owners, involved = rows[sampled], rows
        if self._parallel_samples.leader_of:
            sampled, owners = self._parallel_samples.fork(rows, sampled)
            involved = np.union1d(rows, owners)
        if not len(rows):  # all were preempted, each for another one; their copies wait as above
            return NO_BATCH
        targets = stops[sampled]
        if num_drafts:
            sampled, owners, targets = yield_at_drafts(slots, sampled, owners, targets)
        cuts = () if self._checkpoints is None else self._states_kept(rows, starts, stops, num_drafts)
        copies, unknown = self.tables.take_copies(), self.in_flight.is_unknown(rows)
        drafter = () if self.speculation is None else self.speculation.draft_spans(rows, starts, stops)
        batch = Batch(rows, starts, stops, sampled, owners, targets, copies, unknown, num_drafts, *drafter)
        if cuts:
            batch = replace(batch, cuts=cuts)
        self.in_flight.launch(batch, involved, EMPTY if only_decodes else involved, now_s)
        self._counted_late = EMPTY
        return batch

    def _count_late(self, late: Index) -> None:
        """Count the late rows that would get a token now, and each of them once until a batch is made."""
        if len(late):
            slots, counted = self.slots, self._counted_late
            late = late[slots.decoding(late, slots.num_computed[late], slots.num_tokens[late])]
            self.counters.late_masks += int((~np.isin(late, counted)).sum())
            self._counted_late = late

    def _states_kept(self, rows: Index, starts: Index, stops: Index, num_drafts: int) -> tuple[StateCut, ...]:
        """Keep the states that are wanted of these spans; return the cuts within them."""
        assert self._checkpoints is not None, "there are no states"
        slots = self.slots
        known = np.minimum(stops, slots.num_tokens[rows]) if num_drafts else stops
        at = starts if self.speculation is None else starts - slots.state_lag[rows]
        self._checkpoints.keep_answers(rows, at)
        return self._checkpoints.cuts(rows, starts, known)

    def _shared(self, rows: Index) -> tuple[Index, Index, Index, bool]:
        """Share the budget of a step; return the spans, and whether all of them are decodes."""
        slots = self.slots
        starts, known = slots.num_computed[rows], slots.num_tokens[rows]
        todo, decodes = known - starts, slots.decoding(rows, starts, known)
        if decodes.all():
            return rows, starts, known, True
        todo = self._policy.share(Busy(todo, starts, decodes), self.max_batch_tokens)
        granted = todo > 0
        rows, starts, todo = rows[granted], starts[granted], todo[granted]
        stops = self.tables.fitting(rows, starts, starts + todo)
        if self._checkpoints is not None:
            stops = self._checkpoints.aligned(rows, starts, stops, self.max_batch_tokens)
            kept = stops > starts
            rows, starts, stops = rows[kept], starts[kept], stops[kept]
        return rows, starts, stops, False

    def commit(self, batch: Batch, sampled: Sampled, now_s: float) -> Booked:
        """Book the device's answer to a batch.

        A row with drafts gets the tokens behind its accepted drafts, up to one that ends it; a late row gets
        none.
        """
        slots, counters, outrun = self.slots, self.counters, self.in_flight.outrun
        prompts, scheduled_s = self.in_flight.land(batch)
        rows, positions = batch.owners, batch.targets
        over = self._stop_conditions.of(rows, sampled.tokens, positions)
        if batch.num_drafts or (sampled.tokens == LATE).any():
            counted = book_drafts(slots, batch, sampled, over)
            counters.late_masks += self.in_flight.put_off(batch, sampled)
            rows, positions, sampled = rows[counted], positions[counted], sampled.take(counted)
            over = {at: over[index] for at, index in enumerate(counted.tolist()) if index in over}
        if self.speculation is not None:
            self.speculation.learn(batch, rows, positions, sampled.tokens, counters)
        not_finite = rows[sampled.tokens == NOT_FINITE]
        # No other row may share what such a row computed, not even within this commit
        wrong = [*not_finite.tolist(), *(row for row, is_wrong in outrun.items() if is_wrong)]
        if len(prompts):
            right = prompts[~np.isin(prompts, wrong)] if wrong else prompts
            self.lifecycle.matching.publish_prompts(right)
        ends = {int(rows[index]): reason for index, reason in over.items()}
        if outrun:
            kept = np.flatnonzero(~np.isin(rows, list(outrun)))
            rows, positions, sampled = rows[kept], positions[kept], sampled.take(kept)
            ends = {row: reason for row, reason in ends.items() if row not in outrun}
        booked = rows, sampled
        if self._beam_searches.by_number:
            single, of_searches = self._beam_searches.advance(rows, sampled, now_s)
            rows, positions, sampled = rows[single], positions[single], sampled.take(single)
            ends = of_searches | {row: ends[row] for row in rows.tolist() if row in ends}
        slots.token_ids[rows, positions] = sampled.tokens
        slots.num_tokens[rows] = positions + 1
        slots.add_logprobs(rows, sampled)
        for row in rows[positions == slots.num_given[rows]].tolist():
            slots.requests[row].first_token_s = now_s
        counters.steps += 1
        counters.computed_tokens += batch.num_tokens
        counters.sampled_tokens += len(booked[0])
        took_s = now_s - max(scheduled_s, self._committed_s)
        if self.step_time is not None:
            self.step_time.observe(batch, took_s)
        self._policy.observe(batch, took_s)
        if self.speculation is not None:
            self.speculation.observe(batch, took_s)
        self._committed_s = now_s
        if self.waiting.shares:
            self.waiting.shares.charge_answers(booked[0])
        finished = [self._finish(row, reason) for row, reason in ends.items()]
        for request in finished:
            request.finish_s = now_s
        if outrun:
            for row, is_wrong in self.in_flight.take_landed().items():
                self.lifecycle.vacate(row, is_wrong=is_wrong or row in not_finite)
        flushes = self.has_tier and not self.has_work
        return Booked(*booked, finished, self.tables.take_copies() if flushes else ())

    def resize(
        self, num_pages: int, give_up: GiveUp = "nothing", window_pages: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Change the number of pages while serving; raises ValueError, with nothing changed, if impossible.

        `window_pages` are the pages of each window, and then the states; what is not given keeps its number.
        Held pages are moved to the low end first. A smaller pool may need pages that are held now: `give_up`
        says whether idle cached pages may be evicted ("cached"), and rows preempted ("running"), for it.
        Every accepted request still fits. Returns the number of pages of each group.
        """
        assert not len(self.in_flight), "pages were cut off under a batch in flight"
        tables, slots = self.tables, self.slots
        own = [group.pool.num_pages for group in tables.beside]
        counts = (num_pages, *window_pages, *own[len(window_pages) :])
        assert len(counts) == len(tables.groups), f"{len(counts)} numbers for {len(tables.groups)} pools"
        taken = [*self.waiting.requests, *slots.requests[slots.busy], *self._parallel_samples.requests]
        for group, count in zip(tables.groups, counts):
            check_resize(count, give_up, group, taken)
        self.preemption.free_pages(counts)
        for group, count in zip(tables.groups, counts):
            tables.evict(max(0, group.pool.num_held - (count - 1)), group.number)
        tables.compact(max(group.pool.num_pages for group in tables.groups))
        tables.resize(counts)
        return counts

    def _finish(self, row: int, reason: str) -> Request:
        is_beam, failed = self.slots.beam_width[row] > 0, reason in FAILURES
        is_wrong = reason == "error"  # what got no token for another reason was computed as it always is
        rows = self._beam_searches.rows_of(row) if is_beam else [row]
        in_flight = any(self.in_flight.holds(each) for each in rows) if len(self.in_flight) else False
        for each in rows if in_flight else ():
            self.in_flight.outrun_by(each, is_wrong=is_wrong)
        self.lifecycle.lease(row, reason)
        leave = self.lifecycle.settle if in_flight else self.lifecycle.leave
        request, *_ = [leave(each, failed=failed, is_wrong=is_wrong) for each in rows]
        self._part(request)
        request.finish_reason = "error" if failed else reason
        if failed:
            request.error, request.is_at_fault = complaint(reason, request), reason == "blocked"
        return request

    def _part(self, request: Request) -> None:
        """Detach an ending request from its beams, and from the samples that still follow it."""
        if request.params.beam_width:
            self._beam_searches.end(request)
        if request.followers:
            self._parallel_samples.part(request)
