"""How long may an engine be silent before it is slow, and before it counts as hung?

A working engine sends each step's tokens, and an idle one sends a beat, so a silence is a step that has begun
and not ended. How long a step takes is measured: the largest one before the engine is ready, and then every
silence between two messages, which holds whatever a step may do besides: swaps, compaction, beams, a resize.
"""

from __future__ import annotations

from dataclasses import dataclass

HUNG = 5  # an engine that is silent for so many times the longest silence to be expected is ended
_HALF_LIFE_S = 300.0  # after it a long silence counts half: a machine was busy once, and is not for ever
SHORTEST_S = 1.0  # to be expected: other processes may have the processor for so long
COMPILER_S = 4.0  # the same, of a device that loads or compiles an operator where it is first used


@dataclass(slots=True)
class Silence:
    """Since when an engine has been silent, and how long it may be. Times are of one clock, in seconds.

    `fixed_s` is the recipe's limit, or None for one that follows from what was measured; a silence of
    `expected_s` is always to be expected.
    """

    heard_s: float
    fixed_s: float | None
    expected_s: float = SHORTEST_S
    longest_s: float = 0.0  # silence, of those that ended, which fades

    def hear(self, now_s: float) -> None:
        """A message came. A silence beyond the limit does not count: it was us who did not listen."""
        silent_s = now_s - self.heard_s
        faded_s = self.longest_s * 0.5 ** (silent_s / _HALF_LIFE_S)
        self.longest_s = faded_s if silent_s > self.limit_s else max(silent_s, faded_s)
        self.heard_s = now_s

    def excuse(self, late_s: float, now_s: float) -> None:
        """The server itself did not run for so long, perhaps with the whole machine: that is no silence."""
        self.heard_s = min(now_s, self.heard_s + late_s)

    @property
    def limit_s(self) -> float:
        """An engine that has been silent for longer counts as hung."""
        return self.fixed_s or HUNG * max(self.expected_s, self.longest_s)

    @property
    def slow_s(self) -> float:
        """An engine that has been silent for longer is slower than expected, and may be hung."""
        return min(max(self.expected_s, self.longest_s), self.limit_s / 2)
