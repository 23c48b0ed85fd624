"""Which faults are seeded in pages, their keys and their content?"""

from __future__ import annotations

from tests.mutation.fault import Fault

PAGES, KEYS = "kv_cache/pages.py", "kv_cache/page_keys.py"
STORAGE, RUNNER = "kv_cache/storage.py", "models/runner.py"

CACHE_FAULTS = (
    Fault(
        "freed_while_shared",
        PAGES,
        "freed = pages[left == 0]",
        "freed = pages[left <= 1]",
        "a count of one is taken for free, so the last sharer's page is handed out",
    ),
    Fault(
        "double_free_unnoticed",
        PAGES,
        "assert not wrong.any(), f",
        "assert True, f",
        "a count goes below zero and the page stands in the free list twice",
    ),
    Fault(
        "null_page_free",
        PAGES,
        "self.holders[NULL_PAGE] = 1",
        "self.holders[NULL_PAGE] = 0",
        "page 0 is handed out, which operators read as filler",
    ),
    Fault(
        "share_counts_nothing",
        PAGES,
        "self.holders[pages] = held + 1",
        "self.holders[pages] = held",
        "the first of two sharers frees the page of both",
    ),
    Fault(
        "taken_unheld",
        PAGES,
        "        self.holders[pages] = 1\n        return pages",
        "        return pages",
        "pages in use count as free when the free list is rebuilt",
    ),
    Fault(
        "move_leaks_the_source",
        PAGES,
        "        self.holders[sources] = 0\n",
        "",
        "a page that moved away is never free again",
    ),
    Fault(
        "move_keeps_the_free_list",
        PAGES,
        "        self.holders[sources] = 0\n        self._recount_free()\n",
        "        self.holders[sources] = 0\n",
        "the free list still names the page that was moved to",
    ),
    Fault(
        "free_list_from_rows_only",
        PAGES,
        "free = np.flatnonzero(self.holders == 0)[::-1]",
        "free = np.flatnonzero(self.holders <= 1)[1:][::-1]",
        "pages of one holder are given away when the free list is rebuilt",
    ),
    Fault(
        "compaction_overlaps",
        PAGES,
        "sources = np.flatnonzero(self.holders[dense + 1 :]) + dense + 1",
        "sources = np.flatnonzero(self.holders[dense:]) + dense",
        "a page is source and target of one unordered copy",
    ),
    Fault(
        "resize_loses_holders",
        PAGES,
        "        holders[:kept] = self.holders[:kept]\n",
        "        holders[:1] = 1\n",
        "held pages are free after a resize",
    ),
    Fault(
        "salt_dropped",
        KEYS,
        "hashlib.sha256(salt.encode()).digest()",
        'hashlib.sha256(b"").digest()',
        "tenants can find out by timing what others asked",
    ),
    Fault(
        "key_without_parent",
        KEYS,
        "sha256(previous + data[at : at + width])",
        "sha256(data[at : at + width])",
        "a page is found after another beginning",
    ),
    Fault(
        "key_of_a_partial_page",
        KEYS,
        "len(tokens) // page_size * page_size",
        "-(-len(tokens) // page_size) * page_size",
        "a page that will still be written is shared",
    ),
    Fault(
        "key_by_builtin_hash",
        KEYS,
        "previous = sha256(previous + data[at : at + width]).digest()",
        "previous = str(hash(previous + bytes(data[at : at + width]))).encode()",
        "keys differ between processes, and can be forged",
    ),
    Fault(
        "values_not_copied",
        STORAGE,
        "for tensor in (*self.keys, *self.values):\n            pages = _flat",
        "for tensor in self.keys:\n            pages = _flat",
        "a page's values stay behind when it moves",
    ),
    Fault(
        "first_layer_copied",
        STORAGE,
        "for tensor in (*self.keys, *self.values):\n            pages = _flat",
        "for tensor in (self.keys[0], self.values[0]):\n            pages = _flat",
        "only one layer's pages move",
    ),
    Fault(
        "swapped_the_wrong_way",
        STORAGE,
        "(device, host) if to_host",
        "(device, host) if not to_host",
        "swapping out overwrites the device with what the host held",
    ),
    Fault(
        "resize_zeroes",
        STORAGE,
        "_chunks(old, kept, kept)",
        "_chunks(old, kept[:0], kept[:0])",
        "the keys and values of running requests are lost",
    ),
    Fault(
        "copies_not_made",
        RUNNER,
        "        self.cache.apply(batch.copies)\n",
        "        pass\n",
        "pages are renamed, copied on write and swapped in by name only",
    ),
    Fault(
        "copies_lost_in_a_resize",
        RUNNER,
        "        self.cache.apply(copies)\n        graphs =",
        "        graphs =",
        "what compaction moved before a resize is cut off",
    ),
)
