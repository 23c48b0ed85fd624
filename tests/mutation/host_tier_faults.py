"""Which faults are seeded where evicted pages rest, and where it is counted what lookups found?"""

from __future__ import annotations

from tests.mutation.fault import Fault

INDEX, PREFIX = "kv_cache/prefix_index.py", "kv_cache/prefix_cache.py"
ADMISSION, MATCHING = (
    "continuous_batching/scheduling/admission.py",
    "continuous_batching/paging/prefix_matching.py",
)
SWAP, TABLES = "continuous_batching/paging/swap.py", "continuous_batching/paging/page_tables.py"

HOST_TIER_FAULTS = {
    "rests_by_name_only": Fault(
        TABLES + "::PageTables.evict",
        "self.copy(copy)",
        "",
        "a page is found in the host's pool that was never copied there",
    ),
    "brought_back_by_name_only": Fault(
        TABLES + "::PageTables.bring_back",
        "self.copy(self.prefix.bring_back(names, self.slots.pages(row)[held:]))",
        "self.prefix.bring_back(names, self.slots.pages(row)[held:])",
        "a row reads what the last owner of its page left",
    ),
    "given_away_while_it_comes_back": Fault(
        PREFIX + "::PrefixCache.keep",
        "del self._resting[name]",
        "self._resting.move_to_end(name, last=False)",
        "the pages evicted for a lookup take the place of those that it found",
    ),
    "host_place_kept_after_waking": Fault(
        PREFIX + "::PrefixCache._wake",
        "self._host.release(-names)",
        "",
        "the host's pool fills up with pages that went back to the device",
    ),
    "woken_unheld": Fault(
        PREFIX + "::PrefixCache._wake",
        "self._pool.share(pages)",
        "",
        "a page that came back is handed out while it is still found",
    ),
    "parents_rest_before_leaves": Fault(
        PREFIX + "::PrefixCache._rest",
        "(-targets).tolist()",
        "(-targets[::-1]).tolist()",
        "a chain at rest loses its first page, and its others can never be found",
    ),
    "newest_at_rest_goes": Fault(
        PREFIX + "::PrefixCache.yield_host",
        "islice(self._resting, short)",
        "islice(reversed(self._resting), short)",
        "what came to rest last goes first",
    ),
    "first_of_the_evicted_rest": Fault(
        PREFIX + "::PrefixCache.evict",
        (
            "if room < count:\n"
            "    self._drop(pages[: count - room])\n"
            "return self._rest(pages[count - room :]) if room else None"
        ),
        "if room < count:\n    self._drop(pages[room:])\nreturn self._rest(pages[:room]) if room else None",
        "where room is short leaves rest, and the pages that they continue are gone",
    ),
    "lookup_believed_after_resting": Fault(
        PREFIX + "::PrefixCache._rest",
        "self.version += 1",
        "",
        "a newcomer shares a page of the device that has gone to the host",
    ),
    "resting_has_right_of_way": Fault(
        SWAP + "::SwapTier.leave",
        "not self._prefix.yield_host(num_pages)",
        "num_pages > self.pool.num_free",
        "a full host pool never takes in what a preempted request computed",
    ),
    "forgotten_on_the_device_only": Fault(
        INDEX + "::PrefixIndex.with_what_follows",
        "self.names",
        "self.names[self.names > 0]",
        "what continues a failed request's pages is found at rest",
    ),
    "resize_cuts_the_host_off": Fault(
        INDEX + "::_resized",
        "new[:kept], new[num_pages:] = column[:kept], column[old_pages:]",
        "new[:kept] = column[:kept]",
        "after a resize nothing at rest is found, and its places are held for ever",
    ),
    "missed_for_a_page_that_is_gone": Fault(
        INDEX + "::PrefixIndex.remove",
        "_less(self._num_equal, tokens.tobytes())",
        "",
        "a miss is told as another tenant's page when that page is long gone",
    ),
    "resting_need_no_pages": Fault(
        ADMISSION + "::Admission._pages",
        "len(shared)",
        "len(matched)",
        "a newcomer is let in though its resting pages have nowhere to go",
    ),
    "brought_back_for_a_blocked_row": Fault(
        MATCHING + "::PrefixMatching.unblock",
        "pages > 0",
        "pages != 0",
        "a row that waited takes pages that it was not promised",
    ),
    "host_hits_not_told": Fault(
        MATCHING + "::PrefixMatching.start_from",
        "len(resting) * slots.page_size",
        "found",
        "metrics praise the host tier for what the device held",
    ),
    "evicted_for_ever": Fault(
        PREFIX + "::PrefixCache._insert",
        "self._evicted.pop(key, None)",
        "pass",
        "a page that was stored again is still told to have been evicted",
    ),
    "evictions_of_old_remembered": Fault(
        PREFIX + "::PrefixCache._drop",
        "last=False",
        "",
        "once the memory of evictions is full, new ones are forgotten at once",
    ),
}
