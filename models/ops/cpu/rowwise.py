"""Compute norms, rotary, gates, a router's scores, the greedy choice and draws in C++.

`rowwise.cpp` computes a row, or a number, by itself and in one pass, so that its bits are the same in any
batch.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from devices.cpp_sources import KINDS, compiled_source
from kv_cache.device.transfer import Tensors
from models.ops.reference import Ops

SOURCE = Path(__file__).with_name("rowwise.cpp")
SILU, GELU, CLAMPED = range(3)  # enum Gate of the source
SIGMOID, SOFTPLUS = range(2)  # enum Curve of the source


class _Draws(ctypes.Structure):
    """`Draws` of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("best", "otherwise", "is_drawn", "uniform", "sharpness")),
        *((name, ctypes.c_void_p) for name in ("min_p", "excess", "outside")),
    ]


class Rowwise:
    """The compiled source, which leaves to plain torch the types and strides that it does not read."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, real, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
        self._norm, self._rotate, self._gate = library.norm, library.rotate, library.gate
        self._choose, self._gated_norm = library.choose, library.gated_norm
        self._norm.argtypes = [pointer] * 5 + [integer] * 2 + [real, number, number]
        self._rotate.argtypes = [pointer] * 4 + [integer] * 5 + [number, number]
        self._gate.argtypes = [number, pointer, pointer, integer, integer, real, real, number, number]
        self._choose.argtypes = [pointer, integer, pointer, pointer, integer, integer, number, number]
        self._gated_norm.argtypes = [*[pointer] * 4, *[integer] * 4, real, ctypes.c_bool, number, number]
        self._curve, self._score, self._softmax = library.curve, library.score, library.softmax
        self._curve.argtypes = [number, pointer, pointer, integer, number, number]
        self._score.argtypes = [*[pointer] * 4, *[integer] * 3, number, number]
        self._softmax.argtypes = [*[pointer] * 2, *[integer] * 2]
        for function in (self._norm, self._gated_norm, self._rotate, self._gate, self._choose):
            function.restype = None
        for function in (self._curve, self._score, self._softmax):
            function.restype = None
        self._draw = library.draw
        self._draw.argtypes = [pointer, *[integer] * 3, pointer, pointer, number, number]
        self._draw.restype = ctypes.c_bool
        self._plain = Ops()

    @property
    def functions(self) -> tuple[Any, ...]:
        """The source's functions that `layers.cpp` calls."""
        return self._norm, self._rotate, self._gate

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute Ops.rms_norm."""
        if not _is_read(x, weight):
            return self._plain.rms_norm(x, weight, eps)
        x, weight = x.contiguous(), weight.contiguous()
        y = torch.empty_like(x)
        width = x.shape[-1]
        self._norm(
            *(x.data_ptr(), None, weight.data_ptr(), y.data_ptr(), None),
            *(x.numel() // width, width, eps, KINDS[x.dtype], torch.get_num_threads()),
        )
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Compute Ops.add_rms_norm."""
        if not _is_read(x, residual, weight):
            return self._plain.add_rms_norm(x, residual, weight, eps)
        x, residual, weight = (each.contiguous() for each in (x, residual, weight))
        y, total = torch.empty_like(x), torch.empty_like(x)
        width = x.shape[-1]
        self._norm(
            *(each.data_ptr() for each in (x, residual, weight, y, total)),
            *(x.numel() // width, width, eps, KINDS[x.dtype], torch.get_num_threads()),
        )
        return y, total

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: Literal["silu", "sigmoid"]
    ) -> Tensor:
        """Compute Ops.gated_rms_norm of x [T, H, W]."""
        if x.ndim != 3 or not _is_read(x, gate, weight):
            return self._plain.gated_rms_norm(x, gate, weight, eps, kind)
        x, weight = x.contiguous(), weight.contiguous()
        gate = gate if gate.stride()[1:] == (x.shape[2], 1) else gate.contiguous()
        y = torch.empty_like(x)
        self._gated_norm(
            *(each.data_ptr() for each in (x, gate, weight, y)),
            *(*x.shape, gate.stride(0), eps, kind == "silu", KINDS[x.dtype], torch.get_num_threads()),
        )
        return y

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Compute Ops.rotary."""
        if not _is_read(query, key, cos, sin):
            return self._plain.rotary(query, key, cos, sin)
        cos, sin = cos.contiguous(), sin.contiguous()
        return self._turned(query, cos, sin), self._turned(key, cos, sin)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype)
        self._rotate(
            *(each.data_ptr() for each in (x, cos, sin, y)),
            *(*x.shape, x.stride(0), x.stride(1), KINDS[x.dtype], torch.get_num_threads()),
        )
        return y

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Compute Ops.swiglu."""
        return self._gated(SILU, gate_up) if _is_read(gate_up) else self._plain.swiglu(gate_up)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Compute Ops.geglu."""
        return self._gated(GELU, gate_up) if _is_read(gate_up) else self._plain.geglu(gate_up)

    def clamped_swiglu(self, gate_up: Tensor, slope: float, limit: float) -> Tensor:
        """Compute Ops.clamped_swiglu."""
        if not _is_read(gate_up):
            return self._plain.clamped_swiglu(gate_up, slope, limit)
        return self._gated(CLAMPED, gate_up, slope, limit)

    def _gated(self, gate: int, gate_up: Tensor, slope: float = 0.0, limit: float = 0.0) -> Tensor:
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        y = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype)
        self._gate(
            *(gate, gate_up.data_ptr(), y.data_ptr(), y.numel() // width, width, slope, limit),
            *(KINDS[gate_up.dtype], torch.get_num_threads()),
        )
        return y

    def sigmoid(self, x: Tensor) -> Tensor:
        """Compute Ops.sigmoid."""
        return self._curved(SIGMOID, x) if _is_read(x) else self._plain.sigmoid(x)

    def softplus(self, x: Tensor) -> Tensor:
        """Compute Ops.softplus."""
        return self._curved(SOFTPLUS, x) if _is_read(x) else self._plain.softplus(x)

    def _curved(self, curve: int, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        self._curve(curve, x.data_ptr(), y.data_ptr(), x.numel(), KINDS[x.dtype], torch.get_num_threads())
        return y

    def scores(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute Ops.scores."""
        if not _is_read(x, weight):
            return self._plain.scores(x, weight, bias)
        x, weight = x.contiguous(), weight.contiguous()
        wide = None if bias is None else bias.float().contiguous()
        y = torch.empty(len(x), len(weight), dtype=x.dtype)
        self._score(
            *(x.data_ptr(), weight.data_ptr(), None if wide is None else wide.data_ptr(), y.data_ptr()),
            *(len(x), x.shape[1], len(weight), KINDS[x.dtype], torch.get_num_threads()),
        )
        return y

    def softmax(self, x: Tensor) -> Tensor:
        """Compute Ops.softmax."""
        if x.dtype != torch.float32:
            return self._plain.softmax(x)
        x = x.contiguous()
        y = torch.empty_like(x)
        self._softmax(x.data_ptr(), y.data_ptr(), len(x), x.shape[1])
        return y

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Compute Ops.greedy; the first of equal logits is chosen."""
        if not _is_read(logits) or logits.stride(-1) != 1:
            return self._plain.greedy(logits)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        finite = torch.empty(len(logits), dtype=torch.bool)
        self._choose(
            *(logits.data_ptr(), logits.stride(0), tokens.data_ptr(), finite.data_ptr()),
            *(*logits.shape, KINDS[logits.dtype], torch.get_num_threads()),
        )
        return tokens, finite

    def draw(self, logits: Tensor, best: Tensor, otherwise: Tensor, limits: Tensors) -> Tensor:
        """Compute Ops.draw. Raises MemoryError."""
        if not _is_read(logits) or logits.stride(-1) != 1:
            return self._plain.draw(logits, best, otherwise, limits)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        draws = _Draws(
            *(best.data_ptr(), otherwise.data_ptr()),
            *(_pointer(limits, name) for name in ("drawn", "uniform", "sharpness", "min_p", "excess")),
            _pointer(limits, "k_places"),  # what top_k drops of each row comes first
        )
        has_memory = self._draw(
            *(logits.data_ptr(), logits.stride(0), *logits.shape, ctypes.byref(draws), tokens.data_ptr()),
            *(KINDS[logits.dtype], torch.get_num_threads()),
        )
        if not has_memory:
            raise MemoryError("there is no memory for the weights of a vocabulary's tokens")
        return tokens


def _pointer(limits: Tensors, name: str) -> int | None:
    return limits[name].data_ptr() if name in limits else None


def _is_read(*tensors: Tensor) -> bool:
    """Whether the source reads tensors of their type, which is one."""
    return tensors[0].dtype in KINDS and all(each.dtype == tensors[0].dtype for each in tensors)


@cache
def rowwise() -> Rowwise | str:
    """Return these operators of this machine, compiled if they are not kept, or why there are none."""
    found = compiled_source(SOURCE)
    return found if isinstance(found, str) else Rowwise(found)
