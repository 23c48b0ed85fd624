"""Groups of windows for random schedules, and the recount of their pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.groups import WindowGroup
from kv_cache.pages import PagePool

WINDOWS = ((), (), (1,), (3,), (7, 16), (40,))  # positions that a query sees, by group


def window_groups(
    windows: Sequence[int],
    slots: SlotPool,
    pool: PagePool,
    host: PagePool | None,
    num_pages: Sequence[int],
    num_host_pages: int = 0,
) -> list[WindowGroup]:
    """Groups of these windows, of so many pages each beside the null page."""
    return [
        WindowGroup(
            number,
            window,
            slots.page_size,
            slots.num_slots,
            slots.max_pages,
            PagePool(1 + count),
            PagePool(1 + num_host_pages) if num_host_pages else None,
            pool.num_pages,
            0 if host is None else host.num_pages,
        )
        for number, (window, count) in enumerate(zip(windows, num_pages), 1)
    ]


def least_pages(window: int, page_size: int, num_tokens: int) -> int:
    """The pages of the largest request: those of one window wherever it begins, or all."""
    return max(
        (stop - 1) // page_size - max(0, stop - window) // page_size + 1 for stop in range(1, num_tokens + 1)
    )


@st.composite
def drawn_groups(
    draw: st.DrawFn, slots: SlotPool, pool: PagePool, host: PagePool | None, num_tokens: int, width: int = 1
) -> list[WindowGroup]:
    """No group, one or two; their pools hold the largest request, in `width` beams, and little more."""
    windows = draw(st.sampled_from(WINDOWS))
    least = [width * least_pages(window, slots.page_size, num_tokens) for window in windows]
    num_pages = [each + draw(st.integers(0, 2 * each)) for each in least]
    num_host_pages = draw(st.sampled_from([0, 2, 7, 40])) if host is not None else 0
    return window_groups(windows, slots, pool, host, num_pages, num_host_pages)


def recount_windows(scheduler: Scheduler) -> None:
    """Assert who holds the pages of each window, and what lies beside the entries of the prefix cache."""
    slots, prefix, tables = scheduler.slots, scheduler.prefix, scheduler.tables
    for group in tables.groups[1:]:
        if group.is_of_rows:
            continue
        assert isinstance(group, WindowGroup)
        pool, size = group.pool, group.page_size
        holders: Counter[int] = Counter({0: 1})
        for row in slots.busy.tolist():
            held = group.table[row, group.first[row] : group.stop[row]].tolist()
            assert 0 not in held, f"row {row} holds the null page"
            assert len(set(held)) == len(held), f"row {row} holds a page twice"
            outside = np.delete(group.table[row], np.arange(group.first[row], group.stop[row]))
            assert not outside.any(), f"row {row} names pages that it does not hold"
            holders.update(held)
            # what the next query sees is held, up to what is computed
            computed = int(slots.num_computed[row])
            first = max(0, computed - group.window + 1) // size
            assert group.first[row] <= first or not computed, f"row {row} lacks what it sees"
            assert group.stop[row] * size >= computed
            if row not in scheduler.in_flight.rows and row not in tables.forked:
                writable = group.table[row, computed // size : group.stop[row]]
                assert (pool.holders[writable] == 1).all(), f"row {row} may write to a shared page"
        names = prefix.index.names
        beside = group.beside[names]
        on_device, on_host = beside[beside > 0], -beside[beside < 0]
        assert np.count_nonzero(group.beside) == len(on_device) + len(on_host), "a page lies beside no entry"
        holders.update(on_device.tolist())
        assert np.array_equal(pool.holders, [holders[page] for page in range(pool.num_pages)])
        assert set(pool.free_pages.tolist()) == {page for page in range(pool.num_pages) if not holders[page]}
        assert pool.num_free == len(pool.free_pages)
        idle = {page for page in on_device.tolist() if holders[page] == 1}
        assert set(group._idle) == idle
        assert set(group._resting) == set((-on_host).tolist())
        if group.host is not None:
            left = Counter(on_host.tolist())
            for each in scheduler.lifecycle.swap.all_left.values():
                left.update(each.parts[group.number][1].tolist())
            assert np.array_equal(
                group.host.holders[1:], [left[page] for page in range(1, group.host.num_pages)]
            )
    free = np.ones(slots.num_slots, bool)
    free[slots.busy] = False
    assert not any(group.stop[free].any() or group.table[free].any() for group in tables.groups)
