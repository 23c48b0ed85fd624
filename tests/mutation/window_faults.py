"""Faults of pages that windows give back: freed too early, too late or twice, or found where they are not."""

from __future__ import annotations

from tests.mutation.fault import Fault

STORM = (
    "tests/continuous_batching/test_window_schedules.py"
    "::test_requests_get_the_tokens_of_each_alone_whatever_happens_to_the_pages_of_windows"
)

FAULTS = {
    "window_page_freed_too_early": Fault(
        "kv_cache/groups.py::WindowGroup.first_seen",
        "self.window - 1",
        "self.window - 2",
        "a query lacks the first position of its window, wherever a page ends there",
        STORM,
    ),
    "window_page_freed_too_late": Fault(
        "continuous_batching/paging/page_tables.py::PageTables.free_behind",
        "group.first_seen(computed)",
        "group.first_seen(computed) - 1",
        "a request of many windows finds no page, although it was promised that it would",
        "tests/continuous_batching/test_window_schedules.py"
        "::test_a_request_of_many_windows_needs_the_pages_of_one_and_one_less_is_refused",
    ),
    "window_page_freed_twice": Fault(
        "kv_cache/groups.py::PageGroup.free_behind",
        "self.first[rows] = firsts",
        "",
        "two requests get the same page",
        STORM,
    ),
    "window_freed_before_it_is_published": Fault(
        "continuous_batching/paging/page_tables.py::PageTables.free_behind",
        "np.minimum(group.first_seen(computed), published)",
        "group.first_seen(computed + 16)",
        "what a chunk leaves behind is gone before its batch is booked",
        STORM,
    ),
    "window_hit_not_cut_back": Fault(
        "kv_cache/groups.py::WindowGroup.resumable",
        "last_lacking <= self.first_seen(np.arange(count + 1) * self.page_size)",
        "np.ones(count + 1, dtype=np.bool_)",
        "a request goes on after a prefix whose last window was evicted",
        "tests/continuous_batching/test_window_schedules.py"
        "::test_a_prefix_is_resumed_from_the_last_page_whose_window_is_still_here",
    ),
    "window_evicted_and_still_found": Fault(
        "kv_cache/groups.py::BesideGroup._forget",
        "self.beside[names] = 0",
        "",
        "a page that was given to another request is found as the window of a prefix",
        STORM,
    ),
    "window_not_renamed_with_its_entry": Fault(
        "kv_cache/prefix_cache.py::PrefixCache._rename",
        "group.renamed(sources, targets)",
        "",
        "an entry that moved has the window of another one beside it",
        STORM,
    ),
    "window_outlives_its_entry": Fault(
        "kv_cache/prefix_cache.py::PrefixCache._remove",
        "group.removed(names.tolist())",
        "",
        "pages leak with every entry that is evicted",
        STORM,
    ),
    "window_of_two_groups_cut_apart": Fault(
        "continuous_batching/paging/page_tables.py::PageTables.resumable",
        "np.logical_and.reduce(able)",
        "able[-1]",
        "a prefix is resumed from where only the last group has its window",
        STORM,
    ),
    "chunk_not_shortened": Fault(
        "kv_cache/groups.py::WindowGroup.fitting",
        "int(missing.sum()) <= left",
        "True",
        "a long chunk preempts those that run, for pages that it needs for one step",
        "tests/continuous_batching/test_window_schedules.py"
        "::test_a_long_chunk_preempts_nobody_for_pages_that_it_needs_for_one_step",
    ),
    "beams_lose_where_they_start": Fault(
        "continuous_batching/samples/beam_search.py::BeamSearches.wait_for_beams",
        "stops[rows == leader] = np.minimum(stops[rows == leader], most)",
        "",
        "a resumed search has freed what its other beams start from",
        "tests/continuous_batching/test_beam_search.py"
        "::test_a_resumed_search_keeps_the_window_from_which_its_beams_start",
    ),
    "search_found_by_former_tokens": Fault(
        "continuous_batching/scheduling/admission.py::Admission._enter",
        "self._head = (-1, -1, EMPTY)",
        "",
        "a search that is preempted again starts from pages of tokens that its first beam no longer has",
        "tests/continuous_batching/test_beam_search.py"
        "::test_a_search_preempted_again_finds_pages_by_the_tokens_that_it_has_by_then",
    ),
    "windows_of_the_tier_under_one_key": Fault(
        "continuous_batching/paging/prefix_matching.py::PrefixMatching._save",
        "key_of_group(keys[index], group.number)",
        "keys[index]",
        "a page of a window is written where one of all tokens is looked up",
        "tests/continuous_batching/test_tier.py::test_of_a_window_the_tier_has_what_a_prefix_is_resumed_from",
    ),
    "router_expects_what_windows_lack": Fault(
        "continuous_batching/routing/routing.py::Routing._first",
        "self._resumable(replica, keys[:count], tokens_a_key, groups.values())",
        "count",
        "a router sends a prompt to where its last window was evicted",
        "tests/continuous_batching/test_routing.py::test_a_hit_ends_where_a_replica_has_what_its_windows_see",
    ),
    "window_smaller_than_accepted_requests": Fault(
        "continuous_batching/scheduling/scheduler.py::Scheduler.resize",
        "check_resize(count, give_up, group, taken)",
        "check_resize(counts[0], give_up, tables.groups[0], taken)",
        "a window's pool becomes smaller than what an accepted request needs of it",
        "tests/continuous_batching/test_window_schedules.py"
        "::test_a_pool_of_a_window_shrinks_no_further_than_accepted_requests_allow",
    ),
    "windows_captured_with_other_pages": Fault(
        "models/step/graph_inputs.py::GraphInputs.fill",
        "pages[:width, : len(owners)] = table[owners, :width].T",
        "pages[:width, : len(owners)] = slots.page_table[owners, :width].T",
        "captured steps read the pages of another group",
        "tests/models/test_graphs.py::test_each_group_of_windows_has_addresses_and_pages_of_its_own",
    ),
}
