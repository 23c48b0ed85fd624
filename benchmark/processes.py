"""Spread work over processes that end with the command, however it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor


@contextlib.contextmanager
def process_pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of fresh processes; an error or ctrl-C ends them at once, not after their work."""
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        before = set(multiprocessing.active_children())
        try:
            yield pool
        except BaseException:
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise
