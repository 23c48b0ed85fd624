"""Measure the time that an engine's steps spend in its runner."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Runner

Result = TypeVar("Result")


class TimedRunner:
    """A runner that measures its own time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._taken_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def taken(self) -> float:
        """Return the seconds spent in the runner since the last call."""
        taken_s, self._taken_s = self._taken_s, 0.0
        return taken_s

    def run(self, batch: Batch) -> Sampled:
        """Run a batch as the wrapped runner does."""
        return self._measured(lambda: self._runner.run(batch))

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Start a batch as the wrapped runner does; the wait for its result is measured too."""
        wait = self._measured(lambda: self._runner.start(batch))
        return lambda: self._measured(wait)

    def resize(self, num_pages: int, copies: Any) -> None:
        """Resize the cache as the wrapped runner does."""
        self._runner.resize(num_pages, copies)

    def _measured(self, do: Callable[[], Result]) -> Result:
        start_s = time.perf_counter()
        try:
            return do()
        finally:
            self._taken_s += time.perf_counter() - start_s
