"""Provide a virtual clock, on which only modelled work takes time."""

from __future__ import annotations


class Clock:
    """A clock that stands still until it is moved; called as an engine's clock, it returns its seconds."""

    __slots__ = ("now_s",)

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def reach(self, time_s: float) -> None:
        """Move to a time, unless it is in the past."""
        if time_s > self.now_s:
            self.now_s = time_s
