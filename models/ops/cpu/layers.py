"""Compute the layers of a plain decoder in one call into C++.

`layers.cpp` calls the operators of this project's other sources, with the same bits as one call each. Between
two calls Python would read its own code from memory again, since weights have displaced it from the caches:
of a decode step of 64 rows and 125 M parameters that took a third.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention.cpu.attention import CpuAttention, CpuMetadata
from attention.cpu.compiled import CompiledAttention, Pages
from attention.reference import Attention
from devices.cpp_sources import KINDS, compiled_source
from models.ops.cpu.products import Panels, Products
from models.ops.cpu.rowwise import GELU, SILU, Rowwise
from models.ops.operands import PlainLayer
from models.step_inputs import StepInputs

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("layers.cpp")
_HEAD_NORMS = {"none": 0, "heads": 1, "rotated": 2}  # enum HeadNorm of the source
_GATES = {"silu": SILU, "gelu_tanh": GELU}
_pointer, _integer, _real, _number = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int


class _Operators(ctypes.Structure):
    """`Operators` of the source."""

    _fields_ = tuple(
        (name, _pointer) for name in ("product", "norm", "rotate", "gate", "write", "decode", "extend")
    )


class _Weight(ctypes.Structure):
    """`Weight` of the source."""

    _fields_ = (
        *(("panels", _pointer), ("bias", _pointer)),
        *(("num_outputs", _integer), ("num_inputs", _integer), ("kind", _number)),
    )

    @classmethod
    def of(cls, panels: Panels) -> _Weight:
        bias = None if panels.bias is None else panels.bias.data_ptr()
        return cls(panels.numbers.data_ptr(), bias, panels.num_outputs, panels.num_inputs, panels.kind)


class _View(ctypes.Structure):
    """`View` of the source."""

    _fields_ = (
        *(("places", _pointer), ("num_decodes", _integer), ("decodes", _pointer)),
        *((name, _pointer) for name in ("address", "of_row", "low", "high", "is_tile", "first_tile")),
        *(("most_tiles", _integer), ("tiles", _pointer), ("spans", _pointer)),
        *((name, _integer) for name in ("num_spans", "window", "first_key")),
        *(("cos", _pointer), ("sin", _pointer)),
    )


class _Layer(ctypes.Structure):
    """`Layer` of the source."""

    _fields_ = (
        *((name, _Weight) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _pointer) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        *(("attention_post_norm", _pointer), ("mlp_post_norm", _pointer), ("view", ctypes.POINTER(_View))),
        *(("pages", Pages), ("head_norm", _number), ("gate", _number)),
        ("eps", _real),
    )


class _Step(ctypes.Structure):
    """`Step` of the source."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, _integer) for name in ("num_layers", "rows", "num_read")),
        *((name, _pointer) for name in ("read", "x", "residual", "last", "total", "room")),
        *(("kind", _number), ("num_threads", _number)),
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a layer's pointers lead to, and what of a step it reads."""

    layer: PlainLayer
    view: int  # its number among the views of a step


class CompiledLayers:
    """The source, for the layers of one decoder; weights may be rewritten in place, but not moved."""

    def __init__(
        self,
        library: ctypes.CDLL,
        products: Products,
        rowwise: Rowwise,
        attention: CompiledAttention,
        layers: Sequence[PlainLayer],
        dtype: torch.dtype,
    ) -> None:
        self._compute, self._room_of_step = library.compute_layers, library.room_of_step
        self._compute.argtypes = [_pointer, _pointer]
        self._compute.restype = ctypes.c_bool
        self._room_of_step.argtypes = [_pointer, _integer, _number]
        self._room_of_step.restype = _integer
        called = (*products.functions, *rowwise.functions, *attention.functions)
        self._operators = _Operators(*(ctypes.cast(each, _pointer) for each in called))
        self._attention, self._dtype = attention, dtype
        views: dict[tuple[int, int | None], int] = {}
        self._kept = [_Kept(each, views.setdefault((each.group, each.window), len(views))) for each in layers]
        self._views = tuple(views)
        self._room = torch.empty(0, dtype=torch.uint8)
        self._layers = (_Layer * len(layers))(*(self._layer(each) for each in layers))

    def _layer(self, of: PlainLayer) -> _Layer:
        def at(norm: Tensor | None) -> int | None:
            return None if norm is None else norm.data_ptr()

        return _Layer(
            *(_Weight.of(each) for each, _ in of.linears),
            *map(at, of.norms),
            head_norm=_HEAD_NORMS[of.norm_kind],
            gate=_GATES[of.gate],
            eps=of.eps,
        )

    def __call__(
        self, x: Tensor, residual: Tensor | None, turns: Sequence[tuple[Tensor, Tensor]], step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """Return the output [T, hidden] of the last layer, and the residual that it will be added to.

        `turns` are cosines and sines [T, D] of layers without a window, and last of those with one. If
        `step.read` [R] is given, both are of these rows. Raises MemoryError.
        """
        views = (_View * len(self._views))(*(self._view(*each, turns, step) for each in self._views))
        for made, kept in zip(self._layers, self._kept):
            made.pages = self._attention.pages(*step.cache.of(kept.layer.layer))
            made.view = ctypes.pointer(views[kept.view])
        rows, num_read = x.shape[0], -1 if step.read is None else step.read.shape[0]
        most_rows, num_threads, kind = max(rows, num_read), torch.get_num_threads(), KINDS[self._dtype]
        num_bytes = self._room_of_step(self._layers, most_rows, kind)
        if len(self._room) < num_bytes:
            self._room = torch.empty(num_bytes, dtype=torch.uint8)
        last, total = (x.new_empty(most_rows, x.shape[1]) for _ in range(2))
        given = (None if each is None else each.data_ptr() for each in (step.read, x, residual))
        asked = _Step(
            *(self._layers, len(self._kept), rows, num_read, *given),
            *(last.data_ptr(), total.data_ptr(), self._room.data_ptr(), kind, num_threads),
        )
        if not self._compute(ctypes.byref(self._operators), ctypes.byref(asked)):
            raise MemoryError("there is no memory for the layers of a step")
        read = slice(rows if num_read < 0 else num_read)
        return last[read], total[read]

    def _view(
        self, group: int, window: int | None, turns: Sequence[tuple[Tensor, Tensor]], step: StepInputs
    ) -> _View:
        metadata = step.metadata_of(group)
        assert isinstance(metadata, CpuMetadata)
        decodes, tiles = metadata.decodes, metadata.tiles.get(window)
        prompts = metadata.compiled_prompts.get(window)
        cos, sin = turns[0 if window is None else -1]
        view = _View(
            places=metadata.write_index.data_ptr(),
            num_decodes=metadata.num_decodes,
            decodes=None if isinstance(decodes, slice) else decodes.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
        )
        if tiles is not None:
            for name in ("address", "of_row", "low", "high", "is_tile", "first_tile"):
                setattr(view, name, getattr(tiles, name).data_ptr())
            view.most_tiles = tiles.of_row.shape[1]
        if prompts is not None:
            view.tiles, view.spans = prompts.address.data_ptr(), prompts.spans.data_ptr()
            view.num_spans, view.window = len(prompts.spans), prompts.window or 0
            view.first_key = self._attention.shape.first_key
        return view


def compiled_layers(
    products: Products | None, rowwise: Any, layers: Sequence[PlainLayer], attention: Attention
) -> CompiledLayers | None:
    """Return the source for these layers, or None where an operator of theirs is computed in another way."""
    read = attention.compiled if isinstance(attention, CpuAttention) else None
    if products is None or not isinstance(rowwise, Rowwise) or read is None or not layers:
        return None
    dtype = attention.shape.dtype
    weights = [each for layer in layers for each, _ in layer.linears]
    norms = [each for layer in layers for each in layer.norms if each is not None]
    is_read = (
        dtype in (torch.float32, torch.bfloat16)
        and not attention.shape.int8_pages
        and all(isinstance(each, Panels) for each in weights)
        and all(products.takes(dtype, each) for each in weights)
        and all(each.dtype == dtype and each.is_contiguous() for each in norms)
    )
    if not is_read:
        return None
    library = _library()
    if isinstance(library, str):
        log.warning("compile: layers are computed operator by operator, since %s", library)
        return None
    return CompiledLayers(library, products, rowwise, read, layers, dtype)


@cache
def _library() -> ctypes.CDLL | str:
    """Return the source compiled for this machine, or why there is none."""
    return compiled_source(SOURCE)
