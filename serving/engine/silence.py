"""Decide how long an engine may be silent before it counts as slow, and before it counts as hung.

A working engine sends each step's tokens and an idle one sends a beat, so a silence is a step that has begun
and not ended. The duration of steps is measured: the largest step before the engine is ready, and then every
silence between two messages, which includes whatever else a step may do: swaps, compaction, beams, a resize.
"""

from __future__ import annotations

from dataclasses import dataclass

HUNG = 5  # an engine is ended when silent for this multiple of the longest expected silence
_HALF_LIFE_S = 300.0  # a long silence counts half after this time, since a machine is rarely busy for ever
SHORTEST_S = 1.0  # always to be expected, since other processes may have the processor for so long
COMPILER_S = 4.0  # the same for a device that loads or compiles an operator at its first use


@dataclass(slots=True)
class Silence:
    """Since when an engine has been silent, and how long it may be; times are in seconds of one clock.

    `fixed_s` is the recipe's limit, or None for one derived from measurements; a silence of `expected_s` is
    always to be expected.
    """

    heard_s: float
    fixed_s: float | None
    expected_s: float = SHORTEST_S
    longest_s: float = 0.0  # the longest silence that ended; it decays with time
    allowed_s: float = 0.0  # how long the present silence may be, if the engine announced it

    def hear(self, now_s: float) -> None:
        """Record a message.

        A silence beyond the limit is ignored, since then this process was the one that did not listen.
        """
        if self.allowed_s:  # an announced silence says nothing of steps
            self.allowed_s, self.heard_s = 0.0, now_s
            return
        silent_s = now_s - self.heard_s
        faded_s = self.longest_s * 0.5 ** (silent_s / _HALF_LIFE_S)
        self.longest_s = faded_s if silent_s > self.limit_s else max(silent_s, faded_s)
        self.heard_s = now_s

    def allow(self, most_s: float) -> None:
        """Allow a silence of this duration until the next message."""
        self.allowed_s = most_s

    def excuse(self, late_s: float, now_s: float) -> None:
        """Discount a time in which the server itself did not run, perhaps with the whole machine."""
        self.heard_s = min(now_s, self.heard_s + late_s)

    @property
    def limit_s(self) -> float:
        """The silence after which an engine counts as hung."""
        return max(self.allowed_s, self.fixed_s or HUNG * max(self.expected_s, self.longest_s))

    @property
    def slow_s(self) -> float:
        """The silence after which an engine is slower than expected, and may be hung."""
        return min(max(self.expected_s, self.longest_s), self.limit_s / 2)
