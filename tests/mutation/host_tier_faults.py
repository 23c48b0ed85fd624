"""Which faults are seeded where evicted pages rest, and where it is counted what lookups found?"""

from __future__ import annotations

from tests.mutation.fault import Fault

INDEX, PREFIX = "kv_cache/prefix_index.py", "kv_cache/prefix_cache.py"
ADMISSION, MATCHING = (
    "continuous_batching/scheduling/admission.py",
    "continuous_batching/paging/prefix_matching.py",
)
SWAP, TABLES = "continuous_batching/paging/swap.py", "continuous_batching/paging/page_tables.py"

HOST_TIER_FAULTS = (
    Fault(
        "rests_by_name_only",
        TABLES,
        "            self.copy(copy)\n",
        "",
        "a page is found in the host's pool that was never copied there",
    ),
    Fault(
        "brought_back_by_name_only",
        TABLES,
        "        self.copy(self.prefix.bring_back(names, self.slots.pages(row)[held:]))\n",
        "        self.prefix.bring_back(names, self.slots.pages(row)[held:])\n",
        "a row reads what the last owner of its page left",
    ),
    Fault(
        "given_away_while_it_comes_back",
        PREFIX,
        "            del self._resting[name]\n",
        "            self._resting.move_to_end(name, last=False)\n",
        "the pages evicted for a lookup take the place of those that it found",
    ),
    Fault(
        "host_place_kept_after_waking",
        PREFIX,
        "        self._host.release(-names)\n",
        "",
        "the host's pool fills up with pages that went back to the device",
    ),
    Fault(
        "woken_unheld",
        PREFIX,
        "        self._pool.share(pages)\n        self._host.release",
        "        self._host.release",
        "a page that came back is handed out while it is still found",
    ),
    Fault(
        "parents_rest_before_leaves",
        PREFIX,
        "dict.fromkeys((-targets).tolist())",
        "dict.fromkeys((-targets[::-1]).tolist())",
        "a chain at rest loses its first page, and its others can never be found",
    ),
    Fault(
        "newest_at_rest_goes",
        PREFIX,
        "list(islice(self._resting, short))",
        "list(islice(reversed(self._resting), short))",
        "what came to rest last goes first",
    ),
    Fault(
        "first_of_the_evicted_rest",
        PREFIX,
        "            self._drop(pages[: count - room])\n        return self._rest(pages[count - room :])",
        "            self._drop(pages[room:])\n        return self._rest(pages[:room])",
        "where room is short leaves rest, and the pages that they continue are gone",
    ),
    Fault(
        "lookup_believed_after_resting",
        PREFIX,
        "        self._pool.release(sources)\n        self.version += 1\n",
        "        self._pool.release(sources)\n",
        "a newcomer shares a page of the device that has gone to the host",
    ),
    Fault(
        "resting_has_right_of_way",
        SWAP,
        "if not self._prefix.yield_host(num_pages):",
        "if num_pages > self.pool.num_free:",
        "a full host pool never takes in what a preempted request computed",
    ),
    Fault(
        "forgotten_on_the_device_only",
        INDEX,
        "        here = self.names\n",
        "        here = self.names[self.names > 0]\n",
        "what continues a failed request's pages is found at rest",
    ),
    Fault(
        "resize_cuts_the_host_off",
        INDEX,
        "new[:kept], new[num_pages:] = column[:kept], column[old_pages:]",
        "new[:kept] = column[:kept]",
        "after a resize nothing at rest is found, and its places are held for ever",
    ),
    Fault(
        "missed_for_a_page_that_is_gone",
        INDEX,
        "                _less(self._num_equal, tokens.tobytes())\n",
        "",
        "a miss is told as another tenant's page when that page is long gone",
    ),
    Fault(
        "resting_need_no_pages",
        ADMISSION,
        " - len(shared) + idle\n",
        " - len(matched) + idle\n",
        "a newcomer is let in though its resting pages have nowhere to go",
    ),
    Fault(
        "brought_back_for_a_blocked_row",
        MATCHING,
        "            pages = pages[pages > 0]  # the row was",
        "            pages = pages[pages != 0]  # the row was",
        "a row that waited takes pages that it was not promised",
    ),
    Fault(
        "host_hits_not_told",
        MATCHING,
        "self._counters.host_hit_tokens += len(resting) * slots.page_size",
        "self._counters.host_hit_tokens += found",
        "metrics praise the host tier for what the device held",
    ),
    Fault(
        "evicted_for_ever",
        PREFIX,
        "                self._evicted.pop(key, None)\n",
        "                pass\n",
        "a page that was stored again is still told to have been evicted",
    ),
    Fault(
        "evictions_of_old_remembered",
        PREFIX,
        "self._evicted.popitem(last=False)",
        "self._evicted.popitem()",
        "once the memory of evictions is full, new ones are forgotten at once",
    ),
)
