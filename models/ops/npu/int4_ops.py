"""Hold weights of 4 bits for an NPU, and multiply with them. See virtual_npu/operators/weight_quant.py.

Legend: T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_npu
from torch import Tensor

from devices.ascend_limits import AscendProduct
from models.ops.operands import Int4Weight

PACKED_ROWS = 512  # rows of a weight that are expanded to int32 at once


class Int4Check:
    """The check of whether a product can multiply in 4 bits."""

    product: AscendProduct

    def check_int4(
        self, dtype: torch.dtype, group_size: int | None, largest: int, of_experts: Sequence[int] = ()
    ) -> None:
        """Raise ValueError if this product cannot multiply in 4 bits; see Ops.check_int4."""
        self.product.check_int4(dtype, group_size, largest, of_experts)


class Int4Ops(Int4Check):
    """Linears in 4 bits, by one operator; see Ops."""

    def pack_int4(self, weight: Int4Weight, bias: Tensor | None) -> Any:
        """Return numbers [in, out / 8] in the device's own order, with scales and offsets [groups, out].

        The operator is faster in this form than with a transposed weight (CANN,
        aclnnWeightQuantBatchMatmulV2).
        """
        device, bfloat16 = weight.words.device, weight.scale.dtype == torch.bfloat16
        numbers = Int4Weight(weight.words.cpu(), weight.scale, weight.offset, weight.group_size).numbers()
        inputs = numbers.t().split(PACKED_ROWS)
        rows = [
            torch_npu.npu_convert_weight_to_int4pack(part.contiguous().to(device, torch.int32))
            for part in inputs
        ]
        offset = None if weight.offset is None else weight.offset.t().contiguous()
        group_size = weight.group_size if weight.scale.shape[1] > 1 else 0
        bias = bias.float() if bias is not None and bfloat16 else bias
        return torch.cat(rows), weight.scale.t().contiguous(), offset, bias, group_size

    def linear_int4(self, x: Tensor, packed: Any) -> Tensor:
        """Map [T, in] to [T, out] in one launch."""
        weight, scale, offset, bias, group_size = packed
        y: Tensor = torch_npu.npu_weight_quant_batchmatmul(
            x, weight, scale, antiquant_offset=offset, bias=bias, antiquant_group_size=group_size
        )
        return y
