"""Do a pool's processes end with what started them?"""

from __future__ import annotations

import multiprocessing
import time

import pytest

from benchmark.processes import process_pool


def interrupted() -> None:
    with process_pool(2) as pool:
        for _ in range(4):
            pool.submit(time.sleep, 600)
        raise KeyboardInterrupt


def test_an_interrupt_does_not_wait_for_the_work() -> None:
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began_s < 300, "the work takes 1,200 s"
    assert not multiprocessing.active_children()


def test_work_that_ends_has_its_results() -> None:
    with process_pool(2) as pool:
        assert list(pool.map(abs, range(-3, 1))) == [3, 2, 1, 0]
