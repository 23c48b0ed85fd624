"""Run one step on the device of a pipeline stage, which holds only some of the layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from continuous_batching.batch import Batch, Sampled
from models.sampling import of_prompts
from models.sampling.sampler import Chosen
from models.step.runner import ModelRunner


class StageRunner(ModelRunner):
    """One step of a stage: receive from the stage before, compute its layers, send to the next stage.

    The leader, which is in the last stage, computes a batch when its result is asked for: by then the next
    batch has been made, and the earlier stages compute that one meanwhile.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        # What is to follow each batch that the leader has started and not computed
        self._following = deque[list[Callable[[], None]]]()

    def later(self, action: Callable[[], None]) -> None:
        """Do something once the batches that have been started are computed; on the leader."""
        if self._following:
            self._following[-1].append(action)
        else:
            action()

    def run(self, batch: Batch) -> Sampled:
        """Run a batch as `ModelRunner.run` does; a stage that is not the last chooses nothing."""
        return self.start(batch)()

    @torch.inference_mode()
    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Start a step, or, on the leader, only prepare it, because the slots may change before it runs."""
        compute = self._prepared(batch)
        share = self.decoder.share
        if share.is_last and share.tensor == 0:
            self._following.append([])
            return lambda: self._followed(compute()).wait()
        return compute().wait

    def _followed(self, chosen: Chosen) -> Chosen:
        for action in self._following.popleft():
            action()
        return chosen

    def _prepared(self, batch: Batch) -> Callable[[], Chosen]:
        """Return a function that computes a batch.

        All stages decide alike whether it is a captured step, because the number of rows that they send each
        other depends on it.
        """
        wanted, graphs = of_prompts.wanted_of(batch, self.slots), self.graphs
        if graphs is not None and wanted is None and graphs.takes(batch):
            filled = graphs.filled(batch)
            return lambda: self._computed(batch, lambda: self._replayed(graphs, filled, None))
        inputs, here = self._inputs(batch, None), wanted if self.decoder.share.is_last else None
        return lambda: self._computed(batch, lambda: self._finished(batch, self.decoder(inputs), here))

    @torch.inference_mode()
    def _computed(self, batch: Batch, compute: Callable[[], Chosen]) -> Chosen:
        if batch.copies:
            self.cache.apply(batch.copies)
        return compute()
