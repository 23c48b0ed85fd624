"""Which faults are seeded in pages, their keys and their content?"""

from __future__ import annotations

from tests.mutation.fault import Fault

PAGES, KEYS = "kv_cache/pages.py", "kv_cache/page_keys.py"
STORAGE, RUNNER = "kv_cache/storage.py", "models/runner.py"

CACHE_FAULTS = {
    "freed_while_shared": Fault(
        PAGES + "::PagePool.release",
        "left == 0",
        "left <= 1",
        "a count of one is taken for free, so the last sharer's page is handed out",
    ),
    "double_free_unnoticed": Fault(
        PAGES + "::PagePool.release",
        "not wrong.any()",
        "True",
        "a count goes below zero and the page stands in the free list twice",
    ),
    "null_page_free": Fault(
        PAGES + "::PagePool.__init__",
        "self.holders[NULL_PAGE] = 1",
        "self.holders[NULL_PAGE] = 0",
        "page 0 is handed out, which operators read as filler",
    ),
    "share_counts_nothing": Fault(
        PAGES + "::PagePool.share", "held + 1", "held", "the first of two sharers frees the page of both"
    ),
    "taken_unheld": Fault(
        PAGES + "::PagePool.take",
        "self.holders[pages] = 1",
        "",
        "pages in use count as free when the free list is rebuilt",
    ),
    "move_leaks_the_source": Fault(
        PAGES + "::PagePool.move",
        "self.holders[sources] = 0",
        "",
        "a page that moved away is never free again",
    ),
    "move_keeps_the_free_list": Fault(
        PAGES + "::PagePool.move",
        "self._recount_free()",
        "",
        "the free list still names the page that was moved to",
    ),
    "free_list_from_rows_only": Fault(
        PAGES + "::PagePool._recount_free",
        "np.flatnonzero(self.holders == 0)",
        "np.flatnonzero(self.holders <= 1)[1:]",
        "pages of one holder are given away when the free list is rebuilt",
    ),
    "compaction_overlaps": Fault(
        PAGES + "::PagePool.scattered",
        "np.flatnonzero(self.holders[dense + 1 :]) + dense + 1",
        "np.flatnonzero(self.holders[dense:]) + dense",
        "a page is source and target of one unordered copy",
    ),
    "resize_loses_holders": Fault(
        PAGES + "::PagePool.resize",
        "holders[:kept] = self.holders[:kept]",
        "holders[:1] = 1",
        "held pages are free after a resize",
    ),
    "salt_dropped": Fault(
        KEYS + "::page_keys", "salt.encode()", 'b""', "tenants can find out by timing what others asked"
    ),
    "key_without_parent": Fault(
        KEYS + "::page_keys",
        "previous + data[at : at + width]",
        "data[at : at + width]",
        "a page is found after another beginning",
    ),
    "key_of_a_partial_page": Fault(
        KEYS + "::page_keys",
        "len(tokens) // page_size",
        "-(-len(tokens) // page_size)",
        "a page that will still be written is shared",
    ),
    "key_by_builtin_hash": Fault(
        KEYS + "::page_keys",
        "sha256(previous + data[at : at + width]).digest()",
        "str(hash(previous + bytes(data[at : at + width]))).encode()",
        "keys differ between processes, and can be forged",
    ),
    "values_not_copied": Fault(
        STORAGE + "::KVCache.copy",
        "(*self.keys, *self.values)",
        "self.keys",
        "a page's values stay behind when it moves",
    ),
    "first_layer_copied": Fault(
        STORAGE + "::KVCache.copy",
        "(*self.keys, *self.values)",
        "(self.keys[0], self.values[0])",
        "only one layer's pages move",
    ),
    "swapped_the_wrong_way": Fault(
        STORAGE + "::KVCache._swap",
        "(device, host) if to_host else (host, device)",
        "(device, host) if not to_host else (host, device)",
        "swapping out overwrites the device with what the host held",
    ),
    "resize_zeroes": Fault(
        STORAGE + "::KVCache.resize",
        "_chunks(old, kept, kept)",
        "_chunks(old, kept[:0], kept[:0])",
        "the keys and values of running requests are lost",
    ),
    "copies_not_made": Fault(
        RUNNER + "::ModelRunner._begin",
        "self.cache.apply(batch.copies)",
        "pass",
        "pages are renamed, copied on write and swapped in by name only",
    ),
    "copies_lost_in_a_resize": Fault(
        RUNNER + "::ModelRunner.resize",
        "self.cache.apply(copies)",
        "",
        "what compaction moved before a resize is cut off",
    ),
}
