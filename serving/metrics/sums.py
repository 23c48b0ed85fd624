"""What has happened since the server started, when its engines, who count, come and go?"""

from __future__ import annotations

from collections.abc import Mapping


class Sums:
    """Adds up counters that start from 0 with each engine."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self._last: Mapping[str, int] = {}

    def follow(self, counters: Mapping[str, int]) -> None:
        """A reading of the engine that runs."""
        for name, value in counters.items():
            more = max(0, value - self._last.get(name, 0))
            self.totals[name] = self.totals.get(name, 0) + more
        self._last = counters

    def restart(self) -> None:
        """Another engine counts from 0."""
        self._last = {}

    def __getitem__(self, name: str) -> int:
        return self.totals.get(name, 0)
