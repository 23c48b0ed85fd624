"""Which faults are seeded where pages are found again?"""

from __future__ import annotations

from tests.mutation.fault import Fault

CHAINS, PREFIX = "kv_cache/prefix_index.py", "kv_cache/prefix_cache.py"

PREFIX_FAULTS = {
    "tokens_not_compared": Fault(
        CHAINS + "::PrefixIndex.find",
        "(self._tokens[pages] == wanted).all(axis=1) & (self._parent[pages] == parents)",
        "self._parent[pages] == parents",
        "a colliding key serves another prompt's keys and values",
    ),
    "parents_not_compared": Fault(
        CHAINS + "::PrefixIndex.find",
        "(self._tokens[pages] == wanted).all(axis=1) & (self._parent[pages] == parents)",
        "(self._tokens[pages] == wanted).all(axis=1)",
        "a colliding key joins two chains",
    ),
    "salt_not_compared": Fault(
        CHAINS + "::PrefixIndex.find",
        "self._salt_of.get(found[0]) == salt",
        "True",
        "a colliding key crosses tenants",
    ),
    "published_over_a_collision": Fault(
        CHAINS + "::PrefixIndex.is_same",
        "self._parent[page] == parent and np.array_equal(self._tokens[page], tokens)",
        "self._parent[page] == parent",
        "a row is given the page of another's tokens because the keys agree",
    ),
    "published_across_salts": Fault(
        CHAINS + "::PrefixIndex.is_same",
        "same and (parent != ROOT or self._salt_of[page] == salt)",
        "same",
        "a colliding key lets a row continue from another tenant's page",
    ),
    "published_after_the_forgotten": Fault(
        CHAINS + "::PrefixIndex.tail",
        "int(self._serial[pages[-1]]) or None",
        "int(self._serial[pages[-1]])",
        "a page whose beginning failed becomes the first of a chain",
    ),
    "evictable_while_shared": Fault(
        PREFIX + "::PrefixCache.share",
        "del self._idle[page]",
        "pass",
        "a page in use is still in the order of eviction",
    ),
    "idle_while_held": Fault(
        PREFIX + "::PrefixCache.release",
        "(self._pool.holders[pages] == 1) & self.is_cached(pages)",
        "self.is_cached(pages)",
        "a page that others still hold is evicted",
    ),
    "newest_evicted": Fault(
        PREFIX + "::PrefixCache.evict",
        "islice(self._idle, count)",
        "islice(reversed(self._idle), count)",
        "what was used last is evicted first, and parents before leaves",
    ),
    "parents_evicted_first": Fault(
        PREFIX + "::PrefixCache.release",
        "pages = pages[::-1]",
        "",
        "a chain loses its first page, and its rest can never be found",
    ),
    "tokens_stay_behind": Fault(
        CHAINS + "::PrefixIndex.rename",
        "(self._tokens, self._serial, self._parent)",
        "(self._serial, self._parent)",
        "a page that moved is compared with another page's tokens",
    ),
    "index_stays_behind": Fault(
        CHAINS + "::PrefixIndex.rename",
        "self._page_of[key] = target",
        "self._page_of[key] = source",
        "compaction leaves the prefix index at the old page",
    ),
    "salt_stays_behind": Fault(
        CHAINS + "::PrefixIndex.rename",
        "source in self._salt_of",
        "False",
        "a first page that moved is found under no salt, or under another's",
    ),
    "order_of_eviction_stays_behind": Fault(
        PREFIX + "::PrefixCache.move",
        "not self._idle.keys().isdisjoint(target_of)",
        "False",
        "pages are evicted that moved away",
    ),
    "serial_stays_behind": Fault(
        CHAINS + "::PrefixIndex.rename",
        "self._serial[sources] = 0",
        "",
        "a page that was moved away from still counts as cached",
    ),
    "forgotten_without_what_follows": Fault(
        CHAINS + "::PrefixIndex.with_what_follows",
        "serial in wrong or parent in wrong",
        "serial in wrong",
        "pages after a wrong one stay cached, unfindable and unparented",
    ),
    "removed_but_held": Fault(
        PREFIX + "::PrefixCache._remove",
        "self._pool.release(gone[gone > 0])",
        "",
        "evicted pages are never free again",
    ),
    "removed_but_cached": Fault(
        CHAINS + "::PrefixIndex.remove",
        "self._serial[np.array(pages, dtype=np.int64)] = 0",
        "",
        "a freed page counts as cached when its next owner lets go",
    ),
    "cached_unheld": Fault(
        PREFIX + "::PrefixCache._insert",
        "self._pool.share(pages)",
        "",
        "cached pages are handed out while they are still in the index",
    ),
    "version_stands_still": Fault(
        PREFIX + "::PrefixCache._remove",
        "self.version += 1",
        "",
        "a lookup made before an eviction is believed after it",
    ),
    "resize_forgets_what_is_cached": Fault(
        CHAINS + "::PrefixIndex.resize",
        "_resized(self._serial, num_pages, num_host)",
        "_resized(0 * self._serial, num_pages, num_host)",
        "cached pages are held for ever, and found by nobody",
    ),
}
