"""Faults of pages that windows give back: freed too early, too late or twice, or found where they are not."""

from __future__ import annotations

from tests.mutation.fault import Fault

STORM = (
    "tests/continuous_batching/test_window_schedules.py"
    "::test_requests_get_the_tokens_of_each_alone_whatever_happens_to_the_pages_of_windows"
)
ONE_WINDOW = (
    "tests/continuous_batching/test_window_schedules.py"
    "::test_a_request_of_many_windows_needs_the_pages_of_one_and_one_less_is_refused"
)
RESUMED = (
    "tests/continuous_batching/test_window_schedules.py"
    "::test_a_prefix_is_resumed_from_the_last_page_whose_window_is_still_here"
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
        ONE_WINDOW,
    ),
    "window_page_freed_twice": Fault(
        "kv_cache/groups.py::PageGroup.free_behind",
        "self.first[rows] = firsts",
        "",
        "two requests get the same page",
        STORM,
    ),
    "window_never_freed": Fault(
        "continuous_batching/scheduling/scheduler.py::Scheduler.schedule",
        "self.tables.free_behind()",
        "",
        "a long request keeps all pages",
        ONE_WINDOW,
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
        RESUMED,
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
    "window_not_swapped_in": Fault(
        "continuous_batching/paging/slot_lifecycle.py::SlotLifecycle._swap_in",
        "self.tables.copy(copy)",
        "",
        "a request that comes back sees what another one left in its window",
        STORM,
    ),
    "window_not_copied_on_write": Fault(
        "kv_cache/groups.py::PageGroup._copy_on_write",
        "group=self.number",
        "group=0",
        "the samples of one prompt write into each other's window",
        STORM,
    ),
    "window_table_not_compacted": Fault(
        "kv_cache/groups.py::PageGroup.compact",
        "self.table[rows, :width] = target_of[self.table[rows, :width]]",
        "",
        "rows name the pages that their window had before it was moved",
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
    "resting_page_taken_unpromised": Fault(
        "kv_cache/groups.py::WindowGroup.resumable",
        "beside == 0 if rests else beside <= 0",
        "beside == 0",
        "a row that waited takes pages for copies, while other rows hold all of them",
        "tests/continuous_batching/test_window_schedules.py"
        "::test_a_row_that_waited_for_pages_takes_none_for_copies_of_resting_ones",
    ),
    "search_found_by_former_tokens": Fault(
        "continuous_batching/scheduling/admission.py::Admission._enter",
        "self._head = (-1, -1, EMPTY)",
        "",
        "a search that is preempted again starts from pages of tokens that its first beam no longer has",
        "tests/continuous_batching/test_beam_search.py"
        "::test_a_search_preempted_again_finds_pages_by_the_tokens_that_it_has_by_then",
    ),
    "leader_found_beyond_its_beams": Fault(
        "continuous_batching/samples/beam_search.py::BeamSearches.most_found",
        "search.num_shared(self._slots.page_size)",
        "None",
        "a leader starts behind its other beams, and does not have what their windows see",
        "tests/continuous_batching/test_beam_search.py::test_a_resumed_search_that_just_fits_finishes",
    ),
    "windows_of_the_tier_under_one_key": Fault(
        "continuous_batching/paging/prefix_matching.py::PrefixMatching._save",
        "key_of_group(keys[index], group.number)",
        "keys[index]",
        "a page of a window is written where one of all tokens is looked up",
        "tests/continuous_batching/test_tier.py::test_of_a_window_the_tier_has_what_a_prefix_is_resumed_from",
    ),
    "windows_of_the_tier_into_other_pages": Fault(
        "continuous_batching/paging/prefix_matching.py::PrefixMatching._take_in",
        "group=group",
        "group=0",
        "what a window sees stays in the host's pool as it was, and other pages are overwritten",
        "tests/continuous_batching/test_tier.py::test_of_a_window_the_tier_has_what_a_prefix_is_resumed_from",
    ),
    "prefix_of_the_tier_not_cut_back": Fault(
        "kv_cache/tier/lookup.py::Lookup._cut",
        "at < each.seen_after(stop) or is_here or page in self.contents",
        "at < each.seen_after(stop) or is_here or page in self.contents or page in self._missing",
        "pages are taken in from which nothing can be resumed",
        "tests/kv_cache/test_tier_lookup.py::test_what_no_group_has_cuts_the_prefix_in_front_of_it",
    ),
    "failed_windows_stay_in_the_tier": Fault(
        "continuous_batching/paging/prefix_matching.py::PrefixMatching.forget",
        "[group.number for group in self._tables.groups]",
        "[0]",
        "what a failed request left of its windows is found again beside pages computed anew",
        "tests/continuous_batching/test_tier.py::test_nothing_of_a_request_that_failed_stays_in_the_tier",
    ),
    "router_expects_what_windows_lack": Fault(
        "continuous_batching/routing/routing.py::Routing._first",
        "self._resumable(replica, keys[:count], tokens_a_key, groups.values())",
        "count",
        "a router sends a prompt to where its last window was evicted",
        "tests/continuous_batching/test_routing.py::test_a_hit_ends_where_a_replica_has_what_its_windows_see",
    ),
    "evicted_window_still_told": Fault(
        "kv_cache/groups.py::BesideGroup._forget",
        "self.announce(False, names)",
        "",
        "routers believe in pages of windows that are gone",
        STORM,
    ),
    "windows_left_out_of_all_pages": Fault(
        "kv_cache/events.py::PageEvents._put",
        "everything += [self._beside(*each) for each in self._cache.everything_beside()]",
        "",
        "whoever fell behind expects no hit in a model with windows",
        "tests/kv_cache/test_events.py::test_pages_of_windows_have_events_of_their_own",
    ),
    "windows_not_resized_on_the_device": Fault(
        "kv_cache/device/storage.py::KVCache.resize",
        "if grows[group]: ...",
        "if grows[group] and not group: ...",
        "pages of a window are handed out that the device does not have",
        "tests/kv_cache/test_storage.py::test_each_group_of_layers_has_pages_of_its_own",
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
    "window_layers_write_as_all_others": Fault(
        "models/step_inputs.py::StepInputs.metadata_of",
        "self.window_metadata[group - 1] if group else self.metadata",
        "self.metadata",
        "layers with a window write over the pages of other requests",
        "tests/models/test_windows.py"
        "::test_tokens_are_those_of_transformers_with_exactly_the_pages_of_the_plan",
    ),
}
