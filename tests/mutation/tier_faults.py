"""Faults of the pages that rest in the host's memory, and of those in a store that outlives the engine."""

from __future__ import annotations

from tests.mutation.fault import Fault, TextFault

FAULTS = {
    "rests_by_name_only": Fault(
        "kv_cache/groups.py::PageGroup._made_free",
        "[] if copy is None else [copy]",
        "[]",
        "a page is found in the host's pool that was never copied there",
        "tests/continuous_batching/test_slot_lifecycle.py::test_a_swapped_request_finds_its_shared_pages_at_rest_beside_its_own",
    ),
    "given_away_while_it_comes_back": Fault(
        "kv_cache/prefix_cache.py::PrefixCache.keep",
        "del self._resting[name]",
        "self._resting.move_to_end(name, last=False)",
        "the pages evicted for a lookup take the place of those that it found",
        "tests/kv_cache/test_host_tier.py::test_pages_that_are_about_to_come_back_give_way_to_nobody",
    ),
    "any_checksum": Fault(
        "kv_cache/tier/store.py::content_of",
        "not hmac.compare_digest(entry[_SUM_AT:HEAD_BYTES], _sum(content, key, identity, secret))",
        "False",
        "a page that was damaged on the disk is used",
        "tests/kv_cache/test_tier_entries.py::test_no_byte_of_an_entry_may_change",
    ),
    "written_in_place": Fault(
        "kv_cache/tier/disk.py::DiskStore._put",
        "self._folder / INCOMING",
        "path",
        "a page is found while it is being written, and half of it after a kill",
        "tests/kv_cache/test_tier_stores.py::test_a_disk_that_fails_is_told_as_such",
    ),
    "any_signature": Fault(
        "kv_cache/tier/store.py::_sum",
        "secret is not None",
        "False",
        "whoever writes to the store changes answers",
        "tests/kv_cache/test_fuzzed_tiers.py::test_an_entry_of_who_lacks_the_secret_is_not_used",
    ),
    "full_server_goes_on": TextFault(
        "kv_cache/tier/redis_store.py",
        "redis.call('INCRBY', KEYS[3], 0) --",
        "--",
        "a script that has written is not stopped by a full memory",
        "tests/kv_cache/test_tier_stores.py::test_a_server_that_is_full_gone_or_wants_a_password_fails",
    ),
    "found_after_a_gap": Fault(
        "kv_cache/tier/lookup.py::Lookup.take",
        "break",
        "continue",
        "a page stands for the one before it, which was not there",
        "tests/kv_cache/test_page_tier.py::test_what_is_kept_is_found_up_to_the_first_page_that_is_not_there",
    ),
    "dead_store_is_asked": Fault(
        "kv_cache/tier/page_tier.py::PageReads.begin",
        "not self._health.may_be_asked or self._is_crowded() or self._is_stuck()",
        "self._is_crowded() or self._is_stuck()",
        "each request waits for a server that is gone",
        "tests/kv_cache/test_page_tier.py::test_a_dead_store_is_told_once_left_alone_and_asked_again",
    ),
    "queue_without_bound": Fault(
        "kv_cache/tier/page_tier.py::PageWrites.room",
        "min(wanted, max(0, left // entry_bytes))",
        "wanted",
        "pages fill the host's memory where the disk is slow",
        "tests/kv_cache/test_page_tier.py::test_what_does_not_fit_into_the_queue_is_dropped_and_counted",
    ),
    "any_weights": Fault(
        "recipes/assembly/page_tier.py::digest_of_weights.read",
        '"own": own',
        '"own": ""',
        "a model finds the pages of one with other weights",
        "tests/kv_cache/test_tier_model.py::test_pages_of_another_model_are_never_found",
    ),
}
