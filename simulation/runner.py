"""What does a simulated device answer, and when?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from continuous_batching.batch import Batch, Sampled
from continuous_batching.request import Request, TokenIds
from continuous_batching.slots import SlotPool
from kv_cache.pages import PageCopy
from simulation.clock import Clock


class CostModel(Protocol):
    """How long a device takes for a step."""

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        """Seconds from the batch to its tokens; the rows stand as they were when it was made."""
        ...


class Speaker:
    """Gives each request its known answer; -1, as of a failed step, after its end."""

    def __init__(self, slots: SlotPool, answers: Mapping[str, TokenIds]) -> None:
        self._slots = slots
        self._answers = answers
        self._heard: dict[str, int] = {}

    def say(self, batch: Batch) -> Sampled:
        """The token of each place that a batch asks for."""
        tokens = []
        for row, target in zip(batch.owners.tolist(), batch.targets.tolist()):
            request = self._slots.requests[row]
            answer, at = self._answers[request.id], target - request.num_prompt_tokens
            beyond = -1 if at == self._heard.get(request.id, 0) else 0  # 0: a draft ran over the end
            tokens.append(int(answer[at]) if at < len(answer) else beyond)
        return Sampled(np.array(tokens, dtype=np.int64))

    def hears(self, request: Request) -> bool:
        """Count a token that a request got; whether it has its whole answer now."""
        self._heard[request.id] = heard = self._heard.get(request.id, 0) + 1
        return heard >= len(self._answers[request.id])


class SimulatedRunner:
    """Answers every batch when the cost model says: by the speaker, or with token 0 for all that ask.

    Without a speaker answers are as long as requests ask: give them `ignore_eos`, and no stop token 0. It is
    one device, which does one step after the other.
    """

    def __init__(
        self, clock: Clock, costs: CostModel, slots: SlotPool, speaker: Speaker | None = None
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._slots = slots
        self._speaker = speaker
        self._free_s = 0.0  # when the device has finished every step that was started

    def run(self, batch: Batch) -> Sampled:
        """The answer, at the time when it is there."""
        return self.start(batch)()

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Start a step behind those that were started before; waiting for it moves the clock."""
        done_s = max(self._clock.now_s, self._free_s) + self._costs.step_s(batch, self._slots)
        self._free_s = done_s

        def wait() -> Sampled:
            self._clock.reach(done_s)
            return self.answer(batch)

        return wait

    def answer(self, batch: Batch) -> Sampled:
        """The tokens of a batch."""
        if self._speaker is not None:
            return self._speaker.say(batch)
        return Sampled(np.zeros(len(batch.owners), dtype=np.int64))

    def resize(self, num_pages: int, copies: tuple[PageCopy, ...]) -> None:
        """This device holds no pages."""
