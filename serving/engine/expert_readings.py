"""Read, at intervals, how many tokens chose each expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.engine.messages import ExpertTable

if TYPE_CHECKING:
    from recipes.assembly.engine import BuiltEngine

READ_S = 10.0  # interval between readings, each of which waits for the steps in flight


class ExpertReadings:
    """The readings of an engine that counts its experts; an engine that does not has none."""

    def __init__(self, built: BuiltEngine) -> None:
        self._built, self._due_s = built, 0.0

    def due(self, now_s: float) -> ExpertTable | None:
        """Return a new reading if one is due."""
        counts, mixture = self._built.experts, self._built.config.mixture
        if counts is None or mixture is None or now_s < self._due_s:
            return None
        self._due_s = now_s + READ_S
        steps = self._built.engine.scheduler.counters.steps
        return ExpertTable(counts.read(), mixture.num_chosen, steps)
