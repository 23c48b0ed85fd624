"""Decide which pages of a request are read from a tier, as earlier ones are found or missing.

A prefix can be resumed from if every group of layers has the pages that its next query sees. So a lookup
reads the pages of group 0 in order, up to the first that is missing, and then, from the end backwards, those
that the other groups see there. A page that is missing among these cuts the prefix short in front of it. Of
recurrent states the last one is read, since only the state beside the last page is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_cache.page_keys import key_of_group


class PageName(NamedTuple):
    """A page of a request: the group whose layers it holds, and its place among the request's pages."""

    group: int
    at: int


@dataclass(frozen=True, slots=True)
class SoughtBeside:
    """What a group needs beside the pages of group 0, to go on after a prefix."""

    group: int
    seen_after: Callable[[int], int]  # the first page that a query behind so many pages sees
    is_here: NDArray[np.bool_]  # whether this group has each of the pages that group 0 has here


@dataclass(frozen=True, slots=True)
class Sought:
    """The pages that a request could use, by the keys of its prefix; group 0 has `num_here` of them here."""

    keys: Sequence[bytes]
    num_here: int = 0
    beside: tuple[SoughtBeside, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundPages:
    """The pages that a lookup found: `count` of group 0 from page `first` on, and those `beside` them."""

    first: int
    count: int
    beside: tuple[PageName, ...] = ()


class Lookup:
    """A lookup in a tier, with the content found so far; it ends at the latest at `until_s`."""

    def __init__(self, sought: Sought, until_s: float) -> None:
        self.sought, self.until_s = sought, until_s
        self.contents: dict[PageName, bytes] = {}
        self.has_ended = False
        self._missing: set[PageName] = set()
        self._stop = sought.num_here  # the longest prefix that what was read so far allows, in pages
        self._agreed: FoundPages | None = None  # what all ranks of an engine have, once that is known
        self._has_read_first_group = False  # whether group 0 has been read up to its end, or up to a gap

    def key(self, page: PageName) -> bytes:
        """Return the key of a page in the tier."""
        return key_of_group(self.sought.keys[page.at], page.group)

    def next(self, most: int) -> list[PageName]:
        """Return at most so many pages to be read next; there are none when the lookup is complete."""
        if not self._has_read_first_group and self._stop < len(self.sought.keys):
            stop = min(self._stop + most, len(self.sought.keys))
            return [PageName(0, index) for index in range(self._stop, stop)]
        self._has_read_first_group = True
        self._stop, unread = self._cut(unread_is_missing=False)
        return unread[:most]

    def take(self, pages: Sequence[PageName], contents: Iterable[bytes | None]) -> None:
        """Add the contents of pages that `next` returned, None for those that are missing."""
        for page, content in zip(pages, contents):
            if content is None:
                self._missing.add(page)
                if not page.group:
                    self._has_read_first_group = True
                    break  # what follows a gap is of no use
            else:
                self.contents[page] = content
                self._stop += not page.group

    @property
    def stop(self) -> int:
        """The longest prefix, in pages, that can be resumed from; pages that were not read are missing."""
        return self._cut(unread_is_missing=True)[0]

    def agree(self, stop: int | None) -> None:
        """Use no longer prefix than `stop` pages, which all ranks have; nothing for None."""
        first = self.sought.num_here
        if stop is None:
            self._agreed = FoundPages(first, 0)
            return
        seen = [
            PageName(each.group, at)
            for each in self.sought.beside
            for at in range(each.seen_after(stop), stop)
            if not (at < len(each.is_here) and each.is_here[at])
        ]
        self._agreed = FoundPages(first, max(0, stop - first), tuple(sorted(seen)))

    def found(self) -> FoundPages:
        """Return the pages that were found and are of use; those that were not read count as missing."""
        if self._agreed is not None:
            return self._agreed
        stop, first = self._cut(unread_is_missing=True)[0], self.sought.num_here
        beside = sorted(page for page in self.contents if page.group and page.at < stop)
        return FoundPages(first, max(0, stop - first), tuple(beside))

    def _cut(self, *, unread_is_missing: bool) -> tuple[int, list[PageName]]:
        """Return the longest prefix to resume from, and its pages that are to be read, the last first."""
        stop = at = self._stop
        unread: list[PageName] = []
        while at > min((each.seen_after(stop) for each in self.sought.beside), default=at):
            at -= 1
            for each in self.sought.beside:
                page = PageName(each.group, at)
                is_here = at < len(each.is_here) and bool(each.is_here[at])
                if at < each.seen_after(stop) or is_here or page in self.contents:
                    continue
                if unread_is_missing or page in self._missing:
                    stop = at
                    break
                unread.append(page)
        return stop, [page for page in unread if page.at < stop]
