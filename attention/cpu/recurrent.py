"""Advance recurrent states on a CPU: each state of a decode where it lies, while it is in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.recurrent import Inputs, Recurrence, StateMetadata, by_state, step


class CpuRecurrence(Recurrence):
    """Attention by the gated delta rule on a CPU."""

    def _advance_tokens(
        self, inputs: Inputs, states: Tensor, metadata: StateMetadata, output: Tensor
    ) -> None:
        if states.dtype != torch.float32:
            super()._advance_tokens(inputs, states, metadata, output)
            return
        tokens = zip(*by_state(tuple(each[metadata.tokens] for each in inputs)))
        rows = zip(metadata.tokens.tolist(), metadata.sources.tolist(), metadata.targets.tolist())
        for token, (row, source, target) in zip(tokens, rows):
            state = states[target]
            if source != target:
                state.copy_(states[source])
            output[row] = step(token, state).to(output.dtype)
