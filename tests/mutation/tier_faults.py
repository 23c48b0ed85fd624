"""Which faults are seeded where pages rest on disk or in a server, and come from there?"""

from __future__ import annotations

from tests.mutation.fault import Fault

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

TIER_FAULTS = (
    Fault(
        "any_checksum",
        ENTRIES,
        "    if entry[_SUM_AT:HEAD_BYTES] != _sum(content, key, identity):\n",
        "    if False:\n",
        "a page that was damaged on the disk is used",
    ),
    Fault(
        "sum_of_content_alone",
        ENTRIES,
        "hashlib.sha256(identity + key)",
        "hashlib.sha256()",
        "a page whose name was damaged stands for another",
    ),
    Fault(
        "any_model",
        ENTRIES,
        "    if entry[_IDENTITY_AT:_KEY_AT] != identity:\n",
        "    if False:\n",
        "pages of another model are refused for another reason, if at all",
    ),
    Fault(
        "written_in_place",
        DISK,
        "        incoming = self._folder / INCOMING\n",
        "        incoming = path\n",
        "a page is found while it is being written, and half of it after a kill",
    ),
    Fault(
        "folder_without_bound",
        DISK,
        "                if used + size > self._most_bytes:\n",
        "                if used > self._most_bytes:\n",
        "the folder outgrows its bound by a page",
    ),
    Fault(
        "newest_file_goes",
        DISK,
        "files = sorted(self._files())",
        "files = sorted(self._files(), reverse=True)",
        "those used last make room",
    ),
    Fault(
        "use_is_not_noticed",
        DISK,
        "            _use(path)\n",
        "",
        "a page goes by when it was written, however often it is used",
    ),
    Fault(
        "sum_forgets_what_was_removed",
        REDIS,
        "return redis.call('DECRBY', KEYS[3], size)",
        "return redis.call('DECRBY', KEYS[3], 0)",
        "the server seems full for ever",
    ),
    Fault(
        "server_without_bound",
        REDIS,
        "while sum + size > most do",
        "while sum > most do",
        "the server holds a page more than it may",
    ),
    Fault(
        "full_server_goes_on",
        REDIS,
        "redis.call('INCRBY', KEYS[3], 0) --",
        "--",
        "a script that has written is not stopped by a full memory",
    ),
    Fault(
        "found_after_a_gap",
        READS,
        "                if content is None:\n                    return\n",
        "                if content is None:\n                    continue\n",
        "a page stands for the one before it, which was not there",
    ),
    Fault(
        "wrong_entry_stays",
        READS,
        "            self._take_off([key])\n",
        "",
        "a damaged page is read again by each who asks, and never replaced",
    ),
    Fault(
        "dead_store_is_asked",
        READS,
        "if not self._health.may_be_asked or len",
        "if len",
        "each request waits for a server that is gone",
    ),
    Fault(
        "waits_for_ever",
        READS,
        "        if time.monotonic() < lookup.until_s:\n            return False\n",
        "        if not lookup.has_ended:\n            return False\n",
        "a disk that hangs holds up the whole queue",
    ),
    Fault(
        "queue_without_bound",
        WRITES,
        "min(wanted, self._most_queued - self._num_queued)",
        "wanted",
        "pages fill the host's memory where the disk is slow",
    ),
    Fault(
        "told_each_time",
        HEALTH,
        "            if self.is_well:\n                log.warning(",
        "            if True:\n                log.warning(",
        "a dead server fills the log",
    ),
    Fault(
        "saved_twice_or_not",
        MATCHING,
        "(standing == pages[first:]) & self._prefix.is_cached(standing)",
        "(standing != pages[first:]) & self._prefix.is_cached(standing)",
        "what others computed is written, and what this row computed is not",
    ),
    Fault(
        "key_of_the_page_before",
        MATCHING,
        "request.page_keys[first + index]",
        "request.page_keys[first + index - 1]",
        "a page is kept under another's key",
    ),
    Fault(
        "wrong_pages_stay_in_the_tier",
        MATCHING,
        '            self._tables.copy(PageCopy(EMPTY, EMPTY, "off_tier", tuple(keys)))\n',
        "            pass\n",
        "what failed is found again in the tier, and fails again",
    ),
    Fault(
        "arrives_by_name_only",
        MATCHING,
        '            self._tables.copy(PageCopy(pages, pages, "from_tier"))\n',
        "",
        "a page is found in the host's pool that holds something else",
    ),
    Fault(
        "taken_in_after_a_gap",
        MATCHING,
        "        if at < first:",
        "        if at < first - 100:",
        "pages continue others than they were computed after",
    ),
    Fault(
        "beginning_of_what_was_found",
        MATCHING,
        "        return slice(at - first, at - first + len(pages))\n",
        "        return slice(0, len(pages))\n",
        "where others brought the first pages, the next get their content",
    ),
    Fault(
        "matched_gives_way_to_what_arrives",
        PREFIX,
        "room = self._host.num_free + len(self._resting) - len(resting)",
        "room = self._host.num_free + len(self._resting)",
        "pages take the places of those that they continue",
    ),
    Fault(
        "arrived_leaves_go_last",
        PREFIX,
        "dict.fromkeys((-pages[::-1]).tolist())",
        "dict.fromkeys((-pages).tolist())",
        "a page goes before the one that continues it",
    ),
    Fault(
        "nobody_waits_for_pages",
        ADMISSION,
        "            if request.awaits_pages:\n",
        "            if False:\n",
        "a request computes what is on its way",
    ),
    Fault(
        "waits_after_its_pages_came",
        MATCHING,
        "        request.awaits_pages = False\n",
        "",
        "a request waits for ever",
    ),
    Fault(
        "given_up_and_taken_in",
        ENGINE,
        "            elif self.scheduler.waiting.find(request.id) is request:",
        "            else:",
        "pages arrive for who has gone, or for another of its name",
    ),
    Fault(
        "last_pages_wait_for_a_batch",
        SCHEDULER,
        "flushes = self._has_tier and not self.has_work",
        "flushes = False",
        "what the last request computed is not kept until another comes",
    ),
    Fault(
        "layers_in_another_order",
        BYTES,
        "        tensors = [tensor for each in self._cache.all for tensor in each.host_tensors]\n",
        "        tensors = [tensor for each in self._cache.all for tensor in each.host_tensors[::-1]]\n",
        "a page's values come back as its keys",
    ),
    Fault(
        "any_weights",
        BUILD,
        '        "weights": _weights(recipe),\n',
        "",
        "a model finds the pages of one with other weights",
    ),
)
