"""Advance recurrent states on a CPU in C++, each head of each request by itself, where its state lies.

`recurrent.cpp` computes what `attention.recurrent` defines, the convolution, single tokens and whole pieces,
to the same bits on any number of threads and beside any other requests. Without a compiler the definition's
plain products advance spans, and single tokens one after the other.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from attention.recurrent import Inputs, Recurrence, StateMetadata, by_state, step
from devices.cpp_sources import KINDS, compiled_source

SOURCE = Path(__file__).with_name("recurrent.cpp")
SPAN = ("first_row", "start", "stop", "source", "target")  # Span of the source


class _Rule(ctypes.Structure):
    """`Rule` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "decay", "beta", "states", "output")),
        *((name, ctypes.c_long) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_long) for name in ("key_heads", "heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int) for name in ("kind", "state_kind")),
        ("by_channel", ctypes.c_bool),
        ("by_token", ctypes.c_bool),
    )


class CompiledRecurrence:
    """The compiled source."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self._advance, self._convolve = library.advance, library.convolve
        self._advance.argtypes = [pointer, pointer, integer, number]
        self._convolve.argtypes = [pointer, integer, *[pointer] * 4, *[integer] * 3, number, number]
        self._advance.restype, self._convolve.restype = ctypes.c_bool, None

    def advance(
        self, inputs: Inputs, states: Tensor, metadata: StateMetadata, *, by_token: bool = False
    ) -> Tensor:
        """Compute Recurrence.advance, `by_token` without pieces. Raises MemoryError."""
        query, key, value = (_with_whole_tokens(each) for each in inputs[:3])
        decay, beta = (each.contiguous() for each in inputs[3:])
        output = torch.empty(value.shape, dtype=value.dtype)
        rule = _Rule(
            *(each.data_ptr() for each in (query, key, value, decay, beta, states, output)),
            *(query.stride(0), key.stride(0), value.stride(0)),
            *(key.shape[1], value.shape[1], key.shape[2], value.shape[2]),
            *(KINDS[value.dtype], KINDS[states.dtype], decay.ndim == 3, by_token),
        )
        for spans in _spans(metadata):
            address = ctypes.byref(rule), spans.data_ptr()
            if not self._advance(*address, len(spans), torch.get_num_threads()):
                raise MemoryError("there is no memory to advance the recurrent states of a step")
        return output

    def convolve(self, x: Tensor, weight: Tensor, pasts: Tensor, metadata: StateMetadata) -> Tensor:
        """Compute Recurrence.convolve."""
        x = x if x.stride(1) == 1 else x.contiguous()
        output = torch.empty(x.shape, dtype=x.dtype)
        for spans in _spans(metadata):
            self._convolve(
                *(x.data_ptr(), x.stride(0), weight.data_ptr(), pasts.data_ptr(), output.data_ptr()),
                *(spans.data_ptr(), len(spans), x.shape[1], len(weight), KINDS[x.dtype]),
                torch.get_num_threads(),
            )
        return output


class CpuRecurrence(Recurrence):
    """Attention by the gated delta rule on a CPU; `compiled` is None where there is no compiler.

    With `batch_invariant`, which needs it, each token advances its state by itself, so that what it reads has
    the same bits in a prompt, as a draft and as a decode. Pieces of a prompt sum in another order.
    """

    def __init__(self, compiled: CompiledRecurrence | None = None, *, batch_invariant: bool = False) -> None:
        super().__init__()
        assert not batch_invariant or compiled, "plain torch sums by the number of tokens"
        self._compiled, self._by_token = compiled, batch_invariant

    def convolve(self, x: Tensor, weight: Tensor, pasts: Tensor, metadata: StateMetadata) -> Tensor:
        """See Recurrence.convolve."""
        if self._compiled is None or x.dtype not in KINDS or pasts.dtype != x.dtype:
            return super().convolve(x, weight, pasts, metadata)
        return self._compiled.convolve(x, weight, pasts, metadata)

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
        inputs = query, key, value, decay, beta
        is_read = value.dtype in KINDS and all(each.dtype == value.dtype for each in (query, key, beta))
        if self._compiled is None or not is_read:
            return super().advance(*inputs, states, metadata)
        return self._compiled.advance(inputs, states, metadata, by_token=self._by_token)

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


def _spans(metadata: StateMetadata) -> list[Tensor]:
    """Return the spans [S, 5] as the source reads them: first those of one token, which others may follow."""
    found = []
    if len(metadata.tokens):
        one = torch.ones_like(metadata.tokens)  # it goes on from a state: its position does not count
        columns = (metadata.tokens, one, one + 1, metadata.sources, metadata.targets)
        found.append(torch.stack(columns, 1))
    if metadata.spans:
        found.append(torch.tensor([[getattr(span, name) for name in SPAN] for span in metadata.spans]))
    return found


def _with_whole_tokens(x: Tensor) -> Tensor:
    """Return [T, H, K] with the numbers of a token behind one another."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


@cache
def compiled_recurrence() -> CompiledRecurrence | str:
    """Return the source compiled for this machine, or why there is none."""
    found = compiled_source(SOURCE)
    return found if isinstance(found, str) else CompiledRecurrence(found)
