"""Which faults are seeded where it is decided who runs when?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ROOM = "continuous_batching/"
ADMISSION, DOOR, QUEUE = (
    ROOM + "scheduling/admission.py",
    ROOM + "scheduling/validation.py",
    ROOM + "queueing/waiting_queue.py",
)
ENDINGS, PREEMPTION = ROOM + "sampling/stopping.py", ROOM + "scheduling/preemption.py"
SCHEDULER, SLOTS = ROOM + "scheduling/scheduler.py", ROOM + "slots.py"
DRAFTS = ROOM + "sampling/drafts.py"

SCHEDULE_FAULTS = {
    "draft_after_a_wrong_one": Fault(
        DRAFTS + "::accepted",
        "np.cumsum(~is_right) - ~is_right",
        "0 * np.cumsum(~is_right)",
        "tokens are booked that follow from what the model never said",
    ),
    "wrong_drafts_computed": Fault(
        DRAFTS + "::book_drafts",
        "slots.num_computed[batch.owners[counted]] = batch.targets[counted]",
        "",
        "the keys of a rejected draft are read as those of the token in its place",
    ),
    "drafts_beyond_the_end": Fault(
        DRAFTS + "::book_drafts", "ended.add(row)", "pass", "an answer goes on after its end token"
    ),
    "drafts_evict": Fault(
        DRAFTS + "::extend_by_drafts",
        "extra and extra > tables.pool.num_free - lifecycle.num_promised()",
        "False",
        "a guess takes pages from a running request",
    ),
    "drafts_of_preempted_rows": Fault(
        SCHEDULER + "::Scheduler.schedule",
        "num_drafts = int(np.maximum(stops - slots.num_tokens[rows], 0).sum())",
        "pass",
        "a policy takes drafts that are gone for fewer tokens of prompts; a replay has none of them",
    ),
    "resumed_at_its_prompt": Fault(
        SLOTS + "::SlotPool.take",
        "self.num_tokens[row] = count",
        "self.num_tokens[row] = request.num_prompt_tokens",
        "a preempted request forgets what it has answered",
    ),
    "published_count_stays": Fault(
        SLOTS + "::SlotPool.take",
        "(self.num_computed, self.num_drafts, self.num_pages, self.num_published)",
        "(self.num_computed, self.num_drafts, self.num_pages)",
        "a row's next request publishes nothing",
    ),
    "newcomers_at_the_end": Fault(
        SLOTS + "::SlotPool.take",
        "int(np.searchsorted(self.number[self.busy], request.number))",
        "len(self.busy)",
        "a resumed request loses its place and is preempted first again",
    ),
    "aborted_while_swapped": Fault(
        SCHEDULER + "::Scheduler.end",
        "self.lifecycle.swap.forget(request)",
        "",
        "an abort during a swap leaks host pages",
    ),
    "abort_of_the_unknown": Fault(
        SCHEDULER + "::Scheduler.end",
        "None if row is None else self._finish(row, reason)",
        "self._finish(row, reason)",
        "an abort that comes after the end stops the engine",
    ),
    "victim_stays_in_the_batch": Fault(
        PREEMPTION + "::Preemption.make_room",
        "~np.isin(rows, self._beam_searches.rows_of(victim))",
        "rows >= 0",
        "a request is computed in the row that it was just thrown out of",
    ),
    "victim_not_requeued": Fault(
        PREEMPTION + "::Preemption.preempt",
        "self._waiting.push(request)",
        "",
        "a preempted request is never heard of again",
    ),
    "oldest_preempted": Fault(
        PREEMPTION + "::Preemption.make_room",
        "self.victim(slots, others)",
        "self.victim(slots, slots.busy)",
        "two requests that do not fit together take turns for ever",
    ),
    "resize_evicts_nothing": Fault(
        SCHEDULER + "::Scheduler.resize",
        "tables.evict(max(0, pool.num_held - (num_pages - 1)))",
        "",
        "held pages are cut off with the pool",
    ),
    "resize_without_compaction": Fault(
        SCHEDULER + "::Scheduler.resize",
        "tables.compact(pool.num_pages)",
        "",
        "held pages at the high end are cut off",
    ),
    "resize_forgets_followers": Fault(
        SCHEDULER + "::Scheduler.resize",
        "[*self.waiting.requests, *slots.requests[slots.busy], *self._parallel_samples.requests]",
        "[*self.waiting.requests, *slots.requests[slots.busy]]",
        "the pool shrinks below what a sample will need",
    ),
    "followers_orphaned": Fault(
        SCHEDULER + "::Scheduler._part",
        "if request.followers:\n    self._parallel_samples.part(request)",
        "",
        "when the first sample is aborted the others never answer",
    ),
    "nan_becomes_a_token": Fault(
        ENDINGS + "::StopConditions.of",
        "tokens < 0",
        "tokens < -1",
        "logits that are not finite go on as an answer",
    ),
    "idle_pages_counted_twice": Fault(
        ADMISSION + "::Admission._pages",
        "-(-reserved // self._lifecycle.slots.page_size) - len(shared) + idle",
        "-(-reserved // self._lifecycle.slots.page_size) - len(shared)",
        "a newcomer is let in on pages that are its own prefix, and thrown out again",
    ),
    "stale_lookup": Fault(
        ADMISSION + "::Admission._match",
        "number != request.number or version != self._lifecycle.prefix.version",
        "number != request.number",
        "a newcomer shares pages that were evicted since it was refused",
    ),
    "last_token_needs_a_page": Fault(
        ADMISSION + "::Admission.admit",
        "longest_tokens(request) - 1",
        "longest_tokens(request) + 1",
        "a request that just fits is never admitted",
    ),
    "door_counts_the_null_page": Fault(
        DOOR + "::_capacity",
        "pool.num_pages - 1",
        "pool.num_pages",
        "a request is taken that can never fit, and blocks all",
    ),
    "queue_keeps_the_dead": Fault(
        QUEUE + "::WaitingQueue._top",
        "heap and self._waiting.get(heap[0][2].id) is not heap[0][2]",
        "False",
        "an aborted request is admitted",
    ),
}
