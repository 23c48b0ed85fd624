"""A sampler for the ranks that follow a leader: it takes the tokens that the leader chose.

A choice of a follower's own could differ from the leader's by the last bit of a logit, and every later step
would differ with it; only among the best tokens of all vocabulary shards (models/layers/logit_parts.py) do
all ranks choose alike. The host receives the leader's tokens with its decisions. `ModelRunner.start`, whose
next step may begin before that, fetches them from device to device.

Legend: R sampled rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from continuous_batching.batch import Sampled
from continuous_batching.slots import SlotPool
from kv_cache.device.transfer import to_host
from kv_cache.pages import Index
from models.layers.logit_parts import LogitParts
from models.sampling.sampler import Best, Chosen


class FollowerSampler:
    """Takes the place of the leader's `Sampler` on other ranks, and chooses nothing."""

    captures_draws, reads_logits = False, True

    def prepare(self, rows: Index, targets: Index, slots: SlotPool) -> None:
        """Do nothing, because nothing is chosen."""

    def start(
        self, logits: Tensor, rows: Index, targets: Index, slots: SlotPool, best: Best | None = None
    ) -> Chosen:
        """Return room for the leader's tokens [R], and no tokens for the host.

        The host waits for the step all the same, so that it is no further ahead of its device than the
        leader.
        """
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        computed = to_host(tokens)

        def wait() -> Sampled:
            computed()
            return Sampled(np.empty(0, np.int64))

        return Chosen(tokens, wait)

    def best(self, logits: Tensor, parts: LogitParts | None = None) -> Best:
        """Return zeros [R], or the tokens that all ranks find alike in their parts; called in a capture."""
        if parts is not None:
            return Best.of(*parts.greedy(logits))
        nothing = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return Best(nothing, nothing)

    def draw_columns(self, rows: Index, targets: Index, slots: SlotPool) -> None:
        """Return nothing: no row is drawn here."""

    def draw(self, logits: Tensor, best: Best, columns: Tensor) -> Tensor:
        raise AssertionError("a follower captures no draws")
