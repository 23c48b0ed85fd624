"""Capture steps of decodes as graphs, which run without the host launching each operator.

Steps are captured for a ladder of row counts, of one token each. A span that ends in drafts takes a row for
each of its tokens: all are written before any is read, so each may see those before it. But its keys are then
read once a token; if attention captures spans, steps of `width` tokens a row are captured too, and used while
at most half of their tokens, and no more than a page, are padding. Where layers keep recurrent states, tokens
of one row depend on each other in these: rows with drafts, or with accepted ones to read again, are computed
by steps of spans alone.

A captured step reads its inputs at fixed addresses, to which they are sent in one copy; rows beyond the batch
are padding on the null page. It ends with the best token of each row, and a second graph draws tokens if a
row asks for that. Tokens stay where the next step finds them, so that nothing has to be launched in between.

Legend: R rows of a captured step, W tokens of each, T tokens of the batch, N slots, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.recurrent import DraftRows, StateMetadata
from attention.reference import Attention, AttentionMetadata, StaticDecodes
from borders.files import first_line
from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from kv_cache.device.storage import CacheLayers
from kv_cache.device.transfer import queued
from kv_cache.pages import Index
from models.decoder import Decoder
from models.head import Head
from models.layers.logit_parts import LogitParts
from models.sampling.sampler import Best, takes_best
from models.step.graph_inputs import DRAW, PLACE, GraphInputs, num_values, split
from models.step.inputs import LastTokens
from models.step_inputs import StepInputs

log = logging.getLogger(__name__)

GRAPHS = {"cuda": "CUDAGraph", "npu": "NPUGraph"}  # the graph class of each device's module
ALIGNED = 128  # int32 elements: allocations begin at multiples of this, so copies of what is sent do too


class CapturedSampler(Protocol):
    """The part of models/sampling/sampler.py with which a captured step ends."""

    captures_draws: bool
    reads_logits: bool  # whether logits are read; otherwise only `best` is called

    def best(self, logits: Tensor, parts: LogitParts | None = None) -> Best:
        """Return the best tokens of logits [R, V], or of all ranks' `parts` of them."""
        ...

    def draw_columns(self, rows: Index, targets: Index, slots: SlotPool) -> NDArray[np.int32] | None:
        """Return what `draw` reads for all rows of a step; None if it cannot choose their tokens."""
        ...

    def draw(self, logits: Tensor, best: Best, columns: Tensor) -> Tensor:
        """Return tokens [R] of logits [R, V]."""
        ...


def ladder(most: int, page_size: int) -> list[int]:
    """Return the numbers of rows to capture: doubling up to a page, then growing by a page, up to `most`.

    So there is at most a page of padding, and every padding row writes to its own place in the null page.
    """
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + min(sizes[-1], page_size)))
    return sizes


def doubling(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`, which is the last."""
    sizes = [1 << power for power in range(most.bit_length())]
    return [*sizes, most] if sizes[-1:] != [most] and most else sizes


def captured_sizes(
    attention: Attention,
    most: int,
    width: int,
    most_layers: int = 0,
    *,
    joins: bool = False,
    most_decodes: int | None = None,
) -> tuple[list[int], list[int]]:
    """Return the numbers of rows to capture for steps of up to `most` tokens: of one token, and of `width`.

    They are the same in all stages, none of which has more than `most_layers`. With `most_decodes`, rows of
    one token are at most so many, because no draft takes one. Raises ValueError if the device holds too few
    graphs.
    """
    spans = doubling(most // width) if width > 1 and attention.captures_spans else []
    wanted = ladder(min(most, most_decodes or most), attention.shape.page_size)
    return attention.graph_sizes(wanted, len(spans), most_layers, joins=joins), spans


def smallest(
    batch: Batch, sizes: list[int], span_rows: list[int], width: int, page_size: int
) -> tuple[int, int]:
    """Return the captured step that a batch uses: its rows, and the tokens of each.

    A row of a span has at least as many keys as tokens, so that padding before its first token sees a key.
    At most a page of its tokens are padding, as in steps of one token a row; see `ladder`.
    """
    if batch.num_drafts and span_rows and batch.num_spans <= span_rows[-1]:
        rows = next(size for size in span_rows if size >= batch.num_spans)
        fits = int((batch.stops - batch.starts).max()) <= width <= int(batch.stops.min())
        num_padding = rows * width - batch.num_tokens
        if fits and num_padding <= min(batch.num_tokens, page_size):
            return rows, width
    return next(size for size in sizes if size >= batch.num_tokens), 1


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """One captured step."""

    graph: Any
    inputs: list[GraphInputs]  # buffers in pinned memory, filled by the host in turn
    sent: Tensor  # the same values on the device
    metadata: tuple[AttentionMetadata, ...]  # one for each group of layers
    logits: Tensor  # [R * W, V], the tokens of the batch first
    best: Best
    joins: Any  # the graph that joins the ranks' parts of these logits; None if one rank has them all
    draw: Any  # the graph that draws tokens; None if the device does not capture that
    drawn: Tensor | None  # int64 [R * W]


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A captured step with the inputs of a batch, which the device has not read yet."""

    batch: Batch
    step: CapturedStep
    inputs: GraphInputs
    is_drawn: bool  # whether the step itself draws tokens
    reads_none: bool  # whether no logits are read, so that ranks need not join them


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The results of a captured step, valid until the next run."""

    logits: Tensor | None  # [T, V]; None if only the best tokens are needed and ranks have parts
    best: Best  # [T]
    drawn: Tensor | None  # int64 [T]: the tokens, if the step drew them


class DecodeGraphs:
    """Captured steps of decodes only, of up to `most` tokens; of spans, with up to `width` tokens each.

    None of the `stages` of layers has more than `most_layers`; as many batches as stages are in flight. With
    `follow_at_once` nobody waits for a step before the next ones begin, as for those that make drafts.
    """

    def __init__(
        self,
        decoder: Decoder | Head,
        cache: CacheLayers,
        attention: Attention,
        sampler: CapturedSampler,
        slots: SlotPool,
        most: int,
        width: int,
        stages: int = 1,
        most_layers: int = 0,
        *,
        follow_at_once: bool = False,
    ) -> None:
        self._follow_at_once = follow_at_once
        self.decoder, self.cache, self.attention, self.slots = decoder, cache, attention, slots
        self.sampler, self.width = sampler, width
        self._num_windows = len(decoder.group_windows) - 1
        self._num_states = int(isinstance(decoder, Decoder) and decoder.config.num_recurrent > 0)
        most_rows = min(most, slots.num_slots) if self._num_states else most
        self._joins = isinstance(decoder, Decoder) and decoder.share.tensors > 1 and sampler.reads_logits
        self.sizes, self.span_rows = captured_sizes(
            attention, most, width, most_layers, joins=self._joins, most_decodes=most_rows
        )
        wanted = ladder(most_rows, slots.page_size)
        if self.sizes != wanted:
            log.warning(
                "graphs: of the sizes %s the device holds %s; steps of others run in the next larger one",
                ", ".join(map(str, wanted)),
                ", ".join(map(str, self.sizes)),
            )
        self.device = torch.get_device_module(attention.device)
        self.steps: dict[tuple[int, int], CapturedStep] = {}  # keyed by rows, and tokens of each
        # A step's inputs may be written while those of the step before are still being copied, and while
        # those of all batches in flight wait for their stage
        self._num_inputs, self._turn = max(2, stages), 0
        # The tokens that the step before chose [N], then what this step is sent, so that one gather reads
        # either
        most_tokens = max(rows * width for rows, width in self._all())
        self._first_sent = -(-max(slots.num_slots, most_tokens) // ALIGNED) * ALIGNED
        sent = max(num_values(*step, slots.max_pages, *self._further(step[1])) for step in self._all())
        self._table = torch.zeros(self._first_sent + sent, dtype=torch.int32, device=attention.device)
        self._held: Tensor | None = None  # the tokens with which the table begins

    def holds_beside(self, attention: Attention, most: int) -> bool:
        """Whether the device can hold these graphs beside those of another decoder, up to `most` tokens."""
        others = ladder(most, self.slots.page_size)
        of_target = self.attention, self.sizes, len(others), self._joins
        return all(
            each.holds(sizes, beside + len(self.span_rows), joins=joins)
            for each, sizes, beside, joins in (of_target, (attention, others, len(self.sizes), False))
        )

    def takes(self, batch: Batch) -> bool:
        """Whether a batch consists of decodes only, with or without drafts, and is not too large."""
        if batch.num_tokens != batch.num_spans + batch.num_drafts:
            return False
        if self._num_states and (batch.cuts or not batch.starts.all()):  # a row has no state, or leaves one
            return False
        if self._num_states and self._needs_spans(batch):
            fits = int((batch.stops - batch.starts).max()) <= self.width <= int(batch.stops.min())
            return fits and batch.num_spans <= max(self.span_rows, default=0)
        return batch.num_tokens <= self.sizes[-1]

    def _needs_spans(self, batch: Batch) -> bool:
        """Whether a row has drafts, or reads accepted ones again that its state has not taken in."""
        return batch.num_drafts > 0 or bool(self.slots.state_lag[batch.slots].any())

    def _size(self, batch: Batch) -> tuple[int, int]:
        """Return the rows, and the tokens of each, of the captured step for a batch that `takes` allows."""
        if self._num_states and self._needs_spans(batch):
            # There is no other captured step for these. Where more than a page of tokens is padding, several
            # write to one place of the null page: op-plugin's pages leave open which remains; nobody reads it
            return next(rows for rows in self.span_rows if rows >= batch.num_spans), self.width
        return smallest(batch, self.sizes, self.span_rows, self.width, self.slots.page_size)

    def _further(self, width: int) -> tuple[int, int]:
        """Return the number of windows, and of values for the state of each row of so many tokens."""
        return self._num_windows, self._num_states * (3 if width > 1 else 1)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first, since the others share its memory."""
        pool = self.device.graph_pool_handle()
        # A step runs once before its capture, with padding only, in more rows than the null page may have
        # places
        scratch = self.cache.scratch(max(rows * width for rows, width in self._all()))
        # A capture that cannot begin leaves its own stream
        with self.device.stream(self.device.current_stream()):
            for step in sorted(self._all(), key=math.prod, reverse=True):
                self.steps[step] = self._captured(*step, pool, scratch)
        log.info("graphs: decodes of up to %s rows, captured in %s sizes", self.sizes[-1], len(self.sizes))
        if self.span_rows:
            log.info(
                "graphs: and of up to %s rows of %s tokens, in %s sizes",
                self.span_rows[-1],
                self.width,
                len(self.span_rows),
            )

    def _all(self) -> list[tuple[int, int]]:
        return [(size, 1) for size in self.sizes] + [(rows, self.width) for rows in self.span_rows]

    def drop(self) -> None:
        """Drop all captured steps; this must precede any replacement of the tensors that they read."""
        self.device.synchronize()
        self.steps.clear()
        self._held = None

    def filled(self, batch: Batch) -> FilledStep:
        """Return the step for a batch that `takes` allows, with its inputs as the slots are now."""
        step = self.steps[self._size(batch)]
        self._turn = (self._turn + 1) % self._num_inputs
        inputs = step.inputs[self._turn]
        if self._follow_at_once:
            inputs.wait_for_copy()
        inputs.fill(batch)
        columns = None
        if batch.yields_all:
            columns = self.sampler.draw_columns(batch.owners, batch.targets, self.slots)
        if columns is not None:
            inputs.columns[DRAW, : batch.num_tokens] = columns
        reads_none = step.joins is not None and takes_best(batch.owners, self.slots)
        return FilledStep(batch, step, inputs, columns is not None, reads_none)

    def run(self, filled: FilledStep, last: LastTokens, drafts: Tensor | None = None) -> StepOutputs:
        """Run a step, where `last` has the tokens of the step before, and return its outputs.

        `drafts` [D] are those of the batch, if the device made them.
        """
        batch, step, inputs = filled.batch, filled.step, filled.inputs
        count = batch.num_tokens
        if len(batch.unknown):
            inputs.read_from(batch, last.places(batch))
            if last.tokens is not self._held:  # they were chosen outside of a captured step
                self._table[: len(last.tokens)].copy_(last.tokens)
        if drafts is not None:  # a batch with drafts is not made ahead, so nothing else stands there
            inputs.read_drafts(batch, 0)
            self._table[: len(drafts)].copy_(drafts)
        step.sent.copy_(inputs.values, non_blocking=True)
        if self._follow_at_once:
            inputs.wait_for_copy = queued(self.attention.device)
        self.attention.replay(step.graph, step.metadata, inputs.kv_lens())
        best = Best(step.best.tokens[:count], step.best.chosen[:count])
        logits = None if filled.reads_none else step.logits[:count]
        if step.joins is not None and not filled.reads_none:
            step.joins.replay()
        drawn = None
        if filled.is_drawn:
            assert step.drawn is not None, "draws are captured for every size or none"
            step.draw.replay()
            drawn = step.drawn[:count]
        self._held = best.chosen if drawn is None else drawn
        return StepOutputs(logits, best, drawn)

    def _captured(self, rows: int, width: int, pool: Any, scratch: CacheLayers) -> CapturedStep:
        further = self._further(width)
        size = num_values(rows, width, self.slots.max_pages, *further)
        pinned = torch.zeros(self._num_inputs, size, dtype=torch.int32, pin_memory=True)
        inputs = [GraphInputs(each, rows, width, self.slots, self._first_sent, *further) for each in pinned]
        sent = self._table[self._first_sent :][:size]
        sent.copy_(pinned[0])
        parts_sent = split(sent, rows, width, *further)
        columns = parts_sent[0]
        # Operators compile and allocate in their first run, which is not allowed in a capture
        logits, best, _ = self._step(*parts_sent, scratch)
        parts = self.decoder.parts if self._joins else None
        if parts is not None:
            logits = parts.joined(logits)
        graph_of = getattr(self.device, GRAPHS[self.attention.device.type])
        graph, joins, draw, drawn = graph_of(), None, None, None
        if self.sampler.captures_draws:
            self._drawn(logits, best, columns)
        with self.device.graph(graph, pool=pool):
            logits, best, metadata = self._step(*parts_sent, self.cache)
        if parts is not None:
            joins = graph_of()
            with self.device.graph(joins, pool=pool):
                logits = parts.joined(logits)
        if self.sampler.captures_draws:
            draw = graph_of()
            try:
                with self.device.graph(draw, pool=pool):
                    drawn = self._drawn(logits, best, columns)
            except RuntimeError as error:
                raise ValueError(
                    "device.graphs: draws by top-k and top-p cannot be captured here"
                    f" ({first_line(error)}); run `bash scripts/verify_npu.sh`, whose answer the next start"
                    " follows, or set it to 0"
                ) from error
        return CapturedStep(graph, inputs, sent, metadata, logits, best, joins, draw, drawn)

    def _step(
        self,
        columns: Tensor,
        pages: Tensor,
        windows: list[tuple[Tensor, Tensor]],
        states: Tensor,
        cache: CacheLayers,
    ) -> tuple[Tensor, Best, tuple[AttentionMetadata, ...]]:
        _, positions, write_index, kv_lens, rope_lens, source, adapters = columns[: DRAW.start]
        # A row that failed has no token: its request ends, and this step's result for it is dropped
        token_ids = self._table.index_select(0, source).clamp_(min=0)
        page_table = pages.t().contiguous()
        tables = [(write_index, page_table), *((index, table.t().contiguous()) for index, table in windows)]
        metadata, *of_windows = [
            self.attention.plan_static(StaticDecodes(index, table, kv_lens), seen)
            for (index, table), seen in zip(tables, self.decoder.group_windows)
        ]
        is_dynamic = self.decoder.config.rope.kind == "dynamic"
        step = StepInputs(
            token_ids,
            positions,
            metadata,
            cache,
            rope_lens if is_dynamic else None,
            window_metadata=tuple(of_windows),
        )
        if isinstance(self.decoder, Decoder) and self.decoder.counts_experts:  # padding is on the null page
            step = replace(step, is_asked=(write_index >= self.slots.page_size).int())
        if isinstance(self.decoder, Decoder) and self.decoder.adapters is not None:
            step = replace(step, adapters=adapters)
        if isinstance(self.decoder, Decoder) and self._num_states:
            step = replace(step, states=self._planned_states(states, self.decoder))
        if isinstance(self.decoder, Head):
            step = replace(step, before_index=_before_index(positions, page_table, self.slots.page_size))
        hidden = self.decoder(step)
        if len(page_table) < len(token_ids):  # the batch's tokens first, without the padding between them
            hidden = hidden.index_select(0, columns[PLACE])
        logits = self.decoder.own_logits(hidden)
        best = self.sampler.best(logits, self.decoder.parts)
        self._table[: len(logits)].copy_(best.chosen)
        return logits, best, (metadata, *of_windows)

    def _planned_states(self, states: Tensor, decoder: Decoder) -> StateMetadata | DraftRows:
        recurrence, sizes = decoder.recurrence, decoder.config.recurrent
        if len(states) == 1:
            return recurrence.plan_static(states[0])
        assert sizes is not None, "states have sizes"
        return recurrence.plan_drafts(states, self.width, sizes.conv_width)

    def _drawn(self, logits: Tensor, best: Best, columns: Tensor) -> Tensor:
        tokens = self.sampler.draw(logits, best, columns[DRAW])
        self._table[: len(tokens)].copy_(tokens)
        return tokens


def _before_index(positions: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """Return the cache place of the position before each row's [R]; for padding, a place of the null page."""
    before = (positions.long() - 1).clamp(min=0)
    pages = page_table.gather(1, before[:, None] // page_size)[:, 0]
    return pages * page_size + before % page_size
