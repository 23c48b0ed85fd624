"""Faults of the scheduler: policies, queues, admission, preemption, resizes, ends, and batches in flight."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "draft_after_a_wrong_one": Fault(
        "continuous_batching/speculation/speculation.py::accepted",
        "np.cumsum(~is_right) - ~is_right",
        "0 * np.cumsum(~is_right)",
        "tokens are booked that follow from what the model never said",
        "tests/continuous_batching/test_drafts.py::test_drafts_bring_the_same_tokens_in_fewer_steps",
    ),
    "resumed_at_its_prompt": Fault(
        "continuous_batching/slots.py::SlotPool.take",
        "self.num_tokens[row] = count",
        "self.num_tokens[row] = request.num_prompt_tokens",
        "a preempted request forgets what it has answered",
        "tests/continuous_batching/test_drafts.py::test_drafts_bring_the_same_tokens_in_fewer_steps",
    ),
    "newcomers_at_the_end": Fault(
        "continuous_batching/slots.py::SlotPool._insert_busy",
        "int(np.searchsorted(self.number[self.busy], number))",
        "len(self.busy)",
        "a resumed request loses its place and is preempted first again",
        "tests/continuous_batching/test_scheduler.py::test_the_slot_table_takes_and_frees_rows_oldest_first",
    ),
    "aborted_while_swapped": Fault(
        "continuous_batching/scheduling/scheduler.py::Scheduler.end",
        "self.lifecycle.swap.forget(request)",
        "",
        "an abort during a swap leaks host pages",
        "tests/continuous_batching/test_slot_lifecycle.py::test_a_swapped_request_that_is_aborted_leaves_nothing_behind",
    ),
    "oldest_preempted": Fault(
        "continuous_batching/scheduling/preemption.py::Preemption.make_room",
        "self.victim(slots, others)",
        "self.victim(slots, slots.busy)",
        "two requests that do not fit together take turns for ever",
        "tests/continuous_batching/test_small_pools.py::test_the_oldest_is_never_preempted_whoever_is_chosen",
    ),
    "resize_without_compaction": Fault(
        "continuous_batching/scheduling/scheduler.py::Scheduler.resize",
        "tables.compact(max(group.pool.num_pages for group in tables.groups))",
        "",
        "held pages at the high end are cut off",
        "tests/continuous_batching/test_slot_lifecycle.py::test_the_pool_shrinks_and_grows_while_serving",
    ),
    "followers_orphaned": Fault(
        "continuous_batching/scheduling/scheduler.py::Scheduler._part",
        "if request.followers:\n    self._parallel_samples.part(request)",
        "",
        "when the first sample is aborted the others never answer",
        "tests/continuous_batching/test_slot_lifecycle.py::test_when_a_leader_is_aborted_the_next_sample_leads",
    ),
    "stale_lookup": Fault(
        "continuous_batching/scheduling/admission.py::Admission._match",
        "number != request.number or version != self._lifecycle.prefix.version",
        "number != request.number",
        "a newcomer shares pages that were evicted since it was refused",
        "tests/continuous_batching/test_scheduler.py::test_the_youngest_is_preempted_and_resumes_where_its_pages_are_found",
    ),
    "door_counts_the_null_page": Fault(
        "continuous_batching/scheduling/validation.py::_capacity",
        "pool.num_pages - 1",
        "pool.num_pages",
        "a request is taken that can never fit, and blocks all",
        "tests/continuous_batching/test_scheduler.py::test_a_request_that_can_never_fit_is_refused_at_the_door",
    ),
    "ended_under_the_batch": Fault(
        "continuous_batching/scheduling/scheduler.py::Scheduler._finish",
        "len(self.in_flight)",
        "False",
        "a row is freed while the device computes it, and booked after",
        "tests/continuous_batching/test_scheduler.py::test_a_row_that_ends_between_schedule_and_commit_is_freed_by_the_commit",
    ),
    "late_token_kept": Fault(
        "continuous_batching/scheduling/scheduler.py::Scheduler.commit",
        "np.flatnonzero(~np.isin(rows, list(outrun)))",
        "np.arange(len(rows))",
        "a client gets a token after it hung up",
        "tests/continuous_batching/test_scheduler.py::test_logprobs_stay_aligned_with_the_answer_when_a_request_is_ended_in_flight",
    ),
    "unknown_token_read_by_the_host": Fault(
        "continuous_batching/scheduling/scheduler.py::Scheduler.schedule",
        "self.in_flight.is_unknown(rows)",
        "EMPTY",
        "the device computes token 0 in place of the one that it chose",
        "tests/continuous_batching/test_overlap.py::test_the_next_step_begins_before_the_tokens_of_this_one_are_waited_for",
    ),
    "ahead_without_pages": Fault(
        "continuous_batching/paging/page_tables.py::PageTables.can_go_on",
        "int(group.least(rows, stops).sum()) + forked <= group.num_available",
        "True",
        "a row alone finds no page before those of its chunk in flight are given back",
        "tests/continuous_batching/test_window_schedules.py"
        "::test_no_step_is_begun_ahead_of_the_pages_that_a_row_alone_gives_back_behind_its_chunk",
    ),
    "preempted_in_flight": Fault(
        "continuous_batching/scheduling/preemption.py::Preemption.make_room",
        "self._in_flight.holds(victim)",
        "False",
        "a row is preempted whose last token nobody knows",
        "tests/continuous_batching/test_window_schedules.py"
        "::test_a_row_in_flight_is_not_preempted_for_a_window_that_another_row_goes_on_from",
    ),
    "ahead_of_what_edits_read": Fault(
        "continuous_batching/scheduling/in_flight.py::InFlight.takes_another",
        "bool(self._slots.plain[self.last.owners].all())",
        "True",
        "a penalty counts a token that is not there yet",
        "tests/continuous_batching/test_overlap.py::test_no_step_is_begun_ahead_of_what_it_depends_on",
    ),
    "unknown_token_answered": Fault(
        "continuous_batching/scheduling/in_flight.py::InFlight.outrun_by",
        "self._slots.num_tokens[row] -= 1",
        "",
        "an aborted answer ends in a token that nobody chose",
        "tests/continuous_batching/test_overlap.py::test_an_answer_ends_before_a_token_that_nobody_knows",
    ),
    "longs_keep_nothing": Fault(
        "continuous_batching/policies/prefill_budget.py::LongPrompts._half",
        "-(-max(total, 0) // 2)",
        "0",
        "a long prompt waits for as long as short ones come",
        "tests/continuous_batching/test_policies.py::test_short_prompts_overtake_long_ones_which_keep_half",
    ),
    "orca_counts_no_decodes": Fault(
        "continuous_batching/policies/batching.py::Orca.share",
        "budget - int(np.count_nonzero(decodes))",
        "budget",
        "a step exceeds its budget by its decodes",
        "tests/continuous_batching/test_policies.py::test_orca_computes_whole_prompts_beside_all_decodes",
    ),
    "turns_saved_up": Fault(
        "continuous_batching/queueing.py::FairShare.join",
        "self._served[tenant] = max(self._served[tenant], self._floor)",
        "",
        "a tenant that was away has all turns when it comes back",
        "tests/continuous_batching/test_ordering.py::test_a_tenant_saves_up_no_turns",
    ),
    "outranked_without_end": Fault(
        "continuous_batching/scheduling/preemption.py::Preemption.outranked",
        "place(request) < place(slots.requests[row])",
        "True",
        "a request of low priority is preempted whenever one of higher priority comes",
        "tests/continuous_batching/test_ordering.py::test_who_has_aged_cannot_be_preempted_any_more",
    ),
    "queue_without_end": Fault(
        "continuous_batching/queueing.py::QueueGate.check",
        "count > limit",
        "count > 2 * limit",
        "more wait than the bound says",
        "tests/continuous_batching/test_limits.py::test_a_queue_that_is_full_refuses_and_says_when_to_come_again",
    ),
}
