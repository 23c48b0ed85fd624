"""Where does a tensor of a checkpoint go, and what of it does a rank read?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint import check_finite
from models.linear import Linear
from models.share import Slices

FLOATS = ("F64", "F32", "BF16", "F16")  # converted to the model's dtype
INTEGERS = {torch.int8: ("I8",), torch.int32: ("I32",), torch.int64: ("I64",)}


@dataclass(frozen=True, slots=True)
class Rounding:
    """Numbers become int8 as they come, so that no more than one tensor is there in the model's type."""

    linear: Linear  # which says how
    scale: Tensor  # [rows, 1], the room of the rows' scales


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a checkpoint goes."""

    room: Tensor  # the view of the decoder's parameters; rows beyond what is read are zero
    shape: tuple[int, ...]  # of the tensor
    slices: Slices  # what this rank reads of it
    order: Tensor | None = None  # of the rows that were read, as the room has them; None: as they are
    ranges: tuple[slice, ...] = ()  # of rows that this rank reads one after the other, in place of `slices`
    added: float = 0.0  # to what was read
    rounding: Rounding | None = None  # to the int8 of the room; None: as they are

    @property
    def dtype(self) -> torch.dtype:
        """In which a tensor is held, or rounded from."""
        return self.room.dtype if self.rounding is None else self.rounding.linear.dtype

    @property
    def stored(self) -> tuple[str, ...]:
        """Its types in a file, as safetensors names them."""
        return INTEGERS.get(self.dtype, FLOATS)

    def part(self, whole: Any) -> Tensor:
        """What this rank reads of a tensor, or of the header of one in a file."""
        if self.ranges:
            return torch.cat([whole[rows] for rows in self.ranges])
        found: Tensor = whole[self.slices]
        return found

    def take(self, file: Path, name: str, tensor: Tensor) -> None:
        """Fill the room with what was read; raises ValueError for numbers that it cannot hold."""
        check_finite(file, name, tensor, self.dtype)
        self.fill(tensor)

    def fill(self, tensor: Tensor) -> None:
        """With what was read."""
        if self.order is not None:
            tensor = tensor[self.order]
        if self.added:
            tensor = tensor.float() + self.added  # before it is rounded to the room's type
        rooms = [self.room]
        if self.rounding is None:
            self.room[: len(tensor)].copy_(tensor)
        else:
            numbers, scale = tensor.to(self.room.device, self.dtype), self.rounding.scale
            self.rounding.linear.round_to(self.room[: len(tensor)], scale[: len(tensor)], numbers)
            rooms.append(scale)
        for room in rooms:
            if len(tensor) < len(room):
                room[len(tensor) :].zero_()
