"""Advance recurrent states by Ascend's fused operators, where these take what a layer keeps.

npu_recurrent_gated_delta_rule advances the states of decodes where they lie, and npu_chunk_gated_delta_rule
those of longer spans. Both take states, and all that advances them, in bfloat16 alone (op-plugin's pages);
states in float32, the default, are advanced by the definition's plain products, and so are those whose decays
are by channel, for which neither has an argument that its page supports. With bfloat16 a state is rounded
wherever a span ends: its tokens may then depend on how a prompt was cut, which `cache.state_dtype` says. The
chunked operator takes one width: other spans are advanced by the definition, too.

Legend: T tokens of the step, n tokens of some spans, H value heads, K width of a key, V width of a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch_npu
from torch import Tensor

from attention.npu.registered import lacking_here
from attention.recurrent import Inputs, Recurrence, Rows, StateMetadata, StateSpan, unit
from devices.torch_npu_calls import ON_STATES
from kv_cache.device.transfer import to_device

CHUNK_WIDTH, CHUNK_HEADS = 128, 64  # op-plugin's page of npu_chunk_gated_delta_rule


class FusedRecurrence(Recurrence):
    """Attention by the gated delta rule, with decays of whole heads, on a 910B or 910C."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        lacks = lacking_here(ON_STATES)
        if lacks:
            raise ValueError(
                f"torch_npu {torch_npu.__version__} cannot advance states in bfloat16; it lacks"
                f" {'; '.join(lacks)}: set cache.state_dtype=float32, or install a release that has them"
            )

    def plan(self, starts: Rows, stops: Rows, sources: Rows, targets: Rows) -> StateMetadata:
        """See Recurrence.plan.

        Where every span writes the row that it goes on from, both are one tensor, and no state is copied.
        """
        made = super().plan(starts, stops, sources, targets)
        return replace(made, sources=made.targets) if np.array_equal(sources, targets) else made

    def advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        metadata: StateMetadata,
    ) -> Tensor:
        """See Recurrence.advance."""
        query, key = (unit(each).to(value.dtype) for each in (query, key))
        inputs = (query, key, value.contiguous(), decay, beta.contiguous())
        if not metadata.spans and len(metadata.tokens) == len(value):
            return _decodes(inputs, states, metadata)  # no row need be picked: all are decodes, in order
        output = torch.empty_like(value)
        if len(metadata.tokens):
            chosen = tuple(each[metadata.tokens] for each in inputs)
            output[metadata.tokens] = _decodes(chosen, states, metadata)
        if value.shape[1] <= CHUNK_HEADS and key.shape[2] == value.shape[2] == CHUNK_WIDTH:
            for spans in _in_turn(metadata.spans):
                self._advance_spans(inputs, states, spans, output)
        elif metadata.spans:
            nothing = metadata.tokens[:0]
            rest = StateMetadata(nothing, nothing, nothing, metadata.spans)
            rows = _rows_of(metadata.spans, self.device)
            output[rows] = super().advance(*inputs, states, rest)[rows]
        return output

    def _advance_spans(
        self, inputs: Inputs, states: Tensor, spans: Sequence[StateSpan], output: Tensor
    ) -> None:
        """Advance the states of spans, of which none goes on from what another leaves, in one call."""
        rows = _rows_of(spans, self.device)
        numbers = [(each.source, each.target, each.stop - each.start, each.start) for each in spans]
        sources, targets, lens, starts = to_device(np.array(numbers).T.copy(), self.device)
        initial = states[sources].masked_fill_((starts == 0)[:, None, None, None], 0.0)
        query, key, value, decay, beta = (each[rows] for each in inputs)
        read, last = torch_npu.npu_chunk_gated_delta_rule(
            query,
            key,
            value,
            beta=beta,
            initial_state=initial,
            actual_seq_lengths=lens.int(),
            scale=1 / math.sqrt(key.shape[-1]),
            g=decay,
        )
        output[rows], states[targets] = read, last


def _decodes(inputs: Inputs, states: Tensor, metadata: StateMetadata) -> Tensor:
    """Advance the states of single tokens where they lie, and return what these read. [n, H, V]"""
    query, key, value, decay, beta = inputs
    if metadata.sources is not metadata.targets:
        states[metadata.targets] = states[metadata.sources]
    targets = metadata.targets.int()
    read: Tensor = torch_npu.npu_recurrent_gated_delta_rule(
        query,
        key,
        value,
        states,
        beta=beta,
        scale=1 / math.sqrt(key.shape[-1]),
        actual_seq_lengths=torch.ones_like(targets),
        ssm_state_indices=targets,
        g=decay,
    )
    return read.to(value.dtype)  # it differs only where the stand-in takes float32


def _rows_of(spans: Sequence[StateSpan], device: torch.device) -> Tensor:
    """Return the rows of the packed step that these spans hold, in their order. int64 [n]"""
    rows = torch.cat([torch.arange(each.rows.start, each.rows.stop) for each in spans])
    return to_device(rows.numpy(), device)


def _in_turn(spans: Sequence[StateSpan]) -> list[list[StateSpan]]:
    """Split spans into sets to be advanced one after the other.

    A part of a span goes on from what the part before leaves, so that each is in the set behind that.
    """
    turns: list[list[StateSpan]] = []
    turn_of: dict[int, int] = {}  # the turn of the part that leaves each row
    for span in spans:
        turn = turn_of.get(span.source, -1) + 1 if span.start else 0
        turn_of[span.target] = turn
        if turn == len(turns):
            turns.append([])
        turns[turn].append(span)
    return turns
