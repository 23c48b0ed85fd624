"""Read experts that a checkpoint stores in one tensor a layer, as gpt-oss and Qwen3.5 do.

In gpt-oss, `experts.gate_up_proj` [E, in, 2 * inner] has the outputs of gate and up interleaved, and
`experts.down_proj` is [E, inner, out]; biases beside them are [E, outputs]. In MXFP4 (OCP Microscaling
Formats 1.0) a weight is two tensors of bytes: `_blocks` [E, outputs, G, 16], two numbers of E2M1 in a byte,
the low half first, and `_scales` [E, outputs, G], an exponent of 2 for each block of 32 inputs. In Qwen3.5,
`experts.gate_up_proj` [E, 2 * inner, in] has all outputs of gate before those of up, and `experts.down_proj`
is [E, out, inner]. Each expert is converted to the model's type by itself, and goes where separately stored
linears would go.

Legend: E experts, G blocks of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.destination import FLOATS, Destination
from models.checkpoint.files import tensor_names
from models.checkpoint.modelslim import Unused
from models.checkpoint.stored_parts import PartDestination
from models.config import DecoderConfig
from models.parallel.share import Slices
from models.quantization import MXFP4_BLOCK

# Which of gate, up and down are interleaved in each tensor
STACKS = {"gate_up_proj": (0, 1), "down_proj": (2,)}
BLOCKS, SCALES = "_blocks", "_scales"
E2M1 = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
)  # index: exponent and mantissa; the highest bit is the sign
EXPONENT_BIAS = 127  # bias of a scale's exponent


@dataclass(frozen=True, slots=True)
class Stack:
    """The destination of a tensor that holds the weights, or the biases, of all experts of a layer."""

    shape: tuple[int, ...]  # shape of the tensor
    slices: Slices  # what this rank reads of it, the experts first
    places: dict[int, list[Destination]]  # destinations of the experts on this rank, in interleaved order
    is_turned: bool = False  # whether inputs come before outputs
    stored: tuple[str, ...] = FLOATS
    ranges: tuple[slice, ...] = ()

    def part(self, whole: Any) -> Tensor:
        """See Destination.part."""
        found: Tensor = whole[self.slices]
        return found

    def take(self, file: Path, name: str, tensor: Tensor) -> None:
        """See Destination.take."""
        for number, rows in enumerate(tensor, self.slices[0].start):
            self.take_expert(file, name, number, rows.t() if self.is_turned else rows)

    def take_expert(self, file: Path, name: str, number: int, rows: Tensor) -> None:
        """Store the outputs of one expert: [outputs, in], or its bias."""
        places = self.places.get(number, [])
        for turn, place in enumerate(places):
            place.take(file, name, rows[turn :: len(places)])


@dataclass(frozen=True, slots=True)
class PackedStack:
    """The destination of the blocks, or the scales, of a stack in MXFP4, which are combined."""

    stack: Stack
    columns: slice  # columns of the weights that this rank has
    end: str  # end of the tensor's name
    shape: tuple[int, ...]
    found: dict[str, Tensor]  # what was read of the two tensors, until both are there
    stored: tuple[str, ...] = ("U8",)
    ranges: tuple[slice, ...] = ()

    @property
    def slices(self) -> Slices:
        """The slices of the stack."""
        return self.stack.slices

    def part(self, whole: Any) -> Tensor:
        """See Destination.part."""
        return self.stack.part(whole)

    def is_far(self, name: str, files: Mapping[str, Path]) -> bool:
        """Whether these are blocks whose scales are in another file; see PartDestination.is_far."""
        return self.end == BLOCKS and files[name] != files[name.removesuffix(BLOCKS) + SCALES]

    def take(self, file: Path, name: str, tensor: Tensor) -> None:
        """Keep the first of the two tensors, and fill the stack with the second; see Destination.take."""
        if not self.found:
            self.found[self.end] = tensor.clone()  # the clone releases the mapping
            return
        self.found[self.end] = tensor
        blocks, scales = self.found.pop(BLOCKS), self.found.pop(SCALES)
        first = self.columns.start % MXFP4_BLOCK
        for number, each in enumerate(zip(blocks, scales), self.slices[0].start):
            numbers = unpacked(*each)[:, first : first + self.columns.stop - self.columns.start]
            self.stack.take_expert(file, name, number, numbers)


@dataclass(frozen=True, slots=True)
class PlainStack:
    """The destination of a tensor [E, outputs, in] of all experts: of gate before up, or of down alone."""

    shape: tuple[int, ...]
    experts: slice
    rows: slice  # the outputs that this rank reads, of gate and up alike
    columns: slice
    places: dict[int, list[Destination]]  # destinations of the experts on this rank
    stored: tuple[str, ...] = FLOATS
    ranges: tuple[slice, ...] = ()

    @property
    def slices(self) -> Slices:
        """The experts that this rank reads."""
        return (self.experts,)

    def part(self, whole: Any) -> Tensor:
        """See Destination.part."""
        size = self.shape[1] // self._num_joined
        if self.rows == slice(0, size):
            found: Tensor = whole[self.experts, slice(None), self.columns]
            return found
        firsts = range(0, self.shape[1], size)
        rows = [slice(first + self.rows.start, first + self.rows.stop) for first in firsts]
        return torch.cat([whole[self.experts, each, self.columns] for each in rows], 1)

    def take(self, file: Path, name: str, tensor: Tensor) -> None:
        """See Destination.take."""
        for number, expert in enumerate(tensor, self.experts.start):
            for place, rows in zip(self.places.get(number, []), expert.chunk(self._num_joined)):
                place.take(file, name, rows)

    @property
    def _num_joined(self) -> int:
        return len(next(iter(self.places.values())))


AnyDestination = Destination | PartDestination | Unused | Stack | PackedStack | PlainStack
Destinations = Mapping[str, AnyDestination]


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode bytes [outputs, G, 16] and exponents [outputs, G] to float32 [outputs, G * 32]."""
    values = torch.tensor([*E2M1, *(-each for each in E2M1)])
    numbers = values[torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()]
    return torch.ldexp(numbers, scales.int()[..., None] - EXPONENT_BIAS).flatten(-2)


def in_stacks(
    places: Mapping[str, Destination | PartDestination | Unused],
    config: DecoderConfig,
    path: Path,
    prefixes: Sequence[str] = (),
) -> Destinations:
    """Return the destinations of a checkpoint's tensors, if it stacks the experts of a layer.

    Names of the layers begin with `prefixes`, if they are not counted from the checkpoint's first.
    """
    more: dict[str, AnyDestination] = dict(places)
    mixture = config.mixture
    if mixture is None or not (mixture.is_stacked or mixture.may_be_stacked):
        return more
    stored = tensor_names(path)
    is_packed = any(name.endswith(BLOCKS) for name in stored)
    own = [f"model.layers.{layer}." for layer in range(config.num_layers)]
    for layer, prefix in enumerate(prefixes or own):
        experts = dict(enumerate(config.mlp_names(layer, prefix)))
        held = {number: names for number, names in experts.items() if f"{names[0]}.weight" in places}
        for end, roles in STACKS.items() if held else ():
            name = f"{prefix}{mixture.block}.experts.{end}"
            if not mixture.is_stacked:
                if name in stored:
                    found = {
                        number: [_own(more, f"{names[role]}.weight") for role in roles]
                        for number, names in held.items()
                    }
                    more[name] = _plain(mixture.num_experts, found)
                continue
            for kind, suffix in (("weight", ""), ("bias", "_bias")):
                found = {
                    number: [_own(more, f"{names[role]}.{kind}") for role in roles]
                    for number, names in held.items()
                }
                more |= _stacked(name, suffix, mixture.num_experts, found, is_packed=is_packed)
    return more


def _plain(num_experts: int, places: dict[int, list[Destination]]) -> PlainStack:
    """Return the destination of the weights of some linears of all experts, which lie one after the other."""
    members = next(iter(places.values()))
    one = members[0]
    rows, columns = (
        slice(*cut.indices(size)) for cut, size in zip((*one.slices, slice(None), slice(None)), one.shape)
    )
    shape = num_experts, one.shape[0] * len(members), one.shape[1]
    return PlainStack(shape, slice(min(places), max(places) + 1), rows, columns, places)


def _own(places: dict[str, AnyDestination], name: str) -> Destination:
    place = places.pop(name)
    assert isinstance(place, Destination), f"{name} is read in no parts"
    return place


def _stacked(
    name: str, suffix: str, num_experts: int, places: dict[int, list[Destination]], *, is_packed: bool
) -> dict[str, AnyDestination]:
    """Return the destinations of all weights, or all biases, of some linears of a layer's experts."""
    members = next(iter(places.values()))
    one, turns = members[0], len(members)
    rows, *columns = (
        slice(*cut.indices(size)) for cut, size in zip((*one.slices, slice(None), slice(None)), one.shape)
    )
    # A rank's rows of gate and up are interleaved, and so contiguous
    rows = slice(rows.start * turns, rows.stop * turns)
    outputs, experts = one.shape[0] * turns, slice(min(places), max(places) + 1)
    if not columns or not is_packed:
        shape = num_experts, *one.shape[1:], outputs
        return {name + suffix: Stack(shape, (experts, *columns, rows), places, is_turned=bool(columns))}
    (cut,) = columns
    shape = num_experts, outputs, one.shape[1] // MXFP4_BLOCK
    groups = slice(cut.start // MXFP4_BLOCK, -(-cut.stop // MXFP4_BLOCK))
    stack, found = Stack(shape, (experts, rows, groups), places), dict[str, Tensor]()
    return {
        name + BLOCKS: PackedStack(stack, cut, BLOCKS, (*shape, MXFP4_BLOCK // 2), found),
        name + SCALES: PackedStack(stack, cut, SCALES, shape, found),
    }
