"""Faults of policies, of the order of the queue, and of its limits."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
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
    "nobody_ages": Fault(
        "continuous_batching/queueing.py::Aged.__call__",
        "request.arrival_s - self.priority_s * request.priority",
        "-self.priority_s * request.priority",
        "who has waited for hours is overtaken for ever",
        "tests/continuous_batching/test_ordering.py::test_who_has_aged_cannot_be_preempted_any_more",
    ),
    "turns_saved_up": Fault(
        "continuous_batching/queueing.py::FairShare.join",
        "self._served[tenant] = max(self._served[tenant], self._floor)",
        "",
        "a tenant that was away has all turns when it comes back",
        "tests/continuous_batching/test_ordering.py::test_a_tenant_saves_up_no_turns",
    ),
    "tenant_of_the_row_before": Fault(
        "continuous_batching/queueing.py::FairShare.charge_answers",
        "self._row_number[rows] != slots.number[rows]",
        "self._row_number[rows] < 0",
        "a tenant pays for what another is served",
        "tests/continuous_batching/test_ordering.py::test_tenants_take_turns_by_the_tokens_they_were_served",
    ),
    "outranked_without_end": Fault(
        "continuous_batching/scheduling/preemption.py::Preemption.outranked",
        "row if self._waiting.place(request) < self._waiting.place(slots.requests[row]) else None",
        "row",
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
    "target_unheeded": Fault(
        "continuous_batching/policies/prefill_budget.py::AdaptiveChunks.limit",
        "self._target_itl_s",
        "2 * self._target_itl_s",
        "decodes wait twice as long as they may",
        "tests/continuous_batching/test_adaptive_prefill_budget.py::test_the_target_is_held_within_a_tenth_while_the_load_doubles_and_halves",
    ),
}
