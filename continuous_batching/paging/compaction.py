"""Move held pages towards the low end of the pool.

A paged operator does not need compaction: any free page is as good as another. Compaction makes the region in
use dense, so that a smaller pool can give back what lies above it, or the region can be exported whole.
"""

from __future__ import annotations

from continuous_batching.paging.page_tables import PageTables


class Compaction:
    """Compacts every `every_steps` steps, and moves at most `pages_per_step` pages a step (0: all)."""

    def __init__(self, tables: PageTables, every_steps: int, pages_per_step: int) -> None:
        self._tables = tables
        self._every_steps = every_steps
        self._pages_per_step = pages_per_step or tables.pool.num_pages
        self._going_on = False

    def step(self, num_steps: int) -> None:
        """Move the pages that are due after `num_steps` steps."""
        if num_steps % self._every_steps == 0:
            self._going_on = True
        if self._going_on:
            self._going_on = self._tables.compact(self._pages_per_step) == self._pages_per_step
