"""Which faults are seeded where pages are found again?"""

from __future__ import annotations

from tests.mutation.fault import Fault

CHAINS, PREFIX = "kv_cache/prefix_index.py", "kv_cache/prefix_cache.py"

PREFIX_FAULTS = (
    Fault(
        "tokens_not_compared",
        CHAINS,
        "(self._tokens[pages] == wanted).all(axis=1) & (self._parent[pages] == parents)",
        "self._parent[pages] == parents",
        "a colliding key serves another prompt's keys and values",
    ),
    Fault(
        "parents_not_compared",
        CHAINS,
        " & (self._parent[pages] == parents)",
        "",
        "a colliding key joins two chains",
    ),
    Fault(
        "salt_not_compared",
        CHAINS,
        "right[0] &= self._salt_of.get(found[0]) == salt",
        "right[0] &= True",
        "a colliding key crosses tenants",
    ),
    Fault(
        "published_over_a_collision",
        CHAINS,
        " and np.array_equal(self._tokens[page], tokens)",
        "",
        "a row is given the page of another's tokens because the keys agree",
    ),
    Fault(
        "published_across_salts",
        CHAINS,
        "return same and (parent != ROOT or self._salt_of[page] == salt)",
        "return same",
        "a colliding key lets a row continue from another tenant's page",
    ),
    Fault(
        "published_after_the_forgotten",
        CHAINS,
        "return int(self._serial[pages[-1]]) or None",
        "return int(self._serial[pages[-1]])",
        "a page whose beginning failed becomes the first of a chain",
    ),
    Fault(
        "evictable_while_shared",
        PREFIX,
        "            del self._idle[page]\n        self._pool.share(pages)\n\n",
        "            pass\n        self._pool.share(pages)\n\n",
        "a page in use is still in the order of eviction",
    ),
    Fault(
        "idle_while_held",
        PREFIX,
        "idle = pages[(self._pool.holders[pages] == 1) & self.is_cached(pages)]\n        for page in idle"
        ".tolist():\n            self._idle[page] = None",
        "idle = pages[self.is_cached(pages)]\n        for page in idle.tolist():\n"
        "            self._idle[page] = None",
        "a page that others still hold is evicted",
    ),
    Fault(
        "newest_evicted",
        PREFIX,
        "list(islice(self._idle, count))",
        "list(islice(reversed(self._idle), count))",
        "what was used last is evicted first, and parents before leaves",
    ),
    Fault(
        "parents_evicted_first",
        PREFIX,
        "        pages = pages[::-1]\n        self._pool.release(pages)",
        "        self._pool.release(pages)",
        "a chain loses its first page, and its rest can never be found",
    ),
    Fault(
        "tokens_stay_behind",
        CHAINS,
        "for column in (self._tokens, self._serial, self._parent):",
        "for column in (self._serial, self._parent):",
        "a page that moved is compared with another page's tokens",
    ),
    Fault(
        "index_stays_behind",
        CHAINS,
        "self._page_of[key] = target",
        "self._page_of[key] = source",
        "compaction leaves the prefix index at the old page",
    ),
    Fault(
        "salt_stays_behind",
        CHAINS,
        "if source in self._salt_of:",
        "if False:",
        "a first page that moved is found under no salt, or under another's",
    ),
    Fault(
        "order_of_eviction_stays_behind",
        PREFIX,
        "if not self._idle.keys().isdisjoint(target_of):",
        "if False:",
        "pages are evicted that moved away",
    ),
    Fault(
        "serial_stays_behind",
        CHAINS,
        "        self._serial[sources] = 0\n        keys = ",
        "        keys = ",
        "a page that was moved away from still counts as cached",
    ),
    Fault(
        "forgotten_without_what_follows",
        CHAINS,
        "if serial in wrong or parent in wrong:",
        "if serial in wrong:",
        "pages after a wrong one stay cached, unfindable and unparented",
    ),
    Fault(
        "removed_but_held",
        PREFIX,
        "        self._pool.release(gone[gone > 0])\n",
        "",
        "evicted pages are never free again",
    ),
    Fault(
        "removed_but_cached",
        CHAINS,
        "        self._serial[np.array(pages, dtype=np.int64)] = 0\n",
        "",
        "a freed page counts as cached when its next owner lets go",
    ),
    Fault(
        "cached_unheld",
        PREFIX,
        "        self._pool.share(pages)\n        if not self._evicted",
        "        if not self._evicted",
        "cached pages are handed out while they are still in the index",
    ),
    Fault(
        "version_stands_still",
        PREFIX,
        "            self._host.release(-gone[gone < 0])\n        self.version += 1\n",
        "            self._host.release(-gone[gone < 0])\n",
        "a lookup made before an eviction is believed after it",
    ),
    Fault(
        "resize_forgets_what_is_cached",
        CHAINS,
        "        self._serial = _resized(self._serial, num_pages, num_host)\n",
        "        self._serial = _resized(0 * self._serial, num_pages, num_host)\n",
        "cached pages are held for ever, and found by nobody",
    ),
)
