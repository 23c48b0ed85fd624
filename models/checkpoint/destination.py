"""Describe where a tensor of a checkpoint goes and which part of it a rank reads, and check its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.layers.linear import Linear
from models.parallel.share import Slices

FLOATS = ("F64", "F32", "BF16", "F16")  # converted to the model's dtype
INTEGERS = {torch.int8: ("I8",), torch.int32: ("I32",), torch.int64: ("I64",)}


@dataclass(frozen=True, slots=True)
class Rounding:
    """Quantisation while loading, so that only one tensor at a time exists in the model's type."""

    linear: Linear  # the linear that quantises
    scale: Tensor  # [rows, 1], where the rows' scales go
    # Inputs that this rank holds. It reads the others too, which count for the scales, and waits for no other
    # rank: one may take kept weights instead, or refuse the checkpoint, or compute steps meanwhile
    inputs: slice


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of a tensor of a checkpoint."""

    room: Tensor  # the view of the decoder's parameters; rows beyond what is read become zero
    shape: tuple[int, ...]  # shape of the tensor in the checkpoint
    slices: Slices  # what this rank reads of it
    order: Tensor | None = None  # order of the rows read, as they are stored in `room`; None: unchanged
    # Rows that this rank reads one range after the other, in place of `slices`
    ranges: tuple[slice, ...] = ()
    added: float = 0.0  # added to what was read
    rounding: Rounding | None = None  # quantises to the int8 of `room`; None: numbers are stored as they are

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the tensor is held, or from which it is quantised."""
        return self.room.dtype if self.rounding is None else self.rounding.linear.dtype

    @property
    def stored(self) -> tuple[str, ...]:
        """The allowed types in a file, as safetensors names them."""
        return INTEGERS.get(self.dtype, FLOATS)

    def part(self, whole: Any) -> Tensor:
        """Return this rank's part of a tensor, or of the header of one in a file."""
        if self.ranges:
            return torch.cat([whole[rows] for rows in self.ranges])
        found: Tensor = whole[self.slices]
        return found

    def take(self, file: Path, name: str, tensor: Tensor) -> None:
        """Fill the room with what was read; raises ValueError for numbers that it cannot hold."""
        check_finite(file, name, tensor, self.dtype)
        self.fill(tensor)

    def fill(self, tensor: Tensor) -> None:
        """Fill the room with what was read."""
        if self.order is not None:
            tensor = tensor[self.order]
        if self.added:
            tensor = tensor.float() + self.added  # the sum is rounded to the room's type afterwards
        rooms = [self.room]
        if self.rounding is None:
            self.room[: len(tensor)].copy_(tensor)
        else:
            scale, rows = self.rounding.scale, len(tensor)
            self.rounding.linear.round_to(self.room[:rows], scale[:rows], tensor, self.rounding.inputs)
            rooms.append(scale)
        for room in rooms:
            if len(tensor) < len(room):
                room[len(tensor) :].zero_()


def kept_rows(read: Tensor, ranges: tuple[slice, ...]) -> Tensor:
    """Return the rows of these ranges, one after the other, of what was read; all rows if there are none."""
    return torch.cat([read[rows] for rows in ranges]) if ranges else read


def check_finite(file: Path, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError for a tensor that `dtype` cannot hold; a single NaN would spoil every answer."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    least, most = (each.item() for each in tensor.aminmax())
    largest = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    if not (math.isfinite(least) and math.isfinite(most)):  # both are NaN if any number is
        raise ValueError(f"{file} is damaged: {name} holds NaN or infinity; download it again")
    if max(-least, most) > largest:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{file}: {name} holds {max(-least, most):.3g}, and {kind} reaches {largest:.3g}; set"
            " model.dtype: bfloat16 or float32"
        )
    if name.endswith(".weight_scale") and least < 0:
        raise ValueError(f"{file} is damaged: {name} holds {least:.3g}, and no scale is negative")
