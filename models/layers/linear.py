"""Define linears: how they hold their weight and multiply with it.

A linear is filled in the checkpoint's form, packed once for the device, and then multiplies by the device's
`ops`. Variants split their outputs or sum over tensor ranks.

Legend: T tokens of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from devices.int8 import quantize_rows
from models.config import Form
from models.layers.low_rank import LowRank
from models.ops.divided_rows import DividedRows
from models.ops.operands import Int4Weight, Int8Rows, PairedInt4, StaticInt8, UnpackedLinear
from models.ops.reference import Ops, Packed, Widths
from models.packing import IN_A_WORD, Int4
from models.parallel.group import Group

ROUNDED_ROWS = 512  # rows that are quantised at once, because several copies of them are in float32


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Allocate a weight without filling it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class StaticScales(nn.Module):
    """What a linear with a scale for all of its inputs has beside its weight, until it is packed."""

    def __init__(self, out_features: int, device: torch.device) -> None:
        super().__init__()
        self.deq_scale, self.input_scale, self.input_offset = (
            parameter(out_features, dtype=torch.float32, device=device) for _ in range(3)
        )
        self.quant_bias = parameter(out_features, dtype=torch.int32, device=device)

    def beside(self, weight: Tensor) -> StaticInt8:
        """Return the weight with them."""
        scales = self.deq_scale.data, self.quant_bias.data, self.input_scale.data, self.input_offset.data
        return StaticInt8(weight, *scales)


class StaticProducts:
    """The products of a linear whose inputs have one scale, or one for each linear that it joins.

    Rows are quantised once for all outputs that take them alike.
    """

    def __init__(self, ops: Ops, weight: StaticInt8, widths: Widths, dtype: torch.dtype) -> None:
        self.ops = ops
        self._rows: list[Packed] = []
        numbers: dict[tuple[float, float], int] = {}  # the number of each pair of scale and offset
        self._parts: list[list[tuple[int, Packed]]] = []
        for parts in weight.parts(widths):
            packed = []
            for part in parts:
                inputs = part.input_scale[0].item(), part.input_offset[0].item()
                if inputs not in numbers:
                    numbers[inputs] = len(numbers)
                    self._rows.append(ops.pack_static_rows(part, dtype))
                packed.append((numbers[inputs], ops.pack_static(part, dtype)))
            self._parts.append(packed)

    @property
    def first_weight(self) -> Tensor:
        """The weight that is multiplied first, for a prefetch."""
        first: Tensor = self._parts[0][0][1][0]
        return first

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map [T, in] to a tensor [T, width] for each width."""
        ops = self.ops
        rows = [ops.static_rows(x, packed) for packed in self._rows]
        made = []
        for parts in self._parts:
            found = [ops.linear_static(rows[number], packed, x.dtype) for number, packed in parts]
            made.append(found[0] if len(found) == 1 else torch.cat(found, -1))
        return tuple(made)


class Linear(nn.Module):
    """A linear whose weight is filled as [out, in], then packed for the device.

    `form` says whether the weight is kept in the model's type ("plain"), read in int8 beside a scale
    ("int8"), read in the model's type and quantised at once ("quantize"), read in int8 beside the scales of
    outputs and inputs ("static"), in 4 bits that are multiplied with int8 ("w4a8"), in int8 that is
    multiplied in the model's type ("w8a16"), or in 4 bits (`Int4`).
    """

    def __init__(
        self,
        ops: Ops,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        form: Form = "plain",
        widths: Widths = (),
    ) -> None:
        super().__init__()
        self.ops, self.form, self.widths, self.dtype = ops, form, widths, dtype
        self.in_parts = False  # one launch of all before latent attention reads the weight of each part
        self.is_whole = False  # one launch reads the product of all parts
        self.scale_dtype = torch.float32  # type to which scales are rounded, if an operator takes another one
        stored, width = torch.int8 if self.is_int8 or form in ("static", "w8a16") else dtype, in_features
        self.static: StaticScales | None = StaticScales(out_features, device) if form == "static" else None
        bias = bias and self.static is None  # the quantised bias holds it
        self.weight_scale: nn.Parameter | None = None
        self.weight_offset: nn.Parameter | None = None
        rows = out_features
        if self.is_int8 or form == "w8a16":
            self.weight_scale = parameter(out_features, 1, dtype=torch.float32, device=device)
        elif form == "w4a8":
            self.weight_scale = parameter(out_features, 1, dtype=torch.float32, device=device)
            stored, rows = torch.int8, out_features // 2
        elif isinstance(form, Int4):
            stored, width, count = torch.int32, in_features // IN_A_WORD, form.num_groups(in_features)
            self.weight_scale = parameter(out_features, count, dtype=dtype, device=device)
            if form.has_zeros:
                self.weight_offset = parameter(out_features, count, dtype=dtype, device=device)
        self.weight: nn.Parameter | None = parameter(rows, width, dtype=stored, device=device)
        self.bias = parameter(out_features, dtype=dtype, device=device) if bias else None
        self.packed: Packed = None
        self.low_rank: LowRank | None = None  # what the adapters of requests add

    def pack(self) -> None:
        """Pack the filled weight for the device, once, and drop the unpacked one."""
        if self.static is not None:
            assert self.weight is not None, "a linear is packed once"
            of_all = self.widths or (len(self.weight),)
            made = StaticProducts(self.ops, self.static.beside(self.weight.data), of_all, self.dtype)
            self.packed, self.static, self.weight = (made.first_weight, made), None, None
            return
        given, ops = self.unpacked(), self.ops
        widths: Widths = () if self.is_whole else self.widths
        weight, scale, bias = given.weight, given.scale, given.bias
        if isinstance(weight, Int4Weight):
            int4 = weight, bias
            self.packed = ops.pack_int4_split(*int4, widths) if widths else ops.pack_int4(*int4)
        elif self.form == "w8a16" and isinstance(weight, Tensor) and scale is not None:
            self.packed = self._w8a16(weight, scale, bias)
        elif isinstance(weight, PairedInt4):
            assert not self.widths, "an expert's outputs are read as a whole"
            self.packed = ops.pack_w4a8(weight, bias)
        elif scale is not None:
            int8 = weight, scale.float(), bias
            if widths:
                self.packed = ops.pack_int8_split(*int8, widths, self.in_parts)
            else:
                self.packed = ops.pack_int8(*int8)
        else:
            plain = weight, bias
            if widths:
                self.packed = ops.pack_split(*plain, widths, self.in_parts)
            else:
                self.packed = ops.pack(*plain)
        self.weight = self.weight_scale = self.weight_offset = None

    def _w8a16(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Packed:
        """Pack a part for each width of its outputs; the first weight stands before them, for a prefetch."""
        widths = self.widths or (len(weight),)
        biases = [None] * len(widths) if bias is None else bias.split(widths)
        parts = zip(weight.split(widths), scale.split(widths), biases)
        packed = [self.ops.pack_w8a16(*part, self.dtype) for part in parts]
        return packed[0][0], packed

    def _int4_weight(self, form: Int4) -> Int4Weight:
        assert self.weight is not None, "a linear is packed once"
        assert self.weight_scale is not None, "a weight in 4 bits has scales"
        offset, inputs = self.weight_offset, IN_A_WORD * self.weight.shape[1]
        return Int4Weight(
            self.weight.data,
            self.weight_scale.data,
            None if offset is None else offset.data,
            min(inputs, form.group_size or inputs),
        )

    def unpacked(self) -> UnpackedLinear:
        """Return the weight as it is multiplied, with its scale and bias."""
        bias = None if self.bias is None else self.bias.data
        if isinstance(self.form, Int4):
            return UnpackedLinear(self._int4_weight(self.form), None, bias)
        assert self.weight is not None, "a linear is packed once"
        weight, scale = self.weight.data, self.weight_scale
        if self.form == "w4a8" and scale is not None:
            return UnpackedLinear(PairedInt4(weight, scale[:, 0]), None, bias)
        return UnpackedLinear(weight, None if scale is None else scale[:, 0].to(self.scale_dtype), bias)

    @property
    def rounds(self) -> bool:
        """Whether it is filled by numbers that `round_to` quantises."""
        return self.form == "quantize"

    def round_to(self, rows: Tensor, scale: Tensor, numbers: Tensor, inputs: slice) -> None:
        """Quantise numbers [n, in] to int8 rows [n, held], of `inputs`, and float32 scales [n, 1].

        Numbers are rounded to the model's type first. Scales are those of whole rows, so that int8 weights do
        not depend on the number of ranks.
        """
        rooms = (each.split(ROUNDED_ROWS) for each in (numbers, rows, scale))
        for some, some_rows, some_scale in zip(*rooms):
            part = some.to(rows.device, self.dtype)
            largest = part.abs().amax(-1, keepdim=True).float()
            made, found = quantize_rows(part[:, inputs], largest)
            some_rows.copy_(made)
            some_scale.copy_(found)

    @property
    def is_int8(self) -> bool:
        """Whether it multiplies in int8."""
        return self.form in ("int8", "quantize")

    @property
    def takes_int8(self) -> bool:
        """Whether its inputs may come in int8, which adapters cannot read."""
        return self.is_int8 and self.low_rank is None

    def forward(self, x: Tensor | Int8Rows) -> Tensor | tuple[Tensor, ...]:
        """Map [T, in] to [T, out], or to the parts of a `SplitLinear`.

        Rows in int8 require a linear that `takes_int8`.
        """
        return self._product(x)

    def _product(self, x: Tensor | Int8Rows) -> Tensor:
        """Map [T, in] to [T, out], of this rank's weight alone."""
        assert self.packed is not None, "pack the decoder before its first step"
        if self.is_int8:
            y = self.ops.linear_int8(x, self.packed)
        elif isinstance(self.form, Int4):
            y = self.ops.linear_int4(_unquantized(x), self.packed)
        elif self.form == "w8a16":
            y = self.ops.linear_w8a16(_unquantized(x), self.packed[1][0])
        elif self.form == "w4a8":
            y = self.ops.linear_w4a8(_unquantized(x), self.packed)
        elif self.form == "static":
            (y,) = self.packed[1](_unquantized(x))
        else:
            y = self.ops.linear(_unquantized(x), self.packed)
        if self.low_rank is not None:
            self.low_rank.add(y.split(self.low_rank.widths, dim=-1), _unquantized(x))
        return y


class SplitLinear(Linear):
    """A linear whose outputs are returned in parts, the first of width widths[0], and so on."""

    def forward(self, x: Tensor | Int8Rows) -> tuple[Tensor, ...]:
        """Map [T, in] to a tensor [T, width] for each width."""
        assert self.packed is not None, "pack the decoder before its first step"
        ops, packed, widths = self.ops, self.packed, self.widths
        if self.is_whole:
            return ops.split(self.whole(x), widths)
        if self.is_int8:
            parts = ops.linear_int8_split(x, packed, widths)
        elif isinstance(self.form, Int4):
            parts = ops.linear_int4_split(_unquantized(x), packed, widths)
        elif self.form == "w8a16":
            parts = tuple(ops.linear_w8a16(_unquantized(x), each) for each in packed[1])
        elif self.form == "static":
            parts = packed[1](_unquantized(x))
        else:
            parts = ops.linear_split(_unquantized(x), packed, widths)
        if self.low_rank is not None:
            self.low_rank.add(parts, _unquantized(x))
        return parts

    def whole(self, x: Tensor | Int8Rows) -> Tensor:
        """Map [T, in] to [T, out], the parts of all widths side by side, if the linear `is_whole`."""
        return self._product(x)


class SummedLinear(Linear):
    """A linear whose inputs are divided among the ranks of a group, so that the ranks' products add up."""

    def __init__(
        self,
        ops: Ops,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        form: Form,
        group: Group,
    ) -> None:
        super().__init__(ops, in_features, out_features, bias, dtype, device, form)
        self.group = group

    def forward(self, x: Tensor | Int8Rows, divided: DividedRows | None = None) -> Tensor:
        """Map [T, in] to [T, out], the same on every rank, or to this rank's rows if they are divided.

        In int8, each rank scales its own part of a token.
        """
        if divided is not None:
            return divided.summed(self.part(x))
        if self.form != "plain" or self.low_rank is not None:
            return self.group.all_reduce(self.part(x))
        assert self.packed is not None, "pack the decoder before its first step"
        return self.ops.linear_summed(_unquantized(x), self.packed, self.group)

    def part(self, x: Tensor | Int8Rows) -> Tensor:
        """Return this rank's summand."""
        return self._product(x)


def _unquantized(x: Tensor | Int8Rows) -> Tensor:
    """Return the inputs of a linear or an adapter that reads no rows in int8."""
    assert isinstance(x, Tensor), "only a linear that takes_int8 reads rows in int8"
    return x
