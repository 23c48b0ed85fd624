"""Index full pages by their tokens and all tokens before them.

The index answers which pages hold a request's prefix, and why a lookup ended; holders and eviction are the
task of `prefix_cache`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from kv_cache.page_keys import TokenIds
from kv_cache.pages import Index

Lookup = Literal[
    "whole", "too_short", "other_salt", "evicted", "window_evicted", "no_state", "unaligned", "unseen"
]
ROOT = 0  # serial number before a request's first page
EMPTY: Index = np.empty(0, dtype=np.int64)


def _resized(column: NDArray[Any], num_pages: int, num_host_pages: int) -> NDArray[Any]:
    """Return a column over page names (see `PrefixIndex`) resized to another number of device pages."""
    new = np.zeros((num_pages + num_host_pages, *column.shape[1:]), dtype=column.dtype)
    old_pages = len(column) - num_host_pages
    kept = min(num_pages, old_pages)
    new[:kept], new[num_pages:] = column[:kept], column[old_pages:]
    return new


Counted = TypeVar("Counted", bound=Hashable)


def _less(counts: Counter[Counted], what: Counted) -> None:
    counts[what] -= 1
    if not counts[what]:
        del counts[what]


class PrefixIndex:
    """Full pages by the tokens that they hold and all tokens before them; it knows nothing of holders.

    A page is known by a name: a page of the device by its number, page h of the host's pool by -h. Both index
    the same columns, because numpy counts negative numbers from the end; so a lookup need not distinguish
    them, and a page that changes places keeps all that is known of it.

    Equal keys are not trusted: a hit also compares the page's tokens, its salt and its parent. Each page here
    carries a serial number that is never used twice, and the serial number of the page before it, so that a
    chain is either valid from its root or ends.
    """

    def __init__(self, num_pages: int, num_host_pages: int, page_size: int) -> None:
        self._num_host_pages = num_host_pages
        self._page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # Only first pages of chains have a salt, and count in the two counters below
        self._salt_of: dict[int, str] = {}
        self._num_firsts: Counter[tuple[str, int]] = Counter()  # keyed by salt and first token
        self._num_equal: Counter[bytes] = Counter()  # keyed by the page's tokens
        num_names = num_pages + num_host_pages
        self._tokens = np.zeros((num_names, page_size), dtype=np.int32)
        self._serial = np.zeros(num_names, dtype=np.int64)  # 0: the page is not in the index
        self._parent = np.zeros(num_names, dtype=np.int64)
        self._name_of: dict[int, int] = {}  # serial number -> page
        self._next_serial = ROOT + 1

    def __len__(self) -> int:
        return len(self._key_of)

    @property
    def names(self) -> Index:
        """All pages in the index."""
        return np.fromiter(self._key_of, dtype=np.int64, count=len(self._key_of))

    def has(self, pages: Index) -> NDArray[np.bool_]:
        """Which of these pages are in the index."""
        here: NDArray[np.bool_] = self._serial[pages] > 0
        return here

    def key(self, page: int) -> bytes:
        """The key of a page."""
        return self._key_of[page]

    def prefix(self, page: int) -> tuple[str, list[int]]:
        """Return what a page stands for: the salt of its chain, and all tokens up to its end."""
        pages, parents = [page], self.parents()
        while pages[-1] in parents:
            pages.append(parents[pages[-1]])
        return self._salt_of[pages[-1]], self._tokens[pages[::-1]].ravel().tolist()

    def parents(self) -> dict[int, int]:
        """For each page but the first of a chain, return the page that it continues."""
        pages, name_of = self.names, self._name_of
        return {page: name_of[at] for page, at in zip(pages.tolist(), self._parent[pages].tolist()) if at}

    def chain(self, page: int) -> Index:
        """Return the pages up to this one, as far back as they are in the index."""
        pages = [page]
        while (before := self._name_of.get(int(self._parent[pages[-1]]))) is not None:
            pages.append(before)
        return np.array(pages[::-1], dtype=np.int64)

    def are_last(self, pages: Index) -> NDArray[np.bool_]:
        """Which of these pages no page in the index continues."""
        last: NDArray[np.bool_] = ~np.isin(self._serial[pages], self._parent[self._serial > 0])
        return last

    def everything(self) -> list[tuple[bytes, bytes | None, list[int]]]:
        """Return the key, the parent's key and the tokens of each page, parents first."""
        here, parents, key_of = self.names, self.parents(), self._key_of
        # A page gets its serial number after the page it continues
        order = here[np.argsort(self._serial[here])]
        tokens = self._tokens[order].tolist()
        return [
            (key_of[page], key_of[parents[page]] if page in parents else None, each)
            for page, each in zip(order.tolist(), tokens)
        ]

    def tail(self, pages: Index) -> int | None:
        """Return the serial number that the next page continues, or None if the last page was removed."""
        if not len(pages):
            return ROOT
        return int(self._serial[pages[-1]]) or None

    def find(self, keys: Sequence[bytes], tokens: TokenIds, salt: str, held: Index = EMPTY) -> Index:
        """Return the pages that continue the pages `held`, as far as `tokens` match without a gap.

        `keys` and `tokens` are a request's from its start, and either may go on beyond the other.
        """
        first, size, parent = len(held), self._page_size, self.tail(held)
        if parent is None:
            return EMPTY
        found = []
        for key in islice(keys, first, len(tokens) // size):  # keys of long prompts are not copied
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        if not found:
            return EMPTY
        pages = np.array(found, dtype=np.int64)
        wanted = tokens[first * size : (first + len(pages)) * size].reshape(len(pages), size)
        parents = np.empty_like(pages)
        parents[0] = parent
        parents[1:] = self._serial[pages[:-1]]
        right = (self._tokens[pages] == wanted).all(axis=1) & (self._parent[pages] == parents)
        if parent == ROOT:
            right[0] &= self._salt_of.get(found[0]) == salt
        return pages if right.all() else pages[: int(right.argmin())]

    def why_missed(self, tokens: TokenIds, salt: str, matched: Index) -> Lookup:
        """Return why no page of these tokens, a request's from its start, was found after `matched`."""
        at, size, parent = len(matched), self._page_size, self.tail(matched)
        assert parent is not None, "a page that was found is here"
        wanted = tokens[at * size : (at + 1) * size]
        if parent == ROOT:
            if self._num_equal[wanted.tobytes()]:  # it would have been found under the same salt
                return "other_salt"
            begins_alike = self._num_firsts[salt, int(wanted[0])] > 0
        else:
            nexts = ((self._parent == parent) & (self._serial > 0)).nonzero()[0]
            begins_alike = bool((self._tokens[nexts, 0] == wanted[0]).any())
        return "unaligned" if begins_alike else "unseen"

    def uses(self, keys: Sequence[bytes]) -> bool:
        """Whether any of these keys is in use, or two of them are equal."""
        return len(set(keys)) < len(keys) or not self._page_of.keys().isdisjoint(keys)

    def goes_on(self, page: int) -> bool:
        """Whether any page in the index continues this one."""
        return bool(((self._parent == self._serial[page]) & (self._serial > 0)).any())

    def num_lone(self, pages: Index) -> int:
        """Return how many of the last of these pages, each behind the one before, no other page continues."""
        serials = self._serial[pages]
        serials = serials[serials > 0]
        if not len(serials):
            return 0
        near = (self._parent >= serials.min()) & (self._parent <= serials.max()) & (self._serial > 0)
        num_next = Counter(self._parent[near].tolist())
        count = 0
        for serial in serials[::-1].tolist():
            if num_next[serial] > (count > 0):
                break
            count += 1
        return count

    def num_known(self, keys: Sequence[bytes]) -> int:
        """Estimate how many of a request's keys are in the index, by a binary search over a few of them."""
        return bisect_left(keys, True, key=lambda each: each not in self._page_of)

    def page_of(self, key: bytes) -> int | None:
        """Return the page with this key, whatever it holds."""
        return self._page_of.get(key)

    def is_same(self, page: int, tokens: TokenIds, parent: int, salt: str) -> bool:
        """Whether a page holds these tokens after that parent."""
        same = self._parent[page] == parent and np.array_equal(self._tokens[page], tokens)
        return same and (parent != ROOT or self._salt_of[page] == salt)

    def insert(self, keys: Sequence[bytes], tokens: TokenIds, pages: Index, parent: int, salt: str) -> None:
        """Insert pages [n] of `tokens` [n, B] that continue each other, under unused keys."""
        page_list = pages.tolist()
        self._page_of.update(zip(keys, page_list))
        self._key_of.update(zip(page_list, keys))
        if parent == ROOT:
            self._salt_of[page_list[0]] = salt
            self._num_firsts[salt, int(tokens[0, 0])] += 1
            self._num_equal[tokens[0].tobytes()] += 1
        serials = np.arange(self._next_serial, self._next_serial + len(pages))
        self._next_serial += len(pages)
        self._name_of.update(zip(serials.tolist(), page_list))
        self._tokens[pages] = tokens
        self._serial[pages] = serials
        self._parent[pages] = serials - 1
        self._parent[pages[0]] = parent

    def with_what_follows(self, pages: Index) -> list[int]:
        """Return those of these pages that are in the index, and all pages that continue them."""
        wrong = set(self._serial[pages[self._serial[pages] > 0]].tolist())
        if not wrong:
            return []
        here = self.names
        # A page gets its serial number after the page it continues
        order = here[np.argsort(self._serial[here])]
        lost = []
        for page, serial, parent in zip(
            order.tolist(), self._serial[order].tolist(), self._parent[order].tolist()
        ):
            if serial in wrong or parent in wrong:
                wrong.add(serial)
                lost.append(page)
        return lost

    def remove(self, pages: Index) -> list[bytes]:
        """Remove pages; return their keys."""
        page_list = pages.tolist()
        keys = [*map(self._key_of.pop, page_list)]
        for key in keys:
            del self._page_of[key]
        for page in self._salt_of.keys() & page_list:
            tokens = self._tokens[page]
            _less(self._num_firsts, (self._salt_of.pop(page), int(tokens[0])))
            _less(self._num_equal, tokens.tobytes())
        for serial in self._serial[pages].tolist():
            del self._name_of[serial]
        self._serial[pages] = 0
        return keys

    def rename(self, sources: Index, targets: Index) -> None:
        """Move the entries of source pages to target pages."""
        for column in (self._tokens, self._serial, self._parent):
            column[targets] = column[sources]
        self._serial[sources] = 0
        self._name_of.update(zip(self._serial[targets].tolist(), targets.tolist()))
        keys = [self._key_of.pop(page) for page in sources.tolist()]
        for key, source, target in zip(keys, sources.tolist(), targets.tolist()):
            self._key_of[target] = key
            self._page_of[key] = target
            if source in self._salt_of:
                self._salt_of[target] = self._salt_of.pop(source)

    def resize(self, num_pages: int) -> None:
        """Follow the pool to another number of pages; no page that is removed may be in the index."""
        num_host = self._num_host_pages
        gone = self._serial[num_pages : len(self._serial) - num_host]
        assert not gone.any(), "a page that goes is cached"
        self._tokens = _resized(self._tokens, num_pages, num_host)
        self._serial = _resized(self._serial, num_pages, num_host)
        self._parent = _resized(self._parent, num_pages, num_host)
