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

SCHEDULE_FAULTS = (
    Fault(
        "draft_after_a_wrong_one",
        DRAFTS,
        "wrong = np.cumsum(~is_right) - ~is_right",
        "wrong = 0 * np.cumsum(~is_right)",
        "tokens are booked that follow from what the model never said",
    ),
    Fault(
        "wrong_drafts_computed",
        DRAFTS,
        "    slots.num_computed[batch.owners[counted]] = batch.targets[counted]\n",
        "",
        "the keys of a rejected draft are read as those of the token in its place",
    ),
    Fault(
        "drafts_beyond_the_end",
        DRAFTS,
        "                ended.add(row)\n",
        "                pass\n",
        "an answer goes on after its end token",
    ),
    Fault(
        "drafts_evict",
        DRAFTS,
        "if extra and extra > tables.pool.num_free - lifecycle.num_promised():",
        "if False:",
        "a guess takes pages from a running request",
    ),
    Fault(
        "drafts_of_preempted_rows",
        SCHEDULER,
        "num_drafts = int(np.maximum(stops - slots.num_tokens[rows], 0).sum())",
        "pass",
        "a policy takes drafts that are gone for fewer tokens of prompts; a replay has none of them",
    ),
    Fault(
        "resumed_at_its_prompt",
        SLOTS,
        "        self.num_tokens[row] = count\n",
        "        self.num_tokens[row] = request.num_prompt_tokens\n",
        "a preempted request forgets what it has answered",
    ),
    Fault(
        "published_count_stays",
        SLOTS,
        "for column in (self.num_computed, self.num_drafts, self.num_pages, self.num_published):",
        "for column in (self.num_computed, self.num_drafts, self.num_pages):",
        "a row's next request publishes nothing",
    ),
    Fault(
        "newcomers_at_the_end",
        SLOTS,
        "at = int(np.searchsorted(self.number[self.busy], request.number))",
        "at = len(self.busy)",
        "a resumed request loses its place and is preempted first again",
    ),
    Fault(
        "aborted_while_swapped",
        SCHEDULER,
        "            self.lifecycle.swap.forget(request)\n",
        "",
        "an abort during a swap leaks host pages",
    ),
    Fault(
        "abort_of_the_unknown",
        SCHEDULER,
        "        return None if row is None else self._finish(row, reason)\n",
        "        return self._finish(row, reason)  # type: ignore[arg-type]\n",
        "an abort that comes after the end stops the engine",
    ),
    Fault(
        "victim_stays_in_the_batch",
        PREEMPTION,
        "kept = ~np.isin(rows, self._beam_searches.rows_of(victim))",
        "kept = rows >= 0",
        "a request is computed in the row that it was just thrown out of",
    ),
    Fault(
        "victim_not_requeued",
        PREEMPTION,
        "        request.num_preemptions += 1\n        self._waiting.push(request)\n",
        "        request.num_preemptions += 1\n",
        "a preempted request is never heard of again",
    ),
    Fault(
        "oldest_preempted",
        PREEMPTION,
        "victim = self.victim(slots, others)",
        "victim = self.victim(slots, slots.busy)",
        "two requests that do not fit together take turns for ever",
    ),
    Fault(
        "resize_evicts_nothing",
        SCHEDULER,
        "        tables.evict(max(0, pool.num_held - (num_pages - 1)))\n",
        "",
        "held pages are cut off with the pool",
    ),
    Fault(
        "resize_without_compaction",
        SCHEDULER,
        "        tables.compact(pool.num_pages)\n",
        "",
        "held pages at the high end are cut off",
    ),
    Fault(
        "resize_forgets_followers",
        SCHEDULER,
        ", *self._parallel_samples.requests]",
        "]",
        "the pool shrinks below what a sample will need",
    ),
    Fault(
        "followers_orphaned",
        SCHEDULER,
        "        if request.followers:\n            self._parallel_samples.part(request)\n",
        "",
        "when the first sample is aborted the others never answer",
    ),
    Fault(
        "nan_becomes_a_token",
        ENDINGS,
        "failed = tokens < 0",
        "failed = tokens < -1",
        "logits that are not finite go on as an answer",
    ),
    Fault(
        "idle_pages_counted_twice",
        ADMISSION,
        " - len(shared) + idle\n",
        " - len(shared)\n",
        "a newcomer is let in on pages that are its own prefix, and thrown out again",
    ),
    Fault(
        "stale_lookup",
        ADMISSION,
        "if number != request.number or version != self._lifecycle.prefix.version:",
        "if number != request.number:",
        "a newcomer shares pages that were evicted since it was refused",
    ),
    Fault(
        "last_token_needs_a_page",
        ADMISSION,
        "longest_tokens(request) - 1)",
        "longest_tokens(request) + 1)",
        "a request that just fits is never admitted",
    ),
    Fault(
        "door_counts_the_null_page",
        DOOR,
        "return (pool.num_pages - 1) * slots.page_size + 1",
        "return pool.num_pages * slots.page_size + 1",
        "a request is taken that can never fit, and blocks all",
    ),
    Fault(
        "queue_keeps_the_dead",
        QUEUE,
        "while heap and self._waiting.get(heap[0][2].id) is not heap[0][2]:",
        "while False:",
        "an aborted request is admitted",
    ),
)
