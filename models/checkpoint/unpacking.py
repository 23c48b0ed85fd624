"""Make numbers of the integers and the 8-bit floats that a checkpoint holds.

A packed weight is (integer - zero) * scale, with the zero and the scale of its output and of its input's
group. DeepSeek-V3 (arXiv 2412.19437, quant_method fp8 of config.json) holds `X.weight` in E4M3 beside
`X.weight_scale_inv`, float32, a number for each block of rows and columns, which its weights are multiplied
with. They are read into the model's type, and into int8 from there: no Ascend product before the 950
multiplies such floats.

Legend: O outputs and I inputs of the part that a rank reads, G groups of the whole weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoint.destination import FLOATS, kept_rows
from models.ops.operands import MIDDLE, in_words
from models.packing import LAYOUTS, Layout, Packing
from models.parallel.share import Slices
from models.quantization import BlockScales

SUFFIX = "_scale_inv"
STORED = "F8_E4M3"  # name of the type in safetensors


def scaled(weight: Tensor, scales: Tensor, blocks: BlockScales, first: tuple[int, int] = (0, 0)) -> Tensor:
    """Return a part of a weight [out, in] in float32.

    `first` is its row and column; `scales` are those of all blocks.
    """
    of_rows = (first[0] + torch.arange(weight.shape[0])) // blocks.rows
    of_columns = (first[1] + torch.arange(weight.shape[1])) // blocks.columns
    return weight.float() * scales.float()[of_rows][:, of_columns]


BIAS = "bias"  # GPTQ's first packages wrote one for every linear
ROWS_AT_ONCE = 512  # outputs that are in float32 at once

# Shape, the part that is read, and its types in a file
Part = tuple[tuple[int, ...], Slices, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Unpacking:
    """Unpacks one weight [out, in], of which a rank reads some rows and columns."""

    form: Packing
    shape: tuple[int, int]
    rows: slice
    columns: slice
    # Those of the rows read that are kept; empty: all
    ranges: tuple[slice, ...]
    dtype: torch.dtype  # type of the model

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.form.layout]

    @property
    def optional(self) -> tuple[str, ...]:
        """The ends of names of tensors that may be present."""
        return (self.layout.group, BIAS) if self.form.layout == "gptq" else (self.layout.group,)

    def parts(self, present: set[str]) -> dict[str, Part]:
        """Return its tensors by the ends of their names: required ones, and those in `present`."""
        form, layout, (outputs, inputs) = self.form, self.layout, self.shape
        groups = form.num_groups(inputs)
        every = slice(0, groups)
        wanted = {layout.weight, layout.scale, layout.shape} - {""}
        wanted |= {layout.zero} if form.has_zeros else set()
        wanted |= {layout.group} if form.has_order else set()
        rows, columns = self._words(outputs, self.rows), self._words(inputs, self.columns)
        as_they_are = (outputs, self.rows), (inputs, self.columns)
        packed = (rows, as_they_are[1]) if layout.packs_outputs else (as_they_are[0], columns)
        found = {
            layout.weight: (packed, ("I32",)),
            layout.scale: ((as_they_are[0], (groups, every)), FLOATS),
            layout.zero: ((rows, (groups, every)), ("I32",)),
        }
        parts: dict[str, Part] = {}
        for end, (axes, stored) in found.items():
            ordered = axes[::-1] if layout.is_turned else axes
            parts[end] = tuple(size for size, _ in ordered), tuple(cut for _, cut in ordered), stored
        parts[layout.group] = (inputs,), (self.columns,), ("I32",)
        parts[layout.shape] = (2,), (), ("I64", "I32")
        parts[BIAS] = (outputs,), (), FLOATS
        return {end: part for end, part in parts.items() if end in wanted | present}

    def weight(self, found: Mapping[str, Tensor]) -> tuple[Tensor]:
        """Return the part [O, I] in the model's type; ValueError for tensors that do not belong together."""
        numbers, scales, zeros = self._apart(found)
        if zeros is None:
            zeros = torch.full_like(scales, 2 ** (self.form.bits - 1))
        groups = self._groups(found)
        made = torch.empty(numbers.shape, dtype=self.dtype)
        for first in range(0, len(made), ROWS_AT_ONCE):
            at = slice(first, first + ROWS_AT_ONCE)
            made[at] = (numbers[at] - zeros[at][:, groups]) * scales[at][:, groups]
        return (kept_rows(made, self.ranges),)

    def int4(self, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the part as words, scales, and offsets if there are zeros, as `Int4Weight` holds it.

        Raises ValueError as `weight` does.
        """
        numbers, scales, zeros = self._apart(found)
        size = self.form.group_size or self.shape[1]
        groups = slice(self.columns.start // size, -(-self.columns.stop // size))
        if not torch.equal(self._groups(found), self._groups({})):
            raise ValueError("its inputs are not in the order of their groups, as w4a16 takes them")
        parts = [in_words(numbers), scales[:, groups]]
        parts += [] if zeros is None else [MIDDLE - zeros[:, groups]]
        return tuple(kept_rows(part, self.ranges) for part in parts)

    def _apart(self, found: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return unsigned numbers uint8 [O, I], and scales and zeros [O, G].

        Zeros are None if in the middle.
        """
        form, layout = self.form, self.layout
        said = found[layout.shape].tolist() if layout.shape in found else list(self.shape)
        if said != list(self.shape):
            raise ValueError(f"its shape is said to be {said}, and the model needs {list(self.shape)}")
        if BIAS in found and bool(found[BIAS].any()):
            raise ValueError("it has a bias beside it that is not zero, and this model's linear has none")
        is_turned = layout.is_turned
        tensors = {end: each.t() if is_turned and each.ndim == 2 else each for end, each in found.items()}
        along = (0, self.rows) if layout.packs_outputs else (1, self.columns)
        numbers, scales = self._values(tensors[layout.weight], *along), tensors[layout.scale].float()
        if not form.has_zeros:
            return numbers, scales, None
        words = tensors[layout.zero]
        # 1 is added to every value, and with it what the stored word borrowed from the value above
        if form.less_one:
            words = words + sum(1 << shift for shift in range(0, 32, form.bits))
        return numbers, scales, self._values(words, 0, self.rows).float()

    def _groups(self, found: Mapping[str, Tensor]) -> Tensor:
        """Return the group of each input [I]."""
        most = self.form.num_groups(self.shape[1])
        if self.layout.group not in found:
            size = self.form.group_size or self.shape[1]
            return torch.arange(self.columns.start, self.columns.stop) // size
        groups = found[self.layout.group].long()
        if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < most:
            said = f"{int(groups.min())} to {int(groups.max())}"
            raise ValueError(f"{self.layout.group} names groups from {said}, and there are {most}")
        return groups

    def _words(self, size: int, cut: slice) -> tuple[int, slice]:
        """Return how many words hold `size` values, and which of them hold those of the cut."""
        count = self.form.per_word
        return -(-size // count), slice(cut.start // count, -(-cut.stop // count))

    def _values(self, words: Tensor, axis: int, cut: slice) -> Tensor:
        """Unpack int32 words of two axes along one of them to the uint8 values of the cut."""
        count = self.form.per_word
        octets = words.movedim(axis, -1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        values = octets if self.form.bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
        if self.layout.order:
            values = values.unflatten(-1, (-1, count))[..., list(self.layout.order)].flatten(-2)
        return values.narrow(-1, cut.start % count, cut.stop - cut.start).movedim(-1, axis)
