"""Multiply rows that are quantised by a scale known beforehand (W8A8 of msModelSlim) on an NPU.

See virtual_npu/operators/matmul.py.

Legend: T tokens of the step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from devices.ascend_limits import FRACTAL_NZ, AscendProduct
from models.ops.operands import StaticInt8


class StaticOps:
    """Linears in int8 whose inputs have a scale of their own, by two operators; see Ops."""

    product: AscendProduct

    def pack_static(self, weight: StaticInt8, dtype: torch.dtype) -> Any:
        """Return the weight [in, out] in the format of the matrix unit, with scale and bias [out].

        A product that reads such a weight transposed holds it as [out, in].
        """
        scale = weight.scale.contiguous()
        if dtype == torch.float16:
            scale = bits_in_int64(scale)
        if self.product.turns_tiles:
            held = torch_npu.npu_format_cast(weight.weight.contiguous(), FRACTAL_NZ).t()
        else:
            held = torch_npu.npu_format_cast(weight.weight.t().contiguous(), FRACTAL_NZ)
        return held, scale, weight.bias.contiguous()

    def pack_static_rows(self, weight: StaticInt8, dtype: torch.dtype) -> Any:
        """Return the inverse of the scale, and the offset, for each input, in the rows' type.

        The operator takes no other type, so that an activation may fall on the next integer: of 80 random
        ones 6 do in bfloat16.
        """
        count = weight.weight.shape[1]
        parts = 1 / weight.input_scale[:1], weight.input_offset[:1]
        return tuple(each.to(dtype).repeat(count) for each in parts)

    def static_rows(self, x: Tensor, packed: Any) -> Tensor:
        """Quantise [T, in] to int8 in one launch, which multiplies by the inverse of the scale."""
        inverse, offset = packed
        rows: Tensor = torch_npu.npu_quantize(x, inverse, offset, torch.qint8, -1, False)
        return rows

    def linear_static(self, rows: Tensor, packed: Any, dtype: torch.dtype) -> Tensor:
        """Map int8 [T, in] to [T, out] of this type in one launch."""
        weight, scale, bias = packed
        y: Tensor = torch_npu.npu_quant_matmul(rows, weight, scale, bias=bias, output_dtype=dtype)
        return y


def bits_in_int64(scale: Tensor) -> Tensor:
    """Return the bits of float32 scales, which are not negative, in the low halves of int64 numbers."""
    return scale.float().contiguous().view(torch.int32).long()
