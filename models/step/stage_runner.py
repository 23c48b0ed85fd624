"""Run one step on the device of a pipeline stage, which holds only some of the layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from continuous_batching.batch import Batch, Sampled
from kv_cache.device.transfer import to_host
from kv_cache.pages import Index
from models.sampling import prompt_outputs
from models.sampling.sampler import Chosen
from models.step.runner import ModelRunner


@dataclass(slots=True)
class _Started:
    """A batch that the leader has started: what computes it, what is to follow, and its result once known."""

    compute: Callable[[], Chosen]
    leaves_states: bool  # within its spans, in pages of their own
    following: list[Callable[[], None]] = field(default_factory=list)
    chosen: Chosen | None = None


class StageRunner(ModelRunner):
    """One step of a stage: receive from the stage before, compute its layers, send to the next stage.

    The leader, which is in the last stage, computes a batch when its result is asked for: by then the next
    batch has been made, and the earlier stages compute that one meanwhile.

    A drafter is in the last stage, where the hidden states are. It makes the drafts of a batch when the batch
    is started, and sends them to the first stage, which waits for them.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._started = deque[_Started]()  # batches that the leader has not computed yet

    def later(self, action: Callable[[], None]) -> None:
        """Do something once the batches that have been started are computed; on the leader."""
        if self._started:
            self._started[-1].following.append(action)
        else:
            action()

    def run(self, batch: Batch) -> Sampled:
        """Run a batch as `ModelRunner.run` does; a stage that is not the last chooses nothing."""
        return self.start(batch)()

    @torch.inference_mode()
    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Start a step, or, on the leader, only prepare it, because the slots may change before it runs."""
        drafts = self._drafted(batch)
        compute, share = self._prepared(batch), self.decoder.share
        if not share.is_last or share.tensor:
            return compute().wait
        started = _Started(compute, bool(batch.cuts))
        self._started.append(started)
        if drafts is None:
            return lambda: self._result(started)
        return lambda: replace(self._result(started), drafts=drafts)

    def _result(self, started: _Started) -> Sampled:
        """Compute what has been started, up to this batch, and return its result."""
        while started.chosen is None:
            self._compute_oldest()
        return started.chosen.wait()

    def _compute_oldest(self) -> None:
        oldest = self._started[0]
        oldest.chosen = oldest.compute()
        self._started.popleft()
        for action in oldest.following:
            action()

    def _drafted(self, batch: Batch) -> Index | None:
        """Have the drafts of a batch in the slots of the first and the last stage; return them, if any.

        The last stage makes the batch's copies first, since the drafter reads these pages. That may be before
        it computes batches that were started earlier: their rows are in no further batch, so that their pages
        are neither read nor written by its copies. A state that one of them leaves may have given its page up
        to such a copy, so that they are computed first.
        """
        share, drafts = self.decoder.share, None
        if self.drafter is not None:
            # The other ranks of this stage compute a batch before they hear of the next
            is_waited_for = batch.makes_drafts and share.tensors > 1
            if is_waited_for or (batch.copies and any(each.leaves_states for each in self._started)):
                while self._started:
                    self._compute_oldest()
            self.cache.apply(batch.copies)
            made = self.drafter.run(batch) if len(batch.draft_starts) else None
            if made is not None:
                # Those of the first rank, because another's could differ by the last bit of a logit
                drafts = to_host(self.decoder.group.broadcast(made))()
                self.decoder.stages.send_drafts(torch.from_numpy(drafts))
        elif batch.makes_drafts and share.is_first:
            room = torch.empty(batch.num_drafts, dtype=torch.int64)
            drafts = self.decoder.stages.receive_drafts(room).numpy()
        if drafts is not None:
            guessed = batch.is_draft
            self.slots.token_ids[batch.owners[guessed], batch.targets[guessed]] = drafts
        return drafts

    def _prepared(self, batch: Batch) -> Callable[[], Chosen]:
        """Return a function that computes a batch, whose drafts are known.

        All stages decide alike whether it is a captured step, because the number of rows that they send each
        other depends on it.
        """
        self.sampler.prepare(batch.owners, batch.targets, self.slots)
        wanted, graphs = prompt_outputs.outputs_of(batch, self.slots), self.graphs
        if graphs is not None and wanted is None and graphs.takes(batch):
            filled = graphs.filled(batch)
            return lambda: self._computed(batch, lambda: self._replayed(graphs, filled, None))
        inputs, here = self._inputs(batch, None, wanted), wanted if self.decoder.share.is_last else None
        return lambda: self._computed(batch, lambda: self._finished(batch, inputs, here))

    @torch.inference_mode()
    def _computed(self, batch: Batch, compute: Callable[[], Chosen]) -> Chosen:
        if batch.copies and self.drafter is None:
            self.cache.apply(batch.copies)
        return compute()
