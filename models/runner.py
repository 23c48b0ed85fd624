"""What happens on the device in one step?

Legend: R sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.reference import Attention
from continuous_batching.batch import Batch, Sampled
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index, PageCopy
from kv_cache.storage import KVCache
from kv_cache.transfer import to_device
from models.decoder import Decoder, StepInputs
from models.graphs import DecodeGraphs
from models.sampling import prompt_logprobs
from models.sampling.sampler import Chosen


class RowSampler(Protocol):
    """Chooses one token for each row, as models/sampling/sampler.py does."""

    def start(self, logits: Tensor, rows: Index, targets: Index, slots: SlotPool) -> Chosen:
        """From logits [R, V] of slot rows [R], begin to choose tokens for their positions `targets` [R].

        It does not wait for the device.
        """
        ...


class ModelRunner:
    """One step on the device: inputs from the slot table, forward, sample."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, attention: Attention, sampler: RowSampler, slots: SlotPool
    ) -> None:
        self.config = decoder.config
        self.graphs: DecodeGraphs | None = None
        self.decoder, self.cache, self.attention = decoder, cache, attention
        self.sampler, self.slots = sampler, slots
        decoder.rope.tabulate(slots.max_tokens, decoder.embedding.dtype)
        # The last token of each row: the next step may begin before the host knows it
        self._last = torch.zeros(slots.num_slots, dtype=torch.int64, device=attention.device)

    def capture(self, most: int) -> None:
        """Capture graphs, which from now on run steps of at most `most` decodes and nothing else."""
        self.graphs = DecodeGraphs(self.decoder, self.cache, self.attention, self.slots, most)
        self.graphs.capture()

    def run(self, batch: Batch) -> Sampled:
        """Make the batch's page copies, then compute its spans; one token for each of `batch.owners`."""
        return self._begin(batch).wait()

    @torch.inference_mode()
    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """The same without waiting for the device; the returned function waits.

        The next batch can already use the tokens on the device.
        """
        chosen = self._begin(batch)
        if len(batch.owners):
            self._last[self._to_device(batch.owners)] = chosen.tokens.clamp(min=0)
        return chosen.wait

    @torch.inference_mode()
    def _begin(self, batch: Batch) -> Chosen:
        if batch.copies:
            self.cache.apply(batch.copies)
        unknown = None
        if len(batch.unknown):
            unknown = self._last[self._to_device(batch.slots[batch.unknown])]
        wanted, scored = None, None
        if self.slots.scoring[batch.slots].any():
            wanted = prompt_logprobs.wanted_of(batch, self.slots)
        if self.graphs is not None and wanted is None and self.graphs.takes(batch):
            logits = self._sampled(batch, self.graphs.run(batch, unknown))
        else:
            hidden = self.decoder(self._inputs(batch, unknown))
            scored = None if wanted is None else prompt_logprobs.score(wanted, hidden, self.decoder)
            hidden = self._sampled(batch, hidden)
            logits = self.decoder.logits(hidden) if len(hidden) else hidden
        chosen = Chosen(self._last[:0], lambda: Sampled(np.empty(0, np.int64)))
        if len(logits):
            chosen = self.sampler.start(logits, batch.owners, batch.targets, self.slots)
        if scored is None:
            return chosen
        return Chosen(chosen.tokens, lambda: replace(chosen.wait(), prompt_logprobs=scored()))

    def _sampled(self, batch: Batch, step: Tensor) -> Tensor:
        """From a row for each token of the step [T, ...], those that tokens are sampled from [R, ...]."""
        rows = batch.yielding
        if not len(rows):
            return step[:0]
        is_whole = len(rows) == len(step) and bool((rows == np.arange(len(rows))).all())
        return step if is_whole else step[self._to_device(rows)]

    def _inputs(self, batch: Batch, unknown: Tensor | None) -> StepInputs:
        """All tokens of the batch; `unknown` [U] are the last tokens of spans `batch.unknown`."""
        slots = self.slots
        packed = slots.inputs(batch)
        rope_lens = None
        if self.config.rope.kind == "dynamic":
            num_prompt = np.repeat(slots.num_prompt[batch.slots], batch.stops - batch.starts)
            rope_lens = self._to_device(np.maximum(num_prompt, packed.positions + 1))
        token_ids = self._to_device(packed.token_ids)
        if unknown is not None:
            last = np.cumsum(batch.stops - batch.starts)[batch.unknown] - 1
            token_ids[self._to_device(last)] = unknown.to(token_ids.dtype)
        metadata = self.attention.plan(batch, slots.page_table, packed.write_index)
        return StepInputs(token_ids, self._to_device(packed.positions), metadata, self.cache, rope_lens)

    def resize(self, num_pages: int, copies: tuple[PageCopy, ...]) -> None:
        """Make the copies, then change the number of pages; pages that remain keep their contents."""
        self.cache.apply(copies)
        if self.graphs is not None:
            self.graphs.drop()  # they read the tensors that are about to be replaced
        self.cache.resize(num_pages)
        if self.graphs is not None:
            self.graphs.capture()

    def _to_device(self, array: NDArray[np.integer]) -> Tensor:
        return to_device(array, self.attention.device)
