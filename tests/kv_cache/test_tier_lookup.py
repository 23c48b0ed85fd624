"""A lookup finds the longest prefix that every group can be resumed from, and reads little beside it."""

from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.page_keys import key_of_group, page_keys
from kv_cache.tier.lookup import FoundPages, Lookup, PageName, Sought, SoughtBeside


def seen_after(width: int, num_pages: int) -> int:
    """Of a window that always sees so many pages."""
    return max(0, num_pages - width)


def looked_up(lookup: Lookup, entries: set[PageName], most: int = 3) -> list[PageName]:
    """Which pages were asked for until the lookup was complete."""
    asked = []
    while pages := lookup.next(most):
        asked += pages
        lookup.take(pages, [b"content" if page in entries else None for page in pages])
    assert len(set(asked)) == len(asked), "a page was asked for twice"
    return asked


def sought(num_keys: int, here: dict[int, list[bool]], widths: dict[int, int]) -> Sought:
    """Of prefixes whose first pages are here, with the pages beside them that are."""
    keys = [bytes([at]) * 32 for at in range(num_keys)]
    num_here = max((len(each) for each in here.values()), default=0)
    beside = [
        SoughtBeside(group, partial(seen_after, width), np.array(here.get(group, []), dtype=np.bool_))
        for group, width in widths.items()
    ]
    return Sought(keys, num_here, tuple(beside))


def test_of_other_groups_only_what_is_seen_behind_the_prefix_is_read() -> None:
    entries = {PageName(group, at) for group in (0, 1, 2) for at in range(10)}
    lookup = Lookup(sought(10, {}, {1: 2, 2: 3}), 0.0)
    asked = looked_up(lookup, entries)
    assert sorted(asked) == [
        *(PageName(0, at) for at in range(10)),
        *(PageName(1, at) for at in (8, 9)),
        *(PageName(2, at) for at in (7, 8, 9)),
    ]
    assert lookup.found() == FoundPages(0, 10, tuple(sorted(each for each in asked if each.group)))


def test_what_no_group_has_cuts_the_prefix_in_front_of_it() -> None:
    entries = {PageName(group, at) for group in (0, 1) for at in range(10)} - {PageName(1, 8)}
    lookup = Lookup(sought(10, {}, {1: 3}), 0.0)
    looked_up(lookup, entries)
    assert lookup.found() == FoundPages(0, 8, tuple(PageName(1, at) for at in (5, 6, 7)))


def test_what_is_evicted_here_beside_pages_that_are_still_here_is_read_alone() -> None:
    """Nothing of group 0 is lacking, so that a request without a lookup would compute all of it."""
    lookup = Lookup(sought(4, {1: [True, True, False, True]}, {1: 2}), 0.0)
    assert looked_up(lookup, {PageName(1, 2)}) == [PageName(1, 2)]
    assert lookup.found() == FoundPages(4, 0, (PageName(1, 2),))
    assert not Lookup(sought(4, {1: [False, False, True, True]}, {1: 2}), 0.0).next(1)


def test_what_was_not_read_in_time_counts_as_missing() -> None:
    lookup = Lookup(sought(4, {}, {1: 2}), 0.0)
    for most, page in ((4, 0), (1, 3)):
        pages = lookup.next(most)
        assert pages[0].at == page
        lookup.take(pages, [b"content"] * len(pages))
    assert lookup.found() == FoundPages(0, 0)


@given(
    num_keys=st.integers(0, 12),
    num_here=st.integers(0, 12),
    widths=st.lists(st.integers(1, 5), max_size=2),
    chance=st.randoms(use_true_random=False),
    most=st.integers(1, 4),
)
def test_the_longest_prefix_that_all_groups_have_is_found(
    num_keys: int, num_here: int, widths: list[int], chance: object, most: int
) -> None:
    random = np.random.default_rng(chance.getrandbits(32))
    num_here, groups = min(num_here, num_keys), dict(enumerate(widths, 1))
    here = {group: (random.random(num_here) < 0.7).tolist() for group in groups}
    entries = {
        PageName(group, at) for group in (0, *groups) for at in range(num_keys) if random.random() < 0.8
    }
    asked = sought(num_keys, here or {0: [True] * num_here}, groups)
    lookup = Lookup(asked, 0.0)
    looked_up(lookup, entries, most)

    def has(group: int, at: int) -> bool:
        is_here = at < num_here and (not group or here[group][at])
        return is_here or PageName(group, at) in entries

    longest = max(
        count
        for count in range(num_keys + 1)
        if all(has(0, at) for at in range(count))
        and all(has(group, at) for group, width in groups.items() for at in range(count)[-width:])
    )
    found = lookup.found()
    assert found.count == max(0, longest - num_here)
    for group, width in groups.items():
        for at in range(longest)[-width:]:
            assert PageName(group, at) in found.beside or here[group][at]


def test_a_key_of_another_group_is_the_key_of_no_page() -> None:
    """Also not of one whose tokens are the group's number."""
    for size in (1, 2):
        tokens = np.full(4 * size, 2, dtype=np.int32)
        keys = page_keys(tokens, size, "")
        names = [key_of_group(key, group) for key in keys for group in range(4)]
        assert len({*names, *keys}) == len(names)
        assert [key_of_group(key, 0) for key in keys] == keys
