"""Run one step on the device: page copies, drafts, inputs from the slot table, forward pass, sampling.

Here the host side, which decides a batch, meets the device side, which computes it.

Legend: R sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.reference import Attention
from continuous_batching.batch import Batch, Sampled
from continuous_batching.slots import SlotPool
from kv_cache.device.storage import KVCache
from kv_cache.device.transfer import queued, to_device, to_host
from kv_cache.pages import Index, PageCopy
from models.decoder import Decoder
from models.sampling import prompt_outputs
from models.sampling.sampler import Best, Chosen, arriving, takes_best
from models.step.graphs import CapturedSampler, DecodeGraphs, FilledStep, StepOutputs
from models.step.inputs import LastTokens, step_inputs
from models.step_inputs import StepInputs


class RowSampler(CapturedSampler, Protocol):
    """Chooses one token for each row, as models/sampling/sampler.py does."""

    def prepare(self, rows: Index, targets: Index, slots: SlotPool) -> None:
        """Start the host's work for choosing tokens at these positions, before there are logits."""
        ...

    def start(
        self, logits: Tensor, rows: Index, targets: Index, slots: SlotPool, best: Best | None = None
    ) -> Chosen:
        """Start to choose tokens for positions `targets` [R] from logits [R, V] of slot rows [R].

        It does not wait for the device. `best` are the best tokens of these logits, if they are known.
        """
        ...


class DraftSource(Protocol):
    """Makes the drafts of a step on the device, as models/drafting does."""

    graphs: DecodeGraphs | None

    def capture(self, target: DecodeGraphs) -> None:
        """Capture the steps that make drafts, if the device has room for them beside the target's."""
        ...

    def run(self, batch: Batch) -> Tensor | None:
        """Return the drafts that a batch asks for, int64 [D], span after span, or None."""
        ...

    def finish(self) -> None:
        """Compute what later drafts need of the target's step, which has just been computed.

        It follows each `run`, in the same order; further batches may have been run between the two.
        """
        ...


class ModelRunner:
    """One step on the device: drafts, inputs from the slot table, forward, sample.

    The cache of a `drafter` lies beside that of the target model (see `KVCache`).
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        attention: Attention,
        sampler: RowSampler,
        slots: SlotPool,
        drafter: DraftSource | None = None,
    ) -> None:
        self.config = decoder.config
        self.graphs: DecodeGraphs | None = None
        self.decoder, self.cache, self.attention = decoder, cache, attention
        self.sampler, self.slots, self.drafter = sampler, slots, drafter
        decoder.tabulate(slots.max_tokens)
        self._last = LastTokens(slots.num_slots, attention.device)

    def capture(self, most: int, width: int = 1) -> None:
        """Capture graphs for steps of decodes of at most `most` tokens, with drafts up to `width` a row."""
        parts = self.decoder, self.cache, self.attention, self.sampler, self.slots
        share = self.decoder.share
        self.graphs = DecodeGraphs(*parts, most, width, share.stages, share.most_layers(self.config))
        self.graphs.capture()
        if self.drafter is not None:
            self.drafter.capture(self.graphs)

    def run(self, batch: Batch) -> Sampled:
        """Make the batch's page copies, then compute its spans.

        Returns one token for each of `batch.owners`.
        """
        return self._begin(batch).wait()

    @torch.inference_mode()
    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Run a batch without waiting for the device; the function returned waits.

        The next batch can already use the tokens on the device, which on every rank are those of the first
        rank.
        """
        chosen = self._begin(batch)
        if len(chosen.tokens):
            self.decoder.group.broadcast(chosen.tokens)
        self._last.keep(chosen.tokens, batch.owners)
        return chosen.wait

    @torch.inference_mode()
    def _begin(self, batch: Batch) -> Chosen:
        if batch.copies:
            self.cache.apply(batch.copies)
        if not batch.makes_drafts:
            self.sampler.prepare(batch.owners, batch.targets, self.slots)
        drafts = None
        if self.drafter is not None and len(batch.draft_starts):
            drafts = self.drafter.run(batch)
        # Use those of the first rank, because another's could differ by the last bit of a logit
        if drafts is not None:
            self.decoder.group.broadcast(drafts)
        wanted = prompt_outputs.outputs_of(batch, self.slots)
        if self.graphs is not None and wanted is None and self.graphs.takes(batch):
            return self._replayed(self.graphs, self.graphs.filled(batch), drafts)
        return self._finished(batch, self._inputs(batch, drafts, wanted), wanted, drafts)

    def _hidden(self, batch: Batch, inputs: StepInputs) -> Tensor:
        """Compute the hidden states of a batch, and then what later drafts need of them."""
        hidden: Tensor = self.decoder(inputs)
        self._finish_drafts(batch)
        return hidden

    def _finish_drafts(self, batch: Batch) -> None:
        if self.drafter is not None and len(batch.draft_starts):
            self.drafter.finish()

    def _finished(
        self,
        batch: Batch,
        inputs: StepInputs,
        wanted: prompt_outputs.PromptOutputs | None,
        drafts: Tensor | None = None,
    ) -> Chosen:
        """Compute a batch, and sample from its hidden states."""
        hidden = self._hidden(batch, inputs)
        arrived = None if drafts is None else self._arriving(batch, drafts)
        found = None if wanted is None else prompt_outputs.find(wanted, hidden, self.decoder)
        chosen = self._chosen(batch, hidden if inputs.read is not None else self._sampled(batch, hidden))
        if arrived is not None:
            chosen = _with_drafts(chosen, arrived)
        if found is None:
            return chosen
        return Chosen(chosen.tokens, lambda: found(chosen.wait()))

    def _arriving(self, batch: Batch, drafts: Tensor) -> Callable[[], Index]:
        """Start to copy drafts to the host; the host waits if logits depend on the tokens before them."""
        arrived = to_host(drafts)
        if not self.slots.plain[batch.owners].all():
            guessed = batch.is_draft
            self.slots.token_ids[batch.owners[guessed], batch.targets[guessed]] = arrived()
        return arrived

    def _replayed(self, graphs: DecodeGraphs, filled: FilledStep, drafts: Tensor | None) -> Chosen:
        batch, step = filled.batch, graphs.run(filled, self._last, drafts)
        self._finish_drafts(batch)
        arrived = None if drafts is None else self._arriving(batch, drafts)
        chosen = arriving(step.drawn) if step.drawn is not None else self._chosen_of(batch, step)
        return chosen if arrived is None else _with_drafts(chosen, arrived)

    def _chosen(self, batch: Batch, hidden: Tensor) -> Chosen:
        """Choose tokens for hidden states [R, hidden], which may be empty."""
        if not len(hidden):
            return self._none()
        logits, parts = self.decoder.own_logits(hidden), self.decoder.parts
        if parts is not None:
            if takes_best(batch.owners, self.slots):
                return arriving(self.sampler.best(logits, parts).chosen)
            logits = parts.joined(logits)
        return self.sampler.start(logits, batch.owners, batch.targets, self.slots)

    def _chosen_of(self, batch: Batch, step: StepOutputs) -> Chosen:
        """Choose tokens from the results of a captured step."""
        if not len(batch.owners):
            return self._none()
        if step.logits is None:
            return arriving(self._sampled(batch, step.best.chosen))
        best = step.best if batch.yields_all else None
        logits = self._sampled(batch, step.logits)
        return self.sampler.start(logits, batch.owners, batch.targets, self.slots, best)

    def _none(self) -> Chosen:
        """Choose no token, which is waited for as if it were one.

        A step's time is measured by its wait, and no host may be further ahead of its device than a step.
        """
        done = queued(self.attention.device)

        def wait() -> Sampled:
            done()
            return Sampled(np.empty(0, np.int64))

        return Chosen(self._last.tokens[:0], wait)

    def _sampled(self, batch: Batch, step: Tensor) -> Tensor:
        """Select the rows [R, ...] that tokens are sampled from, of those of all tokens [T, ...]."""
        if not len(batch.owners):
            return step[:0]
        return step if batch.yields_all else step[self._to_device(batch.yielding)]

    def _inputs(
        self, batch: Batch, drafts: Tensor | None, wanted: prompt_outputs.PromptOutputs | None
    ) -> StepInputs:
        """Return the inputs for all tokens of the batch, including those that only the device knows."""
        inputs = step_inputs(batch, self.slots, self.decoder, self.cache)
        token_ids, ends = inputs.token_ids, np.cumsum(batch.stops - batch.starts)
        if len(batch.unknown):
            # A row that failed has no token: its request ends, and this step's result for it is dropped
            unknown = self._last.tokens[self._to_device(self._last.places(batch))].clamp_(min=0)
            token_ids[self._to_device(ends[batch.unknown] - 1)] = unknown.to(token_ids.dtype)
        if drafts is not None:
            spans, targets = batch.sampled[batch.is_draft], batch.targets[batch.is_draft]
            places = ends[spans] - batch.stops[spans] + targets
            token_ids[self._to_device(places)] = drafts.to(token_ids.dtype)
        is_whole = inputs.divided is None and wanted is None
        if not is_whole or not self.decoder.skips_rows or batch.yields_all:
            return inputs
        return replace(inputs, read=self._to_device(batch.yielding))

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        """Make the copies, then change the number of pages; pages that remain keep their content."""
        self.cache.apply(copies)
        for each in self._captured():
            each.drop()  # they read the tensors that are about to be replaced
        self.cache.resize(num_pages)
        for each in self._captured():
            each.capture()

    def release_pages(self) -> None:
        """Give the memory of the cache's pages back.

        No step may follow until the cache has them again, and `capture_steps` has been called.
        """
        for each in self._captured():
            each.drop()
        self.cache.release()

    def capture_steps(self) -> None:
        """Capture anew the steps that `release_pages` has dropped."""
        for each in self._captured():
            each.capture()

    def _captured(self) -> list[DecodeGraphs]:
        graphs = [self.graphs, None if self.drafter is None else self.drafter.graphs]
        return [each for each in graphs if each is not None]

    def _to_device(self, array: NDArray[np.integer]) -> Tensor:
        return to_device(array, self.attention.device)


def _with_drafts(chosen: Chosen, arrived: Callable[[], Index]) -> Chosen:
    """Return the choice with the drafts that were verified."""
    return Chosen(chosen.tokens, lambda: replace(chosen.wait(), drafts=arrived()))
