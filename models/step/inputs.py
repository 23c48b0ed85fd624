"""Build the decoder's inputs of one step from the slot table, and send them to the device.

With overlapped scheduling, a step is prepared before the host knows the tokens that the device sampled last.
`LastTokens` keeps these on the device, with the place of each row's token; the runner and the graphs put them
into the step.

Legend: N rows of the slot table, R sampled rows, U spans of the step whose last token is known only to the
device.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attention.recurrent import StateMetadata, Tails
from continuous_batching.batch import Batch, ragged_ranges
from continuous_batching.slots import SlotPool
from kv_cache.device.storage import CacheLayers
from kv_cache.device.transfer import to_device
from kv_cache.pages import NULL_PAGE, Index
from models.decoder import Decoder
from models.head import Head
from models.step_inputs import StepInputs


def step_inputs(batch: Batch, slots: SlotPool, decoder: Decoder | Head, cache: CacheLayers) -> StepInputs:
    """Send all tokens of a batch, as far as the host knows them, to the device."""
    attention = decoder.attention
    packed = slots.inputs(batch)
    rope_lens = None
    if decoder.config.rope.kind == "dynamic":
        num_prompt = np.repeat(slots.num_prompt[batch.slots], batch.stops - batch.starts)
        rope_lens = to_device(np.maximum(num_prompt, packed.positions + 1), attention.device)
    token_ids = to_device(packed.token_ids, attention.device)
    tables = zip((slots.page_table, *slots.window_tables), packed.write_indexes, decoder.group_windows)
    metadata, *of_windows = [attention.plan(batch, *each) for each in tables]
    positions = to_device(packed.positions, attention.device)
    before_index = None
    if isinstance(decoder, Head):
        rows = np.repeat(batch.slots, batch.stops - batch.starts)
        pages, offsets = np.divmod(np.maximum(packed.positions - 1, 0), slots.page_size)
        places = slots.page_table[rows, pages] * np.int64(slots.page_size) + offsets
        before_index = to_device(places, attention.device)
    adapters = None
    if isinstance(decoder, Decoder) and decoder.adapters is not None and slots.adapter[batch.slots].any():
        numbers = np.repeat(slots.adapter[batch.slots], batch.stops - batch.starts)
        adapters = to_device(numbers, attention.device)
    return StepInputs(
        token_ids,
        positions,
        metadata,
        cache,
        rope_lens,
        before_index,
        adapters=adapters,
        window_metadata=tuple(of_windows),
        states=state_spans(batch, slots, decoder) if isinstance(decoder, Decoder) else None,
        divided=decoder.division(len(packed.token_ids)) if isinstance(decoder, Decoder) else None,
    )


def state_spans(batch: Batch, slots: SlotPool, decoder: Decoder) -> StateMetadata | None:
    """Return which states the spans of a batch go on from and leave; None if no layer keeps one.

    A state stands before the drafts that were accepted last, and is left before those of this batch.
    """
    table = slots.state_pages
    if table is None or not decoder.config.num_recurrent:
        return None
    pages, lags = table[batch.slots].astype(np.int64), slots.state_lag[batch.slots]
    starts, stops, sources, targets = batch.starts - lags, batch.stops, pages, pages
    drafts = batch.drafts_by_span if batch.num_drafts else np.zeros_like(lags)
    stops, num_parts = stops - drafts, np.ones_like(pages)
    if batch.cuts:  # a span in parts, each of which goes on from where the one before has left its state
        spans = np.array([cut.span for cut in batch.cuts])
        ends, left = (np.array([getattr(cut, name) for cut in batch.cuts]) for name in ("position", "page"))
        starts, stops = np.insert(starts, spans + 1, ends), np.insert(stops, spans, ends)
        sources, targets = np.insert(pages, spans + 1, left), np.insert(pages, spans, left)
        num_parts += np.bincount(spans, minlength=len(pages))
    if batch.num_drafts:  # drafts are parts whose state goes nowhere
        having = np.flatnonzero(drafts)
        behind, known = np.cumsum(num_parts)[having], (batch.stops - drafts)[having]
        starts, stops = np.insert(starts, behind, known), np.insert(stops, behind, batch.stops[having])
        sources, targets = np.insert(sources, behind, pages[having]), np.insert(targets, behind, NULL_PAGE)
    planned = decoder.recurrence.plan(starts, stops, sources, targets)
    if not batch.num_drafts and not lags.any():
        return planned
    return replace(planned, tails=_tails(batch, pages, lags, drafts, decoder.attention.device))


def _tails(batch: Batch, pages: Index, lags: Index, drafts: Index, device: torch.device) -> Tails:
    """Return what spans read again of so many accepted drafts, and keep of so many new ones."""
    lens, num_read = batch.stops - batch.starts, int(lags.sum())
    zeros, totals = np.zeros_like(lags), lags + lens
    is_read = ragged_ranges(zeros, totals) < np.repeat(lags, totals)
    order = np.where(is_read, np.cumsum(is_read) - 1, num_read + np.cumsum(~is_read) - 1)
    ends = np.cumsum(lens)
    arrays = (
        *(np.repeat(pages, lags), ragged_ranges(zeros, lags), order, np.flatnonzero(~is_read)),
        *(ragged_ranges(ends - drafts, ends), np.repeat(pages, drafts), ragged_ranges(zeros, drafts)),
    )
    return Tails(*(to_device(each.astype(np.int64), device) for each in arrays))


class LastTokens:
    """The tokens of the step before, and the place of each row's token among them."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.tokens = torch.zeros(0, dtype=torch.int64, device=device)  # [R]; negative if there is none
        self._places = np.zeros(num_rows, dtype=np.int64)  # [N]

    def keep(self, tokens: Tensor, owners: Index) -> None:
        """Store the tokens [R] that a step chose for the rows `owners` [R]."""
        self.tokens = tokens
        self._places[owners] = np.arange(len(owners))

    def places(self, batch: Batch) -> Index:
        """Return where in `tokens` the last tokens of the spans `batch.unknown` are. [U]"""
        places: Index = self._places[batch.slots[batch.unknown]]
        return places
