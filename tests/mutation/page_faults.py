"""Faults of pages, their keys, the prefix cache, and the storage behind them."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "freed_while_shared": Fault(
        "kv_cache/pages.py::PagePool.release",
        "left == 0",
        "left <= 1",
        "a count of one is taken for free, so the last sharer's page is handed out",
        "tests/kv_cache/test_pages.py::test_a_page_is_free_when_its_last_holder_lets_go",
    ),
    "double_free_unnoticed": Fault(
        "kv_cache/pages.py::PagePool.release",
        "left.min(initial=0) >= 0 and pages.all()",
        "True",
        "a count goes below zero and the page stands in the free list twice",
        "tests/kv_cache/test_pages.py::test_a_double_free_is_caught_before_anything_changes",
    ),
    "null_page_free": Fault(
        "kv_cache/pages.py::PagePool.__init__",
        "self.holders[NULL_PAGE] = 1",
        "self.holders[NULL_PAGE] = 0",
        "page 0 is handed out, which operators read as filler",
        "tests/kv_cache/test_identity.py::test_all_at_once_gives_the_tokens_of_each_alone",
    ),
    "move_keeps_the_free_list": Fault(
        "kv_cache/pages.py::PagePool.move",
        "self._recount_free()",
        "",
        "the free list still names the page that was moved to",
        "tests/continuous_batching/test_slot_lifecycle.py::test_compaction_brings_held_pages_to_the_low_end_a_few_at_a_time",
    ),
    "compaction_overlaps": Fault(
        "kv_cache/pages.py::PagePool.scattered",
        "np.flatnonzero(self.holders[dense + 1 :]) + dense + 1",
        "np.flatnonzero(self.holders[dense:]) + dense",
        "a page is source and target of one unordered copy",
        "tests/kv_cache/test_identity.py::test_all_at_once_gives_the_tokens_of_each_alone",
    ),
    "salt_dropped": Fault(
        "kv_cache/page_keys.py::page_keys",
        "salt.encode()",
        'b""',
        "tenants can find out by timing what others asked",
        "tests/kv_cache/test_prefix_cache.py::test_keys_are_chained_from_the_salt_and_cover_full_pages_only",
    ),
    "values_not_copied": Fault(
        "kv_cache/device/storage.py::KVCache.copy",
        "self.of_group(group)[0]",
        "[each for each in self.keys if each is not None]",
        "a page's values stay behind when it moves",
        "tests/kv_cache/test_storage.py::test_copies_take_every_page_to_its_target_and_touch_no_other",
    ),
    "swapped_the_wrong_way": Fault(
        "kv_cache/device/storage.py::KVCache._swap",
        "(device, host) if to_host else (host, device)",
        "(device, host) if not to_host else (host, device)",
        "swapping out overwrites the device with what the host held",
        "tests/kv_cache/test_storage.py::test_copies_keep_every_bit",
    ),
    "tokens_not_compared": Fault(
        "kv_cache/prefix_index.py::PrefixIndex.find",
        "(self._tokens[pages] == wanted).all(axis=1) & (self._parent[pages] == parents)",
        "self._parent[pages] == parents",
        "a colliding key serves another prompt's keys and values",
        "tests/kv_cache/test_prefix_cache.py::test_colliding_keys_never_give_wrong_pages",
    ),
    "salt_not_compared": Fault(
        "kv_cache/prefix_index.py::PrefixIndex.find",
        "self._salt_of.get(found[0]) == salt",
        "True",
        "a colliding key crosses tenants",
        "tests/kv_cache/test_prefix_cache.py::test_equal_pages_under_one_key_and_two_salts_stay_apart",
    ),
    "idle_while_held": Fault(
        "kv_cache/prefix_cache.py::PrefixCache.release",
        "(self._pool.holders[pages] == 1) & self.is_cached(pages)",
        "self.is_cached(pages)",
        "a page that others still hold is evicted",
        "tests/kv_cache/test_prefix_cache.py::test_pages_in_use_are_not_idle",
    ),
    "evicted_from_a_place_it_has_left": Fault(
        "kv_cache/eviction_order.py::EvictionOrder._is_live",
        "self._stamp[pages] == np.arange(stamp, stamp + len(pages))",
        "self._stamp[pages] > 0",
        "a page that was used again is evicted as if it had not been",
        "tests/kv_cache/test_eviction_order.py::test_pages_come_in_the_order_of_a_linked_list",
    ),
    "parents_evicted_first": Fault(
        "kv_cache/prefix_cache.py::PrefixCache.release",
        "pages = pages[::-1]",
        "",
        "a chain loses its first page, and its rest can never be found",
        "tests/kv_cache/test_prefix_cache.py::test_leaves_are_evicted_before_their_parents_and_old_chains_first",
    ),
    "index_stays_behind": Fault(
        "kv_cache/prefix_index.py::PrefixIndex.rename",
        "self._page_of[key] = target",
        "self._page_of[key] = source",
        "compaction leaves the prefix index at the old page",
        "tests/kv_cache/test_host_tier.py::test_evicted_pages_rest_and_are_found_after_those_on_the_device",
    ),
    "forgotten_without_what_follows": Fault(
        "kv_cache/prefix_index.py::PrefixIndex.with_what_follows",
        "serial in wrong or parent in wrong",
        "serial in wrong",
        "pages after a wrong one stay cached, unfindable and unparented",
        "tests/kv_cache/test_prefix_cache.py::test_forgotten_pages_are_not_found_and_neither_is_what_follows",
    ),
    "version_stands_still": Fault(
        "kv_cache/prefix_cache.py::PrefixCache._remove",
        "self._version += 1",
        "",
        "a lookup made before an eviction is believed after it",
        "tests/continuous_batching/test_small_pools.py::test_a_pool_of_the_largest_request_finishes_a_closed_loop",
    ),
}
