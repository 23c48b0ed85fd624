"""Simulate pipeline parallelism: stages of layers that work on several batches in flight.

One scheduler has as many batches in flight as there are stages, of which no two have a row in common. A stage
that waits for the one before it stands in a bubble of one of three kinds (Sarathi, 2023): PB1 between prompts
of different lengths, PB2 between a prompt and decodes, PB3 of decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from continuous_batching.batch import Batch, Sampled
from continuous_batching.slots import SlotPool
from simulation.replica import Clock, CostModel, SimulatedRunner

ObserveStage = Callable[[int, Batch, float, float], None]  # stage, its batch, start and end


@dataclass(slots=True)
class Stages:
    """When each stage is free, and how long the stages stood in bubbles of each kind."""

    costs: Sequence[CostModel]  # cost model of each stage
    send_s: Callable[[int], float]  # seconds for the hidden states of so many tokens to reach the next stage
    observe: ObserveStage | None = None
    busy_s: float = 0.0
    bubbles_s: dict[str, float] = field(default_factory=lambda: {"PB1": 0.0, "PB2": 0.0, "PB3": 0.0})
    _free_s: list[float] = field(init=False)
    _had_prompt: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._free_s = [0.0] * len(self.costs)
        self._had_prompt = [False] * len(self.costs)

    def pass_through(self, batch: Batch, slots: SlotPool, now_s: float) -> float:
        """Return when a batch that is launched now has passed all stages."""
        has_prompt = bool((batch.starts < slots.num_prompt[batch.slots]).any())
        at_s, last_s = now_s, self._free_s[-1]
        for stage, costs in enumerate(self.costs):
            since_s = self._free_s[stage]
            begin_s = max(at_s, since_s)
            # The first stage waits for a batch to return, the others for the stage before them
            waited_s = min(begin_s, last_s) - since_s if stage == 0 else begin_s - max(since_s, now_s)
            if waited_s > 0:
                both = has_prompt + self._had_prompt[stage]
                self.bubbles_s[("PB3", "PB2", "PB1")[both]] += waited_s
            took_s = costs.step_s(batch, slots)
            self.busy_s += took_s
            self._free_s[stage] = begin_s + took_s
            self._had_prompt[stage] = has_prompt
            if self.observe is not None:
                self.observe(stage, batch, begin_s, begin_s + took_s)
            at_s = begin_s + took_s + (self.send_s(batch.num_tokens) if stage + 1 < len(self.costs) else 0.0)
        return at_s


class PipelineRunner(SimulatedRunner):
    """Answers every batch when it has passed all stages."""

    def __init__(self, clock: Clock, stages: Stages, slots: SlotPool) -> None:
        super().__init__(clock, stages.costs[0], slots)
        self._stages = stages

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Launch a batch behind those that were launched before; waiting for it moves the clock."""
        done_s = self._stages.pass_through(batch, self._slots, self._clock.now_s)
        return lambda: self.answer_at(batch, done_s)
