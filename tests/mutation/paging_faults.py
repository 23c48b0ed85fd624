"""Faults of the pages that requests hold: forks, copies on write, swaps and compaction."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "full_hit_computes_nothing": Fault(
        "continuous_batching/request.py::Request.num_findable",
        "len(self.tokens) - 1",
        "len(self.tokens)",
        "a prompt that is cached whole leaves no token to sample from",
        "tests/continuous_batching/test_scheduler.py::test_a_full_hit_computes_only_the_last_token",
    ),
    "published_before_computed": Fault(
        "continuous_batching/paging/prefix_matching.py::PrefixMatching.publish_prompts",
        "np.minimum(slots.num_computed[rows] // slots.page_size, slots.num_shareable[rows])",
        "slots.num_shareable[rows]",
        "others read pages that the next chunk will write",
        "tests/kv_cache/test_identity.py::test_prompts_that_arrive_together_give_the_tokens_of_each_alone",
    ),
    "half_page_published": Fault(
        "continuous_batching/paging/prefix_matching.py::PrefixMatching.publish_all",
        "num_whole // slots.page_size",
        "-(-num_whole // slots.page_size)",
        "an aborted request leaves a page that is found and half written",
        "tests/continuous_batching/test_tier.py::test_who_waits_for_pages_holds_back_those_behind_and_is_counted",
    ),
    "failed_pages_stay": Fault(
        "continuous_batching/paging/prefix_matching.py::PrefixMatching.forget",
        "self._prefix.forget(self._slots.pages(row)[: self._slots.num_published[row]])",
        "[]",
        "one request's NaN poisons all that share its prompt",
        "tests/continuous_batching/test_tier.py::test_nothing_of_a_request_that_failed_stays_in_the_tier",
    ),
    "swap_drops_the_last_page": Fault(
        "kv_cache/groups.py::FullGroup.to_swap",
        "-(-num_computed // self.page_size)",
        "num_computed // self.page_size",
        "the partly filled page of a victim is not swapped out",
        "tests/continuous_batching/test_draft_model.py::test_rows_lack_tokens_while_they_have_no_drafts_and_catch_up",
    ),
    "swapped_in_after_any_beginning": Fault(
        "continuous_batching/paging/slot_lifecycle.py::SlotLifecycle.comes_back",
        "len(matched) == swapped.first",
        "len(matched) <= swapped.first",
        "pages come back although the shared ones before them were evicted",
        "tests/continuous_batching/test_slot_lifecycle.py::test_a_swapped_request_whose_shared_pages_are_gone_is_computed_again",
    ),
    "nobody_waits_for_a_page": Fault(
        "continuous_batching/paging/prefix_matching.py::PrefixMatching._leader_of",
        "index >= num_usable",
        "True",
        "prompts that arrive together are all computed",
        "tests/continuous_batching/test_scheduler.py::test_a_common_prompt_that_arrives_at_once_is_computed_once",
    ),
    "promises_not_counted": Fault(
        "continuous_batching/paging/page_tables.py::PageTables.num_promised",
        "int(group.promised(busy, tokens).sum())",
        "0 * int(group.promised(busy, tokens).sum())",
        "admitted, preempted, admitted again: nothing gets on",
        "tests/continuous_batching/test_scheduler.py::test_what_is_promised_to_a_running_prompt_is_not_given_to_a_newcomer",
    ),
    "fork_marks_one_side": Fault(
        "continuous_batching/paging/page_tables.py::PageTables.fork",
        "{source, row}",
        "{row}",
        "the leader writes on into the page that its forks read",
        "tests/kv_cache/test_identity.py::test_aborts_at_every_step_leave_the_others_the_tokens_of_each_alone",
    ),
    "copy_on_write_from_three": Fault(
        "kv_cache/groups.py::PageGroup._copy_on_write",
        "self.pool.holders[page] > 1",
        "self.pool.holders[page] > 2",
        "the last two sharers write into one page",
        "tests/kv_cache/test_identity.py::test_aborts_at_every_step_leave_the_others_the_tokens_of_each_alone",
    ),
    "compaction_moves_no_data": Fault(
        "continuous_batching/paging/page_tables.py::PageTables.compact",
        "self.copy(copy)",
        "",
        "pages are renamed, and their content stays behind",
        "tests/continuous_batching/test_slot_lifecycle.py::test_compaction_brings_held_pages_to_the_low_end_a_few_at_a_time",
    ),
    "host_pool_overdrawn": Fault(
        "continuous_batching/paging/slot_lifecycle.py::SwapTier.leave",
        "not all(group.can_yield_host(len(pages)) for group, (_, pages) in zip(groups, parts))",
        "False",
        "samples of one prompt exhaust the host pool, and the engine stops",
        "tests/continuous_batching/test_slot_lifecycle.py::test_without_room_in_the_host_pool_a_victim_is_computed_again",
    ),
}
