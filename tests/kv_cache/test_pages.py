"""A page pool hands out every page once, counts holders, and refuses what is freed twice."""

import numpy as np
import pytest

from kv_cache.pages import NULL_PAGE, PagePool


def test_every_page_but_the_null_page_is_handed_out_once() -> None:
    pool = PagePool(8)
    pages = pool.take(7)
    assert sorted(pages.tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="asked for 1 pages, 0 are free"):
        pool.take(1)


def test_low_pages_are_handed_out_first() -> None:
    pool = PagePool(8)
    assert pool.take(3).tolist() == [1, 2, 3]
    pool.release(np.array([2]))
    assert pool.take(2).tolist() == [2, 4]


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.num_free == 2
    assert pool.holders[pages].tolist() == [1, 0]
    pool.release(pages[:1])
    assert sorted(pool.free_pages.tolist()) == [1, 2, 3]


def test_a_double_free_is_caught_before_anything_changes() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    pool.release(pages[:1])
    with pytest.raises(AssertionError, match=r"released pages that nobody holds: \[1\]"):
        pool.release(pages)
    assert pool.holders[pages].tolist() == [0, 1]
    assert pool.num_free == 2


def test_the_null_page_is_never_released_and_free_pages_never_shared() -> None:
    pool = PagePool(4)
    with pytest.raises(AssertionError, match=r"\[0\]"):
        pool.release(np.array([NULL_PAGE]))
    with pytest.raises(AssertionError, match=r"shared pages that nobody holds: \[3\]"):
        pool.share(np.array([3]))


def test_a_pool_without_pages_to_give_is_refused() -> None:
    with pytest.raises(ValueError, match="has none to give beside the null page"):
        PagePool(1)
