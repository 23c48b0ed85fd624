"""Which faults are seeded where pages rest on disk or in a server, and come from there?"""

from __future__ import annotations

from tests.mutation.fault import Fault, TextFault

TIER = "kv_cache/tier/"
ENTRIES, DISK, READS = (f"{TIER}{name}.py" for name in ("entries", "disk", "reads"))
REDIS, WRITES, HEALTH = (f"{TIER}{name}.py" for name in ("redis_store", "writes", "health"))
PREFIX, MATCHING = "kv_cache/prefix_cache.py", "continuous_batching/paging/prefix_matching.py"
ENGINE, ADMISSION = "continuous_batching/engine.py", "continuous_batching/scheduling/admission.py"
SCHEDULER, BYTES = "continuous_batching/scheduling/scheduler.py", "kv_cache/page_bytes.py"
BUILD = "recipes/build/page_tier.py"

STORES = ("tests/kv_cache/test_tier_stores.py",)
THREADS = ("tests/kv_cache/test_page_tier.py",)
TIER_TESTS_OF = {
    ENTRIES: ("tests/kv_cache/test_tier_entries.py",),
    **dict.fromkeys((DISK, REDIS), STORES),
    **dict.fromkeys((READS, WRITES, HEALTH), THREADS),
    BYTES: ("tests/kv_cache/test_page_bytes.py",),
    BUILD: ("tests/kv_cache/test_tier_model.py",),
}

TIER_FAULTS = {
    "any_checksum": Fault(
        ENTRIES + "::content_of",
        "entry[_SUM_AT:HEAD_BYTES] != _sum(content, key, identity)",
        "False",
        "a page that was damaged on the disk is used",
    ),
    "sum_of_content_alone": Fault(
        ENTRIES + "::_sum",
        "hashlib.sha256(identity + key)",
        "hashlib.sha256()",
        "a page whose name was damaged stands for another",
    ),
    "any_model": Fault(
        ENTRIES + "::content_of",
        "entry[_IDENTITY_AT:_KEY_AT] != identity",
        "False",
        "pages of another model are refused for another reason, if at all",
    ),
    "written_in_place": Fault(
        DISK + "::DiskStore._put",
        "self._folder / INCOMING",
        "path",
        "a page is found while it is being written, and half of it after a kill",
    ),
    "folder_without_bound": Fault(
        DISK + "::DiskStore.write",
        "used + size > self._most_bytes",
        "used > self._most_bytes",
        "the folder outgrows its bound by a page",
    ),
    "newest_file_goes": Fault(
        DISK + "::DiskStore._make_room",
        "sorted(self._files())",
        "sorted(self._files(), reverse=True)",
        "those used last make room",
    ),
    "use_is_not_noticed": Fault(
        DISK + "::DiskStore._read",
        "_use(path)",
        "",
        "a page goes by when it was written, however often it is used",
    ),
    "sum_forgets_what_was_removed": TextFault(
        REDIS,
        "return redis.call('DECRBY', KEYS[3], size)",
        "return redis.call('DECRBY', KEYS[3], 0)",
        "the server seems full for ever",
    ),
    "server_without_bound": TextFault(
        REDIS, "while sum + size > most do", "while sum > most do", "the server holds a page more than it may"
    ),
    "full_server_goes_on": TextFault(
        REDIS,
        "redis.call('INCRBY', KEYS[3], 0) --",
        "--",
        "a script that has written is not stopped by a full memory",
    ),
    "found_after_a_gap": Fault(
        READS + "::PageReads._look",
        "if content is None:\n    return",
        "if content is None:\n    continue",
        "a page stands for the one before it, which was not there",
    ),
    "wrong_entry_stays": Fault(
        READS + "::PageReads._checked",
        "self._take_off([key])",
        "",
        "a damaged page is read again by each who asks, and never replaced",
    ),
    "dead_store_is_asked": Fault(
        READS + "::PageReads.begin",
        "not self._health.may_be_asked or len(self._queue) >= MOST_LOOKUPS or self._is_stuck()",
        "len(self._queue) >= MOST_LOOKUPS or self._is_stuck()",
        "each request waits for a server that is gone",
    ),
    "waits_for_ever": Fault(
        READS + "::PageReads.is_over",
        "time.monotonic() < lookup.until_s",
        "not lookup.has_ended",
        "a disk that hangs holds up the whole queue",
    ),
    "queue_without_bound": Fault(
        WRITES + "::PageWrites.room",
        "min(wanted, self._most_queued - self._num_queued)",
        "wanted",
        "pages fill the host's memory where the disk is slow",
    ),
    "told_each_time": Fault(
        HEALTH + "::StoreHealth.failed", "self.is_well", "True", "a dead server fills the log"
    ),
    "saved_twice_or_not": Fault(
        MATCHING + "::PrefixMatching._save",
        "standing == pages[first:]",
        "standing != pages[first:]",
        "what others computed is written, and what this row computed is not",
    ),
    "key_of_the_page_before": Fault(
        MATCHING + "::PrefixMatching._save",
        "first + index",
        "first + index - 1",
        "a page is kept under another's key",
    ),
    "wrong_pages_stay_in_the_tier": Fault(
        MATCHING + "::PrefixMatching.forget",
        'self._tables.copy(PageCopy(EMPTY, EMPTY, "off_tier", tuple(keys)))',
        "pass",
        "what failed is found again in the tier, and fails again",
    ),
    "arrives_by_name_only": Fault(
        MATCHING + "::PrefixMatching.arrive",
        'self._tables.copy(PageCopy(pages, pages, "from_tier"))',
        "",
        "a page is found in the host's pool that holds something else",
    ),
    "taken_in_after_a_gap": Fault(
        MATCHING + "::PrefixMatching.arrive",
        "at < first",
        "at < first - 100",
        "pages continue others than they were computed after",
    ),
    "beginning_of_what_was_found": Fault(
        MATCHING + "::PrefixMatching.arrive",
        "slice(at - first, at - first + len(pages))",
        "slice(0, len(pages))",
        "where others brought the first pages, the next get their content",
    ),
    "matched_gives_way_to_what_arrives": Fault(
        PREFIX + "::PrefixCache.take_in",
        "self._host.num_free + len(self._resting) - len(resting)",
        "self._host.num_free + len(self._resting)",
        "pages take the places of those that they continue",
    ),
    "arrived_leaves_go_last": Fault(
        PREFIX + "::PrefixCache.take_in",
        "pages[::-1]",
        "pages",
        "a page goes before the one that continues it",
    ),
    "nobody_waits_for_pages": Fault(
        ADMISSION + "::Admission.admit",
        "request.awaits_pages",
        "False",
        "a request computes what is on its way",
    ),
    "waits_after_its_pages_came": Fault(
        MATCHING + "::PrefixMatching.arrive", "request.awaits_pages = False", "", "a request waits for ever"
    ),
    "given_up_and_taken_in": Fault(
        ENGINE + "::Engine._take_in",
        "if self.scheduler.waiting.find(request.id) is request: ...",
        "...",
        "pages arrive for who has gone, or for another of its name",
    ),
    "last_pages_wait_for_a_batch": Fault(
        SCHEDULER + "::Scheduler.commit",
        "self._has_tier and not self.has_work",
        "False",
        "what the last request computed is not kept until another comes",
    ),
    "layers_in_another_order": Fault(
        BYTES + "::PageBytes.write_host",
        "each.host_tensors",
        "each.host_tensors[::-1]",
        "a page's values come back as its keys",
    ),
    "any_weights": Fault(
        BUILD + "::_facts",
        '"weights": _weights(recipe)',
        "",
        "a model finds the pages of one with other weights",
    ),
}
