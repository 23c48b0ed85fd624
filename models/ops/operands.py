"""The operands that linears and operators hand to a device.

`UnpackedLinear` is a linear before a device packs it, `ExpertKind` what the experts of a mixture have in
common, `Int8Rows` inputs that are quantised already, and `Int4Weight` a weight in 4 bits: it is (number +
offset) * scale, with a number of 4 bits and its sign, and with the scale and the offset of its output and its
input's group.

Legend: T tokens of the step, O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows that an operator before a linear has quantised already."""

    rows: Tensor  # int8 [T, n]
    scale: Tensor  # float32 [T]
    dtype: torch.dtype  # type of the rows before quantisation


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """A layer of norms, attention with heads of keys and values, and an MLP, all of one rank.

    Linears are packed, and norms in the model's type; those after a block are None where there are none.
    """

    qkv: Any  # `Packed` of its device
    output: Any
    gate_up: Any
    down: Any
    input_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_post_norm: Tensor | None
    mlp_post_norm: Tensor | None
    norm_kind: Literal["none", "heads", "rotated"]  # whether heads are normed, and before or after rotary
    gate: Literal["silu", "gelu_tanh"]
    eps: float
    layer: int  # its number among the layers of the cache
    group: int  # The number of its lifetime
    window: int | None

    @property
    def linears(self) -> tuple[Any, ...]:
        """Its linears in the order in which they are multiplied."""
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Tensor | None, ...]:
        """Its norms in the order of the fields."""
        heads = self.query_norm, self.key_norm
        return self.input_norm, self.mlp_norm, *heads, self.attention_post_norm, self.mlp_post_norm


MIDDLE = 8  # added to a number in a file, so that it has no sign


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight in 4 bits: eight numbers of a row in a word, the first in the lowest bits, each stored plus 8.

    A missing `offset` means 0. The last group may have fewer inputs than the others.
    """

    words: Tensor  # int32 [O, I / 8]
    scale: Tensor  # [O, G], in the model's type
    offset: Tensor | None  # same shape and type as the scale
    group_size: int  # inputs of a group; all of them if there is one group

    def numbers(self) -> Tensor:
        """Return the numbers as int8 [O, I]."""
        octets = self.words.contiguous().view(torch.uint8)
        return torch.stack((octets & 15, octets >> 4), -1).flatten(-2).to(torch.int8) - MIDDLE

    def rows(self, first: int, stop: int) -> Int4Weight:
        """Return some of its outputs."""
        at = slice(first, stop)
        offset = None if self.offset is None else self.offset[at]
        return Int4Weight(self.words[at], self.scale[at], offset, self.group_size)

    def split(self, widths: tuple[int, ...]) -> list[Int4Weight]:
        """Split it into parts of so many outputs each."""
        stops = torch.tensor(widths).cumsum(0).tolist()
        return [self.rows(stop - width, stop) for stop, width in zip(stops, widths)]

    def weight(self) -> Tensor:
        """Return the weight [O, I] in the model's type, rounded once."""
        made = self.numbers().float()
        if self.offset is not None:
            made += self._by_input(self.offset)
        return (made * self._by_input(self.scale)).to(self.scale.dtype)

    def _by_input(self, groups: Tensor) -> Tensor:
        """Expand [O, G] to float32 [O, I]."""
        num_inputs = 8 * self.words.shape[1]
        return groups.float().repeat_interleave(self.group_size, 1)[:, :num_inputs]


def in_words(values: Tensor) -> Tensor:
    """Pack uint8 [O, I] from 0 to 15 into int32 [O, I / 8]."""
    return (values[:, ::2] | values[:, 1::2] << 4).contiguous().view(torch.int32)


@dataclass(frozen=True, slots=True)
class PairedInt4:
    """A weight of numbers from -8 to 7 with a scale for each output, to be multiplied with int8 (W4A8).

    A byte has the numbers of two neighbouring outputs, the first in its low half; each half has its own sign.
    """

    pairs: Tensor  # int8 [O / 2, I]
    scale: Tensor  # float32 [O]

    def numbers(self) -> Tensor:
        """Return the numbers as int8 [O, I]."""
        return unpaired(self.pairs)

    def split(self, num_outputs: int) -> list[PairedInt4]:
        """Split it into parts of so many outputs each, an even number; the last may be smaller."""
        parts = zip(self.pairs.split(num_outputs // 2), self.scale.split(num_outputs))
        return [PairedInt4(*part) for part in parts]


def unpaired(pairs: Tensor) -> Tensor:
    """Unpack int8 bytes [O / 2, I] to the numbers [O, I] of neighbouring outputs, from -8 to 7."""
    return torch.stack((pairs << 4 >> 4, pairs >> 4), 1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class StaticInt8:
    """An int8 weight whose inputs have one scale and one offset, known before they are computed (W8A8).

    A row x becomes q = round(x / input_scale + input_offset), within int8, and the product is (q * weight +
    bias) * scale: `scale` already has the inputs' scale in it, and `bias` what the offset adds.
    """

    weight: Tensor  # int8 [O, I]
    scale: Tensor  # float32 [O]
    bias: Tensor  # int32 [O]
    input_scale: Tensor  # float32 [O], the same for outputs that read the same rows
    input_offset: Tensor  # float32 [O], whole numbers

    def parts(self, widths: tuple[int, ...]) -> list[list[StaticInt8]]:
        """Return, for outputs of each width, the parts whose rows are quantised alike."""
        inputs = torch.stack((self.input_scale, self.input_offset), 1)
        _, counts = torch.unique_consecutive(inputs, dim=0, return_counts=True)
        alike = counts.cumsum(0).tolist()
        stops = torch.tensor(widths).cumsum(0).tolist()
        made = []
        for first, stop in zip((0, *stops), stops):
            ends = sorted({stop, *(each for each in alike if first < each < stop)})
            made.append([self._rows(*pair) for pair in zip((first, *ends), ends)])
        return made

    def _rows(self, first: int, stop: int) -> StaticInt8:
        at = slice(first, stop)
        return StaticInt8(
            self.weight[at], self.scale[at], self.bias[at], self.input_scale[at], self.input_offset[at]
        )


@dataclass(frozen=True, slots=True)
class UnpackedLinear:
    """The weight, scale and bias of a linear, before a device packs them."""

    weight: Tensor | Int4Weight | PairedInt4  # [out, in]
    scale: Tensor | None = None  # [out], if the weight is int8
    bias: Tensor | None = None  # [out]


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """What all experts of a mixture have in common.

    A device decides by it whether to pack them together.
    """

    hidden: int
    inner: int  # inner size on this rank
    form: Literal["plain", "int8", "int4", "static", "w4a8", "w8a16"] = "plain"
    is_swiglu: bool = True  # otherwise it has another gate
    has_bias: bool = False
