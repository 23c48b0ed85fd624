"""How does a step of decodes run without the host launching each operator?

Steps are captured for a ladder of row counts, of one token each. A span that ends in drafts takes a row for
each of its tokens: all are written before any is read, so each may see those before it. Its keys are then
read once a token, and in return no size has to be captured anew for any number of drafts.

A captured step reads its inputs at fixed addresses, to which they are sent in one copy; rows beyond the batch
are padding on the null page. It ends with the best token of each row, and a second graph draws tokens where a
row asks for that. Tokens are left where the next step finds them, so that nothing has to be launched in
between.

Legend: R rows of a captured step, T tokens of the batch, N slots, V vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.reference import Attention, AttentionMetadata, StaticDecodes
from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index
from kv_cache.storage import KVCache
from models.decoder import Decoder, StepInputs
from models.last_tokens import LastTokens
from models.sampling import draw_columns
from models.sampling.sampler import Best

log = logging.getLogger(__name__)

GRAPHS = {"cuda": "CUDAGraph", "npu": "NPUGraph"}  # the class of each device's module
# Columns of a row: token id, position, place to write, kv length, length that sets dynamic rope, and where
# its token is read; then how a token is drawn, then pages
SOURCE = 5
DRAW = slice(6, 6 + draw_columns.COLUMNS)
COLUMNS = DRAW.stop
ALIGNED = 128  # of int32: where allocations begin, so copies of what is sent do too


class CapturedSampler(Protocol):
    """What of models/sampling/sampler.py a captured step ends with."""

    captures_draws: bool

    def best(self, logits: Tensor) -> Best:
        """The best tokens of logits [R, V]."""
        ...

    def draw_columns(self, rows: Index, targets: Index, slots: SlotPool) -> NDArray[np.int32] | None:
        """What `draw` reads of all rows of a step; None where it cannot choose their tokens."""
        ...

    def draw(self, logits: Tensor, best: Best, columns: Tensor) -> Tensor:
        """Tokens [R] of logits [R, V]."""
        ...


def ladder(most: int, page_size: int) -> list[int]:
    """Numbers of rows to capture: doubling up to a page, then growing by a page, up to `most`.

    So there is at most a page of padding, and every padding row writes to its own place in the null page.
    """
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + min(sizes[-1], page_size)))
    return sizes


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """One captured step."""

    graph: Any
    pinned: tuple[Tensor, Tensor]  # int32 [COLUMNS + max_pages, R], which the host fills by turns
    sent: Tensor  # the same on the device
    metadata: AttentionMetadata
    logits: Tensor  # [R, V]
    best: Best
    draw: Any  # the graph that draws tokens; None where the device does not capture that
    drawn: Tensor | None  # int64 [R]


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a captured step found, valid until the next run."""

    logits: Tensor  # [T, V]
    best: Best  # [T]
    drawn: Tensor | None  # int64 [T]: the tokens, where the step drew them


class DecodeGraphs:
    """Captured steps of decodes only, of up to `most` tokens."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        attention: Attention,
        sampler: CapturedSampler,
        slots: SlotPool,
        most: int,
    ) -> None:
        self.decoder, self.cache, self.attention, self.slots = decoder, cache, attention, slots
        self.sampler = sampler
        wanted = ladder(most, slots.page_size)
        self.sizes = attention.graph_sizes(wanted)
        if self.sizes != wanted:
            log.warning(
                "graphs: of the sizes %s the device holds %s; steps of others run in the next larger one",
                ", ".join(map(str, wanted)),
                ", ".join(map(str, self.sizes)),
            )
        self.device = torch.get_device_module(attention.device)
        self.steps: dict[int, CapturedStep] = {}
        self._turn = 0  # a step's inputs may be written while those of the step before are still being copied
        # The tokens that the step before chose [N], then what this step is sent: one gather reads either
        self._first_sent = -(-max(slots.num_slots, self.sizes[-1]) // ALIGNED) * ALIGNED
        size = self._first_sent + self.sizes[-1] * (COLUMNS + slots.max_pages)
        self._table = torch.zeros(size, dtype=torch.int32, device=attention.device)
        self._held: Tensor | None = None  # the tokens that the table begins with

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is decodes only, with drafts or without, and not too many."""
        return batch.num_tokens == batch.num_spans + batch.num_drafts and batch.num_tokens <= self.sizes[-1]

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first, since the others share its memory."""
        pool = self.device.graph_pool_handle()
        # Before a capture its step runs once with padding only, in more rows than the null page may have
        # places
        scratch = self.cache.scratch(self.sizes[-1])
        for size in reversed(self.sizes):
            self.steps[size] = self._captured(size, pool, scratch)
        log.info("graphs: decodes of up to %s rows, captured in %s sizes", self.sizes[-1], len(self.sizes))

    def drop(self) -> None:
        """Drop all captured steps, as must be done before the tensors that they read are replaced."""
        self.device.synchronize()
        self.steps.clear()
        self._held = None

    def run(self, batch: Batch, last: LastTokens) -> StepOutputs:
        """What comes of a batch that `takes` allows, where `last` has the tokens of the step before."""
        count = batch.num_tokens
        step = self.steps[next(size for size in self.sizes if size >= count)]
        self._turn ^= 1
        pinned = step.pinned[self._turn]
        host = pinned.numpy()
        _fill(host[:, :count], batch, self.slots)
        _pad(host[:, count:])
        host[SOURCE] = self._first_sent + np.arange(host.shape[1])  # the token ids that are sent
        columns = None
        if batch.yields_all:
            columns = self.sampler.draw_columns(batch.owners, batch.targets, self.slots)
        if columns is not None:
            host[DRAW, :count] = columns
        if len(batch.unknown):
            ends = np.cumsum(batch.stops - batch.starts)
            host[SOURCE, ends[batch.unknown] - 1] = last.places(batch)
            if last.tokens is not self._held:  # they were chosen outside of a captured step
                self._table[: len(last.tokens)].copy_(last.tokens)
        step.sent.copy_(pinned, non_blocking=True)
        self.attention.replay(step.graph, step.metadata, host[3].tolist())
        best = Best(step.best.tokens[:count], step.best.chosen[:count])
        drawn = None
        if columns is not None:
            assert step.drawn is not None, "draws are captured for every size or none"
            step.draw.replay()
            drawn = step.drawn[:count]
        self._held = best.chosen if drawn is None else drawn
        return StepOutputs(step.logits[:count], best, drawn)

    def _captured(self, size: int, pool: Any, scratch: KVCache) -> CapturedStep:
        shape = (COLUMNS + self.slots.max_pages, size)
        pinned = tuple(torch.zeros(shape, dtype=torch.int32, pin_memory=True) for _ in range(2))
        _pad(pinned[0].numpy())
        sent = self._table[self._first_sent :][: pinned[0].numel()].view(shape)
        sent.copy_(pinned[0])
        logits, best, _ = self._step(sent, scratch)  # operators compile and allocate, which no capture may
        graph_of = getattr(self.device, GRAPHS[self.attention.device.type])
        graph, draw, drawn = graph_of(), None, None
        if self.sampler.captures_draws:
            self._drawn(logits, best, sent)
        with self.device.graph(graph, pool=pool):
            logits, best, metadata = self._step(sent, self.cache)
        if self.sampler.captures_draws:
            draw = graph_of()
            try:
                with self.device.graph(draw, pool=pool):
                    drawn = self._drawn(logits, best, sent)
            except RuntimeError as error:
                raise ValueError(
                    "device.graphs: draws by top-k and top-p cannot be captured here"
                    f" ({_first_line(error)}); run `bash scripts/verify_npu.sh`, whose answer the next start"
                    " follows, or set it to 0"
                ) from error
        return CapturedStep(graph, pinned, sent, metadata, logits, best, draw, drawn)

    def _step(self, sent: Tensor, cache: KVCache) -> tuple[Tensor, Best, AttentionMetadata]:
        _, positions, write_index, kv_lens, rope_lens, source = sent[: DRAW.start]
        # A row that failed has no token: its request ends, and this step of it counts no more
        token_ids = self._table.index_select(0, source).clamp_(min=0)
        page_table = sent[COLUMNS:].t().contiguous()
        metadata = self.attention.plan_static(StaticDecodes(write_index, page_table, kv_lens))
        is_dynamic = self.decoder.config.rope.kind == "dynamic"
        step = StepInputs(token_ids, positions, metadata, cache, rope_lens if is_dynamic else None)
        logits = self.decoder.logits(self.decoder(step))
        best = self.sampler.best(logits)
        self._table[: len(logits)].copy_(best.chosen)
        return logits, best, metadata

    def _drawn(self, logits: Tensor, best: Best, sent: Tensor) -> Tensor:
        tokens = self.sampler.draw(logits, best, sent[DRAW])
        self._table[: len(tokens)].copy_(tokens)
        return tokens


def _first_line(error: RuntimeError) -> str:
    # What a device says, without where it happened
    return str(error).strip().partition("\n")[0]


def _fill(host: NDArray[np.int32], batch: Batch, slots: SlotPool) -> None:
    """A row for each token of a batch."""
    packed = slots.inputs(batch)
    owners = batch.slots
    if batch.num_drafts:
        owners = np.repeat(owners, batch.stops - batch.starts)
    kv_lens = packed.positions + 1
    width = -(-int(batch.stops.max()) // slots.page_size)
    host[0], host[1], host[2], host[3] = packed.token_ids, packed.positions, packed.write_index, kv_lens
    host[4] = np.maximum(slots.num_prompt[owners], kv_lens)
    host[COLUMNS : COLUMNS + width] = slots.page_table[owners, :width].T


def _pad(host: NDArray[np.int32]) -> None:
    """Padding rows: one token each, at position 0, written to different places of the null page."""
    host[:] = 0
    host[2] = np.arange(host.shape[1])
    host[3:5] = 1
