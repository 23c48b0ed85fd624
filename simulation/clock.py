"""What time is it where nothing takes time but what a model says?"""

from __future__ import annotations


class Clock:
    """A clock that stands still until somebody moves it: `clock()` tells the seconds, as an engine asks."""

    __slots__ = ("now_s",)

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def reach(self, time_s: float) -> None:
        """Go on to a time, unless it is past."""
        if time_s > self.now_s:
            self.now_s = time_s
