"""Define the cost model of a simulated device, and the runner that answers by it."""

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
    """A model of the time that a device takes for a step."""

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        """Return the seconds from the batch to its tokens; rows are as they were when the batch was made."""
        ...


class Speaker:
    """Gives each request its known answer; behind its end the token is -1, as of a failed step."""

    def __init__(self, slots: SlotPool, answers: Mapping[str, TokenIds]) -> None:
        self._slots = slots
        self._answers = answers
        self._heard: dict[str, int] = {}

    def say(self, batch: Batch) -> Sampled:
        """Return the token for each position that a batch samples."""
        tokens = []
        for row, target in zip(batch.owners.tolist(), batch.targets.tolist()):
            request = self._slots.requests[row]
            answer, at = self._answers[request.id], target - request.num_prompt_tokens
            # 0: a draft goes beyond the end of the answer
            beyond = -1 if at == self._heard.get(request.id, 0) else 0
            tokens.append(int(answer[at]) if at < len(answer) else beyond)
        return Sampled(np.array(tokens, dtype=np.int64))

    def hears(self, request: Request) -> bool:
        """Count a token that a request got; return whether it has its whole answer."""
        self._heard[request.id] = heard = self._heard.get(request.id, 0) + 1
        return heard >= len(self._answers[request.id])


class SimulatedRunner:
    """Answers every batch at the time of the cost model, by the speaker, or with token 0 for every position.

    Without a speaker answers are as long as requests ask for: give them `ignore_eos`, and no stop token 0. It
    is one device, which does one step after the other.
    """

    def __init__(
        self, clock: Clock, costs: CostModel, slots: SlotPool, speaker: Speaker | None = None
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._slots = slots
        self._speaker = speaker
        self._free_s = 0.0  # time at which the device has finished every step that was started

    def run(self, batch: Batch) -> Sampled:
        """Return the answer, after moving the clock to its time."""
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
        """Return the tokens of a batch."""
        if self._speaker is not None:
            return self._speaker.say(batch)
        return Sampled(np.zeros(len(batch.owners), dtype=np.int64))

    def resize(self, num_pages: int, copies: tuple[PageCopy, ...]) -> None:
        """Do nothing: this device holds no pages."""
