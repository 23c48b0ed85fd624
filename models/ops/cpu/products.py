"""Multiply rows by weights that stay in the type in which they are stored.

The products of few rows, as in decodes, take as long as the weights take to be read. Where the processor does
not multiply bfloat16 itself, oneDNN reads weights in float32, while `products.cpp` reads them in bfloat16 and
widens them in registers, exactly. Where it does, rows of bfloat16 are multiplied without widening. Every row
is summed in the same order whatever it is batched with, so that its result has the same bits for any number
of rows and threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from devices.cpp_sources import KINDS, compiled_source
from kv_cache.device.huge_pages import HugeArena

SOURCE = Path(__file__).with_name("products.cpp")
PROBE = 1 << 16  # numbers that are tried before a whole weight is narrowed


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight [out, in] in the order in which `products.cpp` reads it, and its bias in float32."""

    numbers: Tensor
    num_outputs: int
    num_inputs: int
    kind: int  # the kind of panels in `products.cpp`, which says in what order the numbers lie
    bias: Tensor | None


class Products:
    """The functions of the compiled `products.cpp`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self._pack, self._multiply = library.pack, library.multiply
        self._pack.argtypes = [pointer, pointer, integer, integer, number]
        self._multiply.argtypes = [
            *(pointer, integer, pointer, pointer, pointer, integer),
            *(integer, integer, integer, number, number),
        ]
        self._pack.restype, self._multiply.restype = None, ctypes.c_bool
        self._width = int(library.outputs_of_a_panel())
        self._pairs = int(library.kind_of_pairs())
        # False where weights are replaced while an engine serves: they are packed as the first were, whatever
        # their numbers
        self.narrows = True
        # Huge pages make products with few rows 1.1 to 1.3 times as fast
        self._arena = HugeArena()

    @property
    def functions(self) -> tuple[Any, ...]:
        """The source's function that `layers.cpp` calls."""
        return (self._multiply,)

    def takes(self, dtype: torch.dtype, panels: Panels) -> bool:
        """Whether rows of a type are multiplied by a packed weight as they are, and give that type."""
        return dtype == (torch.bfloat16 if panels.kind == self._pairs else torch.float32)

    def multiplies(self, weight: Tensor) -> bool:
        """Whether this processor multiplies a weight [out, in] as it is, in pairs of neighbouring inputs."""
        return self._pairs >= 0 and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0

    def pack(self, weight: Tensor, bias: Tensor | None, *, is_widened: bool = True) -> Panels:
        """Pack a weight [out, in] in its own type, or in bfloat16 if it `narrows` and that holds all numbers.

        It is multiplied in float32 unless `is_widened` is false. Then rows are rounded to bfloat16, and
        `multiplies` must be true of the weight.
        """
        weight = (narrowed(weight) if is_widened and self.narrows else weight).contiguous()
        num_outputs, num_inputs = weight.shape
        rows = -(-num_outputs // self._width) * self._width
        numbers = self._arena.empty(rows * num_inputs, weight.dtype)
        kind = KINDS[weight.dtype] if is_widened else self._pairs
        self._pack(weight.data_ptr(), numbers.data_ptr(), num_outputs, num_inputs, kind)
        return Panels(
            numbers, num_outputs, num_inputs, kind, None if bias is None else bias.float().contiguous()
        )

    def multiply(self, x: Tensor, panels: Panels) -> Tensor:
        """Map [T, in] to [T, out] in x's type, summed in float32. Raises MemoryError."""
        is_paired = panels.kind == self._pairs
        rows = x.bfloat16() if is_paired else x.float()
        if rows.stride(-1) != 1 or (is_paired and rows.stride(0) % 2):
            rows = rows.contiguous()
        num_rows = rows.shape[0]  # len() of a tensor takes ten times as long
        y = torch.empty(num_rows, panels.num_outputs, dtype=rows.dtype)
        has_memory = self._multiply(
            *(rows.data_ptr(), rows.stride(0), panels.numbers.data_ptr()),
            None if panels.bias is None else panels.bias.data_ptr(),
            *(y.data_ptr(), panels.num_outputs, num_rows, panels.num_outputs, panels.num_inputs),
            *(panels.kind, torch.get_num_threads()),
        )
        if not has_memory:
            raise MemoryError("there is no memory for a block of a product's rows")
        return y.to(x.dtype)


def narrowed(weight: Tensor) -> Tensor:
    """Return float32 numbers in bfloat16 if that holds all of them, as where a checkpoint is widened."""
    if weight.dtype != torch.float32:
        return weight
    probe = weight.flatten()[:PROBE]
    if not torch.equal(probe.bfloat16().float(), probe):
        return weight
    half = weight.bfloat16()
    return half if torch.equal(half.float(), weight) else weight


@cache
def products() -> Products | str:
    """Return the products of this machine, compiled if they are not kept, or why there are none."""
    found = compiled_source(SOURCE)
    return found if isinstance(found, str) else Products(found)
